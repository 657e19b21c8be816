"""Predicted step time and power of a layout, part by part; see docs/cost.md.

Passes through the model are those of `search_spaces.roofline`; a pipeline waits for its bubble (Narayanan et al. 2021,
section 2.2), what becomes of gradients and parameters is ZeRO's (Rajbhandari et al. 2020), and power is what the work
costs until the limit is reached and the clock falls. A prediction warms a search; it never stands in for a measurement.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from search_spaces.blocks import Cut, Places, update_of
from search_spaces.coefficients import IDLE_SHARE, POWER_SHARE, Coefficients, data_sheet
from search_spaces.contention import contention
from search_spaces.engines import facts_of
from search_spaces.engines.base import EngineFacts
from search_spaces.launches import ENDS, TRUSTED, is_usual, launch_of, specimen_of, usual_s
from search_spaces.layout import Layout
from search_spaces.network import BESIDE, Collective
from search_spaces.parameters import Held, held
from search_spaces.roofline import Load, communicate, network, passes, spread
from search_spaces.workload import Workload

__all__ = ["Coefficients", "Prediction", "data_sheet", "predict", "predicted_metrics"]

ADDED_AGAIN = 1.8
"""Time of the CPU for what fp8 adds to a block of which some is computed again, in that for one of which nothing is.
Measured of GPT's blocks on a host of H100 (benchmarks/results/README.md)."""

PASSED_S = 3.5e-3
"""Time of the CPU on usual hosts to have a microbatch come from the stage before, and go to the next, and back: by five
layouts of small models in two stages on H200 that wait for the CPU; on a CPU, half of a millisecond to one."""

BACKWARD_APART = 1.25
"""Time of the CPU for a block whose backward pass is taken apart, as zero bubbles have it, in that for another: 1.2 to
1.45 of tiny models on a CPU."""

TOGETHER = 5
"""Power of the mean by which a microbatch takes longer than the longer of what its GPU computes and its CPU launches:
each is the longer one for a while, as forward passes are short on the GPU, and the CPU's lead is bounded. Next to
nothing is added where one takes twice as long as the other, a seventh where both are alike. Fitted on H100 and H200."""

IN_TURNS = 3
"""The same where the CPU waits in each block for some of what it gave the GPU, or may be no block ahead of it. Of
DeepSpeed's experts on H100."""

SPARED_TOGETHER = 0.55
"""Of the power that a GPU spares while it waits for the CPU, what it spares where ranks communicate in each block: part
of that time NCCL's kernels wait for the other ranks. Fitted to 27 layouts on two H100 and H200."""

AUTOCAST_BYTES = 14
"""Memory traffic of one parameter and microbatch under autocast, which casts weights and their gradients."""

AVERAGED_S = 0.04
"""Seconds over which a limit is taken to hold the mean power: of the time that a GPU waits for other pipeline stages in
a step no more lets its clock rise. Fitted to some sixty layouts in stages on up to four GPUs."""

STILL = 0.5
"""Share of the time in which a few threads work for milliseconds, as they count tokens of DeepSpeed's experts one after
the other, that lets the clock of products rise no more: a limit is held over less. Fitted to the power of fourteen
layouts on two H200 (benchmarks/results/README.md)."""

ZERO_BUBBLE = 1 / 3
"""The bubble of schedules that take backward passes apart, in that of 1F1B, for forward, backward and weight-gradient
passes F, B and W of one length: F + B - W in place of F + B + W (Qi et al. 2023, table 1). The V schedule has none
there; torch's order of it, played with two stages, leaves as much, and so it was measured on two H200."""

ZERO_BUBBLE_AGAIN = 1 / 2
"""The same where B is twice as long, as it computes the block again."""


@dataclass(frozen=True)
class Prediction:
    """`power_w`: mean of one of the layout's GPUs; `joules_per_token`: of all of them. On the pipeline rank that has
    most to do, `parts`: where the seconds of a step go, by name; `ahead`: how many times as long its GPU is taken to
    compute for a microbatch as the CPU to launch that."""

    step_time_s: float
    power_w: float
    tokens_per_s: float
    joules_per_token: float
    parts: dict[str, float]
    ahead: float


