"""Linear layers in 8-bit floats follow the exact ones as closely as their three and two bits of mantissa allow."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from search_spaces import memory
from search_spaces.models import ModelShape
from search_spaces.network import Collective
from search_spaces.workload import Workload
from tests.trainables.one_rank import calls_of_a_step, kept_bytes
from tests.trainables.test_parity import GLOBAL_BATCH_SIZE, GPT, SEQUENCE_LENGTH, WIDER, megatron, wide
from trainables.engines.megatron.fp8 import Float8Linear, use_fp8
from trainables.engines.megatron.fp8_casts import FORWARD, GRADIENT, quantize
from trainables.standin.ledger import Call


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(FORWARD, 2**-4), (GRADIENT, 2**-3)])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
def test_quantized_values_lie_within_half_a_step(dtype: torch.dtype, bound: float, magnitude: float) -> None:
    x = torch.linspace(0.5, 1.0, 997) * magnitude
    quantized, scale = quantize(x, dtype)
    assert quantized.dtype == dtype
    torch.testing.assert_close(quantized.float() * scale, x, rtol=bound, atol=0)


def test_zeros_stay_zero() -> None:
    quantized, scale = quantize(torch.zeros(16), FORWARD)
    assert torch.equal(quantized.float() * scale, torch.zeros(16))


@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradients_follow_the_exact_ones(bias: bool) -> None:
    torch.manual_seed(0)
    exact = nn.Linear(64, 96, bias=bias)
    rough = nn.Linear(64, 96, bias=bias)
    rough.load_state_dict(exact.state_dict())
    use_fp8(rough)
    assert isinstance(rough, Float8Linear)
    x = torch.randn(2, 16, 64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out, found = exact(x), rough(y)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    found.backward(upstream)
    assert x.grad is not None
    assert y.grad is not None
    assert 0 < error(found, out) < 0.06
    assert 0 < error(y.grad, x.grad) < 0.09
    for name, parameter in exact.named_parameters():
        gradient = rough.get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        assert error(gradient, parameter.grad) < 0.09


def test_only_linear_layers_change() -> None:
    inner = nn.Sequential(nn.Linear(16, 16))
    module = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), inner)
    parameters = dict(module.named_parameters())
    use_fp8(module)
    assert [type(child) for child in (module[0], module[1], inner[0])] == [Float8Linear, nn.LayerNorm, Float8Linear]
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_a_cast_outside_a_compiled_block_is_a_few_kernels(dtype: torch.dtype) -> None:
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    found, scale = quantize(x, dtype)
    plain, plain_scale = inspect.unwrap(quantize)(x, dtype)
    assert torch.equal(found.view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(scale, plain_scale)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        quantize(x, dtype)
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 1 <= len(kernels) <= 4


def test_ranks_gather_in_8_bits_and_sum_in_bf16() -> None:
    layout = megatron(2, tp=2, sp=True, precision="bf16")
    plain = calls_of_a_step(WIDER, layout)
    rough = calls_of_a_step(WIDER, replace(layout, precision="fp8"))
    values = layout.micro_batch_size * SEQUENCE_LENGTH * WIDER.hidden
    # To attention and to the feed-forward network, forward, and back from them.
    gathers = 4 * WIDER.layers * layout.gradient_accumulation_steps
    assert plain - rough == {Call(Collective.ALL_GATHER, 2 * values, (0, 1)): gathers}
    assert rough - plain == {
        Call(Collective.ALL_GATHER, values, (0, 1)): gathers,
        Call(Collective.ALL_REDUCE, 4, (0, 1)): gathers,  # which is for the scale
    }


def test_whole_sequences_need_no_scale_in_common() -> None:
    layout = megatron(2, tp=2, precision="bf16")
    assert calls_of_a_step(WIDER, layout) == calls_of_a_step(WIDER, replace(layout, precision="fp8"))


@pytest.mark.parametrize(
    "model", [wide(WIDER), *(pytest.param(model, marks=pytest.mark.slow) for model in (WIDER, GPT))]
)
@pytest.mark.parametrize(("ranks", "splits_sequence"), [(1, False), (2, False), (2, True)])
def test_blocks_keep_beyond_those_in_bf16_what_the_memory_model_counts(
    model: ModelShape, ranks: int, splits_sequence: bool
) -> None:
    layout = megatron(ranks, tp=ranks, sp=splits_sequence, precision="bf16")
    rough = replace(layout, precision="fp8")
    work = Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE)
    plain_estimate, estimate = (memory.estimate(each, work).ranks[0].activations for each in (layout, rough))
    more = kept_bytes(model, rough) - kept_bytes(model, layout)
    # The model takes norms and biases for weights, and counts no scales.
    assert more == pytest.approx((estimate - plain_estimate) / model.layers, abs=16 * model.hidden)
