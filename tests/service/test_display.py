"""What a person reads while a search runs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from search_spaces.layout import Layout
from service.answers.candidates import Candidate, candidates
from service.display import Display
from service.goals import Goals
from service.metrics import DIRECTIONS, Method
from service.problem import Budget
from service.result import Purpose, TrialResult
from trainables.status import Status

GOALS = Goals({name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token", "throttle_ratio")})
CONFIG = Layout("megatron", 4, 16, micro_batch_size=2, tensor_parallel_size=2, zero_stage=1, sequence_parallel=True)


def ok(rate: float, joules: float | None, method: Method = Method.COUNTER) -> TrialResult:
    metrics = {"tokens_per_s": rate, "joules_per_token": joules, "throttle_ratio": None}
    return TrialResult("t", CONFIG, Status.OK, metrics=metrics, methods={"joules_per_token": method})


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def make(trials: int = 10, began_ago_s: float = 0.0, wall_time_s: float | None = None) -> Display:
    return Display(GOALS, Budget(wall_time_s=wall_time_s), trials, began=time.monotonic() - began_ago_s)


def test_a_trial_starts(capsys: pytest.CaptureFixture[str]) -> None:
    make(began_ago_s=65).started(CONFIG.label)
    assert lines_of(capsys) == ["[  1:05] start  megatron 4gpu dp2 tp2 zero1 mbs2 sp"]


def test_a_trial_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    make().finished(ok(1234.5, 0.0665), 9)
    trial, search = lines_of(capsys)
    assert re.fullmatch(
        r"\[  0:0\d\] ok     megatron 4gpu dp2 tp2 zero1 mbs2 sp: 1,234 tokens/s, 0.0665 J/token", trial
    )
    assert "trial 1 of at most 10; best so far: 1,234 tokens/s, 0.0665 J/token; about" in search


def test_a_trial_that_lacks_an_objective_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    make().finished(replace(ok(1234.5, None), cause="GPU-0: energy_mj stood still for 3.0 s"), 9)
    assert lines_of(capsys)[0].endswith(": 1,234 tokens/s; GPU-0: energy_mj stood still for 3.0 s")


@pytest.mark.parametrize("status", [Status.OOM, Status.HANG, Status.CRASH, Status.INVALID])
def test_a_trial_fails(capsys: pytest.CaptureFixture[str], status: Status) -> None:
    make().finished(TrialResult("t", CONFIG, status, "rank 1 ran out of memory"), 9)
    trial, search = lines_of(capsys)
    assert re.search(rf"\] {status} +megatron 4gpu .*: rank 1 ran out of memory$", trial)
    assert "trial 1 of at most 10; best so far: none yet" in search


def test_a_trial_is_ranked_among_all_once_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []

    def counted(results: Sequence[TrialResult]) -> list[Candidate]:
        ranked.append(len(results))
        return candidates(results)

    monkeypatch.setattr("service.display.candidates", counted)
    progress = make()
    for trials in (1, 2):
        progress.finished(ok(100.0 * trials, 0.1 * trials), 7)
        assert progress.best == {"tokens_per_s": 100.0 * trials, "joules_per_token": 0.1}
        progress.figure("tokens_per_s", 1.0)
    assert ranked == [1, 2]


def test_best_so_far_is_by_each_objective(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make()
    for rate, joules in ((100.0, 0.3), (200.0, 0.5), (150.0, 0.2)):
        progress.finished(ok(rate, joules), 7)
    progress.finished(TrialResult("t", CONFIG, Status.CRASH, "gone"), 6)
    assert "best so far: 200 tokens/s, 0.2 J/token;" in lines_of(capsys)[-1]
    assert progress.best == {"tokens_per_s": 200.0, "joules_per_token": 0.2}


def test_estimated_figures_carry_a_star(capsys: pytest.CaptureFixture[str]) -> None:
    make().finished(ok(100.0, 0.3, Method.ESTIMATED), 9)
    trial, search = lines_of(capsys)
    assert trial.endswith(": 100 tokens/s, 0.3* J/token")
    assert "best so far: 100 tokens/s, 0.3* J/token;" in search
    make().finished(ok(100.0, 0.3), 9)
    assert "*" not in "".join(lines_of(capsys))


def test_extrapolated_figures_carry_a_tilde(capsys: pytest.CaptureFixture[str]) -> None:
    make().finished(ok(100.0, 0.3, Method.EXTRAPOLATED), 9)
    trial, search = lines_of(capsys)
    assert trial.endswith(": 100 tokens/s, 0.3~ J/token")
    assert "best so far: 100 tokens/s, 0.3~ J/token;" in search


def test_a_missing_figure_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    make().finished(ok(100.0, None), 9)
    trial, search = lines_of(capsys)
    assert trial.endswith(": 100 tokens/s")
    assert "best so far: 100 tokens/s;" in search


@pytest.mark.parametrize(
    ("elapsed_s", "budget", "left"),
    [
        (10.0, {}, "about 40 s left"),  # one trial of five took 10 s
        (60.0, {}, "about 4 min left"),
        (10.0, {"wall_time_s": 30.0}, "about 20 s left"),
        (40.0, {"wall_time_s": 30.0}, "about 0 s left"),
    ],
)
def test_time_left(capsys: pytest.CaptureFixture[str], elapsed_s: float, budget: dict[str, float], left: str) -> None:
    make(5, elapsed_s, **budget).finished(ok(100.0, 0.3), 4)
    assert lines_of(capsys)[-1].endswith(left)


@pytest.mark.parametrize("purpose", [Purpose.SENTINEL, Purpose.FINALIST, Purpose.CALIBRATION])
def test_trials_that_do_not_explore_say_so_and_count_for_the_time_only(
    capsys: pytest.CaptureFixture[str], purpose: Purpose
) -> None:
    progress = make(5, 30.0)
    progress.finished(ok(100.0, 0.3), 4)
    progress.started(CONFIG.label, purpose)
    progress.finished(replace(ok(999.0, 0.1), purpose=purpose), 2)
    start, trial, stand = lines_of(capsys)[-3:]
    assert start.endswith(f"{CONFIG.label} ({purpose})")
    assert trial.endswith(f"{CONFIG.label} ({purpose}): 999 tokens/s, 0.1 J/token")
    best = 999.0 if purpose == Purpose.FINALIST else 100.0
    shown = f"{best:.0f} tokens/s, {0.1 if purpose == Purpose.FINALIST else 0.3} J/token"
    assert stand.strip() == f"trials planned: 2; best so far: {shown}; about 30 s left"
    assert (progress.done, progress.best["tokens_per_s"]) == (1, best)


def test_a_failure_of_the_machines_is_told_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make()
    progress.retried(TrialResult("t", CONFIG, Status.CRASH, "a node was lost", infrastructure=True))
    (line,) = lines_of(capsys)
    assert line.endswith(f"crash  {CONFIG.label}: a node was lost; it is run again")
    assert progress.done == 0


def test_of_a_calibration_nothing_is_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    make().finished(replace(ok(100.0, 0.3), purpose=Purpose.CALIBRATION), 0)
    assert lines_of(capsys)[-1].strip() == "trials planned: 0; about 0 s left"