def predict(layout: Layout, work: Workload, calibration: Coefficients) -> Prediction:
    """For a legal layout of the whole model of `work`."""
    c, rounds = calibration, layout.gradient_accumulation_steps
    layers = [layout.layers_of(rank, work.shape.layers) for rank in range(layout.pipeline_parallel_size)]
    loads = _loads(layout, work, layers, c)
    sums = _sums_s(layout, work, layers, c)
    computing = [load.seconds + summed for load, summed in zip(loads, sums, strict=True)]
    behind = _launching(layout, work, layers, c)
    engine = facts_of(layout, work)
    in_turns = engine.waits_for_gpu(layout, work.shape) or engine.lead_is_short(layout)
    exponent = IN_TURNS if in_turns else TOGETHER
    times = [_together(gpu, cpu, exponent) for gpu, cpu in zip(computing, behind, strict=True)]
    slow = max(range(len(times)), key=times.__getitem__)
    load = loads[slow]
    upkeep = _upkeep(layout, work, slow, times[slow], c)
    updating = upkeep.updating

    clocked = rounds * (load.matmul + load.attention)
    steady = rounds * times[slow] - clocked + updating + upkeep.exposed
    core = rounds * load.flops * c.joules_per_flop
    rest = (rounds * load.moved + upkeep.moved) * c.joules_per_byte
    rest += (rounds * load.sent + upkeep.sent) * c.joules_per_link_byte
    limit, idle = c.power_limit_w, c.idle_w
    if layout.power_limit_w is not None:
        limit = min(limit, POWER_SHARE * layout.power_limit_w)
        idle = min(idle, IDLE_SHARE * limit)
    launching = rounds * (times[slow] - computing[slow])
    together = SPARED_TOGETHER if _communicates_in_blocks(layout) else 1.0
    spared = idle * (1 - c.unlaunched_share) * together * launching

    # With the sums of gradients in them, bubbles are up to 0.8% of a step too long (four H200).
    waits = _bubble(layout) * (sum(times) / times[slow] - 1) / layout.virtual_pipeline_stages
    between = _between_stages(layout, work, c)
    apart = waits * (times[slow] - sums[slow]) + between
    eased = steady - STILL * rounds * load.still + apart / (1 + apart / AVERAGED_S)
    clock = _clock(clocked, eased, core, rest, limit - idle + spared / (clocked + eased))
    stretched = rounds * times[slow] + clocked / clock - clocked
    bubble = waits * (stretched / rounds - sums[slow])
    offloading = upkeep.offloaded / c.offloaded_per_s
    step = stretched + updating + upkeep.exposed + bubble + between + offloading + c.step_s

    # What ranks have less to do than the slowest they wait for it.
    busy = sum(each.seconds for each in loads) / len(loads) / load.seconds
    power = idle + (busy * (core * clock**2 + rest) - spared) / step
    tokens_per_s = layout.global_batch_size * work.sequence_length / step
    parts = {
        "matmul": rounds * load.matmul / clock,
        "attention": rounds * load.attention / clock,
        "elementwise": rounds * load.elementwise,
        "launch": launching,
        "model_states": rounds * sums[slow] + updating,
        "offload": offloading,
        "tensor_parallel": rounds * load.tensor,
        "context_parallel": rounds * load.context,
        "expert_parallel": rounds * load.experts,
        "data_parallel": upkeep.exposed,
        "between_stages": between,
        "bubble": bubble,
        "step": c.step_s,
    }
    ahead = computing[slow] / behind[slow]
    return Prediction(step, power, tokens_per_s, power * layout.num_gpus / tokens_per_s, parts, ahead)


def _bubble(layout: Layout) -> float:
    """In that of 1F1B (Narayanan et al. 2021)."""
    if not layout.splits_backward:
        return 1.0
    return ZERO_BUBBLE_AGAIN if layout.recompute == "full" else ZERO_BUBBLE


def _communicates_in_blocks(layout: Layout) -> bool:
    """Whether ranks do so in every block of every microbatch."""
    split = layout.tensor_parallel_size * layout.context_parallel_size * layout.expert_parallel_size
    return split > 1 or (layout.shard_ranks > 1 and layout.zero_stage >= 2)


def predicted_metrics(layout: Layout, work: Workload, calibration: Coefficients) -> dict[str, float]:
    """What is predicted of a layout, by the names that trials have their figures under. MFU is missing where the
    accelerator's peak is not known."""
    return metrics_of(predict(layout, work, calibration), layout, work)


