"""The cost model: what it says of layouts for which the answer is known, and what must hold for all."""

from __future__ import annotations

from dataclasses import Field, fields, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces import cost
from search_spaces.attention import CUDNN, FLASH_2, Kernel
from search_spaces.blocks import Cut
from search_spaces.coefficients import is_unproven
from search_spaces.contention import contention
from search_spaces.cost import PASSED_S, SPARED_TOGETHER, Coefficients, data_sheet, predict, predicted_metrics
from search_spaces.experts import COMPILED, EAGER, FUSED
from search_spaces.hardware import ACCELERATORS
from search_spaces.launches import ENDS, usual_s
from search_spaces.layout import SCHEDULES, Layout
from search_spaces.models import PRESETS, ModelShape
from search_spaces.operators import Kind, Operator
from search_spaces.roofline import PRODUCT_S, Load, passes, priced
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload


def sheet_of(name: str) -> Coefficients:
    found = data_sheet(name)
    assert found is not None
    return found


SHEET = sheet_of("h100")
ENDLESS = 1e30
IDEAL = Coefficients(
    source="a machine that does nothing but matrix products and attention",
    matmul_flops=1e15,
    attention_flops=1e15,
    fp32_speed=0.1,
    fp8_speed=2.0,
    memory_bytes_per_s=ENDLESS,
    eager_bytes_per_s=ENDLESS,
    states_bytes_per_s=ENDLESS,
    link_bytes_per_s=ENDLESS,
    network_bytes_per_s=ENDLESS,
    idle_w=100.0,
    power_limit_w=700.0,
    joules_per_flop=1e-13,
    joules_per_byte=1e-30,
    joules_per_link_byte=1e-30,
    matmul_half=1e-9,
    host_time=1e-30,
    step_s=1e-30,
    link_latency_s=1e-30,
    network_latency_s=1e-30,
)
IDEAL_LINKS = replace(IDEAL, link_bytes_per_s=4.5e11, network_bytes_per_s=5e10)
WORK = Workload(PRESETS["llama3-8b"], 8192, 64, ACCELERATORS["h100"])
MIXTURE = replace(WORK, model=PRESETS["mixtral-8x7b"])
AXES: dict[str, list[Any]] = {
    "engine": ["megatron", "deepspeed"],
    "num_gpus": [8, 16],
    "tensor_parallel_size": [1, 2, 8],
    "pipeline_parallel_size": [1, 2, 4],
    "context_parallel_size": [1, 2],
    "expert_parallel_size": [1, 2],
    "pipeline_schedule": list(SCHEDULES),
    "virtual_pipeline_stages": [1, 2],
    "stage_layers": [None, (7, 9), (15, 17)],
    "zero_stage": [0, 1, 2, 3],
    "data_parallel_replicate_size": [1, 2],
    "micro_batch_size": [1, 2],
    "recompute": ["none", "selective", "full"],
    "offload_optimizer": [False, True],
    "compile": [False, True],
    "precision": ["bf16", "fp32", "fp8"],
}
UNPROVEN = [name for name, each in ACCELERATORS.items() if each.published_mfu and not each.products]
RATES = [field for field in fields(Coefficients) if field.name.endswith("_per_s")]


@cache
def legal() -> list[tuple[Workload, Layout]]:
    """Of a model so small that hardly any layout's memory has to be replayed, and of a mixture."""
    works = replace(WORK, model=PRESETS["llama3-1b"]), MIXTURE
    return [(work, layout) for work in works for layout in enumerate_space(AXES, work).layouts]


LAYOUTS = st.deferred(lambda: st.sampled_from(legal()))


def layout_of(**settings: Any) -> Layout:
    return Layout("megatron", 8, 64, **settings)


ALONE = Layout("megatron", 1, 64)
PRODUCTS_S = 64 * 3 * (7 * WORK.shape.layers + 1) * PRODUCT_S
"""Of a step of it: seven products a block and the head's, and twice as many backward, in each of 64 microbatches."""


def seconds(layout: Layout, calibration: Coefficients = SHEET, work: Workload = WORK) -> float:
    return predict(layout, work, calibration).step_time_s


