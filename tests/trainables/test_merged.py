"""Attention in parts that are merged is masked attention, results and gradients, for every rank of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.models import PRESETS
from trainables.engines.megatron.context import attend_to_the_ends, positions
from trainables.kernels import _Gathered
from trainables.merged import is_fast, merged_parts
from trainables.model import Parts
from trainables.recompute import recomputed

Attending = Callable[[Tensor, Tensor], Tensor]

RANKS = [(size, rank) for size in (2, 4) for rank in range(size)]


def merged(q: Tensor, keys_values: Tensor, size: int, rank: int) -> Tensor:
    output: Tensor = merged_parts(q, by_ranks(keys_values, size), rank)[0]
    return output


def at_the_ends(q: Tensor, keys_values: Tensor, size: int, rank: int) -> Tensor:
    return attend_to_the_ends(q, by_ranks(keys_values, size), rank)


def by_ranks(keys_values: Tensor, size: int) -> Tensor:
    """Those of whole sequences, (2, batch, heads, sequence, head_dim), as each rank has them."""
    places = [positions(keys_values.shape[3], size, rank, keys_values.device) for rank in range(size)]
    return torch.stack([keys_values[..., where, :] for where in places])


def masked(q: Tensor, keys_values: Tensor, where: Tensor) -> Tensor:
    """Attention of queries at the positions `where`, with a mask, and a key for each head of queries."""
    repeats = q.shape[1] // keys_values.shape[2]
    k, v = keys_values.repeat_interleave(repeats, dim=2)
    mask = where[:, None] >= torch.arange(k.shape[2]).to(where)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def given(heads: int, key_heads: int, width: int, length: int, size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Two sequences, with queries in the order that a model has them in, in values that bf16 has."""
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    q = draw(2, length // size, heads, width).transpose(1, 2)
    keys_values = draw(2, 2, key_heads, length, width)
    return q.bfloat16().to(q.dtype), keys_values.bfloat16().to(q.dtype)


def results(run: Attending, dtype: torch.dtype, q: Tensor, keys_values: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of what goes in, in float64."""
    inputs = [each.detach().to(dtype).requires_grad_() for each in (q, keys_values)]
    output = run(*inputs)
    above = torch.cos(torch.arange(output.numel(), device=q.device)).bfloat16().to(dtype).view(output.shape)
    return [each.double() for each in (output.detach(), *grad(output, inputs, above))]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("size", "rank"), RANKS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("attend", [merged, at_the_ends])
def test_it_is_masked_attention(attend: Any, key_heads: int, size: int, rank: int) -> None:
    q, keys_values = given(4, key_heads, 16, 48, size)
    where = positions(48, size, rank, q.device)
    expected = results(partial(masked, where=where), torch.float64, q, keys_values)
    run = partial(attend, size=size, rank=rank)
    assert max(errors(results(run, torch.float64, q, keys_values), expected)) < 1e-14
    assert max(errors(results(run, torch.bfloat16, q, keys_values), expected)) < 1e-2


def test_the_result_is_in_the_order_of_tokens() -> None:
    """In which the product after it takes it without a copy, and gives its gradient."""
    q, keys_values = given(4, 2, 16, 48, 2)
    assert merged(q, keys_values, 2, 1).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_compilers_are_told_of_what_it_gives(size: int, rank: int) -> None:
    """Shapes, strides and gradients, without running it: a compiled block takes it as it is."""
    q, keys_values = (each.bfloat16().requires_grad_() for each in given(4, 2, 16, 48, size))
    torch.library.opcheck(merged_parts, (q, by_ranks(keys_values, size).detach().requires_grad_(), rank))


class Calls(TorchDispatchMode):
    """How often attention is computed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.wattune.merged_parts.default
        return func(*args, **(kwargs or {}))


def trained(mode: str, split_backward: bool) -> tuple[list[Tensor], int]:
    plain = Parts(PRESETS["tiny-llama"], positions(64, 2, 1, torch.device("cpu")), seed=0).block(0)
    plain.attention.attend = _Gathered(2)
    block = recomputed(plain, mode, split_backward)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Calls() as calls:
        block(x).square().mean().backward()
    return [each.grad for each in (x, *block.parameters()) if each.grad is not None], calls.count


@pytest.mark.parametrize(
    ("mode", "split_backward", "times"), [("selective", False, 1), ("full", False, 2), ("full", True, 2)]
)
def test_recomputation_keeps_what_is_merged(mode: str, split_backward: bool, times: int) -> None:
    expected, once = trained("none", False)
    found, calls = trained(mode, split_backward)
    assert (once, calls) == (1, times)
    assert len(found) == len(expected) == 10
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0),
    reason="takes a GPU of NVIDIA's, Hopper or newer",
)
@pytest.mark.parametrize(("size", "rank"), RANKS)
@pytest.mark.parametrize("shape", [(8, 8, 128), (8, 2, 128), (8, 1, 64), (6, 2, 96)])
def test_on_hopper_it_is_about_as_exact_as_flash_attention(shape: tuple[int, int, int], size: int, rank: int) -> None:
    q, keys_values = given(*shape, 2048, size, "cuda")
    assert is_fast(q.bfloat16(), keys_values[0].bfloat16())
    assert not is_fast(q, keys_values[0])
    where = positions(2048, size, rank, q.device)
    expected = results(partial(masked, where=where), torch.float32, q, keys_values)
    # Results of both parts are rounded to bf16 before they are merged: of errors of random values, a fourth more.
    ours, flash = (
        errors(results(partial(run, size=size, rank=rank), torch.bfloat16, q, keys_values), expected)
        for run in (merged, at_the_ends)
    )
    assert all(one < 1.5 * other < 1e-2 for one, other in zip(ours, flash, strict=True)), (ours, flash)
