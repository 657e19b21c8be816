"""The figures of a trial, by the names of the record, from what its ranks report and what telemetry saw."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from search_spaces.layout import Layout
from search_spaces.messages import scripts
from search_spaces.playing import play_passes
from service.metrics import Method, Part, made_of
from service.problem import Problem
from service.result import DeviceRecord, NodeWindow, RankRecord, slowest_passes
from telemetry.windows.trial import WindowSummary
from trainables.breakdown import Breakdown
from trainables.child import Outcome
from trainables.mailbox import Member
from trainables.measure import Timing
from trainables.program import RankReport


def rank_records(outcomes: list[Outcome], members: list[Member]) -> tuple[RankRecord, ...]:
    """What each rank of the trial was and did, by rank. `outcomes` and `members` are by worker."""
    records = [
        RankRecord(
            rank=report.rank,
            worker=member.rank,
            node_id=member.node_id,
            device=report.device,
            coordinates=report.coordinates,
            peak_memory_gib=report.peak_memory_gib,
            breakdown=report.profile.breakdown if report.profile else None,
            own_s=report.profile.own_s if report.profile else (),
            interrupted_s=report.profile.interrupted_s if report.profile else None,
            passes=report.passes,
            compute_alone_s=report.profile.compute_alone_s if report.profile else (),
        )
        for outcome, member in zip(outcomes, members, strict=False)
        if (report := outcome.report) is not None
    ]
    return tuple(sorted(records, key=lambda record: record.rank))


def device_records(windows: Iterable[NodeWindow], summary: WindowSummary) -> tuple[DeviceRecord, ...]:
    """What each device did. `summary` is of these windows."""
    nodes = {device: window.node_id for window in windows for device in window.devices}
    names = [field.name for field in fields(DeviceRecord) if field.name != "node_id"]
    return tuple(
        DeviceRecord(node_id=nodes[one.device], **{name: getattr(one, name) for name in names})
        for one in summary.devices
    )


def lent_devices(members: Iterable[Member]) -> tuple[DeviceRecord, ...]:
    """The devices of a trial that did not end well: those of the workers that took part, which on CPU share one."""
    return tuple(DeviceRecord(*one) for one in dict.fromkeys((member.uuid, member.node_id) for member in members))


def pipeline_metrics(layout: Layout, ranks: Iterable[RankRecord], step_time_s: float | None) -> dict[str, float | None]:
    """What a pipeline of these ranks waits for itself in a step that takes so long, by its schedule played with their
    passes, and how uneven its stages are; nothing where no passes are known."""
    passes = slowest_passes(ranks)
    if not passes or step_time_s is None:
        return {}
    played = play_passes(scripts(layout), passes)
    return {
        "bubble_ratio": statistics.fmean(played.waiting) / step_time_s,
        "stage_imbalance": max(played.busy) / statistics.fmean(played.busy) - 1,
    }


def breakdown_metrics(breakdowns: Iterable[Breakdown | None]) -> dict[str, float | None]:
    """Each time of the ranks' breakdowns as their mean, and the most idle and most held-up ranks' own."""
    by_rank = [asdict(breakdown) for breakdown in breakdowns if breakdown is not None]
    if not by_rank:
        return {}
    means = {f"breakdown_{name}": statistics.fmean(times[name] for times in by_rank) for name in by_rank[0]}
    most = ("idle_s", "exposed_communication_s")
    return means | {f"breakdown_max_{name}": max(times[name] for times in by_rank) for name in most}


def breakdown_problems(outcomes: list[Outcome]) -> list[str]:
    """Why ranks that were to be profiled have no breakdown."""
    ranks: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.report is not None and outcome.report.profile is not None and outcome.report.profile.problem:
            ranks.setdefault(outcome.report.profile.problem, []).append(outcome.report.rank)
    return [
        f"no breakdown of rank{'s' * (len(these) > 1)} {', '.join(map(str, sorted(these)))}: {problem}"
        for problem, these in ranks.items()
    ]


def telemetry_problems(summary: WindowSummary, idle: WindowSummary | None) -> list[str]:
    """Why figures are missing or want looking at, and which fabrics held the trial up."""
    mute = [one.device for one in summary.devices if one.energy_j is None and not one.problems]
    said = [*summary.problems, *(f"{device}: tells neither energy nor power" for device in mute), *summary.saturated]
    if idle is None:
        return [*said, "no idle_energy_j: the node's GPUs are not all the gang's"]
    return [*said, *(f"idle {problem}" for problem in idle.problems)]


def of_step(
    problem: Problem, gpus: int, tokens: float, *, mean_s: float, median_s: float | None, energy_j: float | None
) -> dict[str, float | None]:
    """The metrics made of the time and energy of a step of so many `tokens` on so many GPUs; None is missing.

    All that is extrapolated or bounded goes by these two alone: `mean_s` and `median_s`, in seconds, and `energy_j`.
    """
    return {
        **problem.speed(tokens / mean_s, gpus),
        "step_time_s": median_s,
        "joules_per_token": None if energy_j is None else energy_j / tokens,
        "energy_per_step_j": energy_j,
    }


def metrics(
    tokens: float,
    reports: Sequence[RankReport],
    timing: Timing,
    summary: WindowSummary,
    idle: WindowSummary | None,
    problem: Problem,
) -> dict[str, float | None]:
    """The figures of one window, of steps of so many `tokens`, by the names of the record; None is missing.

    `summary` is of the devices that worked, `idle` of the gang's others, None if it is not known which they are.
    """
    steps, energy_j = len(timing.window_steps_s), summary.energy_j
    return {
        **of_step(
            problem,
            len(reports),
            tokens,
            mean_s=sum(timing.window_steps_s) / steps,
            median_s=statistics.median(timing.window_steps_s),
            energy_j=None if energy_j is None else energy_j / steps,
        ),
        "idle_energy_j": idle_energy_j(idle) if reports[0].device is not None else None,
        **summary.metrics(),
    }


def trial_metrics(reports: Sequence[RankReport], gang_s: float) -> dict[str, float | None]:
    """The figures of a whole trial, of all its windows.

    `gang_s` is all the time that the trial kept the gang from the next one; `trial_overhead_s` is what of it went
    neither into compiling, nor into warm-up, nor into windows, nor into the breakdown.
    """
    memory = [report.peak_memory_gib for report in reports if report.peak_memory_gib is not None]
    timings = reports[0].timings.values()
    spent = {
        "compile_time_s": sum(timing.compile_s for timing in timings),
        "warmup_time_s": sum(sum(timing.warmup_steps_s) - timing.compile_s for timing in timings),
        "window_time_s": sum(sum(timing.window_steps_s) for timing in timings),
        "breakdown_time_s": max(report.profile.time_s if report.profile else 0.0 for report in reports),
    }
    return spent | {
        "trial_overhead_s": gang_s - sum(spent.values()),
        "peak_memory_gib": max(memory, default=None),
        "final_loss": reports[0].losses[-1] if reports[0].losses else None,
    }


def idle_energy_j(idle: WindowSummary | None) -> float | None:
    """What the gang's idle GPUs drew: nothing if there are none."""
    if idle is None:
        return None
    return idle.energy_j if idle.devices else 0.0


def methods(summary: WindowSummary, idle: WindowSummary | None) -> dict[str, Method]:
    """How the energy and throttle figures that are known were obtained, by metric."""
    how = summary.methods()
    if summary.energy_j is not None and summary.energy_method is not None:
        how |= dict.fromkeys(made_of(Part.ENERGY), summary.energy_method)
    if idle is not None and idle.energy_j is not None and idle.energy_method is not None:
        how["idle_energy_j"] = idle.energy_method
    return {metric: Method(method) for metric, method in how.items()}
