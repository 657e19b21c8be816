"""How long the CPU takes for a block, by engine and mode, as an operator: which modes differ, and a layout of each.

What decides is how many kernels, hooks and collectives a block has, and in which of torch's ways they are called, not
how large they are. So one tiny model tells it of all layouts that train in the same mode.
"""

from __future__ import annotations

from typing import NamedTuple

from search_spaces.engines import facts_of
from search_spaces.engines.base import EngineFacts
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.operators import Kind, Operator
from search_spaces.workload import Workload

ROUNDS = 2
"""Microbatches that a step has more than another of which the time is taken off."""

ENDS = 1
"""Blocks for whose kernels the CPU needs as long as for the embedding, the head and the loss together: half of one to
two, by models of 4 and of 8 layers (CPU, both engines)."""

TABLED = 4
"""Experts of a rank for which `launched_ms` stands, though tiny models had eight: a step takes the CPU longer."""

MORE_AGAIN = 1.5
"""Time of the CPU for what blocks of several ranks have more, where they are computed again, in that where they are
not: forward collectives are repeated."""

TRUSTED = 0.3
"""How much of the logarithm of a launch's time is what was measured of it. The rest is what the host's other launches
say of it, by the engine's `launched_ms`: the same launch, measured again, differs by 12%."""


class Specimen(NamedTuple):
    """A tiny model to be trained as a layout says: by one of its ranks, once with each of two global batches, in
    sequences, of which the later has `ROUNDS` microbatches more."""

    layout: Layout
    model: ModelShape
    sequence_length: int
    batches: tuple[int, int]

    @property
    def workload(self) -> Workload:
        """With the first of its batches."""
        return Workload(self.model, self.sequence_length, self.batches[0])

    def launch_s(self, step_s: tuple[float, float]) -> float:
        """The time of a block and a microbatch, by that of a step with each of the batches."""
        few, many = step_s
        return (many - few) / (ROUNDS * (self.model.layers + ENDS))


def usual_s(layout: Layout, work: Workload) -> float:
    """Seconds of the CPU for a block on usual hosts, without what fp8 adds to eager ones."""
    model, engine = work.shape, facts_of(layout, work)
    block = "experts" if model.num_experts else model.family
    once = {"gathers"} if engine.recomputes_in_graphs(layout, model) else set()
    ms = engine.launched_ms[block][layout.recompute][layout.compile]
    if model.num_experts:
        ms *= 1 + engine.launched_per_expert * (_experts_here(layout, model) - TABLED)
    for mode in _modes(layout, engine):
        again = 1.0 if layout.recompute == "none" or mode in once else MORE_AGAIN
        ms += again * engine.launched_more_ms.get(mode, (0.0, 0.0))[layout.compile]
    return 1e-3 * ms


def is_usual(launch: Operator) -> bool:
    """Whether it is of a mode that engines have in `launched_ms`."""
    return launch.precision == "bf16" and len(launch.form) == 3


def launch_of(layout: Layout, work: Workload) -> Operator:
    """The launch of a block of a layout."""
    model = work.shape
    dims = (_experts_here(layout, model), model.experts_per_token) if model.num_experts else ()
    form = (layout.engine, model.family, layout.recompute, *_modes(layout, facts_of(layout, work)))
    return Operator(Kind.LAUNCH, dims, layout.precision, layout.compile, form)


def _experts_here(layout: Layout, model: ModelShape) -> int:
    """Those of a rank."""
    return model.num_experts // layout.expert_parallel_size


def _modes(layout: Layout, engine: EngineFacts) -> list[str]:
    """In which its blocks have more for the CPU to do than on one GPU."""
    modes = {
        "tensor": layout.tensor_parallel_size > 1,
        "sequence": layout.splits_sequence,
        "context": layout.context_parallel_size > 1,
        "experts": layout.expert_parallel_size > 1,
        "reduces": layout.zero_stage == 2,
        "gathers": layout.zero_stage == 3,
        "autocast": engine.autocasts(layout),
    }
    return [name for name, holds in modes.items() if holds]


def specimen_of(launch: Operator) -> Specimen:
    """What to train for the time of a launch: two ranks of whatever the mode has several of."""
    engine, family, recompute, *modes = launch.form
    tensor, context, experts = (2 if name in modes else 1 for name in ("tensor", "context", "experts"))
    data = 2 if {"reduces", "gathers", "autocast"} & set(modes) or experts > context else 1
    layout = Layout(
        engine,
        tensor * context * data,
        data,
        tensor_parallel_size=tensor,
        context_parallel_size=context,
        expert_parallel_size=experts,
        zero_stage=_zero_stage(modes, context * data),
        sequence_parallel="sequence" in modes,
        recompute=recompute,
        compile=launch.compiled,
        precision=launch.precision,
    )
    here, chosen = launch.dims or (0, 2)
    model = ModelShape(
        family,
        layers=8,
        hidden=64,
        heads=8,
        kv_heads=8 if family == "gpt" else 4,
        ffn_hidden=128,
        vocab=128,
        max_sequence_length=64,
        num_experts=here * experts,
        experts_per_token=chosen,
    )
    return Specimen(layout, model, 64, (data, data * (1 + ROUNDS)))


def _zero_stage(modes: list[str], shards: int) -> int:
    if "gathers" in modes:
        return 3
    if "reduces" in modes:
        return 2
    return int(shards > 1 and "autocast" not in modes)
