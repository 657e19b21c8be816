"""Ray Tune gets the trials of an agenda, and waits where what comes next depends on those under way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ray.tune.search import Searcher

from service.result import Purpose, TrialResult
from service.sampling.agenda import CalibrationAgenda
from service.sampling.searcher import AgendaSearcher, outcome_of
from service.spec import parse_spec
from service.step import Step, Wish
from tests.service.records import PLENTY, Room
from trainables.status import Status

SPEC = parse_spec(
    "{name: s, model: tiny-llama, data: synthetic, sequence_length: 64, global_batch_size: 8, "
    "cluster: {gpus_per_node: 2, accelerator: cpu}, space: {micro_batch_size: [1, 2], precision: fp32}}"
)
LAYOUT, OTHER = SPEC.legal.layouts


def test_tune_gets_layout_purpose_and_front_and_is_told_to_wait_or_that_it_is_over() -> None:
    agenda = CalibrationAgenda(SPEC, [LAYOUT])
    searcher = AgendaSearcher(agenda, PLENTY)
    config = searcher.suggest("a")
    assert isinstance(config, dict)
    assert json.loads(json.dumps(config)) == config
    assert Step.from_config(config) == Step(LAYOUT, Purpose.CALIBRATION)
    assert searcher.suggest("b") is None, "what becomes of the trial under way may bring another"
    agenda.take(TrialResult("a", LAYOUT, Status.OK, purpose=Purpose.CALIBRATION))
    assert searcher.suggest("b") == Searcher.FINISHED


def test_the_front_reaches_a_trial() -> None:
    step = Step(LAYOUT, Purpose.SEARCH, ({"tokens_per_s": 3.0, "joules_per_token": 0.1},))
    assert Step.from_config(step.to_config()) == step


def test_a_trial_is_handed_out_once_there_are_workers_for_it() -> None:
    room = Room(0)
    searcher = AgendaSearcher(CalibrationAgenda(SPEC, [LAYOUT, OTHER]), room)
    assert [searcher.suggest("a"), searcher.suggest("a")] == [None, None]
    room.workers = 4
    assert isinstance(searcher.suggest("a"), dict)
    assert room.lent == {"a": Wish(2, alone=True)}
    assert searcher.suggest("b") is None, "no other runs beside it"
    room.release("a")
    assert isinstance(searcher.suggest("b"), dict)


def test_a_search_that_is_stopped_does_not_wait_for_workers() -> None:
    agenda = CalibrationAgenda(SPEC, [LAYOUT])
    searcher = AgendaSearcher(agenda, Room(0))
    assert searcher.suggest("a") is None
    agenda.stopped = True
    assert searcher.suggest("a") == Searcher.FINISHED


@pytest.mark.parametrize("reported", [None, {}, {"training_iteration": 0}])
def test_a_trial_that_reported_nothing_was_lost_with_its_machine(reported: dict[str, Any] | None) -> None:
    result = outcome_of("a", Step(LAYOUT, Purpose.FINALIST), reported)
    assert (result.trial_id, result.layout, result.status) == ("a", LAYOUT, "crash")
    assert (result.purpose, result.infrastructure) == ("finalist", True)
    assert result.cause
    assert "\n" not in result.cause


def test_an_outcome_comes_through_unchanged() -> None:
    result = TrialResult("a", OTHER, Status.OOM, "out of memory on rank 1", purpose=Purpose.SENTINEL)
    assert outcome_of("a", Step(OTHER, Purpose.SENTINEL), {"result": json.dumps(result.to_dict())}) == result
