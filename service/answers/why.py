"""Why a layout is not the answer: what became of each layout that a few settings select, and for what reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from search_spaces.layout import Layout
from search_spaces.memory import estimate
from service.answers.candidates import Candidate
from service.answers.ranking import compared, within_noise
from service.axes import SpaceSpec
from service.errors import InputError
from service.goals import Comparison
from service.metrics import number, with_unit
from service.problem import Problem
from service.reading import read_yaml
from service.spec import explanation

if TYPE_CHECKING:
    from service.record.results import SearchRecord

FRONT, DOMINATED, LEGAL, NOT_TRIED, REFUSED = "on the front", "dominated", "legal", "not tried", "refused"
UNTRIED = (LEGAL, NOT_TRIED)
SHOWN = 10
"""Layouts that nobody tried which a text names, unless all are asked for."""


@dataclass(frozen=True)
class Fate:
    """What became of a layout, or of `layouts` ones that a rule refused together, which have no `label` and `layout`.

    `outcome` is `on the front`, `dominated`, `constrained` (it breaks a constraint of the search), `not ranked` (it
    lacks a figure that others have), the status of a trial without result, `not tried`, `refused` or, without a search,
    `legal`.
    """

    outcome: str
    reason: str | None
    layouts: int = 1
    label: str | None = None
    layout: Layout | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; the layout is under `config`."""
        values = asdict(self)
        del values["layout"]
        return values | {"config": self.layout and self.layout.to_dict()}


@dataclass(frozen=True)
class Explanation:
    """`fates` of all layouts, what was measured first; `notes` on all of them."""

    fates: tuple[Fate, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"fates": [fate.to_dict() for fate in self.fates], "notes": list(self.notes)}


def parse_choices(texts: Sequence[str]) -> dict[str, Any]:
    """Axis -> value, of texts such as ``zero_stage=3`` or ``micro_batch_size=[1, 2]``. Raises `InputError`."""
    chosen: dict[str, Any] = {}
    for text in texts:
        axis, equals, value = text.partition("=")
        if axis in chosen:
            raise InputError(f"{axis} is given twice; name several values as {axis}=[...]")
        try:
            chosen[axis] = read_yaml(value)
        except ValueError:
            equals = ""
        if not (axis and equals):
            raise InputError(f"{text!r} is not AXIS=VALUE")
    return chosen


def why(problem: Problem, choices: Mapping[str, Any], search: SearchRecord | None = None) -> Explanation:
    """What became of the layouts of `problem` with the chosen values, which need not be among its own.

    `choices` has values of axes as a spec's `space` has them, single ones or lists. `search` is the record of the
    search of this problem; without one, the answer is what is legal, and what is refused by which rule. Raises
    `InputError` for an axis or value that no spec could have.
    """
    chosen = _checked(choices, problem)
    narrowed = replace(problem, axes=problem.axes | chosen)
    try:
        space = narrowed.legal
    except ValueError as error:
        raise InputError(str(error)) from None
    tried = {} if search is None else _tried(search)
    # A setting without effect beside the others is written as the default: no legal layout has the value chosen.
    idle = [axis for axis in chosen if space.layouts and not any(_has(one, axis, chosen) for one in space.layouts)]
    wanted = [axis for axis in chosen if axis not in idle]
    known = dict.fromkeys([*space.layouts, *tried])
    layouts = [layout for layout in known if all(_has(layout, axis, chosen) for axis in wanted)]
    notes = [
        f"{axis} {_text(beyond)} is not in the spec"
        for axis, values in chosen.items()
        if (beyond := [value for value in values if value not in problem.axes[axis]])
    ]
    notes += [f"{axis} {_text(chosen[axis])} has no effect beside the other settings" for axis in idle]
    fates = [tried.get(layout) or _untried(layout, narrowed, search is not None) for layout in layouts]
    fates.sort(key=lambda fate: (fate.outcome != FRONT, fate.outcome in UNTRIED, fate.outcome))
    refused = [Fate(REFUSED, f"{rule}: {space.reasons[rule]}", count) for rule, count in space.refused.items()]
    return Explanation((*fates, *refused), tuple(notes))