@settings(deadline=None, max_examples=50)
@given(LAYOUTS)
def test_parts_make_up_the_step_and_power_keeps_its_limit(drawn: tuple[Workload, Layout]) -> None:
    work, layout = drawn
    prediction = predict(layout, work, SHEET)
    assert min(prediction.parts.values()) >= 0
    assert sum(prediction.parts.values()) == pytest.approx(prediction.step_time_s)
    unlaunched = prediction.parts["launch"] / prediction.step_time_s
    idle_w = SHEET.idle_w * (1 - (1 - SHEET.unlaunched_share) * unlaunched)
    assert idle_w < prediction.power_w <= SHEET.power_limit_w * (1 + 1e-6)
    tokens = work.global_batch_size * work.sequence_length
    assert prediction.tokens_per_s == pytest.approx(tokens / prediction.step_time_s)
    energy = prediction.power_w * prediction.step_time_s * layout.num_gpus
    assert prediction.joules_per_token == pytest.approx(energy / tokens)


@settings(deadline=None, max_examples=50)
@given(LAYOUTS, st.sampled_from(RATES))
def test_nothing_is_slower_for_more_bandwidth(drawn: tuple[Workload, Layout], rate: Field[float]) -> None:
    work, layout = drawn
    faster = replace(SHEET, **{rate.name: 2 * getattr(SHEET, rate.name)})
    assert seconds(layout, faster, work) <= seconds(layout, SHEET, work) * (1 + 1e-9)


def test_matrix_products_and_attention_take_the_models_flops() -> None:
    """PaLM's count, appendix B, with the causal half of attention."""
    model, length = WORK.shape, WORK.sequence_length
    causal = model.flops_per_token(length) - 6 * model.layers * model.hidden * length
    tokens = WORK.global_batch_size * length
    weights_in_norms = 6.0 * (2 * model.layers + 1) * model.hidden
    expected = tokens * (causal - weights_in_norms) / IDEAL.matmul_flops
    # Attention's backward pass is two and a half times its forward pass, where PaLM has twice, and both take longer.
    forward, backward = CUDNN.times(length, model.head_dim)
    attention = 2 * forward + 5 * backward - 6
    attention *= tokens * model.layers * model.hidden * length / IDEAL.attention_flops
    assert seconds(ALONE, IDEAL) == pytest.approx(expected + attention + PRODUCTS_S, rel=1e-6)


def test_each_product_has_a_time_of_its_own() -> None:
    """In a microbatch four times as large there are as many products to four times the FLOPs."""
    small, large = (predict(replace(ALONE, micro_batch_size=size), WORK, IDEAL).parts["matmul"] for size in (1, 4))
    assert small - large == pytest.approx(PRODUCTS_S * 3 / 4, rel=1e-6)


@pytest.mark.parametrize(("engine", "each_s"), [("megatron", EAGER.each_s), ("megatron-lm", FUSED.each_s)])
def test_an_expert_of_a_grouped_product_takes_no_time_of_its_own_but_where_that_is_a_fact(
    engine: str, each_s: float
) -> None:
    model = MIXTURE.shape
    dims = (8192, model.hidden, model.ffn_hidden)
    cut = Cut.of(replace(ALONE, engine=engine), MIXTURE)
    few, many = (
        priced(Operator(Kind.EXPERTS, (*dims, experts, 2), "bf16", False, ("llama", "grouped")), cut, IDEAL)
        for experts in (4, 8)
    )
    assert many[0].matmul - few[0].matmul == pytest.approx(4 * 3 * each_s, rel=1e-6)
    assert many[1].matmul - few[1].matmul == pytest.approx(4 * 6 * each_s, rel=1e-6)


def test_compiled_blocks_move_less_around_their_experts_and_choose_in_fewer_kernels() -> None:
    model, tokens = MIXTURE.shape, 8192
    dims = (tokens, model.hidden, model.ffn_hidden, 8, 2)
    cut = Cut.of(ALONE, MIXTURE)
    eager, compiled = (
        priced(Operator(Kind.EXPERTS, dims, "bf16", compiled, ("llama", "grouped")), cut, IDEAL)
        for compiled in (False, True)
    )
    moved = 2 * tokens * 2 * model.hidden  # of one value for each hidden state of a token and each of its experts
    assert eager[0].moved - compiled[0].moved == pytest.approx(moved * (EAGER.hidden - COMPILED.hidden))
    assert eager[1].moved - compiled[1].moved == pytest.approx(moved * (EAGER.hidden_back - COMPILED.hidden_back))
    spared_s = moved * (EAGER.hidden - COMPILED.hidden) / IDEAL.eager_bytes_per_s
    assert eager[0].seconds - compiled[0].seconds == pytest.approx(spared_s + EAGER.token_s * tokens)


