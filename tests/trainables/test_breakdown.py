from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.breakdown import (
    COLLECTIVES,
    COMPUTE,
    GENERIC,
    MEMORY_COPY,
    Breakdown,
    awake_s,
    break_down,
    collective_category,
    interrupted_s,
    kernel_category,
    mean,
    operator_category,
    own_times,
    union_ns,
)

KERNELS = {
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNT": "matmul",
    "nvjet_qqtst_128x128_128x6_1x2_h_bz_TNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel": (
        "matmul"
    ),
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<int>>>": (
        "matmul"
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams)": "matmul",
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN": "matmul",
    "triton_tem_fused_mm_0": "matmul",
    "triton_tem_fused_flex_attention_1": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<cutlass::half_t>>": (
        "attention"
    ),
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)": (
        "attention"
    ),
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, true>": "attention",
    "attn_fwd.kd": "attention",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_3": "other",
    "triton_red_fused__to_copy_all_gather_into_tensor_mm_rms_norm_2": "other",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": "other",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "other",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)": "all_gather",
    "ncclKernel_AllReduce_TREE_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "other_communication",
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": GENERIC,
    "void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>": "all_reduce",
    "multimem_all_gather_kernel": "all_gather",
    "wait_signal_kernel(unsigned int**, int, int, int, int)": "other_communication",
    "standin_all_gather": "all_gather",
    "standin_reduce_scatter": "reduce_scatter",
    "standin_all_to_all": "all_to_all",
    "standin_send": "send_recv",
    "standin_barrier": "other_communication",
    "Memcpy DtoD (Device -> Device)": MEMORY_COPY,
    "Memcpy HtoD (Pinned -> Device)": MEMORY_COPY,
    "Memcpy PtoP (Device -> Device)": "other_communication",
    "Memset (Device)": MEMORY_COPY,
}


@pytest.mark.parametrize(("name", "category"), KERNELS.items())
def test_kernels_are_known_by_their_names(name: str, category: str) -> None:
    assert kernel_category(name) == category


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::_grouped_mm", "matmul"),
        ("aten::mul", "other"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_fused_adamw_", "other"),
        ("fsdp::chunk_cat", "other"),
        ("aten::copy_", MEMORY_COPY),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::recv_", "send_recv"),
        ("c10d::barrier", None),
        ("standin_all_reduce", "all_reduce"),
        ("_c10d_functional::wait_tensor", None),
        ("autograd::engine::evaluate_function: MmBackward0", None),
        ("Optimizer.step#AdamW.step", None),
    ],
)
def test_operators_are_known_by_their_names(name: str, category: str | None) -> None:
    assert operator_category(name) == category


def test_a_collective_is_read_from_gloo_s_names_as_well() -> None:
    found = [collective_category(f"gloo:{name}") for name in ("all_reduce", "all_gather", "send", "recv", "all_to_all")]
    assert found == ["all_reduce", "all_gather", "send_recv", "send_recv", "all_to_all"]


CATEGORIES = (*COMPUTE, *COLLECTIVES, MEMORY_COPY)
INTERVALS = st.lists(st.tuples(st.sampled_from(CATEGORIES), st.integers(0, 60), st.integers(0, 40)), max_size=40)


@given(INTERVALS)
def test_times_are_those_of_a_clock_that_looks_every_tick(intervals: list[tuple[str, int, int]]) -> None:
    """Against a grid of 100 ticks of one second, looked at one by one."""
    tick = 1_000_000_000
    busy = {name: np.zeros(100, dtype=bool) for name in CATEGORIES}
    for name, start, length in intervals:
        busy[name][start : start + length] = True
    starts = np.array([start * tick for _, start, _ in intervals], dtype=np.int64)
    ends = np.array([(start + length) * tick for _, start, length in intervals], dtype=np.int64)
    found = break_down([name for name, *_ in intervals], starts, ends, span_s=100.0)

    compute = np.any([busy[name] for name in COMPUTE], axis=0)
    communication = np.any([busy[name] for name in COLLECTIVES], axis=0)
    for name in CATEGORIES:
        assert getattr(found, f"{name}_s") == busy[name].sum()
    for name in COLLECTIVES:
        assert getattr(found, f"exposed_{name}_s") == (busy[name] & ~compute).sum()
    assert found.compute_s == compute.sum()
    assert found.communication_s == communication.sum()
    assert found.overlapped_communication_s == (communication & compute).sum()
    assert found.exposed_communication_s == (communication & ~compute).sum()
    assert found.idle_s == (~(compute | communication | busy[MEMORY_COPY])).sum()


