"""What blocks keep for their backward pass, as `search_spaces.replay` has it and as torch does."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from search_spaces.engines import facts_of
from search_spaces.layout import Layout
from search_spaces.memory import _block_activations
from search_spaces.models import ModelShape
from search_spaces.replay import RUNS
from search_spaces.workload import Workload
from tests.trainables.live_bytes import LiveBytes
from trainables import moe
from trainables.model import Parts
from trainables.recompute import recomputed

SHAPES = {
    "gpt": ModelShape("gpt", 1, 256, 4, 4, 1024, 512, 64),
    "llama": ModelShape("llama", 1, 192, 4, 2, 704, 512, 64, head_dim=64),  # heads wider than hidden / heads
    "mixture": ModelShape("llama", 1, 256, 4, 2, 704, 512, 64, num_experts=8),
}
SEQUENCES, SEQUENCE = 2, 64
TOKENS = SEQUENCES * SEQUENCE


def kept_in_replay(shape: ModelShape, recompute: str, compiled: bool) -> float:
    """Bytes, and those of the block's input."""
    training = RUNS["sharded"](shape, TOKENS, 1, compiled, recompute)
    training.take("x0", TOKENS * shape.hidden)
    training._forward(0)
    return sum(piece.size for piece in (training.live["x0"], *training.block.values()))


def kept_by_torch(shape: ModelShape, recompute: str, compiled: bool) -> float:
    """What autograd is given to keep of a graph, or else all that is there after the forward pass but for parameters:
    the policy of selective recomputation keeps what it keeps to itself."""
    torch.compiler.reset()
    parts = Parts(shape, torch.arange(SEQUENCE), seed=0)
    block = recomputed(parts.block(0).bfloat16(), recompute)
    if compiled:
        block.compile()
    x = torch.randn(SEQUENCES, SEQUENCE, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    if compiled or recompute == "none":
        block(x).float().sum().backward()
        fixed = {tensor.untyped_storage().data_ptr() for tensor in block.parameters()}
        if parts.rotary is not None:
            fixed.add(parts.rotary.untyped_storage().data_ptr())
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in fixed:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = block(x)
        assert out.requires_grad
        return sum(sizes.values())
    gc.collect()
    with LiveBytes() as live:
        out = block(x)
        assert out.requires_grad
        return live._now()  # with what comes out, which is as large as what went in


@pytest.mark.parametrize(
    ("model", "recompute", "compiled"),
    [
        ("gpt", "none", False),
        ("gpt", "selective", False),
        ("llama", "selective", False),
        ("mixture", "selective", False),
        pytest.param("gpt", "none", True, marks=pytest.mark.slow),
        pytest.param("llama", "none", True, marks=pytest.mark.slow),
        pytest.param("gpt", "selective", True, marks=pytest.mark.slow),
        pytest.param("llama", "selective", True, marks=pytest.mark.slow),
    ],
)
def test_blocks_keep_what_is_replayed(
    model: str, recompute: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the formula counts of layouts of several GPUs, for which nothing is replayed."""
    # One product of all experts, as on GPUs.
    monkeypatch.setattr(moe, "grouped_matmul", torch.ops.aten._grouped_mm)
    shape = SHAPES[model]
    found = kept_by_torch(shape, recompute, compiled)
    assert kept_in_replay(shape, recompute, compiled) == pytest.approx(found, rel=0.01)
    layout = Layout("megatron", 2, 2 * SEQUENCES, micro_batch_size=SEQUENCES, recompute=recompute, compile=compiled)
    work = Workload(shape, SEQUENCE, layout.global_batch_size)
    counted, _ = _block_activations(layout, shape, facts_of(layout, work), TOKENS, SEQUENCE, False)
    assert counted == pytest.approx(found, rel=0.01)
