"""`wattune plan`: every legal layout is predicted, and what is shown is the best of that."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from search_spaces.cost import data_sheet
from search_spaces.doubt import MEASURED, UNLAUNCHED
from search_spaces.layout import Layout
from search_spaces.memory import glance
from service.cli import main
from service.fitting import expected
from service.plan import ROWS, Plan, _close, make_plan, text
from service.spec import load_spec, make_problem

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE = EXAMPLES / "llama3_8b_8xh200.yaml"


def planned(**changes: Any) -> Plan:
    """Of the example on eight H200, with `changes` to its fields."""
    spec = make_problem(yaml.safe_load(NODE.read_text()) | changes)
    return make_plan(spec, expected(spec.cluster))


def costs(plan: Plan, layout: Layout) -> tuple[float, float]:
    (found,) = (forecast for forecast in plan.forecasts if forecast.layout == layout)
    return -found.metrics["tokens_per_s"], found.metrics["joules_per_token"]


def test_every_legal_layout_is_predicted() -> None:
    plan = planned()
    assert [forecast.layout for forecast in plan.forecasts] == list(plan.problem.legal.layouts)
    for forecast in plan.forecasts:
        found = forecast.metrics
        tokens = plan.problem.tokens_per_step
        assert found["tokens_per_s"] == pytest.approx(tokens / found["step_time_s"])
        assert found["joules_per_token"] == pytest.approx(found["mean_power_w"] / found["tokens_per_s"])
        assert found["energy_per_step_j"] == pytest.approx(found["joules_per_token"] * tokens)
        assert 0 < found["mfu"] < 1
        assert forecast.share is not None
        assert forecast.band == ("borderline" if forecast.share >= 0.8 else "fits")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "1 to 3 kinds of its ranks, in about N s (measurement.explore: slices)"),
        ({"measurement": {"explore": "auto"}}, "1 to 3 kinds of its ranks, in about N s"),
        ({"space": {"tensor_parallel_size": 8, "zero_stage": [0, 1]}, "measurement": {"explore": "slices"}}, "1 kind "),
        ({"space": {"pipeline_parallel_size": 2, "zero_stage": [0, 1]}}, "2 kinds of its ranks, in about N s ("),
        ({"cluster": {"gpus_per_node": 8, "accelerator": "gpu"}}, None),  # of whose network nothing is known
        ({"model": "llama3-1b", "space": {"num_gpus": 1}}, None),
    ],
)
def test_what_slices_would_take_is_told_in_a_line(changes: dict[str, Any], said: str | None) -> None:
    lines = [line for line in text(planned(**changes)).splitlines() if line.startswith("slices: ")]
    seconds = [re.sub(r"about [1-9]\d* s", "about N s", line) for line in lines]
    assert [line.startswith(f"slices: one GPU explores a layout by {said}") for line in seconds] == [True] * bool(said)


def example(path: Path) -> Any:
    """A row of a table."""
    marks = [pytest.mark.slow] if path.stem == "gpt3_175b_1024xh100" else []  # of ten thousand layouts
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [example(path) for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_examples_are_planned(path: Path) -> None:
    spec = load_spec(path)
    plan = make_plan(spec, expected(spec.cluster))
    assert plan.front or plan.source is None
    assert plan.slices is None or plan.slices.fewest <= plan.slices.most <= 4


@pytest.mark.parametrize("name", ["gpt3_175b", "llama3_405b"])
def test_models_for_a_thousand_gpus_are_explored_in_minutes_by_one(name: str) -> None:
    spec = load_spec(EXAMPLES / f"{name}_1024xh100_by_slices.yaml")
    assert spec.measurement.explore == "slices"
    assert spec.least.size == 1
    plan = make_plan(spec, expected(spec.cluster))
    assert plan.slices is not None
    assert plan.slices.seconds is not None
    assert plan.slices.seconds < (spec.budget.wall_time_s or 0.0) / 5
    assert 50 < len(plan.promising) < 500


def test_the_front_is_what_nothing_promising_beats() -> None:
    plan = planned()
    promising = [costs(plan, forecast.layout) for forecast in plan.promising]
    front = [costs(plan, forecast.layout) for forecast in plan.front]
    beaten = {
        mine
        for mine in promising
        if any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in promising)
    }
    assert set(front) == set(promising) - beaten
    assert plan.front[0] == plan.best("tokens_per_s")[0]
    assert plan.objectives == {"tokens_per_s": "maximize", "joules_per_token": "minimize"}


def test_what_breaks_a_constraint_is_not_promising() -> None:
    tight = planned(constraints=["peak_memory_gib<=60"])
    assert 0 < len(tight.promising) < len(planned().promising)
    for forecast in tight.forecasts:
        assert (forecast in tight.promising) == (forecast.metrics["peak_memory_gib"] <= 60)
    hopeless = planned(constraints=["peak_memory_gib<=1"])
    assert hopeless.front == []
    assert "No legal layout is predicted to keep the constraints" in text(hopeless)


def test_what_is_predicted_not_to_fit_is_not_promising() -> None:
    """Selective recomputation was never measured, so that more is let in than is believed to fit."""
    space = {"recompute": "selective", "micro_batch_size": [1, 2, 4, 8], "zero_stage": [1, 2, 3]}
    plan = planned(sequence_length=8704, space=space)
    doubtful = [forecast for forecast in plan.forecasts if forecast.share is not None and forecast.share > 1]
    assert doubtful
    assert not [forecast for forecast in doubtful if forecast in plan.promising]


def test_proxies_have_to_fit_and_are_predicted_whole() -> None:
    plan = planned(model="llama3-70b", depth_proxy=[4, 8])
    for forecast in plan.forecasts:
        deeper = glance(forecast.layout, plan.problem.at_depth(8).workload)
        assert forecast.share == deeper.share
        assert forecast.metrics["peak_memory_gib"] > deeper.peak_bytes / 2**30
    assert "each trial is run with 8 and with 4 layers" in text(plan)


def test_machines_of_which_nothing_is_known() -> None:
    plan = planned(cluster={"gpus_per_node": 8, "accelerator": "gpu"}, constraints=[])
    assert plan.source is None
    assert (plan.objectives, plan.front) == ({}, [])
    assert all(not forecast.metrics and forecast.share is forecast.band is None for forecast in plan.forecasts)
    shown = text(plan)
    assert "Predicted" not in shown
    assert shown.count("megatron 8gpu") == ROWS
    assert f"{len(plan.forecasts) - ROWS} more" in shown


def test_what_is_stated_of_the_machines_is_predicted() -> None:
    """A slow network takes time, a power limit watts and time; the plan says what it rests on."""
    machines = {"nodes": 2, "gpus_per_node": 4, "accelerator": "a100"}
    stated: list[dict[str, Any]] = [{}, {"network": {"node_gb_per_s": 1}}, {"power_limit_w": 250}]
    plans = [planned(cluster=machines | facts) for facts in stated]
    usual, slow, capped = ([forecast.metrics for forecast in plan.forecasts] for plan in plans)
    slower = [b["step_time_s"] / a["step_time_s"] for a, b in zip(usual, slow, strict=True)]
    assert 1 <= min(slower) < 2 < max(slower)
    assert max(each["mean_power_w"] / 8 for each in capped) <= 250 < max(each["mean_power_w"] / 8 for each in usual)
    assert [plan.source for plan in plans] == [
        "data sheet of a100",
        "data sheet of a100; as the spec states: network",
        "data sheet of a100; as the spec states: power limit",
    ]
    assert all(plan.notices[0].startswith("never measured on a100") for plan in plans)


def test_machines_that_were_never_measured_are_said_to_be() -> None:
    plan = planned(cluster={"gpus_per_node": 8, "accelerator": "a100"})
    (notice,) = plan.notices
    assert notice.startswith("never measured on a100: by its data sheet")
    assert plan.to_dict()["notices"] == [notice]
    assert f"note: {notice}" in text(plan)
    assert 0.5 < max(forecast.metrics["mfu"] for forecast in plan.forecasts) < 0.8

    sheet = data_sheet("a100")
    assert sheet is not None
    calibrated = make_plan(
        plan.problem, replace(sheet, matmul_flops=290e12, source="16 trials, from data sheet of a100")
    )
    assert calibrated.notices == ()
    assert "note:" not in text(calibrated)
    assert calibrated.front[0].metrics["mfu"] > plan.front[0].metrics["mfu"]
    assert planned().notices == ()  # H200


def test_predictions_say_how_far_off_they_may_be() -> None:
    plan = planned()
    ranked, open_between = plan.best("tokens_per_s"), plan.undecided("tokens_per_s")
    assert open_between == [ranked[0], *(one for one in ranked[1:] if one in open_between)]
    assert 1 < len(open_between) < len(ranked)
    fastest, last, slowest = (one.metrics["tokens_per_s"] for one in (ranked[0], open_between[-1], ranked[-1]))
    assert ranked[0].doubt is not None
    assert fastest / last <= 1 + 2 * ranked[0].doubt.off < fastest / slowest
    shown = text(plan)
    assert f"Predicted best on tokens_per_s, of which {len(open_between)} are too close" in shown
    assert "may be off" in shown
    assert all(0 < point["apart"] <= point["off"] for point in plan.to_dict()["points"])
    unknown = planned(cluster={"gpus_per_node": 8, "accelerator": "gpu"})
    assert {point["off"] for point in unknown.to_dict()["points"]} == {None}


def test_layouts_that_can_hardly_be_faster_are_not_taken_for_the_best() -> None:
    plan = planned()
    ranked = plan.best("tokens_per_s")
    best = replace(ranked[0], doubt=MEASURED)
    slower = replace(best, metrics=best.metrics | {"tokens_per_s": 0.9 * best.metrics["tokens_per_s"]})
    assert not _close(best, replace(slower, doubt=UNLAUNCHED), "tokens_per_s")
    assert _close(replace(best, doubt=UNLAUNCHED), slower, "tokens_per_s")


def test_axes_that_nobody_chose_are_told_with_their_reasons() -> None:
    assert "space: auto" not in text(planned())
    cluster = {"nodes": 64, "gpus_per_node": 8, "accelerator": "h100"}
    plan = planned(model="llama3-405b", space="auto", cluster=cluster, global_batch_size=512)
    shown, told = text(plan), plan.to_dict()
    assert "space: auto" in shown
    assert "within a node of 8 GPUs" in shown
    assert "null, [4 stages], [8 stages]" in shown
    assert told["chosen_axes"]["tensor_parallel_size"] == [1, 2, 4, 8]
    assert set(told["chosen_for"]) == set(told["chosen_axes"])
    assert plan.promising


def test_the_best_is_told_as_a_spec_has_it() -> None:
    for changes in ({}, {"space": {"num_gpus": [4, 8], "engine": "deepspeed", "zero_stage": [2, 3]}}):
        plan = planned(**changes)
        line = next(line for line in text(plan).splitlines() if line.startswith("The first as a spec has it: "))
        space = yaml.safe_load(line.partition(": ")[2])
        assert space["micro_batch_size"] == plan.best("tokens_per_s")[0].layout.micro_batch_size
        assert planned(space=space).problem.legal.layouts == (plan.best("tokens_per_s")[0].layout,)


def test_what_ranks_alone_cannot_have_is_left_out_of_a_space_that_nobody_wrote() -> None:
    gangs, slices = (planned(space="auto", measurement={"explore": how}) for how in ("gang", "slices"))
    assert gangs.problem.axes["async_tensor_parallel"] == [False, True]
    assert slices.problem.axes["async_tensor_parallel"] == [False]
    assert gangs.slices == slices.slices
    assert gangs.slices is not None


def test_command() -> None:
    told = json.loads(CliRunner().invoke(main, ["plan", str(NODE), "--json"]).stdout)
    points = [Layout.from_dict(point) for point in told["points"]]
    assert points == list(load_spec(NODE).legal.layouts)
    assert told["distinct"] == len(points) + sum(told["refused"].values())
    assert told["memory_bands"]["fits"] + told["memory_bands"]["borderline"] == len(points)
    assert "h200" in told["predicted_from"]
    assert {point["layout"] for point in told["points"] if point["on_predicted_front"]} == {
        forecast.layout.label for forecast in planned().front
    }
    brief, full = (CliRunner().invoke(main, ["plan", str(NODE), *options]).stdout for options in ([], ["--all"]))
    assert "memory_fits" in brief
    assert "Predicted front" in brief
    assert sum(point.label in brief for point in points) < len(points)
    assert all(point.label in full for point in points)
