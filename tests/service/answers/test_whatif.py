"""Layouts explored by slices, on machines unlike those that were measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.composition import Fleet, RankTimes, compose
from search_spaces.kinds import kinds
from search_spaces.layout import Layout
from search_spaces.network import Network
from search_spaces.schedules import Action, Pass, orders
from service.answers.whatif import Change, parse_change, text, whatif
from service.errors import InputError, NoAnswerError
from service.metrics import Direction, Method
from service.record.results import TrialRecord
from service.result import Proxy, SliceRecord, TrialResult
from tests.service.records import problem, search
from trainables.status import Status

PROBLEM = problem(cluster={"nodes": 2, "gpus_per_node": 2, "accelerator": "cpu"})
NETWORK = Network("by hand", 2, 1e8, 1e7, 1e-6, 1e-5)
PIPELINE = Layout("megatron", 4, 16, micro_batch_size=2, pipeline_parallel_size=2, precision="fp32")
REPLICAS = Layout("megatron", 4, 16, micro_batch_size=2, precision="fp32")

Results = dict[str, TrialResult]


def sliced(trial_id: str, layout: Layout, pass_s: float = 1.0, layers: int | None = None, **more: Any) -> TrialResult:
    """Ranks of a pipeline take `pass_s` for each pass, the second half as much again; replicas reduce for a quarter of
    their step."""
    work = PROBLEM.workload.run if layers is None else PROBLEM.at_depth(layers).workload.run
    times = {}
    for kind in kinds(layout, work):
        slower = pass_s * (1 + kind.pipeline_rank / 2)
        passes = dict.fromkeys(orders(layout)[kind.pipeline_rank], slower)
        exposed = {"all_reduce": 0.25 * (1.0 + slower * len(passes))}
        times[kind] = replace(RankTimes(passes, 1.0, 400.0, 100.0, 10.0, exposed_s=exposed), **more)
    step = compose(layout, work, times, NETWORK)
    return TrialResult(
        trial_id,
        layout,
        Status.OK,
        metrics={"tokens_per_s": step.tokens_per_s, "joules_per_token": step.joules_per_token},
        methods={"tokens_per_s": Method.SLICE, "joules_per_token": Method.SLICE},
        slices=tuple(SliceRecord(kind, of_kind) for kind, of_kind in times.items()),
        network=NETWORK,
    )


def recorded(*results: TrialResult) -> tuple[tuple[TrialRecord, ...], Callable[[TrialRecord], TrialResult | None]]:
    """The trials as records have them, and what reads the rest."""
    trials = [
        TrialRecord(
            one.trial_id,
            one.layout.label,
            one.layout,
            one.status,
            None,
            {name: value for name, value in one.metrics.items() if value is not None},
            one.methods,
            f"run-{one.trial_id}",
        )
        for one in results
    ]
    kept = {one.trial_id: one for one in results}
    return tuple(trials), lambda trial: TrialResult.from_dict(kept[trial.trial_id].to_dict())


OBJECTIVES = {"tokens_per_s": Direction.MAXIMIZE}


def test_a_slow_gpu_is_put_where_it_costs_most() -> None:
    trials, read = recorded(sliced("a", PIPELINE), sliced("b", REPLICAS))
    found = whatif(search(*trials, objectives=OBJECTIVES), PROBLEM, Change(slow_gpu=0.1), read)
    assert [one.candidate.trial_id for one in found.layouts] == ["b", "a"], "in the order of best"
    replicas, pipeline = found.layouts
    assert replicas.rank == 0
    assert replicas.before.step_time_s == 1.0
    assert replicas.after.step_time_s == pytest.approx(1.1)
    assert pipeline.rank == 2, "the first of the second stage, which takes longer"
    times = {one.kind: one.times for one in sliced("a", PIPELINE).slices}
    expected = compose(PIPELINE, PROBLEM.workload.run, times, NETWORK, Fleet({2: 1.1}))
    assert pipeline.after == pytest.approx((expected.step_time_s, expected.joules_per_token))
    assert pipeline.before.joules_per_token is not None
    assert pipeline.after.joules_per_token is not None
    assert pipeline.after.joules_per_token > pipeline.before.joules_per_token
    assert "slow rank" in text(found)
    assert found.to_dict()["layouts"][1]["slow_rank"] == 2


def test_slower_links_cost_what_of_communication_is_exposed() -> None:
    trials, read = recorded(sliced("b", REPLICAS))
    found = whatif(search(*trials, objectives=OBJECTIVES), PROBLEM, Change(link=-0.2), read)
    (one,) = found.layouts
    assert one.rank is None
    assert one.after.step_time_s == pytest.approx(1 + 0.25 * 0.25)
    assert "+6.2%" in text(found)


def test_a_step_that_follows_from_shallower_models_is_followed_again() -> None:
    """Half a second, and half a second for each of four layers."""
    runs = [Proxy(layers, sliced(f"a-{layers}", REPLICAS, layers=layers, tail_s=(1 + layers) / 2)) for layers in (1, 2)]
    trials, read = recorded(replace(sliced("a", REPLICAS), proxies=tuple(runs)))
    (one,) = whatif(search(*trials, objectives=OBJECTIVES), PROBLEM, Change(slow_gpu=0.5), read).layouts
    assert one.before.step_time_s == pytest.approx(2.5)
    assert one.after.step_time_s == pytest.approx(3.75)


def test_a_step_that_follows_from_smaller_batches_is_followed_again() -> None:
    """A second, and a second for sixteen sequences."""
    few, many = (
        sliced(f"a-{batch}", replace(REPLICAS, global_batch_size=batch), tail_s=1 + batch / 16) for batch in (4, 8)
    )
    proxies = tuple(Proxy(PROBLEM.workload.shape.layers, run) for run in (few, many))
    trials, read = recorded(replace(sliced("a", REPLICAS), slices=(), proxies=proxies))
    (one,) = whatif(search(*trials, objectives=OBJECTIVES), PROBLEM, Change(slow_gpu=0.5), read).layouts
    assert one.before.step_time_s == pytest.approx(2.0)
    assert one.after.step_time_s == pytest.approx(3.0)


def test_what_a_record_lacks_is_one_line() -> None:
    bare, old = sliced("a", PIPELINE, exposed_s={}), replace(sliced("b", REPLICAS), network=None)
    trials, read = recorded(bare, old, sliced("c", replace(REPLICAS, micro_batch_size=4)))
    record = search(*trials, objectives=OBJECTIVES)
    assert whatif(record, PROBLEM, Change(link=-0.2), read).notices == (
        "1 layout left out: their records lack the network that was assumed, which earlier versions did not keep",
        "1 layout left out: their records lack the communication that was exposed, which `measurement.breakdown` tells",
    )
    assert len(whatif(record, PROBLEM, Change(slow_gpu=0.1), read).layouts) == 2
    with pytest.raises(NoAnswerError, match="not in reach"):
        whatif(record, PROBLEM, Change(slow_gpu=0.1), lambda trial: None)
    with pytest.raises(NoAnswerError, match="no layout was explored by slices"):
        whatif(search(objectives=OBJECTIVES), PROBLEM, Change(slow_gpu=0.1), read)


def test_records_from_before_the_network_and_reducing_were_kept_are_read() -> None:
    action = Action(1, Pass.BACKWARD, 0)
    kept = sliced("a", PIPELINE, reduces={action: 0.5})
    assert TrialResult.from_dict(json.loads(json.dumps(kept.to_dict()))).slices == kept.slices
    values = kept.to_dict()
    del values["network"]
    for one in values["slices"]:
        del one["times"]["reduces"]
    before = TrialResult.from_dict(values)
    assert before.network is None
    assert [one.times.reduces for one in before.slices] == [{}, {}]


def test_records_of_two_shares_of_tokens_are_read_and_tell_how_long_a_step_takes() -> None:
    """The rank with the fullest experts lets the others wait; what these draw meanwhile is not told."""
    kept = sliced("a", REPLICAS)
    values = json.loads(json.dumps(kept.to_dict()))
    (even,) = values["slices"]
    fullest = {"kind": even["kind"] | {"share": "fullest"}, "times": even["times"] | {"tail_s": 1.25}}
    values["slices"] = [{"kind": even["kind"] | {"share": "even"}, "times": even["times"]}, fullest]
    before = TrialResult.from_dict(values)
    (slice_,) = kept.slices
    assert before.slices == (slice_, replace(slice_, times=replace(slice_.times, tail_s=1.25)))
    trials, read = recorded(before)
    (one,) = whatif(search(*trials, objectives=OBJECTIVES), PROBLEM, Change(slow_gpu=0.1), read).layouts
    assert (one.before.step_time_s, one.before.joules_per_token) == (1.25, None)
    assert one.after.step_time_s > 1.25


@pytest.mark.parametrize(
    ("slow_gpu", "link", "names"),
    [
        (None, None, "--slow-gpu or --link"),
        ("5", None, "slow-gpu: '5'"),
        ("-5%", None, "slow-gpu: '-5%' is not above 0"),
        (None, "fast", "link: 'fast'"),
        (None, "-100%", "link: '-100%' leaves no bandwidth"),
        ("0%", "0%", "other than 0%"),
    ],
)
def test_changes_that_cannot_be_meant_are_refused(slow_gpu: str | None, link: str | None, names: str) -> None:
    with pytest.raises(InputError, match=names):
        parse_change(slow_gpu, link)


def test_changes_are_shares() -> None:
    assert parse_change("5%", "-20 %") == Change(0.05, -0.2)
