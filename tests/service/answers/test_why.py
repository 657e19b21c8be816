"""What became of layouts, on a small spec and records made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from search_spaces.layout import Layout
from service.answers.why import SHOWN, parse_choices, text, why
from service.errors import InputError
from service.metrics import DIRECTIONS
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.result import Purpose
from service.spec import parse_spec
from tests.service.records import search, trial

SPACE = {"tensor_parallel_size": [1, 2], "zero_stage": [0, 3], "micro_batch_size": [1, 2, 3]}


def spec(**changes: Any) -> Problem:
    facts = {"name": "small", "model": "tiny-llama", "data": "synthetic", "sequence_length": 64}
    machines = {"cluster": {"nodes": 1, "gpus_per_node": 2, "accelerator": "h200"}, "space": SPACE}
    wanted = {"global_batch_size": 8, "objectives": {"tokens_per_s": "maximize", "joules_per_token": "minimize"}}
    return parse_spec(yaml.safe_dump({**facts, **machines, **wanted, **changes}))


def of(layout: Layout, status: str = "ok", cause: str | None = None, **metrics: float) -> TrialRecord:
    made = trial(layout.label, "counter", status, **metrics)
    return replace(made, layout=layout, label=layout.label, cause=cause)


def layout(**settings: Any) -> Layout:
    return next(
        point for point in spec().legal.layouts if all(getattr(point, axis) == v for axis, v in settings.items())
    )


FAST = layout(tensor_parallel_size=1, zero_stage=0, micro_batch_size=1)
SLOW = layout(tensor_parallel_size=2, micro_batch_size=1)
BIG = layout(tensor_parallel_size=1, zero_stage=0, micro_batch_size=2)
LEFT = layout(tensor_parallel_size=2, micro_batch_size=2)
RECORD = search(
    of(FAST, tokens_per_s=100, joules_per_token=1),
    of(SLOW, tokens_per_s=50, joules_per_token=1),
    of(BIG, "oom", "rank 0: out of memory"),
    objectives={name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token")},
)


def test_every_layout_has_one_fate_and_what_was_measured_comes_first() -> None:
    found = why(spec(), {}, RECORD)
    assert {fate.label: fate.outcome for fate in found.fates if fate.label} == {
        FAST.label: "on the front",
        SLOW.label: "dominated",
        BIG.label: "oom",
        **{p.label: "not tried" for p in spec().legal.layouts if p not in (FAST, SLOW, BIG)},
    }
    assert found.fates[0].outcome == "on the front"
    assert found.fates[-1].outcome == "refused"
    assert sum(fate.layouts for fate in found.fates) == spec().legal.distinct


def test_each_fate_has_its_reason() -> None:
    reasons = {fate.label: fate.reason for fate in why(spec(), {}, RECORD).fates}
    assert reasons[FAST.label] == "100 tokens/s, 1 J/token"
    assert reasons[SLOW.label] == f"by {FAST.label}: 100 against 50 tokens/s"
    assert reasons[BIG.label] == "rank 0: out of memory"
    assert (reasons[LEFT.label] or "").startswith("needs ")
    assert (reasons[None] or "").startswith("batch_divides: global batch 8")


def test_settings_select_layouts() -> None:
    labels = [fate.label for fate in why(spec(), {"tensor_parallel_size": 2}, RECORD).fates if fate.label]
    assert labels == [SLOW.label, LEFT.label]
    two = why(spec(), {"tensor_parallel_size": [1, 2], "micro_batch_size": 1, "zero_stage": [0]}, RECORD)
    assert [fate.label for fate in two.fates] == [FAST.label, SLOW.label]


def test_a_setting_without_effect_is_told() -> None:
    found = why(spec(), {"tensor_parallel_size": 2, "micro_batch_size": 1, "zero_stage": 3}, RECORD)
    assert [fate.label for fate in found.fates] == [SLOW.label]
    assert found.notes == ("zero_stage 3 has no effect beside the other settings",)


def test_values_beyond_the_spec_are_judged_and_told() -> None:
    found = why(spec(), {"micro_batch_size": 4, "tensor_parallel_size": 1, "zero_stage": 0}, RECORD)
    assert [(fate.outcome, fate.layout and fate.layout.micro_batch_size) for fate in found.fates] == [("not tried", 4)]
    assert found.notes == ("micro_batch_size 4 is not in the spec",)
    (never,) = why(spec(), {"micro_batch_size": 16, "tensor_parallel_size": 1}, RECORD).fates
    assert (never.outcome, never.label) == ("refused", None)
    assert (never.reason or "").startswith("batch_divides: global batch 8")


def test_a_layout_that_breaks_a_constraint_or_lacks_a_figure_says_which() -> None:
    record = replace(
        RECORD,
        constraints=("tokens_per_s<=80",),
        trials=(*RECORD.trials, of(LEFT, tokens_per_s=10)),
    )
    fates = {fate.label: (fate.outcome, fate.reason) for fate in why(spec(), {}, record).fates}
    assert fates[FAST.label] == ("constrained", "it does not keep tokens_per_s<=80")
    assert fates[SLOW.label][0] == "on the front"
    assert fates[LEFT.label] == ("not ranked", "joules_per_token is missing")


def test_a_figure_that_is_missing_is_told_with_its_recorded_cause() -> None:
    lacking = of(LEFT, cause="GPU 1: the energy counter was reset", tokens_per_s=10)
    record = replace(RECORD, trials=(*RECORD.trials, lacking))
    told = "joules_per_token is missing: GPU 1: the energy counter was reset"

    def fate(record: SearchRecord) -> tuple[str, str | None]:
        return next((one.outcome, one.reason) for one in why(spec(), {}, record).fates if one.label == LEFT.label)

    assert fate(record) == ("not ranked", told)
    again = [replace(lacking, trial_id=f"again-{i}", purpose=Purpose.FINALIST) for i in range(2)]
    again[0] = replace(again[0], cause=None)
    assert fate(replace(record, trials=(*record.trials, *again))) == ("not ranked", told)
    bounded = replace(record, constraints=("joules_per_token<=5",))
    assert fate(bounded) == ("constrained", f"it does not keep joules_per_token<=5; {told}")


def test_without_a_search_the_answer_is_what_is_legal() -> None:
    outcomes = {fate.outcome for fate in why(spec(), {}).fates}
    assert outcomes == {"legal", "refused"}


def test_a_layout_beaten_by_no_more_than_its_interval_says_so() -> None:
    def again(point: Layout, *speeds: float) -> list[TrialRecord]:
        made = [of(point, tokens_per_s=speed, joules_per_token=1) for speed in speeds]
        return [replace(one, trial_id=f"{one.trial_id}-{i}", purpose=Purpose.FINALIST) for i, one in enumerate(made)]

    def told(*speeds: float) -> str | None:
        record = replace(RECORD, trials=(*again(FAST, 100, 101, 102), *again(SLOW, *speeds)))
        return next(fate.reason for fate in why(spec(), {}, record).fates if fate.outcome == "dominated")

    assert told(99, 100, 101) == f"by {FAST.label}: 101 against 100 tokens/s (within noise)"
    assert told(49, 50, 51) == f"by {FAST.label}: 101 against 50 tokens/s"


def test_a_text_names_a_few_of_the_layouts_that_nobody_tried() -> None:
    many = why(spec(space=SPACE | {"recompute": ["none", "selective", "full"]}), {}, RECORD)
    untried = sum(fate.outcome == "not tried" for fate in many.fates)
    assert untried > SHOWN
    few = text(many)
    assert few.count("\nnot tried") == SHOWN
    assert few.endswith(f"note: {untried - SHOWN} more were not tried: --all names them")
    assert text(many, every=True).count("\nnot tried") == untried
    assert f"on the front  {FAST.label}\n              100 tokens/s, 1 J/token\n" in few


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        (["zero_stage"], "'zero_stage' is not AXIS=VALUE"),
        (["=1"], "'=1' is not AXIS=VALUE"),
        (["zero_stage=[1"], r"'zero_stage=\[1' is not AXIS=VALUE"),
        (["colour=1"], "colour is no axis; axes: engine, num_gpus"),
        (["zero_stage=9"], r"zero_stage: must be less than or equal to 3 \(given: 9\)$"),
        (["micro_batch_size=many"], r"micro_batch_size: must be a valid integer \(given: \"many\"\)$"),
        (
            ["zero_stage=1", "zero_stage=2"],
            r"^zero_stage is given twice; name several values as zero_stage=\[\.\.\.\]$",
        ),
        (["zero_stage=010"], r"zero_stage: must be a valid integer \(given: \"010\"\)$"),
        (["compile=yes"], r"compile: must be a valid boolean \(given: \"yes\"\)$"),
    ],
)
def test_wrong_choices_are_refused(choices: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        why(spec(), parse_choices(choices))


def test_more_layouts_than_there_is_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = spec()
    monkeypatch.setattr("search_spaces.space.MOST_LAYOUTS", 2)
    with pytest.raises(InputError, match=r"^space: more than 2 layouts"):
        why(problem, parse_choices(["micro_batch_size=[1, 2, 4, 8]"]))
