"""Trials by slices: each kind of a layout's ranks runs alone, on one GPU, and the step is put together from them.

What a rank does itself, its kernels, memory and power, is measured; what comes from others is stood in for
(`trainables.standin`), in the time that the network is taken to need. See docs/slices.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from search_spaces.coefficients import POWER_SHARE
from search_spaces.composition import Composed, RankTimes, compose
from search_spaces.hardware import LINKS_AWAKE_S
from search_spaces.kinds import RankKind, kinds, others_in_memory
from search_spaces.layout import Layout
from search_spaces.memory import usable_bytes
from search_spaces.network import Network
from search_spaces.stretching import stretch
from search_spaces.wander import meeting, waited
from service.metrics import OFF, Method, Part, made_of
from service.problem import Problem
from service.result import Purpose, SliceRecord, TrialResult
from service.trials import probe
from service.trials.bench import Alone, Bench
from service.trials.extrapolation import SPENT
from service.trials.figures import breakdown_metrics, of_step
from service.trials.slice_breakdown import by_pipeline_rank, exposed_s, products, unprofiled
from trainables.breakdown import Breakdown
from trainables.command import Command
from trainables.command_slice import CommandSlice
from trainables.program import RankProgram, TrialRequest
from trainables.slice import Slice
from trainables.status import Status
from trainables.training import Training

MEANS = (
    "throttle_ratio",
    "power_cap_ratio",
    "mean_sm_clock_mhz",
    "mean_gpu_temp_c",
    "tensor_activity",
    "dram_activity",
)
HIGHEST = ("peak_gpu_temp_c", "peak_hbm_temp_c")
LOWEST = ("min_sm_clock_mhz", "min_gpu_temp_margin_c")
"""The states of GPUs that a trial by slices has: as they are while a rank works, averaged over the layout's GPUs, or of
the one that is worst off. What differs between GPUs, or flows between them, it has not."""

SLOWED = 0.6
"""By what share of the power that links take from them matrix products take longer at the power limit: 0.55 to 0.7 on
two H200 (benchmarks/results/drawn_2xh200.txt)."""

COMPOSED = made_of(Part.TIME, Part.ENERGY, Part.POWER, Part.MEMORY)


def network_of(bench: Bench, layout: Layout) -> Network:
    """The network that the layout's ranks are taken to communicate over."""
    assert bench.network is not None, "the spec's check refuses slices where nothing is known of the network"
    return replace(bench.network, rank_order=layout.rank_order)


def runs_alone(bench: Bench, layout: Layout) -> bool:
    """Whether ranks of the layout can run without the others, for which the bench must know the network."""
    return bench.network is not None and not layout.async_tensor_parallel


def run_slices(bench: Bench, request: TrialRequest) -> TrialResult:
    """The result of a layout whose ranks run alone, kind after kind, on one GPU of the bench.

    `request` is the trial as a gang of all its ranks would get it. Whatever goes wrong with a rank is the trial's
    status and cause. The fullest by the memory model goes first, so that a layout which does not fit takes one kind's
    time; where layouts that may not fit are to be probed, what a probe would refuse is out of memory here, too. Of
    ranks that differ in nothing but memory, others than the one that is measured take the few steps of a probe.
    """
    layout, work, network = request.layout, bench.problem.workload.run, network_of(bench, request.layout)
    found = kinds(layout, work)
    first = probe.fullest(layout, work) if len(found) > 1 else found[0]
    probed = probe.due(layout, bench.problem)
    others = others_in_memory(layout, work)
    asks = dict.fromkeys(sorted(found, key=lambda kind: kind != first), request)
    asks |= dict.fromkeys(others, probe.probing(request, request.batches))
    seen: dict[RankKind, Alone] = {}
    for kind, asked in asks.items():
        one = run_kind(bench, replace(asked, trial_id=f"{request.trial_id}-rank{kind.rank}"), kind)
        if isinstance(one, TrialResult):
            return replace(one, trial_id=request.trial_id, ranks=())
        if probed and (reason := probe.unsettled(one.report)) is not None:
            return TrialResult(request.trial_id, layout, Status.OOM, reason, devices=one.whole.devices)
        seen[kind] = one
    return _together(bench, request, network, {kind: seen[kind] for kind in found}, [seen[kind] for kind in others])


def run_kind(bench: Bench, request: TrialRequest, kind: RankKind) -> Alone | TrialResult:
    """Run one rank of a layout with the memory that the problem's GPUs have. The trial's result if it did not end well.

    `request` is a trial of the whole layout.
    """
    whole, network = request.program, network_of(bench, request.layout)
    usable = usable_bytes(bench.problem.workload.accelerator)
    program: RankProgram
    if isinstance(whole, Command):
        program = CommandSlice(whole, network, usable)
    else:
        assert isinstance(whole, Training)
        program = Slice(whole, kind.rank, network, usable)
    one = bench.alone(replace(request, program=program))
    if isinstance(one, TrialResult) and one.status == Status.OOM and usable is not None:
        name = bench.problem.cluster.accelerator
        return replace(one, cause=f"{one.cause} (of {usable / 2**30:.1f} GiB that torch can reserve on {name})")
    return one


