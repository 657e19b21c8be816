"""What a search found, in sentences: each computed from the record, with its numbers and how sure they are.

A finding is a function of what is known, which returns a sentence, or None where the record does not bear it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import AXES, Layout
from search_spaces.placement import plain
from service.answers.candidates import Candidate
from service.answers.change import Value, change
from service.answers.growth import advances, spent_gpu_hours
from service.answers.placements import Placement, placements
from service.answers.ranking import compared, leaders, undecided
from service.goals import Comparison
from service.metrics import Direction, heading, number, with_unit
from service.record.results import SearchRecord
from service.result import Straggler
from trainables.status import Status

PAYS = 0.02
"""A step up in the microbatch that adds less than this share does not pay."""

CAPPED = 0.5
"""Share of the time at the power limit from which on it is what limits a layout, rather than its peaks."""

LOST = 0.2
"""Share of a step lost to one cause from which on that is what limits a layout."""

FULL = 0.9
"""Share of a GPU's memory from which on a layout has no room for more."""

SATURATED = 0.9
"""Share of its peak above which a fabric holds a trial up; `telemetry.windows.trial` has it too, but imports Arrow."""

UNUSED = 0.005
"""Below this a fabric's share is not worth a word."""

LATE = 0.25
"""The last part of a search's GPU hours, in which a front that still grows asks for more of them."""

GROWS = 0.02
"""Share of the hypervolume that the front gained by then, below which it counts as settled."""

ENOUGH = 8
"""Layouts tried, with fewer of which nobody can tell that the front has settled."""

UNEVEN = 0.02
"""Share of a pipeline rank's time from which on its layers are worth another cut."""

FABRICS = {"link_utilisation": "links between GPUs", "pcie_utilisation": "PCIe"}

OVERLAPS = {
    "overlap_grad_reduce": "reducing gradients beside computation",
    "overlap_param_gather": "gathering parameters beside computation",
    "async_tensor_parallel": "asynchronous tensor parallelism",
}


@dataclass(frozen=True)
class Found:
    """A search, and what its spec adds: the user's own `baseline` and how many layouts are `legal`, None if unknown."""

    search: SearchRecord
    baseline: Layout | None = None
    legal: int | None = None

    @cached_property
    def comparison(self) -> Comparison[Candidate]:
        """All that is ranked."""
        return compared(self.search)

    @cached_property
    def objective(self) -> tuple[str, Direction] | None:
        """The first objective that was measured, and which way it is better."""
        return next(iter(self.comparison.objectives.items()), None)

    @cached_property
    def winner(self) -> Candidate | None:
        """The best layout on it."""
        return None if self.objective is None else leaders(self.comparison).get(self.objective[0])


def findings(found: Found) -> list[str]:
    """All that the record bears, what a reader asks first in front."""
    return [sentence for finding in FINDINGS if (sentence := finding(found)) is not None]


def winner(found: Found) -> str | None:
    """The best layout, and by how much it beats the user's own and what people run by default."""
    best = found.winner
    if best is None or found.objective is None:
        return None
    metric, _ = found.objective
    how = "measured once" if len(best.trials) == 1 else f"mean of {len(best.trials)} trials, 95% interval"
    sentence = f"{best.label} is the best on {metric}: {_figure(best, metric)} ({how})"
    others = [("your own layout", _measured(found, found.baseline))] if found.baseline else []
    others += [("ZeRO-3 alone", _first(found, _zero_alone)), ("tensor parallelism alone", _first(found, _tensor_alone))]
    gains = [f"{_gain(best, other, metric)} {name} ({other.label})" for name, other in others if other is not None]
    if found.baseline == best.layout:
        gains.insert(0, "it is your own layout")
    return f"{sentence}; {', '.join(gains)}." if gains else f"{sentence}."