def test_what_does_not_overlap_is_none_of_it_to_the_nanosecond() -> None:
    starts, ends = np.array([0, 6_543_217]), np.array([6_543_217, 8_987_654])
    found = break_down(["matmul", "all_reduce"], starts, ends, 0.01)
    assert (found.overlapped_communication_s, found.exposed_communication_s) == (0.0, 0.002444437)


def test_fifty_thousand_kernels_are_joined_in_a_moment() -> None:
    starts = np.arange(50_000, dtype=np.int64) * 10
    assert union_ns(starts[::-1], starts[::-1] + 4) == 200_000


@pytest.mark.parametrize(
    ("spans_ms", "awake_ms"),
    [
        ([], 0),
        ([(0, 10)], 60),
        ([(0, 10), (30, 40), (300, 301)], 90 + 51),
        ([(370, 380)], 60),  # half of that at the begin, as of the step before
        ([(0, 10), (370, 380)], 60 + 30),
        ([(0, 400)], 400),
    ],
)
def test_links_stay_awake_for_a_while_after_each_collective_also_in_the_next_step(
    spans_ms: list[tuple[int, int]], awake_ms: int
) -> None:
    begin_ns = 7_000_000_000
    starts, ends = (begin_ns + 10**6 * np.array(times, dtype=np.int64) for times in np.array(spans_ms).reshape(-1, 2).T)
    assert awake_s(starts, ends, begin_ns, 0.4) == pytest.approx(awake_ms / 1e3)


def test_an_operator_s_own_time_is_what_its_callees_leave() -> None:
    operators = [
        (1, 0, 100, "Optimizer.step#AdamW.step"),
        (1, 10, 90, "aten::add"),
        (1, 20, 30, "aten::mm"),
        (1, 40, 60, "aten::scaled_dot_product_attention"),
        (1, 42, 50, "aten::bmm"),
        (1, 70, 80, "_c10d_functional::wait_tensor"),
        (2, 5, 15, "c10d::allreduce_"),
        (2, 6, 14, "aten::copy_"),
    ]
    categories, starts, ends = own_times(operators[::-1])
    times = dict.fromkeys(categories, 0)
    for category, start, end in zip(categories, starts, ends, strict=True):
        times[category] += end - start
    assert times == {"other": 80 - 10 - 20 - 10, "matmul": 10, "attention": 20, "all_reduce": 10}


def test_a_breakdown_goes_through_json() -> None:
    found = break_down(["matmul"], np.array([0]), np.array([500_000_000]), 2.0)
    assert (found.matmul_s, found.idle_s) == (0.5, 1.5)
    assert Breakdown(**json.loads(json.dumps(asdict(found)))) == found


def test_what_interrupts_kernels_is_told_from_what_slows_them() -> None:
    usual = {"gemm": [0.010, 0.020], "norm": [0.001]}
    slow = {name: [1.1 * seconds for seconds in times] for name, times in usual.items()}
    hit = [usual, usual | {"gemm": [0.010, 0.023]}, usual, usual | {"gemm": [0.012, 0.020]}]
    assert interrupted_s([slow] * 4) == pytest.approx(0)
    assert interrupted_s(hit) == pytest.approx((0.003 + 0.002) / 4)
    assert interrupted_s(hit[:2]) is None, "of two steps neither is the usual one"
    assert interrupted_s([*hit, {"gemm": [0.010]}]) is None, "other work"
    assert interrupted_s([{}, {}, {}]) == 0


def test_the_mean_of_steps_is_that_of_each_time() -> None:
    one = break_down(["matmul"], np.array([0]), np.array([10**9]), 2.0)
    other = break_down(["matmul"], np.array([0]), np.array([3 * 10**9]), 4.0)
    found = mean([one, other])
    assert (found.span_s, found.matmul_s, found.compute_s, found.idle_s) == (3.0, 2.0, 2.0, 1.0)
    assert found.own_s == 3.0


def test_what_it_takes_to_compute_alone_leaves_out_a_fifth_of_what_is_overlapped() -> None:
    found = break_down(["matmul", "all_reduce"], np.array([0, 10**9]), np.array([2 * 10**9, 3 * 10**9]), 3.0)
    assert (found.compute_s, found.overlapped_communication_s) == (2.0, 1.0)
    assert found.compute_alone_s == pytest.approx(1.8)