@pytest.mark.parametrize("kernel", [CUDNN, FLASH_2])
def test_heads_between_the_measured_widths_are_between_them_in_speed(kernel: Kernel) -> None:
    """A FLOP has as many more exponentials as heads are narrower."""
    wide, between, narrow = (kernel.times(4096, width) for width in (128, 96, 64))
    for one, other, third in zip(wide, between, narrow, strict=True):
        assert other == pytest.approx(one + (third - one) / 3)
    assert kernel.times(4096, 256) == wide
    assert kernel.times(4096, 32) == narrow


@pytest.mark.parametrize(("engine", "slower"), [("megatron", 1.13), ("megatron-earlier", 1.85), ("deepspeed", 1.0)])
def test_attention_of_gathered_keys_is_not_square_and_slower(engine: str, slower: float) -> None:
    """Ulysses's ranks have whole sequences of some heads."""
    plain, split = (
        predict(replace(layout_of(zero_stage=1, context_parallel_size=size), engine=engine), WORK, IDEAL).parts[
            "attention"
        ]
        for size in (1, 2)
    )
    assert split / plain == pytest.approx(slower, rel=0.02)


# TFLOP/s of both passes, as measured (benchmarks/results/attention_1xh100.txt), in those over 8192 tokens and wide.
@pytest.mark.parametrize(
    ("accelerator", "few", "narrow"), [("h100", 424 / 550, 432 / 550), ("a100", 254 / 302, 273 / 302)]
)
def test_attention_takes_longer_over_few_tokens_and_in_narrow_heads(
    accelerator: str, few: float, narrow: float
) -> None:
    device = ACCELERATORS[accelerator]

    def seconds(**changes: Any) -> float:
        return predict(ALONE, replace(WORK, accelerator=device, **changes), IDEAL).parts["attention"]

    more = replace(ALONE, micro_batch_size=4, global_batch_size=4 * ALONE.global_batch_size)
    work = replace(WORK, accelerator=device, sequence_length=2048, global_batch_size=more.global_batch_size)
    assert 4 * predict(more, work, IDEAL).parts["attention"] / seconds() == pytest.approx(1 / few, rel=0.06)
    wide = replace(WORK.shape, heads=2 * WORK.shape.heads, kv_heads=2 * WORK.shape.kv_heads, head_dim=64)
    assert seconds(model=wide) / seconds() == pytest.approx(1 / narrow, rel=0.06)