def limit(found: Found) -> str | None:
    """What limits the best layout: power, memory, communication or the host, by the breakdown and the counters."""
    best = found.winner
    if best is None:
        return None
    values, span_s = best.metrics, best.metrics.get("breakdown_span_s")
    limits: list[str] = []
    if (capped := values.get("power_cap_ratio")) is not None and capped >= CAPPED:
        clock = f", at {values['mean_sm_clock_mhz']:,.0f} MHz on average" if "mean_sm_clock_mhz" in values else ""
        limits.append(f"the power limit, which held the clocks down for {capped:.0%} of the time{clock}")
    if span_s:
        lost = {
            "communication that nothing hides": values["breakdown_exposed_communication_s"] / span_s,
            "ranks without work, which wait for the host or for each other": values["breakdown_idle_s"] / span_s,
        }
        ordered = sorted(lost.items(), key=lambda one: -one[1])
        limits += [f"{cause}, {share:.0%} of a step" for cause, share in ordered if share >= LOST]
    known = ACCELERATORS.get(str(found.search.params.get("accelerator")))
    memory = values.get("peak_memory_gib")
    if known is not None and known.memory_gib is not None and memory is not None and memory >= FULL * known.memory_gib:
        limits.append(f"memory, of which it takes {memory:.0f} of {known.memory_gib:.0f} GiB")
    if limits:
        return f"What limits {best.label}: {'; '.join(limits)}."
    if not span_s:
        return None
    compute = values["breakdown_compute_s"] / span_s
    return f"What limits {best.label} is computation itself, {compute:.0%} of a step."


def microbatch(found: Found) -> str | None:
    """Where larger microbatches stop paying, of the layouts that differ in nothing else."""
    if found.objective is None:
        return None
    metric, direction = found.objective
    sweeps = alike(found, "micro_batch_size")
    if not sweeps:
        return None
    group = min(sweeps, key=lambda one: (-len(one), min(direction.cost(each.metrics[metric]) for each in one)))
    base = _without(group[0], "mbs")
    for smaller, larger in pairwise(group):
        better = _better(larger, smaller, metric, direction)
        if better < PAYS:
            sizes = f"from {smaller.layout.micro_batch_size} to {larger.layout.micro_batch_size}"
            return f"Microbatches stop paying at {smaller.layout.micro_batch_size}: {sizes}, {metric} " + (
                f"changes by {_change(larger, smaller, metric)}{_more_memory(larger, smaller)} ({base})."
            )
    first, last = group[0], group[-1]
    sizes = f"from {first.layout.micro_batch_size} to {last.layout.micro_batch_size}, the largest measured"
    return f"Microbatches paid up to the largest: {sizes}, {metric} changes by {_change(last, first, metric)} ({base})."


def fabric(found: Found) -> str | None:
    """Which fabrics saturate, and how far the others are from it."""
    saturated, others = [], []
    for metric, name in FABRICS.items():
        busy = {one.label: one.metrics[metric] for one in found.comparison.results if metric in one.metrics}
        most = max(busy, key=busy.__getitem__, default=None)
        if most is None or busy[most] < UNUSED:
            continue
        over = sum(share > SATURATED for share in busy.values())
        if over:
            saturated.append(f"{name} in {over} of {len(busy)} layouts, at {busy[most]:.0%} of the peak in {most}")
        else:
            others.append(f"{name}, at {busy[most]:.0%} of the peak at most")
    parts = [
        f"{word}: {'; '.join(some)}" for word, some in (("Saturated", saturated), ("not saturated", others)) if some
    ]
    told = "; ".join(parts)
    return f"{told[0].upper()}{told[1:]}." if told else None


def recomputation(found: Found) -> str | None:
    """What computing activations again costs or gains, of layouts alike but for it."""
    pairs = [
        (group[0], other)
        for group in alike(found, "recompute")
        if group[0].layout.recompute == "none"
        for other in group[1:]
    ]
    return _effect("Recomputation", pairs, found)


def overlap(found: Found) -> str | None:
    """What hiding communication gains or heats, of layouts alike but for it."""
    told = []
    for axis, name in OVERLAPS.items():
        pairs = [(group[0], group[1]) for group in alike(found, axis) if len(group) == 2]
        if sentence := _effect(name.capitalize(), pairs, found):
            told.append(sentence)
    return " ".join(told) or None


def hottest(found: Found) -> str | None:
    """What the differences between GPUs cost the best layout, whose ranks wait for the slowest."""
    best = found.winner
    if best is None:
        return None
    values = best.metrics
    if not all(name in values for name in ("gpu_temp_spread_c", "sm_clock_spread_mhz", "mean_sm_clock_mhz")):
        return None
    warmer, apart, clock = (values[name] for name in ("gpu_temp_spread_c", "sm_clock_spread_mhz", "mean_sm_clock_mhz"))
    if best.layout.num_gpus < 2:
        return None
    lost = apart / (clock + apart)
    return (
        f"In {best.label} the hottest GPU was {warmer:.1f} degC above the coolest, and clocks were {apart:,.0f} MHz "
        f"apart: where all wait for the slowest, that costs {lost:.1%} of the speed at most."
    )


