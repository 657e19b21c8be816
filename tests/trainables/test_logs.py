"""Logs of real runs are read: lines of `logs/` were printed by the programs themselves."""

from __future__ import annotations

import math
from dataclasses import astuple
from pathlib import Path

import pytest

from trainables.command import LogPatterns
from trainables.foreign.process import uncoloured
from trainables.foreign.steps import LogSteps, StepEnd
from trainables.logs import LOGS, LogLine, LogReader

RECORDED = Path(__file__).parent / "logs"
READ = {
    "megatron-lm": [
        LogLine(None, memory_gib=61480 / 1024),
        LogLine(2, 2.02153, 5.6301, 6.895),
        LogLine(3, 2.003316, 5.4106, 6.603),
        LogLine(122, 2.50422, 86.5452, 0.231),
    ],
    "torchtitan": [
        LogLine(4, 7.62585, None, 26.625, 66.91),
        LogLine(5, 7.07623, None, 46.5, 66.91),
        LogLine(24, 6.1861, None, None, 1.41),
    ],
    "deepspeed-pipeline": [LogLine(2, 1.1611, 0.039), LogLine(3, 1.1215, 0.014)],
    "deepspeed": [LogLine(3), LogLine(4)],
    "nemo": [LogLine(0, 1.371, 2.193), LogLine(1, 1.37, 0.3513), LogLine(49, 11.96, 12.39)],
}


def read(name: str, text: str) -> list[LogLine]:
    reader = LogReader(LOGS[name])
    return [line for line in map(reader.read, text.splitlines()) if line is not None]


@pytest.mark.parametrize("name", LOGS)
def test_a_recorded_log_is_read(name: str) -> None:
    found = read(name, (RECORDED / f"{name}.txt").read_text())
    assert [astuple(line) for line in found] == [pytest.approx(astuple(line)) for line in READ[name]]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # Megatron-LM leaves a loss that is not finite out, and counts it.
        (
            "megatron-lm",
            " iteration        7/      10 | consumed samples:           56 | elapsed time per iteration (ms): 12.5 | "
            "learning rate: 1.000000E-04 | global batch size:     8 | loss scale: 1.0 | grad norm: nan | "
            "number of skipped iterations:   0 | number of nan iterations:   1 |",
        ),
        ("torchtitan", "[titan] - root - INFO - step:  3  loss:     nan  grad_norm:     nan  memory:  9.46GiB(64.99%)"),
        ("nemo", "Training epoch 0, iteration 3/9 | lr: 6e-05 | global_step: 3 | reduced_train_loss: nan"),
    ],
)
def test_a_loss_that_is_not_finite_is_seen(name: str, line: str) -> None:
    (found,) = read(name, line)
    assert found.loss is not None
    assert math.isnan(found.loss)


def test_what_is_no_step_of_training_is_none() -> None:
    assert not read("torchtitan", "validate step: 10  loss:  3.2440  memory:  9.46GiB(64.99%)  tps: 7,282")
    assert not read(
        "megatron-lm", " validation loss at iteration 10 | lm loss value: 2.003316E+00 | lm loss PPL: 7.4E+00"
    )
    # A stage of a pipeline that has no loss says so by -1.
    assert read("torchtitan", "step:  3  loss: -1.0000  grad_norm:  1.5000  memory:  9.46GiB(64.99%)") == [
        LogLine(3, None, None, 1.5, 9.46)
    ]


def test_colours_are_taken_out_before() -> None:
    line = "\x1b[31mstep:  3  \x1b[32mloss:  3.2440  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[39m"
    assert read("torchtitan", uncoloured(line)) == [LogLine(3, 3.244, None, 1.5)]


def test_a_line_ends_all_steps_since_the_last() -> None:
    steps = LogSteps(LogPatterns(r"step (?P<step>\d+) took (?P<seconds>\S+) s, loss (?P<loss>\S+)"))
    for line, ns in [
        ("step 2 took 1 s, loss 3", 100),
        ("step 2 took 1 s, loss 3", 150),
        ("step 5 took 1 s, loss 2", 400),
    ]:
        steps.hear(line, ns)
    taken = []
    while steps.wait(0):
        taken.append(steps.take())
    assert taken == [
        StepEnd(2, 100, 3.0, seconds=1.0),
        StepEnd(3, 200, seconds=1.0),
        StepEnd(4, 300, seconds=1.0),
        StepEnd(5, 400, 2.0, seconds=1.0),
    ]


def test_a_group_that_is_no_number_is_a_problem() -> None:
    steps = LogSteps(LogPatterns(r"step (?P<step>\S+)"))
    steps.hear("step one", 0)
    assert (
        steps.problem == "the patterns of steps read what is no number: invalid literal for int() with base 10: 'one'"
    )