def _together(
    bench: Bench, request: TrialRequest, network: Network, seen: Mapping[RankKind, Alone], others: Sequence[Alone]
) -> TrialResult:
    """The trial's result from what was seen of each kind of its ranks, in steps of the trial's own batch or of fewer
    microbatches, and of `others` the memory."""
    problem, layout, first = bench.problem, request.layout, next(iter(seen.values()))
    device = problem.cluster.device
    links_w = device.links_awake_w if problem.cluster.gpus_per_node > 1 else 0.0
    limits = [limit for limit in (device.power_limit_w, layout.power_limit_w) if limit is not None]
    limit_w = POWER_SHARE * min(limits, default=math.inf)
    times: dict[RankKind, RankTimes] = {}
    for kind, one in seen.items():
        alone, few = rank_times(one, bench.slower, links_w, limit_w, device.apart), one.runs[0].layout
        alone = replace(alone, memory_gib=max(memory_gib(each) for each in [one, *others]))
        times[kind] = alone if few == layout else stretch(alone, few, layout, kind.pipeline_rank)
    step = compose(layout, problem.workload.run, times, network)
    profiled = {kind: breakdown_of(one) for kind, one in seen.items()}
    broken_down = breakdown_metrics(by_pipeline_rank(step, times, profiled))
    metrics = _figures(problem, layout, step, seen) | broken_down
    trials = [*seen.values(), *others]
    spent: dict[str, float | None] = {name: sum(one.whole.metrics.get(name) or 0.0 for one in trials) for name in SPENT}
    problems = [f"as rank {kind.rank}: {one.whole.cause}" for kind, one in seen.items() if one.whole.cause]
    return TrialResult(
        trial_id=request.trial_id,
        layout=layout,
        status=Status.OK,
        cause="; ".join(dict.fromkeys(problems)) or None,
        metrics=metrics | spent,
        methods=_methods(metrics, first, (*COMPOSED, *MEANS, *HIGHEST, *LOWEST, *broken_down)),
        step_times_s=first.runs[0].step_times_s,
        windows=tuple(window for one in seen.values() for run in one.runs for window in run.windows),
        environment=first.whole.environment,
        losses=first.whole.losses,
        ranks=tuple(one.whole.ranks[0] for one in trials),
        slices=tuple(SliceRecord(kind, times) for kind, times in times.items()),
        network=network,
    )


def held_against(measured: TrialResult, explored: Iterable[TrialResult]) -> TrialResult:
    """The result of a layout measured in full, with what its slices were off, if they explored it.

    For each metric that both have, `OFF` with its name: the slices' figure over the measured one, less 1.
    """
    sliced = (one for one in explored if one.purpose == Purpose.SEARCH and Method.SLICE in one.methods.values())
    by_slices = next((one for one in sliced if one.layout == measured.layout), None)
    if by_slices is None:
        return measured
    off: dict[str, float | None] = {
        OFF + name: figure / real - 1
        for name in COMPOSED
        if (figure := by_slices.metrics.get(name)) and (real := measured.metrics.get(name))
    }
    return replace(measured, metrics=measured.metrics | off)


def rank_times(one: Alone, slower: Mapping[str, float], links_w: float, limit_w: float, apart: float) -> RankTimes:
    """What a rank does in a step of the largest batch that its trial timed, on the slowest GPU.

    All wait for that. `slower`: how much longer that takes at its power limit than each GPU, by UUID. Below the limit
    clocks are alike. `links_w`: what a GPU draws more while its links are awake, as they are not where a rank is alone.
    Products that are held at the power limit have that less, as far as they are: nothing else nears it, so that links
    add to what it draws, up to `limit_w`, at which a GPU's mean power is held. Ranks that meet in every block wait for
    each other, too, as their clocks wander at the limit: two GPUs are `apart` so much then (`search_spaces.wander`).
    """
    run, report = one.runs[0], one.report
    assert report.slice is not None
    batch = run.layout.global_batch_size
    times, window = report.slice.times[batch], report.timings[batch].window_steps_s
    # What the device's own marks leave out of a step is the host's: to deal the next batch, and to notice the end.
    busy = statistics.fmean(window) - times.waited_s
    limited, power_w = run.metrics.get("power_cap_ratio") or 0.0, run.metrics.get("mean_power_w") or 0.0
    waiting_w, paused = one.waiting_w or power_w, times.waited_s / (busy + times.waited_s)
    awake_w = links_w * links_awake(one)
    computing_w = (power_w - paused * waiting_w) / (1 - paused)
    profiled = breakdown_of(one)
    held = limited * products(profiled)
    added_w = min((1 - held) * awake_w, max(0.0, limit_w - computing_w))
    slowed = SLOWED * held * awake_w / computing_w if computing_w else 0.0
    ahead = [limited * (longer - 1) for longer in sorted(slower.values())]
    met = meeting(run.layout)
    waits = waited((*ahead, *met * (0.0,))[:met], held * apart / math.sqrt(2))
    busy_power_w = power_w + (1 - paused) * added_w + paused * awake_w
    measured = RankTimes(
        passes=times.passes_s,
        tail_s=busy - times.head_s - sum(times.passes_s.values()) - sum(times.reduces_s.values()),
        busy_power_w=busy_power_w,
        waiting_power_w=waiting_w + awake_w,
        memory_gib=memory_gib(one),
        head_s=times.head_s,
        update_s=times.update_s,
        waited_s=times.waited_s,
        exposed_s=exposed_s(profiled, busy),
        products=products(profiled),
        reduces=times.reduces_s,
        microbatch_s=times.microbatch_s,
        microbatch_power_w=busy_power_w * microbatch_power(one.runs, times.microbatch_s, busy),
    )
    own = 1 - sum(measured.exposed_s.values()) / busy
    return measured.on_slower(1 + limited * (slower.get(report.device or "", 1.0) - 1) + (slowed + waits) / own)