def slowest(found: Found) -> str | None:
    """The GPU for which others waited most often, what that costs, and why."""
    known = [trial.straggler for trial in found.search.trials if trial.straggler is not None]
    of_gpus: dict[str, list[Straggler]] = {}
    for one in known:
        of_gpus.setdefault(one.device or f"rank {one.rank}", []).append(one)
    if not of_gpus:
        return None
    name, waited = max(of_gpus.items(), key=lambda one: len(one[1]))
    causes = Counter(str(one.cause) for one in waited)
    share = statistics.median(one.cost for one in waited)
    ended = sum(trial.status == Status.OK for trial in found.search.trials)
    return (
        f"In {len(waited)} of {ended} trials the others waited for {name}, for {share:.1%} of a step by the median; "
        f"what slows it: {', '.join(f'{cause} ({times}x)' for cause, times in causes.most_common())}."
    )


def uneven(found: Found) -> str | None:
    """How uneven the stages of the best layout are, where no other cut of its layers was tried."""
    best = found.winner
    if best is None or best.layout.stage_layers is not None or placements(found.search.trials):
        return None
    imbalance, bubble = (best.metrics.get(name) for name in ("stage_imbalance", "bubble_ratio"))
    if imbalance is None or bubble is None or imbalance < UNEVEN:
        return None
    return (
        f"In {best.label} the pipeline rank with most to do computes {imbalance:.1%} longer than they do on average, "
        f"and GPUs wait for other pipeline ranks for {bubble:.1%} of the time: where its engine lets stages have other "
        "layers, `stage_layers: auto` has a search try those that even this out."
    )


def placed(found: Found) -> str | None:
    """What it was worth to do the best layout's work in other places, and whether that was kept."""
    sentences = [_worth(one) for one in placements(found.search.trials) if one.speed is not None]
    return " ".join(sentences) or None


def _worth(one: Placement) -> str:
    assert one.speed is not None
    parts = [f"the time of a step {one.speed}"]
    parts += [f"{heading(metric)} {saves}" for metric, saves in one.costs.items()]
    text = (
        f"{one.layout.label}, its work in other places, saves of what {plain(one.layout).label} takes, in "
        f"{one.speed.pairs} pairs: {', '.join(parts)}"
    )
    for metric, (before, after) in one.states.items():
        text += f"; {heading(metric)} {number(metric, before)} before, {number(metric, after)} after"
    return f"{text}. It was {'kept' if one.kept else 'not kept: that may be chance'}."


def next_hours(found: Found) -> str | None:
    """What the next GPU hours would best be spent on."""
    if found.objective is None:
        return None
    pairs = undecided(found.comparison)
    if pairs:
        metric, (one, other) = next(iter(pairs.items()))
        return f"Spend the next GPU hours on repeats of {one.label} and {other.label}: {metric} is not decided yet."
    grown, hours = advances(found.search), spent_gpu_hours(found.search)
    if not grown or not hours:
        return None
    before = max((step.hypervolume for step in grown if step.gpu_hours <= (1 - LATE) * hours), default=0.0)
    tried = len({trial.layout for trial in found.search.trials})
    left = None if found.legal is None else max(0, found.legal - tried)
    if left == 0:
        return "Nothing is left to try: the next GPU hours need a larger space, or another model or cluster."
    gained = 1 - before
    remain = "" if left is None else f", and {left:,} legal layouts are untried"
    if gained > GROWS:
        return (
            f"Spend the next GPU hours on more trials: the front gained {gained:.0%} of its hypervolume in the last "
            f"{LATE:.0%} of {hours:.3g} GPU hours{remain}."
        )
    if tried < ENOUGH:
        return f"Spend the next GPU hours on more trials: {tried} do not tell whether the front has settled{remain}."
    return (
        f"The front has settled: the last {LATE:.0%} of {hours:.3g} GPU hours added {gained:.1%} of its hypervolume"
        f"{remain}. The next ones are better spent on another space, or on repeats of the layouts on the front."
    )


FINDINGS: tuple[Callable[[Found], str | None], ...] = (
    winner,
    limit,
    microbatch,
    fabric,
    recomputation,
    overlap,
    hottest,
    slowest,
    uneven,
    placed,
    next_hours,
)