def test_flash_attention_needs_more_energy_than_cudnn_on_hopper() -> None:
    """1.3 times as much, where nothing but attention counts, however slow; and no more where there is no cuDNN's."""

    def joules(engine: str, accelerator: str) -> float:
        device, limitless = ACCELERATORS[accelerator], replace(IDEAL, idle_w=1e-9, power_limit_w=ENDLESS)
        work = replace(WORK, sequence_length=2**20, accelerator=device)
        return predict(replace(layout_of(zero_stage=1), engine=engine), work, limitless).joules_per_token

    assert joules("torchtitan", "h100") / joules("megatron", "h100") == pytest.approx(1.3, rel=0.03)
    assert joules("composer", "h100") == pytest.approx(joules("torchtitan", "h100"), rel=0.01)
    assert joules("torchtitan", "a100") == pytest.approx(joules("megatron", "a100"), rel=0.01)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, True),
        ({"engine": "deepspeed", "compile": True}, True),
        ({"compile": True}, False),
        ({"precision": "fp8"}, False),
    ],
)
def test_full_recomputation_runs_blocks_forward_once_more(settings: dict[str, Any], left_out: bool) -> None:
    """But for the last product, where nothing needs what it gives."""
    headless = replace(WORK, model=replace(WORK.shape, vocab=8))
    plain, again = (
        predict(replace(layout_of(zero_stage=1, recompute=mode), **settings), headless, IDEAL)
        for mode in ("none", "full")
    )
    forward, backward = CUDNN.times(WORK.sequence_length, WORK.shape.head_dim)
    once_more = forward / (forward + 2.5 * backward)
    assert again.parts["attention"] / plain.parts["attention"] == pytest.approx(1 + once_more)
    shape = WORK.shape
    keys = shape.kv_heads * shape.head_dim
    last, others = shape.hidden * shape.ffn_hidden, 2 * shape.hidden * (shape.hidden + keys + shape.ffn_hidden)
    expected = 4 / 3 - left_out * last / (last + others) / 3
    assert again.parts["matmul"] / plain.parts["matmul"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_recomputation_leaves_out_is_summed_over_no_ranks(sequence_parallel: bool) -> None:
    """Of two sums each way the second pass forward has one, or of two scatters one, and all gathers."""
    free = replace(IDEAL, contention=0.0)
    plain, again = (
        predict(layout_of(tensor_parallel_size=2, sequence_parallel=sequence_parallel, recompute=mode), WORK, free)
        for mode in ("none", "full")
    )
    assert again.parts["tensor_parallel"] / plain.parts["tensor_parallel"] == pytest.approx(
        1 + (3 / 4 if sequence_parallel else 1 / 2) / 2, rel=0.02
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3 / 32),
        ({"pipeline_schedule": "gpipe"}, 3 / 32),
        ({"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_stages": 2}, 3 / 64),
        ({"pipeline_schedule": "interleaved_zero_bubble", "virtual_pipeline_stages": 2}, 1 / 64),
        ({"pipeline_schedule": "zbv_zero_bubble", "virtual_pipeline_stages": 2}, 1 / 64),
        ({"pipeline_schedule": "zbv_zero_bubble", "virtual_pipeline_stages": 2, "recompute": "full"}, 3 / 128),
    ],
)
def test_bubble_of_even_stages(settings: dict[str, Any], expected: float) -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v m); zero bubble leaves a third of it, or half."""
    headless = replace(WORK, model=replace(WORK.shape, vocab=8))
    layout = layout_of(pipeline_parallel_size=4, **settings)
    prediction = predict(layout, headless, IDEAL)
    assert layout.gradient_accumulation_steps == 32
    assert prediction.parts["bubble"] / (prediction.step_time_s - prediction.parts["bubble"]) == pytest.approx(
        expected, rel=1e-3
    )


def test_the_slowest_stage_sets_the_pace() -> None:
    even, uneven, worse = (
        seconds(layout_of(pipeline_parallel_size=2, stage_layers=layers)) for layers in (None, (17, 15), (12, 20))
    )
    assert uneven < even < worse  # the last stage has the head besides


def test_at_the_power_limit_the_clock_falls() -> None:
    hungry = replace(IDEAL, joules_per_flop=1e-12)
    free, held = (predict(ALONE, WORK, calibration) for calibration in (IDEAL, hungry))
    # All the time is that of FLOPs, but what attention and the single products take beyond them.
    forward, backward = CUDNN.times(WORK.sequence_length, WORK.shape.head_dim)
    beyond = free.parts["attention"] * (1 - 3.5 / (forward + 2.5 * backward)) + PRODUCTS_S
    beyond /= free.step_time_s
    assert free.power_w == pytest.approx(IDEAL.idle_w + 1e-13 * IDEAL.matmul_flops * (1 - beyond))
    assert held.power_w == pytest.approx(IDEAL.power_limit_w)
    # Power above idle goes with the cube of the clock: 1000 W and less at the full one, of which 600 are allowed.
    assert held.step_time_s / free.step_time_s == pytest.approx((1000 * (1 - beyond) / 600) ** (1 / 3))


def test_a_layouts_own_power_limit_counts_if_it_is_the_lower_one() -> None:
    hungry = replace(IDEAL, joules_per_flop=1e-12)
    held, lower, higher = (predict(replace(ALONE, power_limit_w=limit), WORK, hungry) for limit in (None, 400, 100_000))
    assert higher == held
    # Mean power is held at 98.5% of a limit: of 400 W at 394, of which 100 are idle; without its own at 700.
    assert lower.power_w == pytest.approx(394.0)
    assert lower.step_time_s / held.step_time_s == pytest.approx((600 / 294) ** (1 / 3))
    assert lower.joules_per_token < held.joules_per_token
    assert predict(replace(ALONE, power_limit_w=50), WORK, hungry).power_w == pytest.approx(0.985 * 50, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ({}, 0.0),
        ({"pipeline_schedule": "gpipe"}, 0.05),
        ({"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_stages": 2}, 0.25),
        ({"pipeline_schedule": "zbv_zero_bubble", "virtual_pipeline_stages": 2}, 0.21),
    ],
)
def test_products_beside_messages_take_longer(settings: dict[str, Any], beside: float) -> None:
    layout = layout_of(pipeline_parallel_size=2, **settings)
    plain = layout_of(pipeline_parallel_size=2)
    slower = predict(layout, WORK, IDEAL).parts["matmul"] / predict(plain, WORK, IDEAL).parts["matmul"]
    assert slower == pytest.approx(1 + beside * contention(layout, WORK))


def test_gpus_that_wait_take_idle_power() -> None:
    waiting = replace(IDEAL, step_s=1e6)
    assert predict(layout_of(zero_stage=1), WORK, waiting).power_w == pytest.approx(IDEAL.idle_w, rel=1e-3)


def test_gpus_that_wait_for_the_cpu_take_less() -> None:
    waiting = replace(IDEAL, host_time=1e9, unlaunched_share=0.3)
    assert predict(ALONE, WORK, waiting).power_w == pytest.approx(0.3 * IDEAL.idle_w, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "spared"),
    [
        ({}, 0.7),
        ({"zero_stage": 1}, 0.7),
        ({"zero_stage": 3}, 0.7 * SPARED_TOGETHER),
        ({"context_parallel_size": 2}, 0.7 * SPARED_TOGETHER),
        ({"tensor_parallel_size": 2}, 0.7 * SPARED_TOGETHER),
    ],
)
def test_they_spare_less_where_ranks_communicate_in_blocks(settings: dict[str, Any], spared: float) -> None:
    waiting = replace(IDEAL, host_time=1e9, unlaunched_share=0.3)
    drawn = predict(layout_of(**settings), WORK, waiting).power_w
    assert drawn == pytest.approx((1 - spared) * IDEAL.idle_w, rel=1e-3)


def test_clocks_rise_for_waits_as_long_as_a_limit_averages() -> None:
    """Of shorter steps the same bubble counts for more."""
    hungry = replace(IDEAL, joules_per_flop=1e-12)

    def beside(work: Workload) -> float:
        """What products take in two stages, in what they take in one, which has as many."""
        one, two = (predict(layout_of(pipeline_parallel_size=ranks), work, hungry).parts["matmul"] for ranks in (1, 2))
        return two / one

    headless = replace(WORK, model=replace(WORK.shape, vocab=8))
    assert beside(replace(headless, sequence_length=512)) < beside(headless) < 1


@pytest.mark.parametrize(("engine", "counts"), [("deepspeed", True), ("megatron", False)])
def test_clocks_rise_less_for_what_a_few_threads_count(
    engine: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit, of tokens of DeepSpeed's experts."""
    layout = replace(layout_of(zero_stage=1, expert_parallel_size=4), engine=engine)
    limited, unlimited = (replace(SHEET, power_limit_w=limit_w) for limit_w in (400.0, ENDLESS))
    less, free = (predict(layout, MIXTURE, machine) for machine in (limited, unlimited))
    monkeypatch.setattr(cost, "STILL", 0.0)
    more, as_free = (predict(layout, MIXTURE, machine) for machine in (limited, unlimited))
    assert (less.parts["matmul"] > more.parts["matmul"]) == (less.power_w < more.power_w) == counts
    assert less.parts["elementwise"] == more.parts["elementwise"]
    assert free == as_free


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_tokens_are_counted_again_by_what_is_computed_again(recompute: str, times: int) -> None:
    """As long as the rest takes longer than it was taken to, if that was measured."""

    def block(recompute: str) -> Load:
        cut = Cut.of(replace(ALONE, engine="deepspeed", recompute=recompute), MIXTURE)
        return passes(cut, MIXTURE.shape, MIXTURE.sequence_length, SHEET).block

    found = block(recompute)
    assert 0 < found.still == pytest.approx(times * block("none").still)
    assert found.still < found.elementwise
    longer = found.lasting(2 * found.seconds)
    assert longer.still / longer.elementwise == pytest.approx(found.still / found.elementwise)