def _checked(choices: Mapping[str, Any], problem: Problem) -> dict[str, list[Any]]:
    """Axis -> values, as a spec has them."""
    own = {} if problem.trainer is None else problem.trainer.own
    for axis in choices:
        if axis not in (*SpaceSpec.model_fields, *own):
            raise InputError(f"{axis} is no axis; axes: {', '.join([*SpaceSpec.model_fields, *own])}")
    try:
        checked = SpaceSpec.model_validate(choices)
    except ValidationError as error:
        raise InputError(explanation(error)) from None
    values = {axis: getattr(checked, axis) for axis in choices}
    for axis in values:
        if values[axis] is None:
            raise InputError(f"{axis}: give a value")
        if axis in own:
            values[axis] = values[axis] if isinstance(values[axis], list) else [values[axis]]
            if missing := [value for value in values[axis] if value not in own[axis]]:
                raise InputError(f"{axis}: the trainer has not {_text(missing)}; it has {_text(own[axis])}")
    return {axis: list(dict.fromkeys(several)) for axis, several in values.items()}


def _has(layout: Layout, axis: str, chosen: Mapping[str, list[Any]]) -> bool:
    return layout.setting(axis) in chosen[axis]


def _text(values: Sequence[Any]) -> str:
    return ", ".join(str(list(value) if isinstance(value, tuple) else value) for value in values)


def _tried(search: SearchRecord) -> dict[Layout, Fate]:
    """What became of each layout that the search tried."""
    fates = {}
    for trial in search.trials:
        layout = trial.layout
        fates[layout] = Fate(trial.status, trial.cause, label=layout.label, layout=trial.layout)
    comparison = compared(search)
    front = comparison.front()
    for one in comparison.results:
        fates[one.layout] = Fate(*_judged(one, comparison, front), label=one.label, layout=one.layout)
    return fates


def _judged(one: Candidate, comparison: Comparison[Candidate], front: Sequence[Candidate]) -> tuple[str, str]:
    """Outcome and reason of a layout that was measured."""
    if one in front:
        return FRONT, ", ".join(
            with_unit(metric, one.metrics[metric], one.methods.get(metric), one.intervals.get(metric))
            for metric in comparison.objectives
        )
    if broken := [limit for limit in comparison.goals.limits if not comparison.keeps(one, limit)]:
        kept = " and ".join(limit.text for limit in broken)
        unknown = [limit.metric for limit in broken if comparison.value(one, limit.metric) is None]
        return "constrained", "; ".join([f"it does not keep {kept}", *(_lacking(one, metric) for metric in unknown)])
    needed = comparison.objectives or comparison.goals.objectives
    if lacking := [metric for metric in needed if comparison.value(one, metric) is None]:
        return "not ranked", "; ".join(_lacking(one, metric) for metric in lacking)
    better = comparison.beating(one, front)
    assert better is not None, "what is neither on the front nor refused is beaten by the front"
    differing = [metric for metric in comparison.objectives if better.metrics[metric] != one.metrics[metric]]
    figures = [
        f"{number(metric, better.metrics[metric], better.methods.get(metric))} against "
        f"{with_unit(metric, one.metrics[metric], one.methods.get(metric))}"
        for metric in differing
    ]
    noise = " (within noise)" if all(within_noise(better, one, metric) for metric in differing) else ""
    return DOMINATED, f"by {better.label}: {', '.join(figures)}{noise}"


def _lacking(one: Candidate, metric: str) -> str:
    """Why a metric of a layout does not count: it is more in doubt than others', or missing for a recorded cause."""
    if metric in one.metrics:
        return f"{metric} is {one.methods[metric]}"
    cause = one.why_missing(metric)
    return f"{metric} is missing: {cause}" if cause else f"{metric} is missing"


def _untried(layout: Layout, problem: Problem, searched: bool) -> Fate:
    memory = None if problem.shape is None else estimate(layout, problem.workload.run)
    needs = None if memory is None or memory.share is None else memory.needs
    return Fate(NOT_TRIED if searched else LEGAL, needs, label=layout.label, layout=layout)


def text(explanation: Explanation, every: bool = False) -> str:
    """For a terminal: a paragraph for each layout, or rule. Of layouts that nobody tried, a few or `every` one."""
    lines = [f"note: {note}" for note in explanation.notes]
    width = max((len(fate.outcome) for fate in explanation.fates), default=0)
    untried = 0
    for fate in explanation.fates:
        untried += fate.outcome in UNTRIED
        if every or untried <= SHOWN or fate.outcome not in UNTRIED:
            parts = [fate.label or f"{fate.layouts} layout{'s' * (fate.layouts > 1)}", *filter(None, [fate.reason])]
            lines.append(f"{fate.outcome.ljust(width)}  " + f"\n{' ' * width}  ".join(parts))
    if not every and untried > SHOWN:
        lines.append(f"note: {untried - SHOWN} more were not tried: --all names them")
    return "\n".join(lines)
