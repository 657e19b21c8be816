"""Linear layers in 8-bit floats follow the exact ones as closely as their three and two bits of mantissa allow."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from search_spaces import memory
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Collective
from search_spaces.workload import Workload
from tests.trainables.ledgers import CPU, no_time
from tests.trainables.test_parity import GLOBAL_BATCH_SIZE, GPT, SEQUENCE_LENGTH, WIDER, megatron, wide
from trainables.engines.base import Job
from trainables.engines.megatron.engine import MegatronEngine
from trainables.engines.megatron.fp8 import Float8Linear, use_fp8
from trainables.engines.megatron.fp8_casts import FORWARD, GRADIENT, quantize
from trainables.standin.join import join
from trainables.standin.ledger import Call, Ledger


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


@contextmanager
def one_rank(model: ModelShape, layout: Layout) -> Iterator[tuple[MegatronEngine, Ledger]]:
    """The first rank of a layout, alone, and what it calls the others for."""
    ledger = join(0, layout.num_gpus, no_time, CPU)
    yield MegatronEngine(Job(layout, model, SEQUENCE_LENGTH, seed=0, rank=0, device=CPU, alone=True)), ledger
    dist.destroy_process_group()


def tokens(layout: Layout, model: ModelShape) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab, (layout.micro_batch_size, SEQUENCE_LENGTH), generator=generator)


def calls_of_a_step(model: ModelShape, layout: Layout) -> Counter[Call]:
    with one_rank(model, layout) as (engine, ledger):
        engine.step(iter([(tokens(layout, model),) * 2] * layout.gradient_accumulation_steps))
        return Counter(ledger)


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


def kept_bytes(model: ModelShape, layout: Layout) -> int:
    """What the last block keeps of a microbatch for its backward pass, besides its parameters."""
    with one_rank(model, layout) as (engine, _):
        stage, kept = engine.stages[0], []

        def keep(x: Tensor) -> Tensor:
            kept.append(x._local_tensor if isinstance(x, DTensor) else x)
            return x

        x = stage.embedding(tokens(layout, model))  # type: ignore[misc]
        for before in stage.blocks[:-1]:
            x = before(x)
        block = stage.blocks[-1]
        with saved_tensors_hooks(keep, lambda x: x):
            block(x)
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        for parameter in block.parameters():
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            sizes.pop(local.untyped_storage().data_ptr(), None)
        return sum(sizes.values())


@pytest.mark.parametrize("model", [WIDER, wide(WIDER), GPT])
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


@pytest.mark.parametrize("model", [GPT, wide(GPT)])
@pytest.mark.parametrize(("ranks", "splits_sequence"), [(1, False), (2, False), (2, True)])
def test_blocks_keep_in_bf16_what_the_memory_model_counts(model: ModelShape, ranks: int, splits_sequence: bool) -> None:
    """But for what norms and attention keep of each token. A llama's norms keep copies on CPUs."""
    layout = megatron(ranks, tp=ranks, sp=splits_sequence, precision="bf16")
    work = Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE)
    counted = memory.estimate(layout, work).ranks[0].activations / model.layers
    assert kept_bytes(model, layout) == pytest.approx(counted, abs=32 * layout.micro_batch_size * SEQUENCE_LENGTH)