def test_as_much_for_the_cpu_as_for_the_gpu_takes_longer_than_either() -> None:
    (blocks, rounds), computing = (WORK.shape.layers + ENDS, WORK.global_batch_size), seconds(ALONE, IDEAL)
    usual = blocks * rounds * usual_s(ALONE, WORK)

    def beside(times: float) -> float:
        """The step where the CPU has so many times as much to do."""
        return seconds(ALONE, replace(IDEAL, host_time=times * computing / usual)) / computing

    assert beside(1.0) == pytest.approx(2 ** (1 / 5))
    assert beside(0.5) == pytest.approx(1.0, abs=0.02)
    assert beside(2.0) == pytest.approx(2.0, abs=0.04)


def test_the_cpu_has_microbatches_come_and_go_and_takes_backward_passes_apart() -> None:
    """By a thousand seconds for each of two chunks, and by a quarter of a block's time."""
    waiting = replace(IDEAL, host_time=1e3 / PASSED_S)

    def busy(schedule: str, chunks: int) -> float:
        stages = {"pipeline_parallel_size": 2, "virtual_pipeline_stages": chunks, "pipeline_schedule": schedule}
        layout = layout_of(**stages)
        return predict(layout, WORK, waiting).parts["launch"] / layout.gradient_accumulation_steps

    block_s = waiting.host_time * usual_s(ALONE, WORK) * (WORK.shape.layers + ENDS) / 2
    assert busy("1f1b", 1) == pytest.approx(block_s + 1e3, rel=1e-3)
    assert busy("interleaved_1f1b", 2) == pytest.approx(block_s + 2e3, rel=1e-3)
    assert busy("interleaved_zero_bubble", 2) == pytest.approx(1.25 * block_s + 2e3, rel=1e-3)


