"""Ray Tune gets the trials of a course, and waits where what comes next depends on those under way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray.tune.search import Searcher

from search_spaces.layout import Layout
from service.result import TrialResult
from service.sampling.agenda import CalibrationAgenda
from service.sampling.searcher import AgendaSearcher, outcome_of
from service.spec import parse_spec

SPEC = parse_spec(
    "{name: s, model: tiny-llama, data: synthetic, sequence_length: 64, global_batch_size: 8, "
    "cluster: {gpus_per_node: 2, accelerator: cpu}, space: {micro_batch_size: [1, 2], precision: fp32}}"
)
LAYOUT, OTHER = SPEC.legal.layouts


def test_tune_gets_layout_purpose_and_front_and_is_told_to_wait_or_that_it_is_over() -> None:
    course = CalibrationAgenda(SPEC, [LAYOUT])
    searcher = AgendaSearcher(course)
    values = searcher.suggest("a")
    assert isinstance(values, dict)
    assert json.loads(json.dumps(values)) == values
    assert Layout.from_dict(values) == LAYOUT
    assert (values["purpose"], values["front"]) == ("calibration", [])
    assert searcher.suggest("b") is None, "what becomes of the trial under way may bring another"
    course.take(TrialResult("a", LAYOUT, "ok", purpose="calibration"))
    assert searcher.suggest("b") == Searcher.FINISHED


@pytest.mark.parametrize("reported", [None, {}, {"training_iteration": 0}])
def test_a_trial_that_reported_nothing_was_lost_with_its_machine(reported: dict[str, Any] | None) -> None:
    result = outcome_of("a", LAYOUT.to_dict() | {"purpose": "finalist", "front": []}, reported)
    assert (result.trial_id, result.layout, result.status) == ("a", LAYOUT, "crash")
    assert (result.purpose, result.infrastructure) == ("finalist", True)
    assert result.cause
    assert "\n" not in result.cause


def test_an_outcome_comes_through_unchanged() -> None:
    result = TrialResult("a", OTHER, "oom", "out of memory on rank 1", purpose="sentinel")
    layout = OTHER.to_dict() | {"purpose": "sentinel", "front": []}
    assert outcome_of("a", layout, {"result": json.dumps(result.to_dict())}) == result
