"""What the driver makes of Tune's events when the record cannot be written."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from ray.tune.experiment import Trial

from service.display import Display
from service.driver import _Recorder, gang_sizes
from service.home import Home, user
from service.problem import Problem
from service.queue.claims import Claim
from service.queue.quota import Quota
from service.record.results import Results
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from service.sampling.agenda import CalibrationAgenda
from service.trials.accelerators import resources_per_worker
from service.trials.gang import Gang
from service.turns import Turns
from tests.service.records import PLENTY, problem
from trainables.status import Status


def test_a_result_that_cannot_be_written_is_not_taken_and_ends_the_search(home: Home) -> None:
    """What is raised at the end of a trial, Tune takes for the trial's failure, tells of that, and goes on."""
    spec = problem(space={"precision": "fp32", "micro_batch_size": [1, 2]})
    agenda = CalibrationAgenda(spec, spec.legal.layouts[:2])
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", spec, {})
    nobody: Any = None  # a trial that reported has given its gang back, and this one has no samples
    display = Display(spec.goals, spec.budget, agenda.sought)
    recorder = _Recorder(tracker, display, agenda, nobody, nobody, turns(spec), None)
    trials = []
    for trial_id in ("a", "b"):
        step = agenda.next(trial_id, PLENTY)
        assert step is not None
        result = TrialResult(trial_id, step.layout, Status.OK, purpose=Purpose.CALIBRATION)
        trial = Trial("evaluate", config=step.to_config(), trial_id=trial_id, stub=True)
        trial.run_metadata.last_result = {"result": json.dumps(result.to_dict())}
        recorder.on_trial_start(0, [], trial)
        trials.append(trial)

    recorder.on_trial_complete(0, [], trials[0])
    recorder.on_step_end(0, [])
    unsent = home.spool("s1") / "unsent"
    unsent.rmdir()
    unsent.write_text("in the way, as no space on the device would be")
    recorder.on_trial_complete(0, [], trials[1])
    recorder.on_trial_error(0, [], trials[1])
    with pytest.raises(OSError, match="unsent"):
        recorder.on_step_end(0, [])
    assert list(agenda.under_way) == ["b"]
    tracker.finish_search("failed", {})
    record = Results(home.tracking_uri).search("s1")
    assert (record.status, [trial.status for trial in record.trials]) == ("failed", ["ok", "stopped"])


def turns(spec: Problem) -> Turns:
    """A search's part in a queue that it has not joined."""
    claim = Claim("s1", 0, 0.0, resources_per_worker(spec.cluster), size=2, gangs=3)

    def start(name: str, avoid: Collection[str]) -> Gang:
        raise AssertionError("it has no turn")

    queue: Any = None
    return Turns(claim, queue, start, print)


def test_a_search_ends_when_nothing_is_left_of_its_users_quota(home: Home) -> None:
    spec = problem(space={"precision": "fp32", "micro_batch_size": [1, 2]})
    agenda = CalibrationAgenda(spec, spec.legal.layouts[:2])
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", spec, {})
    nobody: Any = None
    quota = Quota(user(), 1e-9, None, home.tracking_uri)
    display = Display(spec.goals, spec.budget, agenda.sought)
    recorder = _Recorder(tracker, display, agenda, nobody, nobody, turns(spec), quota)
    step = agenda.next("a", PLENTY)
    assert step is not None
    trial = Trial("evaluate", config=step.to_config(), trial_id="a", stub=True)
    result = TrialResult("a", step.layout, Status.OK, purpose=Purpose.CALIBRATION)
    trial.run_metadata.last_result = {"result": json.dumps(result.to_dict())}
    recorder.on_trial_start(0, [], trial)
    assert recorder.exceeded is None
    recorder.on_trial_complete(0, [], trial)
    assert recorder.failure is None
    assert (recorder.exceeded or "").startswith(f"quota: user {user()} has used ")
    assert agenda.next("b", PLENTY) is None
    assert agenda.over, "though a trial is left"


@pytest.mark.parametrize(
    ("changes", "at_hand", "sizes"),
    [
        ({}, 8, [4, 4]),
        ({"budget": {"trials": 1}}, 8, [4]),
        ({}, 7, [4]),
        ({"measurement": {"explore": "slices"}}, 8, [4, 4]),
        ({"measurement": {"explore": "slices"}}, 3, [3]),
        ({"measurement": {"explore": "slices"}}, 1, [1]),
    ],
)
def test_a_gang_has_the_workers_of_the_largest_layout_or_what_there_is_for_slices(
    changes: dict[str, Any], at_hand: int, sizes: list[int]
) -> None:
    cluster = {"gpus_per_node": 8, "accelerator": "h200"}
    axes = {"num_gpus": [2, 4], "zero_stage": [0, 1, 2, 3], "micro_batch_size": [1, 2]}
    assert gang_sizes(problem(cluster=cluster, space=axes, **changes), at_hand) == sizes