def metrics_of(prediction: Prediction, layout: Layout, work: Workload) -> dict[str, float]:
    """A prediction of a layout, likewise."""
    tokens = layout.global_batch_size * work.sequence_length
    speed = work.speed(prediction.tokens_per_s, layout.num_gpus)
    return {name: value for name, value in speed.items() if value is not None} | {
        "step_time_s": prediction.step_time_s,
        "joules_per_token": prediction.joules_per_token,
        "energy_per_step_j": prediction.joules_per_token * tokens,
        "mean_power_w": prediction.power_w * layout.num_gpus,
    }


def _clock(clocked: float, steady: float, core: float, rest: float, budget: float) -> float:
    """The clock, in that without a limit, at which the mean power above idle is `budget` at most.

    `clocked` seconds lengthen as the clock falls, `steady` ones do not. Of the joules above idle, `core` is of what the
    clock drives: it falls with the square of the voltage, which is taken to follow the clock. With s for the clock,
    core s^2 + rest = budget (clocked / s + steady), to whose one positive root Newton's method descends.
    """
    if core + rest <= budget * (clocked + steady):
        return 1.0
    clock, linear = 1.0, rest - budget * steady
    for _ in range(6):
        clock -= (core * clock**3 + linear * clock - budget * clocked) / (3 * core * clock**2 + linear)
    return clock


def _loads(layout: Layout, work: Workload, layers: list[int], c: Coefficients) -> list[Load]:
    """Of each pipeline rank, which has so many `layers`, for one microbatch forward and backward."""
    through = passes(Cut.of(layout, work), work.shape, work.sequence_length, c)
    blocks = {count: through.block.times(count) for count in set(layers)}
    loads = [blocks[count] for count in layers]
    first, last = layout.end_ranks
    loads[first] = loads[first].plus(through.embedding)
    loads[last] = loads[last].plus(through.head)
    if layout.pipeline_parallel_size == 1:
        return loads
    beside = facts_of(layout, work).beside_messages.get(layout.pipeline_schedule, 0.0)
    slower = 1 + beside * contention(layout, work)
    return [load._replace(matmul=slower * load.matmul, attention=slower * load.attention) for load in loads]


def _together(gpu: float, cpu: float, exponent: int) -> float:
    """Seconds of a microbatch that takes the GPU and the CPU so many."""
    longer, shorter = max(gpu, cpu), min(gpu, cpu)
    return longer * float((1 + (shorter / longer) ** exponent) ** (1 / exponent))


def _launching(layout: Layout, work: Workload, layers: list[int], c: Coefficients) -> list[float]:
    """Seconds that the CPU of each pipeline rank, which has so many `layers`, takes to launch a microbatch."""
    block, passed = launch_s(layout, work, c), 0.0
    if layout.pipeline_parallel_size > 1:
        passed = _host(c) * c.host_time * PASSED_S * layout.virtual_pipeline_stages
        block *= BACKWARD_APART if layout.splits_backward else 1.0
    behind = [passed + block * count for count in layers]
    for end in layout.end_ranks:
        behind[end] += block * ENDS / 2
    return behind


def launch_s(layout: Layout, work: Workload, c: Coefficients) -> float:
    """Time of the CPU for a block and a microbatch: by formula, as the host is at those launches that were measured,
    and as this one was."""
    formula_s = _launch_s(layout, work, c)
    if not c.operators.launches:
        return formula_s
    launch = launch_of(layout, work)
    seconds, timing = _host(c) * formula_s, c.operators.of(launch)
    if timing is not None:
        seconds *= (timing.forward_s / seconds) ** (TRUSTED if is_usual(launch) else 1.0)
    return c.launches_in_step * seconds


@lru_cache(maxsize=256)
def _host(c: Coefficients) -> float:
    """What the launches that were measured take, in the time that the formula has for them: the median, of those of
    usual modes if there are any; 1 where none was."""
    rows = [row for row in c.operators.launches if is_usual(row.operator)] or c.operators.launches
    ratios = []
    for row in rows:
        specimen = specimen_of(row.operator)
        ratios.append(row.forward_s / _launch_s(specimen.layout, specimen.workload, c))
    return statistics.median(ratios) if ratios else 1.0


def _launch_s(layout: Layout, work: Workload, c: Coefficients) -> float:
    """`launch_s` by formula."""
    added = facts_of(layout, work).launch_s(layout, c) * (1.0 if layout.recompute == "none" else ADDED_AGAIN)
    return c.host_time * usual_s(layout, work) + added


def update_s(engine: EngineFacts, parameters: float, c: Coefficients) -> float:
    """Time of the GPU for the update of so many parameters."""
    if c.operators.rows and (timing := c.operators.of(update_of(engine, parameters))) is not None:
        return c.operators_in_step * timing.forward_s
    return engine.update_bytes * parameters / c.states_bytes_per_s


