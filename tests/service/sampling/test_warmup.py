"""A search begins with the user's own layout, earlier winners, and what is predicted to be good."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from search_spaces.coefficients import Coefficients
from search_spaces.cost import data_sheet, predict
from search_spaces.layout import Layout
from search_spaces.memory import MemoryModel, band
from service.metrics import Direction
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.sampling.warmup import APART, PREDICTED, WINNERS, first_points, open_study, predictions, winners
from service.spec import parse_spec

SPEC = """
name: search
model: llama3-8b
data: synthetic
sequence_length: 8192
global_batch_size: 16
cluster: {gpus_per_node: 4, accelerator: h200}
space:
  engine: [megatron, deepspeed]
  num_gpus: [2, 4]
  tensor_parallel_size: [1, 2, 4]
  pipeline_parallel_size: [1, 2]
  zero_stage: [0, 1, 2, 3]
  micro_batch_size: [1, 2]
  recompute: [none, full]
  compile: true
"""


def sheet() -> Coefficients:
    found = data_sheet("h200")
    assert found is not None
    return found


SHEET = sheet()


def spec(**changed: Any) -> Problem:
    return replace(parse_spec(SPEC), **changed)


def record(layouts: list[Layout]) -> SearchRecord:
    """A search whose trials, the later the slower and the thriftier, are all on its front."""
    trials = tuple(
        TrialRecord(
            trial_id=f"t{number}",
            label=layout.label,
            layout=layout,
            status="ok",
            cause=None,
            metrics={"tokens_per_s": 100.0 - number, "joules_per_token": 1.0 - number / 100},
            methods={},
            run_id=f"r{number}",
        )
        for number, layout in enumerate(layouts)
    )
    return SearchRecord(
        id="earlier",
        name="earlier",
        status="finished",
        started=datetime(2026, 1, 1, tzinfo=UTC),
        objectives={"tokens_per_s": Direction.MAXIMIZE, "joules_per_token": Direction.MINIMIZE},
        constraints=(),
        params={},
        environment={},
        notices=(),
        run_id="run",
        trials=trials,
    )


def differ(one: Layout, other: Layout) -> int:
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Layout))


def test_predictions_are_the_cost_models_under_the_names_of_the_record() -> None:
    points, work = spec().legal.layouts, spec().workload
    found = predictions(points, work, SHEET)
    assert set(found) == set(points)
    point = points[7]
    expected, metrics = predict(point, work, SHEET), found[point]
    assert metrics["tokens_per_s"] == expected.tokens_per_s
    assert metrics["mean_power_w"] == expected.power_w * point.num_gpus
    assert metrics["energy_per_step_j"] == pytest.approx(metrics["mean_power_w"] * metrics["step_time_s"])
    for metric, value in spec().speed(expected.tokens_per_s, point.num_gpus).items():
        assert metrics[metric] == pytest.approx(value)


def test_winners_are_what_earlier_searches_found() -> None:
    points = spec().legal.layouts
    good, other = [points[3], points[40]], [points[9]]
    batch = [replace(layout, global_batch_size=64) for layout in good]
    assert list(winners([record(batch)], spec())) == good
    assert list(winners([record(other), record(good), record(other)], spec())) == [*other, *good]
    assert list(winners([record([replace(good[0], precision="fp32")])], spec())) == []


def test_no_more_searches_are_read_than_winners_are_wanted() -> None:
    points, work = spec().legal.layouts, spec().workload
    safe = [point for point in points if band(point, work) == "fits"]
    searches = iter([record(safe[:3]), record(safe[3:6]), record(safe[6:9])])
    assert first_points(winners(searches, spec()), {}, spec().goals.objectives, MemoryModel(work)) == safe[:WINNERS]
    assert next(searches) == record(safe[6:9])


def test_the_best_predicted_come_first_and_are_no_neighbours() -> None:
    points, work, memory = spec().legal.layouts, spec().workload, MemoryModel(spec().workload)
    predicted = predictions(points, work, SHEET)
    found = first_points([], predicted, spec().goals.objectives, memory)
    safe = [point for point in points if band(point, work) == "fits"]
    assert len(found) == PREDICTED
    assert len(safe) < len(points)
    assert set(found) <= set(safe)
    assert found[0] == max(safe, key=lambda point: predicted[point]["tokens_per_s"])
    thrifty = sorted(safe, key=lambda point: predicted[point]["joules_per_token"])
    assert found[1] == next(point for point in thrifty if differ(point, found[0]) >= APART)
    assert min(differ(one, other) for one in found for other in found if one != other) >= APART


def test_winners_come_before_them_unless_they_may_not_fit() -> None:
    points, work = spec().legal.layouts, spec().workload
    safe = [point for point in points if band(point, work) == "fits"]
    edge = next(point for point in points if band(point, work) == "borderline")
    found = first_points([edge, *safe[:6]], {}, spec().goals.objectives, MemoryModel(work))
    assert found == safe[:WINNERS]


def test_few_layouts_are_all_begun_with() -> None:
    points, work = spec().legal.layouts, spec().workload
    safe = [point for point in points if band(point, work) == "fits"][:2]
    predicted = predictions(safe, work, SHEET)
    assert set(first_points([], predicted, spec().goals.objectives, MemoryModel(work))) == set(safe)


def test_a_study_begins_with_the_baseline_then_winners_then_predictions(tmp_path: Path) -> None:
    points = spec().legal.layouts
    safe = [point for point in points if band(point, spec().workload) == "fits"]
    baseline = {field: getattr(safe[5], field) for field in spec().axes}
    chosen = spec(baseline=baseline, sampler="tpe")
    study = open_study(chosen, "search", f"sqlite:///{tmp_path}/optuna.db", SHEET, [record([safe[9], safe[5]])])
    asked = [study.ask() for _ in range(2 + PREDICTED)]
    assert asked[:2] == [safe[5], safe[9]]
    predicted = predictions(points, chosen.workload, SHEET)
    assert (
        asked[2:]
        == first_points(safe[9:10] + safe[5:6], predicted, chosen.goals.objectives, MemoryModel(chosen.workload))[2:]
    )


@pytest.mark.parametrize("sampler", [pytest.param("random", marks=pytest.mark.slow), "exhaustive"])
def test_samplers_for_reference_know_nothing_ahead(sampler: str, tmp_path: Path) -> None:
    points = spec().legal.layouts
    studies = [
        open_study(spec(sampler=sampler), "search", f"sqlite:///{tmp_path}/{number}.db", SHEET, searches)
        for number, searches in enumerate(([], [record([points[30]])]))
    ]
    one, other = ([study.ask() for _ in range(3)] for study in studies)
    assert one == other
    if sampler == "exhaustive":
        assert one == list(points[:3])