def test_of_what_is_hidden_one_piece_is_beside_nothing() -> None:
    """Of the 34 in which parameters are gathered and gradients sent. The others cost the computation as many of a GPU's
    multiprocessors as their bandwidth takes channels: eight adapters have a tenth of that of links."""
    near, large = replace(layout_of(zero_stage=1), global_batch_size=512), replace(WORK, global_batch_size=512)
    slow = replace(IDEAL, matmul_flops=1e12, attention_flops=1e12)
    links = replace(slow, link_bytes_per_s=1e9)
    adapters = replace(slow, link_bytes_per_s=8e9, network_bytes_per_s=1e8)
    for layout, machine, rate, share in ((near, links, 9e8, 1.0), (replace(near, num_gpus=16), adapters, 8e8, 0.1)):
        free, beside = (
            predict(layout, large, replace(machine, contention=each)).parts["data_parallel"] for each in (1e-9, 0.4)
        )
        seconds = (2 + 4) * WORK.shape.parameters * (1 - 1 / layout.num_gpus) / rate
        assert free == pytest.approx(seconds / 34, rel=0.01)
        assert beside - free == pytest.approx(share * 0.4 * 33 / 34 * seconds, rel=0.01)


def test_groups_within_a_node_are_faster() -> None:
    within = layout_of(tensor_parallel_size=8, compile=True)
    assert seconds(within) < seconds(within, work=replace(WORK, gpus_per_node=4))


def test_rank_order_decides_who_shares_a_node() -> None:
    small = replace(WORK, gpus_per_node=4)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    plain = layout_of(tensor_parallel_size=2)
    assert seconds(plain, work=small) < seconds(replace(plain, rank_order=order), work=small)
    assert seconds(replace(plain, rank_order=tuple(range(8))), work=small) == seconds(plain, work=small)
    assert seconds(replace(plain, rank_order=order)) == seconds(plain)  # one node


DATA: dict[str, Any] = {"zero_stage": 1}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 4, "sequence_parallel": True, "compile": True}


