"""A program of a user's of which one rank runs alone: that it trains as among the others, or says why it cannot."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.layout import Layout
from search_spaces.network import Network
from tests.trainables.conftest import RunRanks
from tests.trainables.test_command import COMMAND, PROCEDURE
from trainables.command_slice import CommandSlice
from trainables.program import TrialRequest

PLAIN = ("examples/plain_pytorch.py", "--micro-batch-size", "2", "--global-batch-size", "8")
DISTRIBUTED = str(Path(__file__).parent / "distributed_program.py")
FAST = Network("a test", 2, 1e15, 1e15, 1e-12, 1e-12)
SLOW = replace(FAST, link_latency_s=0.03)


def request(*arguments: str, ranks: int, alone: Network | None = FAST, breakdown: bool = False) -> TrialRequest:
    """A trial of `python ARGUMENTS` on so many ranks: of the first of them `alone` over a network, or of all."""
    command = replace(COMMAND, arguments=("python", *arguments))
    return TrialRequest(
        trial_id=f"{' '.join(arguments)} {time.monotonic_ns()}",
        layout=Layout("mine", ranks, 8, micro_batch_size=2, precision="fp32"),
        program=command if alone is None else CommandSlice(command, alone),
        procedure=replace(PROCEDURE, breakdown=breakdown),
        deadline_s=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, PLAIN),
        (4, PLAIN),
        (4, (DISTRIBUTED, "--does", "fsdp")),
        (2, (DISTRIBUTED, "--does", "objects")),
    ],
)
def test_a_rank_alone_calls_for_what_it_calls_for_among_others(
    ranks: int, arguments: tuple[str, ...], run_ranks: RunRanks, tmp_path: Path
) -> None:
    calls = []
    for number, alone in enumerate((None, FAST)):
        file = tmp_path / str(number)
        recorded = ("-m", "tests.trainables.recorded_program", str(file), *arguments)
        outcomes = run_ranks(request(*recorded, ranks=ranks, alone=alone))
        assert {(outcome.status, outcome.cause) for outcome in outcomes} == {("ok", None)}
        calls.append(json.loads(file.read_text()))
    assert any(calls[0])
    assert calls[0] == calls[1]


@pytest.mark.slow
def test_a_rank_alone_reports_a_step_that_is_busy_from_end_to_end(run_ranks: RunRanks) -> None:
    (outcome,) = run_ranks(request(*PLAIN, ranks=4, breakdown=True))
    assert (outcome.status, outcome.cause) == ("ok", None)
    report = outcome.report
    assert report is not None
    assert report.slice is not None
    (timing,), (step,) = report.timings.values(), report.slice.times.values()
    assert step.tail_s == pytest.approx(sum(timing.window_steps_s) / len(timing.window_steps_s))
    assert (report.rank, step.passes_s, report.problems) == (0, {}, ())
    assert report.profile is not None
    assert report.profile.breakdown is not None
    assert report.profile.breakdown.all_reduce_s > 0


@pytest.mark.slow
def test_collectives_take_the_time_of_the_network(run_ranks: RunRanks) -> None:
    steps = {}
    for network in (FAST, SLOW):
        (outcome,) = run_ranks(request(*PLAIN, ranks=2, alone=network))
        assert outcome.report is not None
        steps[network] = min(outcome.report.timings[8].window_steps_s)
    assert steps[SLOW] >= steps[FAST] + 0.01


@pytest.mark.parametrize(
    ("does", "status", "cause"),
    [
        ("its own store", "invalid", "the program connects to MASTER_ADDR and MASTER_PORT itself to meet its other"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("sockets", "crash", "is waited for, but this rank runs alone: others are stood in for in torch.dis"),
                ("alone", "invalid", "the program has taken a step without torch.distributed.init_process_group, in"),
                ("waits", "invalid", "the program waits for what another rank is to write in a store: exit code 1: "),
                ("mpi", "crash", "RuntimeError: the backend mpi starts its own ranks: a rank that runs alone takes"),
            ]
        ),
    ],
)
def test_a_program_that_meets_its_ranks_in_other_ways_says_which(
    does: str, status: str, cause: str, run_ranks: RunRanks
) -> None:
    began = time.monotonic()
    (outcome,) = run_ranks(request(DISTRIBUTED, "--does", does, ranks=2))
    assert (outcome.status, cause in str(outcome.cause)) == (status, True), outcome.cause
    assert time.monotonic() - began < 100  # it does not take the deadline


@pytest.mark.slow
def test_what_only_a_schedule_could_tell_is_told(run_ranks: RunRanks) -> None:
    (outcome,) = run_ranks(request(DISTRIBUTED, "--does", "messages", ranks=2))
    assert outcome.report is not None
    assert outcome.report.problems == (
        "messages between two ranks are taken to need no time, as only their schedule could tell",
    )


@pytest.mark.slow
@pytest.mark.parametrize("does", ["again", "fsdp1", "zero1", "zero2", "zero3"])
def test_frameworks_find_no_difference(does: str, run_ranks: RunRanks) -> None:
    (outcome,) = run_ranks(request(DISTRIBUTED, "--does", does, ranks=4))
    assert (outcome.status, outcome.cause) == ("ok", None)


@pytest.mark.slow
def test_a_hugging_face_trainer_finds_no_difference(run_ranks: RunRanks, tmp_path: Path) -> None:
    (outcome,) = run_ranks(request("tests/trainables/huggingface_program.py", str(tmp_path), ranks=4))
    assert (outcome.status, outcome.cause) == ("ok", None)


def test_a_rank_finds_the_places_that_torchrun_would_give_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    look = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))"
    run_ranks(request("-c", look, ranks=4))
    seen = json.loads((tmp_path / "seen").read_text())
    assert {name: seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert seen["GROUP_WORLD_SIZE"] == "2"


def test_a_sitecustomize_of_the_program_s_own_is_not_lost(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.came = True")
    trial = request("-c", f"import sys; open({str(tmp_path / 'seen')!r}, 'w').write(str(sys.came))", ranks=2)
    assert isinstance(trial.program, CommandSlice)
    command = replace(trial.program.command, environment=(("PYTHONPATH", str(tmp_path)),))
    run_ranks(replace(trial, program=replace(trial.program, command=command)))
    assert (tmp_path / "seen").read_text() == "True"