def memory_gib(one: Alone) -> float:
    """What a rank reserved at most; 0 where nobody counts."""
    return one.report.peak_memory_gib or 0.0


def microbatch_power(runs: Sequence[TrialResult], microbatch_s: float, step_s: float) -> float:
    """The power of a microbatch, of `microbatch_s` seconds, over the mean of a step of `step_s`, that of the first run.

    The energy of steps without a pipeline differs by that of as many microbatches as they do, and their time by these.
    What is done once a step draws something, and no more than microbatches: that bounds what errors of both powers make
    of it. 1 of a single run, or where powers are not known.
    """
    if len(runs) == 1 or not microbatch_s:
        return 1.0
    count, fewer = (run.layout.gradient_accumulation_steps for run in runs)
    power_w, other_w = (run.metrics.get("mean_power_w") for run in runs)
    if power_w is None or other_w is None:
        return 1.0
    shorter_s = step_s - (count - fewer) * microbatch_s
    share = (step_s - other_w / power_w * shorter_s) / (step_s - shorter_s)
    return min(max(1.0, share), max(1.0, step_s / (count * microbatch_s)))


def links_awake(one: Alone) -> float:
    """Share of a rank's step in which its links would be awake for what it sends and receives, messages between
    pipeline ranks at the begin and the end of each pass among that."""
    report = one.report
    assert report.slice is not None
    profile = report.profile
    passes = report.slice.times[one.runs[0].layout.global_batch_size].passes_s.values()
    if profile is None or profile.breakdown is None or profile.linked_s is None:
        return float(one.whole.layout.num_gpus > 1)
    messages = sum(min(seconds, LINKS_AWAKE_S) for seconds in passes) / sum(passes) if passes else 0.0
    return max(messages, min(1.0, profile.linked_s / profile.breakdown.span_s))


def breakdown_of(one: Alone) -> Breakdown | None:
    """Where the time of a rank's step of the first batch size went; None if it was not profiled, or could not be."""
    if one.report.profile is None or one.report.profile.breakdown is None:
        return None
    window = one.report.timings[one.runs[0].layout.global_batch_size].window_steps_s
    return unprofiled(one.report.profile.breakdown, statistics.fmean(window))


def _figures(
    problem: Problem, layout: Layout, step: Composed, seen: Mapping[RankKind, Alone]
) -> dict[str, float | None]:
    """The figures of a step, by the names of the record; None is missing."""
    runs = {kind: one.runs[0].metrics for kind, one in seen.items()}
    powered = all(metrics.get("mean_power_w") for metrics in runs.values())
    weighed = all(one.report.peak_memory_gib for one in seen.values())
    first = next(iter(seen.values()))
    tokens = first.report.tokens_per_step or layout.global_batch_size * problem.sequence_length
    figures = of_step(
        problem,
        layout.num_gpus,
        tokens,
        mean_s=step.step_time_s,
        median_s=step.step_time_s,
        energy_j=step.energy_j if powered else None,
    )
    figures["mean_power_w"] = step.mean_power_w if powered else None
    figures["peak_memory_gib"] = step.peak_memory_gib if weighed else None
    for name in MEANS:
        figures[name] = _mean([(metrics.get(name), len(kind.stands_for)) for kind, metrics in runs.items()])
    for names, worst in ((HIGHEST, max), (LOWEST, min)):
        for name in names:
            values = [value for metrics in runs.values() if (value := metrics.get(name)) is not None]
            figures[name] = worst(values) if values else None
    return figures | {"bubble_ratio": step.bubble}


def _mean(weighted: Sequence[tuple[float | None, int]]) -> float | None:
    """None as soon as a value is."""
    total = 0.0
    for value, weight in weighted:
        if value is None:
            return None
        total += value * weight
    return total / sum(weight for _, weight in weighted)


def _methods(metrics: Mapping[str, float | None], one: Alone, names: Sequence[str]) -> dict[str, Method]:
    """How the figures came about: by slices, but what was estimated stays so, as it says more against a figure."""
    estimated = {name for name, how in one.whole.methods.items() if how == Method.ESTIMATED}
    present = [name for name in names if metrics.get(name) is not None]
    return {name: Method.ESTIMATED if name in estimated else Method.SLICE for name in present}