@pytest.mark.parametrize(
    ("base", "faster"),
    [
        (DATA, {"compile": True}),
        (DATA, {"precision": "fp8"}),
        (DATA | {"precision": "fp32"}, {"precision": "bf16"}),
        (DATA, {"reduce_precision": "bf16"}),
        (DATA | {"overlap_grad_reduce": False}, {"overlap_grad_reduce": True}),
        (DATA | {"overlap_param_gather": False}, {"overlap_param_gather": True}),
        (DATA | {"recompute": "full"}, {"recompute": "selective"}),
        (DATA | {"recompute": "selective"}, {"recompute": "none"}),
        (DATA, {"micro_batch_size": 2}),
        ({"zero_stage": 3}, {"zero_stage": 2}),
        ({"zero_stage": 2}, {"zero_stage": 1}),
        (TENSOR, {"async_tensor_parallel": True}),
        (TENSOR, {"precision": "fp8"}),
        ({"engine": "deepspeed", "tensor_parallel_size": 2}, {"engine": "megatron"}),
        ({"engine": "deepspeed", "zero_stage": 2, "offload_optimizer": True}, {"offload_optimizer": False}),
        ({"engine": "deepspeed", "zero_stage": 2, "bucket_size": 100_000}, {"bucket_size": 500_000_000}),
        ({"context_parallel_size": 2, "zero_stage": 1}, {"context_parallel_size": 1}),
    ],
)
def test_which_of_two_settings_is_the_faster_one(base: dict[str, Any], faster: dict[str, Any]) -> None:
    slow = replace(layout_of(), **base)
    assert seconds(replace(slow, **faster)) < seconds(slow)


def test_gathers_of_split_sequences_are_half_as_long_in_fp8() -> None:
    """Which are half of what tensor-parallel ranks send; sums are in bf16."""
    slow = replace(IDEAL, link_bytes_per_s=1e9)
    for split, share in ((True, 3 / 4), (False, 1.0)):
        layout = layout_of(**TENSOR | {"sequence_parallel": split})
        plain, rough = (
            predict(replace(layout, precision=precision), WORK, slow).parts["tensor_parallel"]
            for precision in ("bf16", "fp8")
        )
        assert rough / plain == pytest.approx(share, rel=0.01)


def test_split_products_cast_what_they_share_once() -> None:
    """And of split sequences their own tokens alone."""

    def casts(layout: Layout) -> float:
        plain, rough = (predict(replace(layout, precision=name), WORK, SHEET) for name in ("bf16", "fp8"))
        return rough.parts["elementwise"] - plain.parts["elementwise"]

    split = replace(ALONE, num_gpus=8, tensor_parallel_size=8)
    for compiled in (True, False):
        whole, all_of_it, own = (
            casts(replace(layout, compile=compiled))
            for layout in (ALONE, replace(split, sequence_parallel=False), split)
        )
        assert own < all_of_it < whole


def test_hybrid_shards_gather_within_the_node() -> None:
    work = replace(WORK, global_batch_size=4096)
    many = Layout("megatron", 4096, 4096, zero_stage=3)
    assert seconds(replace(many, data_parallel_replicate_size=512), work=work) < seconds(many, work=work)


