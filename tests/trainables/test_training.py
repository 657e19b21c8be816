from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from tests.trainables.conftest import RunRanks
from trainables.child import Nursery
from trainables.data import SYNTHETIC
from trainables.losses import check_learning
from trainables.measure import Procedure
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.platforms.cpu import Cpu
from trainables.program import InvalidTrial, Place, Progress, TrialRequest
from trainables.training import Training

MODEL = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)
LAYOUT = Layout("megatron", 1, 4, micro_batch_size=2, precision="fp32")
PROCEDURE = Procedure(steady_steps=2, warmup_tolerance=0.5, warmup_max_s=0.2, window_s=0.2, window_min_steps=7)
TRAINING = Training(MODEL, SYNTHETIC, sequence_length=32, seed=0)
REQUEST = TrialRequest("alone", LAYOUT, TRAINING, PROCEDURE, deadline_s=120)


@pytest.mark.parametrize(
    "losses",
    [(6.2, 6.1, 6.0), (6.2, 5.0), (6.2, 7.0, 6.5, 6.0, 6.1, 6.3)],
    ids=["falling", "two steps", "up and down, the last third below"],
)
def test_falling_losses_are_training(losses: tuple[float, ...]) -> None:
    check_learning(losses)


@pytest.mark.parametrize(
    ("losses", "complaint"),
    [
        ((6.2, float("nan"), 6.0), "the loss is not finite: 6.2 at first, 6 at last"),
        ((6.2, 6.1, float("inf")), "the loss is not finite"),
        ((6.2, 6.2, 6.2), "the loss does not fall: 6.2000 at first, 6.2000 at last"),
        ((6.2, 6.0, 6.5), "the loss does not fall"),
        ((6.2,), "the loss does not fall"),
        ((6.2, 6.0, 5.9, 5.8, 6.0, 6.5), "the loss does not fall: 6.2000 at first, 6.2500 at last"),
    ],
)
def test_other_losses_are_not(losses: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(InvalidTrial, match=complaint):
        check_learning(losses)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_a_rank_reports_what_it_measured(engine: str, run_ranks: RunRanks) -> None:
    request = replace(REQUEST, trial_id=f"alone on {engine}", layout=replace(LAYOUT, engine=engine))
    (outcome,) = run_ranks(request)
    assert (outcome.status, outcome.cause, outcome.phase) == ("ok", None, "report")
    report = outcome.report
    assert report is not None
    timing = report.timings[LAYOUT.global_batch_size]
    assert len(timing.window_steps_s) >= PROCEDURE.window_min_steps
    assert sum(timing.window_steps_s) >= PROCEDURE.window_s
    # The steps fill the window, but for the exchanges of their times, in which a busy machine may halt the process.
    window_s = (timing.end_ns - timing.start_ns) / 1e9
    assert 0.6 * window_s < sum(timing.window_steps_s) <= window_s * (1 + 1e-9)
    assert len(report.losses) == len(report.grad_norms) == len(timing.warmup_steps_s) + len(timing.window_steps_s)
    assert report.losses[0] == pytest.approx(np.log(MODEL.vocab), rel=0.02)
    assert (report.device, report.peak_memory_gib) == (None, None)
    assert report.environment == {"torch": torch.__version__}


def test_the_seed_chooses_the_model(run_ranks: RunRanks) -> None:
    first_losses = []
    for trial_id, seed in (("seed 0", 0), ("seed 0 again", 0), ("seed 1", 1)):
        (outcome,) = run_ranks(replace(REQUEST, trial_id=trial_id, program=replace(TRAINING, seed=seed)))
        assert outcome.report is not None
        first_losses.append(outcome.report.losses[0])
    assert first_losses[0] == first_losses[1] != first_losses[2]


def test_training_that_does_not_learn_is_invalid(run_ranks: RunRanks, tmp_path: Path) -> None:
    # Twenty steps that teach to expect one token, then ten with a token each that none has seen before.
    per_step = LAYOUT.global_batch_size * TRAINING.sequence_length
    by_step = np.array([0] * 20 + list(range(1, 11)), dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", np.append(by_step.repeat(per_step), 0))
    procedure = Procedure(1, 0.5, 1e-9, 1e-9, window_min_steps=28)
    request = replace(
        REQUEST,
        trial_id="unlearning",
        program=replace(TRAINING, data=str(tmp_path / "tokens.npy")),
        procedure=procedure,
    )
    (outcome,) = run_ranks(request)
    assert outcome.status == "invalid"
    assert outcome.cause is not None
    assert outcome.cause.startswith("the loss does not fall")


def told_by_a_child(
    nursery: Nursery, run: Callable[[TrialRequest, Place, Connection], None], request: TrialRequest, place: Place
) -> Any:
    """What `run` sends of a trial from a process like a trial's."""
    ours, theirs = nursery._context.Pipe(duplex=False)
    child = nursery._context.Process(target=run, args=(request, place, theirs))
    child.start()
    theirs.close()
    told = ours.recv()
    child.join()
    return told


class Crowded(Cpu):
    """Has given back memory in each step so far, were its steps to be believed."""

    steps = 0

    def synchronize(self) -> None:
        self.steps += 1

    def reclaims(self, device: torch.device) -> int:
        return self.steps


def report_crowded(request: TrialRequest, place: Place, connection: Connection) -> None:
    report = request.program.run(request, place, lambda _: None)
    connection.send((report.reclaims, len(report.timings[LAYOUT.global_batch_size].window_steps_s)))


def test_what_was_given_back_is_counted_in_the_window_alone(nursery: Nursery, store: TCPStore) -> None:
    place = Place(0, 0, "127.0.0.1", store.port, Crowded())
    reclaims, steps = told_by_a_child(nursery, report_crowded, replace(REQUEST, trial_id="crowded"), place)
    assert reclaims == steps >= PROCEDURE.window_min_steps


def count_objects(request: TrialRequest, place: Place, connection: Connection) -> None:
    """Objects before the trial, and, from the second step on, the most that a collection would go through."""
    before, counts = gc.get_freeze_count() + len(gc.get_objects()), []

    def count(progress: Progress) -> None:
        if progress.tokens_per_s:
            counts.append(len(gc.get_objects()))

    request.program.run(request, place, count)
    connection.send((before, max(counts[1:])))


def test_no_step_is_held_up_by_a_collection_of_all_objects(nursery: Nursery, store: TCPStore) -> None:
    place = Place(0, 0, "127.0.0.1", store.port, CPU)
    request = replace(REQUEST, trial_id="collected", layout=replace(LAYOUT, recompute="full"))
    before, during = told_by_a_child(nursery, count_objects, request, place)
    assert before > 300_000
    assert during < 10_000
