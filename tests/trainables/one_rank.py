"""One rank of a layout, alone on a CPU: what it calls the others for, and what its blocks keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from tests.trainables.ledgers import CPU, no_time
from tests.trainables.live_bytes import LiveBytes
from tests.trainables.test_parity import SEQUENCE_LENGTH
from trainables.engines.base import Job
from trainables.engines.megatron.engine import MegatronEngine
from trainables.model import Attention
from trainables.standin.join import join
from trainables.standin.ledger import Call, Ledger


@contextmanager
def one_rank(
    model: ModelShape, layout: Layout, sequence: int = SEQUENCE_LENGTH
) -> Iterator[tuple[MegatronEngine, Ledger]]:
    """The first rank of a layout, alone, and what it calls the others for."""
    ledger = join(0, layout.num_gpus, no_time, CPU).ledger
    yield MegatronEngine(Job(layout, model, sequence, seed=0, rank=0, device=CPU, alone=True)), ledger
    dist.destroy_process_group()


def tokens(layout: Layout, model: ModelShape, sequence: int = SEQUENCE_LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab, (layout.micro_batch_size, sequence), generator=generator)


def calls_of_a_step(model: ModelShape, layout: Layout) -> Counter[Call]:
    with one_rank(model, layout) as (engine, ledger):
        engine.step(iter([(tokens(layout, model),) * 2] * layout.gradient_accumulation_steps))
        return Counter(ledger)


def local_of(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def kept_bytes(model: ModelShape, layout: Layout, sequence: int = SEQUENCE_LENGTH) -> int:
    """What the last block keeps of a microbatch for its backward pass, besides its parameters: of what autograd is
    given, or else, as the policy of selective recomputation keeps what it keeps to itself, all that is there."""
    with one_rank(model, layout, sequence) as (engine, _):
        stage, kept = engine.stages[0], []

        def keep(x: Tensor) -> Tensor:
            kept.append(local_of(x))
            return x

        x = stage.embedding(tokens(layout, model, sequence))  # type: ignore[misc]
        for before in stage.blocks[:-1]:
            x = before(x)
        block = stage.blocks[-1]
        block(x)  # which gathers its parameters
        if layout.recompute == "selective" and not layout.compile:
            with LiveBytes() as live:
                out = block(x)
                assert out.requires_grad
                return live._now()  # with what comes out, which is as large as what went in
        with saved_tensors_hooks(keep, lambda x: x):
            block(x)
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        rotary = [part.rotary for part in block.modules() if isinstance(part, Attention) and part.rotary is not None]
        for lasting in (*block.parameters(), *rotary):
            sizes.pop(local_of(lasting).untyped_storage().data_ptr(), None)
        return sum(sizes.values())