def alike(found: Found, axis: str) -> list[list[Candidate]]:
    """The ranked layouts in groups of two or more that differ in one axis alone, in the order of its values."""
    row = AXES[axis]
    groups: dict[Layout, dict[Any, Candidate]] = {}
    for one in found.comparison.ranked(found.comparison.results):
        values = groups.setdefault(replace(one.layout, **{axis: row.idle}), {})
        values.setdefault(getattr(one.layout, axis), one)

    def place(value: Any) -> float:
        return (row.allowed or ()).index(value) if isinstance(value, str) else float(value)

    return [[group[value] for value in sorted(group, key=place)] for group in groups.values() if len(group) > 1]


def _effect(name: str, pairs: Sequence[tuple[Candidate, Candidate]], found: Found) -> str | None:
    """What a setting changes, from the first of each pair to the second: medians, and between what they lie."""
    if not pairs:
        return None
    parts = []
    shares = [metric for metric in found.comparison.objectives if metric != "throttle_ratio"]
    for metric in shares:
        changes = [
            other.metrics[metric] / one.metrics[metric] - 1
            for one, other in pairs
            if one.metrics.get(metric) and metric in other.metrics
        ]
        if changes:
            parts.append(f"{metric} by {_span(changes, '+.1%')}")
    warmer = [
        other.metrics["peak_gpu_temp_c"] - one.metrics["peak_gpu_temp_c"]
        for one, other in pairs
        if "peak_gpu_temp_c" in one.metrics and "peak_gpu_temp_c" in other.metrics
    ]
    if warmer:
        parts.append(f"the hottest GPU by {_span(warmer, '+.0f')} degC")
    if not parts:
        return None
    of = "one pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
    return f"{name}, by {of} of layouts alike but for it, changes {', '.join(parts)}."


def _span(values: Sequence[float], style: str) -> str:
    low, high = format(min(values), style), format(max(values), style)
    middle = format(statistics.median(values), style)
    return middle if low == high else f"{middle} ({low} to {high})"


def _figure(one: Candidate, metric: str) -> str:
    return with_unit(metric, one.metrics[metric], one.methods.get(metric), one.intervals.get(metric))


def _gain(best: Candidate, other: Candidate, metric: str) -> str:
    """By how much one layout is ahead of another; both are measured."""
    if best is other:
        return "which is also"
    return f"{_change(best, other, metric)} against"


def _change(one: Candidate, base: Candidate, metric: str) -> str:
    """By what share a figure differs from that of `base`, with the 95% interval of the ratio where both have one."""
    return str(change(*(Value(each.metrics[metric], each.intervals.get(metric)) for each in (one, base))))


def _better(one: Candidate, base: Candidate, metric: str, direction: Direction) -> float:
    """By what share a figure is better than that of `base`; negative if it is worse."""
    share = one.metrics[metric] / base.metrics[metric] - 1
    return share if direction is Direction.MAXIMIZE else -share


def _more_memory(one: Candidate, base: Candidate) -> str:
    before, after = base.metrics.get("peak_memory_gib"), one.metrics.get("peak_memory_gib")
    if before is None or after is None:
        return ""
    return f" for {after - before:+.1f} GiB of memory"


def _measured(found: Found, layout: Layout | None) -> Candidate | None:
    """The ranked candidate of a layout, unless it is the winner."""
    some = [one for one in found.comparison.ranked(found.comparison.admitted) if one.layout == layout]
    return some[0] if some and some[0] is not found.winner else None


def _first(found: Found, kind: Callable[[Layout], bool]) -> Candidate | None:
    """The best layout of a kind on as many GPUs as the winner has, unless that is of this kind itself."""
    best = found.winner
    if best is None or found.objective is None or kind(best.layout):
        return None
    same = [
        one
        for one in found.comparison.ranked(found.comparison.results)
        if kind(one.layout) and one.layout.num_gpus == best.layout.num_gpus
    ]
    ordered = found.comparison.ordered(same, *found.objective)
    return ordered[0] if ordered else None


def _zero_alone(layout: Layout) -> bool:
    """Fully sharded data parallelism and nothing else: what most people start with."""
    return layout.zero_stage == 3 and layout.shard_ranks == layout.num_gpus and layout.context_parallel_size == 1


def _tensor_alone(layout: Layout) -> bool:
    """Tensor parallelism over all GPUs: what is advised within a node."""
    return layout.tensor_parallel_size == layout.num_gpus > 1


def _without(one: Candidate, word: str) -> str:
    """The label without the part that begins with a word."""
    return " ".join(part for part in one.label.split() if not part.startswith(word))