def _sums_s(layout: Layout, work: Workload, layers: list[int], c: Coefficients) -> list[float]:
    """Seconds in which a GPU of each pipeline rank, which has so many `layers`, sums up the gradients of a
    microbatch."""
    engine, rounds, (first, last) = facts_of(layout, work), layout.gradient_accumulation_steps, layout.end_ranks
    kinds = [(count, rank == first, rank == last) for rank, count in enumerate(layers)]
    seconds = {}
    for rank, kind in enumerate(kinds):
        if kind not in seconds:
            whole = held(layout, work.shape, rank, engine.splits_tables).whole
            seconds[kind] = _summed_bytes(layout, engine, whole) / c.states_bytes_per_s / rounds
    return [seconds[kind] for kind in kinds]


def _summed_bytes(layout: Layout, engine: EngineFacts, whole: float) -> float:
    """That a GPU moves to sum up the gradients of so many parameters in a step: they are copied to be sent, or where
    they are summed, and added to what is there."""
    rounds, summed = layout.gradient_accumulation_steps, engine.sum_width(layout)
    copied = engine.sent_bytes(layout) + (AUTOCAST_BYTES if engine.autocasts(layout) else 0)
    return (rounds * copied + ((rounds - 1) * summed if layout.zero_stage < 2 else 0)) * whole


class _Upkeep(NamedTuple):
    """What is done with gradients, parameters and optimizer states in a step: seconds that it takes a GPU beside the
    microbatches' own, bytes that it moves and sends in all, seconds of communication that nothing hides, and parameters
    that the CPU updates."""

    updating: float
    moved: float
    sent: float
    exposed: float
    offloaded: float


def _upkeep(layout: Layout, work: Workload, rank: int, round_s: float, c: Coefficients) -> _Upkeep:
    """Of a GPU of a pipeline rank that takes `round_s` for a microbatch, waiting for the CPU included."""
    engine, zero, rounds = facts_of(layout, work), layout.zero_stage, layout.gradient_accumulation_steps
    layers, holds = layout.layers_of(rank, work.shape.layers), held(layout, work.shape, rank, engine.splits_tables)
    whole, shard, groups = holds.whole, holds.sharded(layout), _groups(layout, holds)
    given, summed = engine.gathered_bytes(layout, layers, holds), engine.sum_width(layout)
    forward, backward = round_s / 3, round_s * 2 / 3
    # Pipelines sum after their last backward pass.
    hides_gathers = layout.overlap_param_gather and engine.has_use("overlap_param_gather", layout)
    hides_sums = layout.overlap_grad_reduce and engine.has_use("overlap_grad_reduce", layout)
    hides_sums = hides_sums and layout.pipeline_parallel_size == 1

    places = Places.of(layout, work)
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * rounds}[zero]
    kind = Collective.BROADCAST if engine.shards_by_tensors else Collective.ALL_GATHER
    count = engine.gathers(layout, layers, whole)
    gather, received, shares = _communicated(kind, given, groups, count, places, c)
    exposed, sent = gathers * _exposed(gather, count, forward, shares, hides_gathers, c), gathers * received

    sums = rounds if zero >= 2 else 1
    kind = Collective.ALL_REDUCE if engine.sums_whole(layout) else Collective.REDUCE_SCATTER
    at_once = not zero or engine.shards_by_tensors
    count, size = engine.messages(layout, layers, whole), summed * whole
    over = [group.with_copies for group in groups] if at_once else groups
    scatter, scattered, shares = _communicated(kind, size, over, count, places, c)
    exposed += sums * _exposed(scatter, count, backward, shares, hides_sums, c)
    sent += sums * scattered
    if not at_once and layout.data_parallel_replicate_size > 1:
        over = [group.among_copies for group in groups]
        between, more, shares = _communicated(Collective.ALL_REDUCE, size, over, count, places, c)
        exposed, sent = exposed + _exposed(between, count, backward, shares, hides_sums, c), sent + more

    gathered = 0.0 if engine.gathers_in_place else gathers * 2.0 * given
    updating, moved = gathered / c.states_bytes_per_s, gathered + _summed_bytes(layout, engine, whole)
    if layout.offload_optimizer:
        return _Upkeep(updating, moved, sent, exposed, shard)
    most = max(shard, _largest_tensor(layout, work, rank)) if engine.shards_by_tensors else shard
    updated = update_s(engine, most, c)
    return _Upkeep(updating + updated, moved + engine.update_bytes * shard, sent, exposed, 0.0)


