"""What a search came to, from records made by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import timedelta

import pytest

from search_spaces.layout import Layout
from service.answers.report import ENOUGH_TRIALS, Refusal, cramers_v, report, text
from service.metrics import DIRECTIONS, Method
from service.record.results import TrialRecord
from service.result import Purpose
from tests.service.records import STARTED, problem, search, trial

TWO = {name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token")}


def timed(number: int, speed: float, energy: float, **changes: object) -> TrialRecord:
    """The `number`-th trial of a search, of half an hour each, on two GPUs."""
    start = STARTED + number * timedelta(minutes=30)
    made = trial(str(number), tokens_per_s=speed, joules_per_token=energy)
    return replace(made, started=start, ended=start + timedelta(minutes=30), **changes)  # type: ignore[arg-type]


def test_hypervolume_grows_trial_by_trial_over_gpu_hours() -> None:
    trials = [
        timed(0, 0, 10),
        timed(1, 0, 10, status="oom", cause="rank 0: out of memory"),
        timed(2, 10, 10),
        timed(3, 5, 10),
        timed(4, 0, 0),
        timed(5, 99, 0, purpose="finalist"),
    ]
    advances = report(search(*trials, objectives=TWO)).advances
    assert [(step.trials, step.gpu_hours) for step in advances] == [(1, 1.0), (3, 3.0), (5, 5.0)]
    # Scaled, the three points are (1, 1), (0, 1) and (1, 0), and volume is counted up to (1.1, 1.1).
    whole = 0.1 * 1.1 + 0.1 * 1.1 - 0.1 * 0.1
    assert [step.hypervolume for step in advances] == pytest.approx([0.01 / whole, 0.11 / whole, 1.0])
    assert report(search(*trials, objectives=TWO)).gpu_hours == 6.0


def test_what_explores_by_slices_takes_one_gpu() -> None:
    one, other = timed(0, 10, 10, methods={"tokens_per_s": Method.SLICE}), timed(1, 0, 0, status="oom", cause="no room")
    assert report(search(one, other, timed(2, 9, 10, purpose=Purpose.FINALIST), objectives=TWO)).gpu_hours == 2.0


def test_a_search_without_result_has_a_report() -> None:
    told = report(search(timed(0, 1, 1, status="crash", cause="it broke"), objectives=TWO))
    assert (told.advances, told.importance, told.refusals) == ((), {}, None)
    assert "1 crash: " in text(told)
    assert "it broke" in text(told)
    assert text(report(search(objectives=TWO))).startswith("s1; no trials; 0 GPU hours")


def test_importance_goes_to_the_axis_that_decides() -> None:
    axes = itertools.product((1, 2, 4), (1, 2), ("none", "full"))
    layouts = [
        Layout("megatron", 4, 8, tensor_parallel_size=tp, micro_batch_size=mbs, recompute=recompute)
        for tp, mbs, recompute in axes
    ]
    trials = of_layouts(layouts)
    found = report(search(*trials, objectives=TWO)).importance
    assert found["tokens_per_s"]["tensor_parallel_size"] > 0.9
    assert found["joules_per_token"]["recompute"] > 0.9
    assert set(found["tokens_per_s"]) == {"tensor_parallel_size", "micro_batch_size", "recompute"}
    assert sum(found["tokens_per_s"].values()) == pytest.approx(1.0)
    assert report(search(*trials[: ENOUGH_TRIALS - 1], objectives=TWO)).importance == {}


def of_layouts(layouts: list[Layout]) -> list[TrialRecord]:
    """A trial of each, of a speed that tensor parallelism alone decides, and an energy that recomputation does."""
    return [
        replace(timed(i, 100 / one.tensor_parallel_size, 2.0 if one.recompute == "full" else 1.0), layout=one)
        for i, one in enumerate(layouts)
    ]


def test_axes_that_change_together_share_what_they_explain_and_are_named() -> None:
    """Sequence parallelism is on where there is tensor parallelism: which of the two matters, nobody can tell."""
    layouts = [
        Layout("megatron", 4, 8, tensor_parallel_size=tp, sequence_parallel=tp > 1, recompute=recompute)
        for tp, recompute in itertools.product((1, 2, 4), ("none", "selective", "full"))
    ]
    told = report(search(*of_layouts(layouts), objectives=TWO))
    both = "tensor_parallel_size + sequence_parallel"
    assert told.together == (("tensor_parallel_size", "sequence_parallel"),)
    assert all(set(shares) == {both, "recompute"} for shares in told.importance.values())
    assert told.importance["tokens_per_s"][both] > 0.9
    assert told.importance["joules_per_token"]["recompute"] > 0.9
    assert "tensor_parallel_size and sequence_parallel change together: one share for all of them" in text(told)
    apart = [*layouts, *(replace(one, sequence_parallel=False) for one in layouts if one.tensor_parallel_size == 2)]
    told = report(search(*of_layouts(apart), objectives=TWO))
    assert told.together == ()
    assert "change together" not in text(told)
    assert set(told.importance["tokens_per_s"]) == {"tensor_parallel_size", "sequence_parallel", "recompute"}


def test_how_far_two_axes_go_together() -> None:
    assert cramers_v([0, 0, 1, 1], [0, 1, 0, 1]) == 0.0
    assert cramers_v([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1]) == pytest.approx(1.0), "one is a function of the other"
    # Of two halves of 30, with one trial off: the phi coefficient of the table 15, 0, 1, 14.
    off = cramers_v([0] * 15 + [1] * 15, [0] * 16 + [1] * 14)
    assert off == pytest.approx(15 * 14 / (15 * 15 * 16 * 14) ** 0.5)
    assert off == pytest.approx(0.94, abs=0.005)


def test_the_sentinel_is_told_from_its_first_measurement_on() -> None:
    trials = [
        timed(0, 100, 1.0),
        timed(1, 101, 1.0, purpose="sentinel"),
        timed(2, 0, 0, purpose="sentinel", status="crash"),
        timed(3, 95, 1.1, purpose="sentinel"),
        timed(4, 500, 9.0, purpose="finalist"),
    ]
    told = report(search(*trials, objectives=TWO))
    assert [run.metrics["tokens_per_s"] for run in told.sentinel_runs] == [100, 101, 95]
    assert [run.change["tokens_per_s"] for run in told.sentinel_runs] == pytest.approx([0.0, 0.01, -0.05])
    assert "95 (-5.00%)" in text(told)
    assert report(search(trials[0], objectives=TWO)).sentinel_runs == ()


def test_failures_are_counted_by_status_and_those_of_machines_apart() -> None:
    trials = [
        timed(0, 1, 1, status="oom", cause="rank 0: out of memory"),
        timed(1, 1, 1, status="oom", cause="rank 1: out of memory"),
        timed(2, 1, 1, status="crash", cause="node lost", infrastructure=True),
        timed(3, 1, 1, status="crash", cause="assertion"),
        timed(4, 1, 1, status="pruned", cause="at best 10 tokens/s"),
        timed(5, 1, 1),
    ]
    told = report(search(*trials, objectives=TWO))
    assert [(failure.status, failure.trials, failure.cause) for failure in told.failures] == [
        ("oom", 2, "rank 0: out of memory"),
        ("crash of the machines", 1, "node lost"),
        ("crash", 1, "assertion"),
        ("pruned", 1, "at best 10 tokens/s"),
    ]
    assert told.trials == {"search": {"oom": 2, "crash": 2, "pruned": 1, "ok": 1}}


def test_a_report_is_plain_json_and_names_what_rules_refused() -> None:
    asked = problem(space={"tensor_parallel_size": 2, "pipeline_parallel_size": [1, 2], "precision": "fp32"})
    told = report(search(timed(0, 1, 1), timed(1, 1, 1, purpose="sentinel"), objectives=TWO), asked)
    ((rule, layouts),) = asked.legal.refused.items()
    reason = asked.legal.reasons[rule]
    assert told.refusals == (Refusal(rule, layouts, reason),)
    assert f"{layouts} refused by {rule}\n    {reason}" in text(told)
    read = json.loads(json.dumps(told.to_dict()))
    assert read["refusals"] == [{"rule": rule, "layouts": layouts, "reason": reason}]
    assert read["sentinel_runs"][0]["started"].startswith("2026-01-01T00:00")