def test_spread_experts_exchange_tokens() -> None:
    spread = predict(layout_of(zero_stage=1, expert_parallel_size=4), MIXTURE, SHEET)
    assert spread.parts["expert_parallel"] > 0
    assert predict(layout_of(zero_stage=1), MIXTURE, SHEET).parts["expert_parallel"] == 0


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_states_of_experts_are_shared_among_ranks_that_hold_the_same_ones(zero: int) -> None:
    """These are on a node each where eight experts are spread over eight nodes of eight GPUs, and each sends as much
    through its own adapter as all of a node's do where all ranks have the same parameters."""

    def shared_s(ranks: int, experts: int, holds: int) -> float:
        """With so many experts spread over ranks, of which each `holds` some."""
        layout = Layout("megatron", ranks, ranks, expert_parallel_size=experts // holds, zero_stage=zero)
        layout = replace(layout, overlap_grad_reduce=False, overlap_param_gather=False)
        work = replace(MIXTURE, model=replace(PRESETS["mixtral-8x7b"], num_experts=experts), global_batch_size=ranks)
        return predict(layout, work, IDEAL_LINKS).parts["data_parallel"]

    assert 5 < shared_s(64, 8, 1) / (shared_s(64, 2, 2) / 2) < 8
    assert shared_s(64, 64, 1) < 0.2 * shared_s(64, 2, 2), "no other rank has them"
    assert shared_s(8, 8, 1) < 0.2 * shared_s(8, 2, 2)


def test_gpt3_on_1024_h100_is_about_as_fast_as_published() -> None:
    """Megatron-LM's README, strong scaling: 0.47 of bf16's peak on 96 GPUs, 0.42 on 4608."""
    model = PRESETS["gpt3-175b"]
    work = Workload(model, 2048, 1536, ACCELERATORS["h100"])
    layout = Layout(
        "megatron",
        1024,
        1536,
        tensor_parallel_size=8,
        pipeline_parallel_size=8,
        pipeline_schedule="interleaved_1f1b",
        virtual_pipeline_stages=6,
        zero_stage=1,
        sequence_parallel=True,
        compile=True,
        reduce_precision="bf16",
    )
    speed = predict(layout, work, SHEET).tokens_per_s * model.flops_per_token(2048) / 1024
    assert 0.3 < speed / 989.4e12 < 0.5


@settings(deadline=None, max_examples=50)
@given(LAYOUTS, st.sampled_from(UNPROVEN), st.sampled_from([512, 8192, 131_072]))
def test_where_nothing_was_measured_no_layout_is_faster_than_what_was_published(
    drawn: tuple[Workload, Layout], name: str, length: int
) -> None:
    work = replace(drawn[0], sequence_length=length, accelerator=ACCELERATORS[name])
    mfu = predicted_metrics(drawn[1], work, sheet_of(name))["mfu"]
    assert mfu < (ACCELERATORS[name].published_mfu or 0)


def test_gpt3_on_a100_is_about_as_fast_as_published() -> None:
    """Dao 2023, FlashAttention-2, table 1: GPT-3 2.7B on eight A100, 225 TFLOP/s a GPU in sequences of 8192 tokens, 175
    with FlashAttention, which that in Triton was about as fast as."""
    model = ModelShape("gpt", 32, 2560, 20, 20, 10_240, 50_304, 8192, tie_embeddings=True)
    work = Workload(model, 8192, 512, ACCELERATORS["a100"])
    for engine, published, off in (("megatron", 225e12, 0.1), ("composer", 175e12, 0.14)):
        layout = Layout(engine, 8, 512, micro_batch_size=2, zero_stage=1)
        speed = predict(layout, work, sheet_of("a100")).tokens_per_s * model.flops_per_token(8192) / 8
        assert speed == pytest.approx(published, rel=off)


def test_only_data_sheets_of_what_was_never_measured_are_unproven() -> None:
    unproven = {name for name in ACCELERATORS if name != "gpu" and is_unproven(name, sheet_of(name))}
    assert unproven == {"a100", "a100-40", "b200", "mi250", "mi300x", "mi325x"}
    assert not is_unproven("a100", replace(sheet_of("a100"), source="16 trials", matmul_flops=280e12))


def test_every_accelerator_that_is_known_has_a_labelled_calibration() -> None:
    for name in ACCELERATORS:
        calibration = data_sheet(name)
        if name == "gpu":
            assert calibration is None
        else:
            assert calibration is not None
            assert name in calibration.source.lower()
            numbers = [field.name for field in fields(Coefficients) if field.type == "float"]
            assert all(getattr(calibration, name) > 0 for name in numbers)


def test_gradients_of_a_bias_are_summed_up() -> None:
    cut = Cut.of(ALONE, WORK)
    plain, biased = (Operator(Kind.PRODUCT, (8192, 4096, 1024), "bf16", False, form) for form in ((), ("bias",)))
    (forward, backward), (same, more) = (priced(operator, cut, SHEET) for operator in (plain, biased))
    assert same == forward
    assert more.elementwise - backward.elementwise == pytest.approx(2 * 8192 * 1024 / SHEET.eager_bytes_per_s)