class _Group(NamedTuple):
    """Ranks that share states of a part of a GPU's parameters, `stride` apart, and `copies` of them that do."""

    part: float
    ranks: int
    stride: int
    copies: int = 1

    @property
    def with_copies(self) -> _Group:
        """All of them at once."""
        return _Group(self.part, self.ranks * self.copies, self.stride)

    @property
    def among_copies(self) -> _Group:
        """Those of all copies that have the same shard."""
        return _Group(self.part / self.ranks, self.copies, self.stride * self.ranks)


def _groups(layout: Layout, holds: Held) -> list[_Group]:
    """Of experts that are spread over ranks, those with the same ones share, as far apart; of all else, all."""
    ranks, stride, experts = layout.shard_group_size, layout.tensor_parallel_size, layout.expert_parallel_size
    others = _Group(holds.dense / holds.whole, ranks, stride, layout.shard_ranks // ranks)
    if experts == 1 or not holds.experts:
        return [others._replace(part=1.0)]
    alike = max(1, ranks // experts)
    of_experts = _Group(1 - others.part, alike, stride * experts, layout.shard_ranks // experts // alike)
    return [others, of_experts]


def _communicated(
    kind: Collective, size: float, groups: Sequence[_Group], count: int, places: Places, c: Coefficients
) -> tuple[float, float, float]:
    """Seconds of collectives in `count` pieces, of `size` bytes of which each group has its part, bytes that a GPU
    sends, and the bandwidth that they attain, in that of links."""
    found = [communicate(kind, size * group.part, count, group.ranks, group.stride, places, c) for group in groups]
    seconds, sent = (math.fsum(column) for column in zip(*found, strict=True))
    if not seconds:
        return 0.0, sent, 0.0
    shares = [_share(group.ranks, group.stride, places, c) for group in groups]
    return seconds, sent, sum(share * took for share, (took, _) in zip(shares, found, strict=True)) / seconds


def _largest_tensor(layout: Layout, work: Workload, rank: int) -> float:
    """Parameters of the largest tensor on a GPU of a pipeline rank."""
    model = work.shape
    rows = max(model.ffn_hidden, model.vocab if rank in layout.end_ranks else 0)
    return rows * model.hidden / layout.tensor_parallel_size


def _share(ranks: int, stride: int, places: Places, c: Coefficients) -> float:
    """Bandwidth that collectives of ranks `stride` apart attain, in that of links."""
    return network(places, c).share(spread(ranks, stride, places))


def _exposed(seconds: float, count: int, beside: float, share: float, hidden: bool, c: Coefficients) -> float:
    """What communication in `count` pieces adds to a step that computes for `beside` seconds in the meantime.

    One piece is beside nothing: parameters are gathered before the first part computes, and gradients of the last are
    summed after it. The others cost the computation as much as their bandwidth is in that of links, for NCCL has a
    channel, which is a multiprocessor's, for each 20 GB/s or so (`speedArrayIntra` in `src/graph/search.cc`).
    """
    if not hidden:
        return seconds
    alone = seconds / count
    others = seconds - alone
    lasting = (1 + share * (BESIDE - 1)) * others
    return alone + max(0.0, lasting - beside) + share * c.contention * min(others, beside)


def _between_stages(layout: Layout, work: Workload, c: Coefficients) -> float:
    """Seconds in which hidden states and their gradients are on their way to the slowest pipeline rank."""
    engine, ranks, tensor = facts_of(layout, work), layout.pipeline_parallel_size, layout.tensor_parallel_size
    if ranks == 1:
        return 0.0
    tokens = layout.micro_batch_size * work.sequence_length / layout.context_parallel_size
    size, places = tokens * work.shape.hidden * layout.width, Places.of(layout, work)
    gathered = 0.0
    if layout.splits_sequence or engine.splits_sends:
        if not layout.splits_sequence:
            gathered, _ = communicate(Collective.ALL_GATHER, size, 1, tensor, 1, places, c)
        size /= tensor
    one = gathered + network(places, c).takes(Collective.SEND, size, spread(ranks, layout.num_gpus // ranks, places))
    exposed = c.contention if engine.hides_sends(layout) else 1.0
    return 2 * layout.virtual_pipeline_stages * (exposed * layout.gradient_accumulation_steps + ranks - 1) * one
