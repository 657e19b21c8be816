"""A run in training against the search that its layout came from: what it attains, and whether another would do it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.answers.candidates import Candidate
from service.answers.change import Value
from service.answers.ranking import compared, ranked
from service.errors import InputError, NoAnswerError
from service.goals import Comparison
from service.metrics import DIRECTIONS, Direction, with_unit
from service.record.results import SearchRecord
from service.student import confidence_interval
from service.watch.findings import Finding

SPEED = "tokens_per_s"

LEAST = 3
"""Windows of whose speeds a mean is made, at least."""

BELOW, BETTER = 0.03, 0.01
"""Shares from which on a run is below its search, whose trials read no data from disks and write no checkpoints, and
from which on another layout is worth a word."""


@dataclass(frozen=True)
class Attained:
    """What a run attains now: tokens a second in each of the latest windows, and J a token, None where not known.

    `slowest_mhz`: the mean SM clock of its slowest GPU, None where that is not known. `sound`: how many of its GPUs are
    not among those found to be slow.
    """

    speeds: Sequence[float]
    joules_per_token: float | None
    slowest_mhz: float | None
    sound: int


@dataclass(frozen=True)
class Against:
    """A search, and which of its layouts a run has. `metric`: the first objective that a run tells of."""

    record: SearchRecord
    comparison: Comparison[Candidate]
    used: Candidate
    metric: str

    @classmethod
    def of(cls, record: SearchRecord, choices: Mapping[str, Any]) -> Against:
        """The best layout with these values of axes is what runs.

        Raises `InputError` for an axis that there is not, `NoAnswerError` if no layout has a result and these values.
        """
        comparison = compared(record)
        metric = next((name for name in comparison.objectives if name in _TOLD), SPEED)
        direction = comparison.objectives.get(metric, DIRECTIONS[metric])
        some = comparison.ordered(ranked(comparison), metric, direction)
        for axis in choices:
            if some and not hasattr(some[0].layout, axis):
                raise InputError(f"layout: there is no axis {axis!r}")
        fitting = [one for one in some if all(_is(getattr(one.layout, axis), value) for axis, value in choices.items())]
        if not fitting:
            raise NoAnswerError(f"search {record.id}: no layout with a result is the run's")
        return cls(record, comparison, fitting[0], metric)

    @property
    def direction(self) -> Direction:
        return self.comparison.objectives.get(self.metric, DIRECTIONS[self.metric])

    @property
    def tokens(self) -> float | None:
        """Of a step, where the program does not tell; None of a search whose sequence length is not known."""
        length = self.record.params.get("sequence_length")
        return None if length is None else self.used.layout.global_batch_size * float(length)

    def judge(self, attained: Attained) -> list[Finding]:
        """Nothing before there are enough windows to tell."""
        now, then = self._now(attained), self._recorded(self.used)
        if now is None or then is None:
            return []
        return [*self._below(now, then), *self._outdated(now, then, attained)]

    def _now(self, attained: Attained) -> Value | None:
        if self.metric == "joules_per_token":
            return None if attained.joules_per_token is None else Value(attained.joules_per_token)
        if len(attained.speeds) < LEAST:
            return None
        mean, half_width = confidence_interval(attained.speeds)
        factor = 1.0 if self.metric == SPEED else 1 / self.used.layout.num_gpus
        return Value(mean * factor, None if half_width is None else half_width * factor)

    def _recorded(self, one: Candidate) -> Value | None:
        value = self.comparison.value(one, self.metric)
        return None if value is None else Value(value, one.intervals.get(self.metric))

    def _below(self, now: Value, then: Value) -> Iterator[Finding]:
        if self._behind(now, then, BELOW):
            share = abs(now.value / then.value - 1)
            text = f"the run has {self._said(now)}, {share:.1%} worse than the {self._said(then)} of the search"
            yield Finding("below", "run", text, {"metric": self.metric, "now": now.value, "measured": then.value})

    def _outdated(self, now: Value, then: Value, attained: Attained) -> Iterator[Finding]:
        """Of the layouts that were not ahead in the search, the one that is farthest ahead now, if one is for sure."""
        hopes = [
            (hoped, one, slowed)
            for one in ranked(self.comparison)
            if one is not self.used and (was := self._recorded(one)) is not None and not self._ahead(was, then)
            for hoped, slowed in [self._hoped(one, was, attained)]
        ]
        if not hopes:
            return
        hoped, best, slowed = min(hopes, key=lambda one: self.direction.cost(one[0].value))
        if not self._behind(now, hoped, BETTER):
            return
        held = "were it slowed as much as the slowest GPU's clock" if slowed else "as the search measured it"
        text = (
            f"{self.used.label} is no longer the best: {self._said(now)} now, {self._said(then)} in the search; "
            f"{best.label} would have {self._said(hoped)}, {held}"
        )
        details = {"metric": self.metric, "now": now.value, "measured": then.value, "layout": best.label}
        yield Finding("outdated", "run", text, details | {"config": best.layout.to_dict(), "expected": hoped.value})

    def _hoped(self, one: Candidate, was: Value, attained: Attained) -> tuple[Value, bool]:
        """What another layout would attain on the machine as it is, rather less than more: as slow as the slowest GPU,
        unless it can do without it; and whether it is slowed."""
        clock, recorded = attained.slowest_mhz, one.metrics.get("mean_sm_clock_mhz")
        spared = one.layout.num_gpus <= attained.sound and one.layout.num_gpus < self.used.layout.num_gpus
        if self.metric == "joules_per_token" or spared or not clock or not recorded or clock >= recorded:
            return was, False
        slower = clock / recorded
        return Value(was.value * slower, None if was.half_width is None else was.half_width * slower), True

    def _ahead(self, one: Value, other: Value) -> bool:
        return self.direction.cost(one.value) < self.direction.cost(other.value)

    def _behind(self, one: Value, other: Value, share: float) -> bool:
        """Whether one is worse than the other by more than a share of it and by more than both may be off."""
        margin = max(share * abs(other.value), (one.half_width or 0.0) + (other.half_width or 0.0))
        return self.direction.cost(one.value) > self.direction.cost(other.value) + margin

    def _said(self, value: Value) -> str:
        return with_unit(self.metric, value.value, None, value.half_width)


_TOLD = (SPEED, "tokens_per_s_per_gpu", "joules_per_token")


def _is(value: Any, asked: Any) -> bool:
    return value in asked if isinstance(asked, list) and not isinstance(value, list | tuple) else value == asked
