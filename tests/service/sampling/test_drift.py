"""How far the sentinel moved, and when that is told."""

from __future__ import annotations

import pytest

from search_spaces.layout import Layout
from service.result import NodeWindow, TrialResult
from service.sampling.drift import Drift, beyond_noise, drift, drifts
from trainables.status import Status

LAYOUT = Layout("megatron", 1, 8)


def run(rate: float, joules: float | None = 1.0, gpu: str = "GPU-a") -> TrialResult:
    windows = (NodeWindow("node", 0, 1, (gpu,)),)
    metrics = {"tokens_per_s": rate, "joules_per_token": joules}
    return TrialResult("t", LAYOUT, Status.OK, metrics=metrics, windows=windows)


def test_a_move_is_from_the_first_value_to_the_farthest() -> None:
    found = drift([[100.0, 101.0, 96.0, 102.0]])
    assert found == Drift(100.0, 96.0)
    assert found.share == pytest.approx(-0.04)
    assert drift([[100.0]]) is drift([]) is None


def test_gangs_are_held_against_themselves() -> None:
    runs = [run(100.0, gpu="GPU-a"), run(90.0, gpu="GPU-b"), run(100.5, gpu="GPU-a"), run(89.1, gpu="GPU-b")]
    assert drifts(runs, one_place=False)["tokens_per_s"] == Drift(90.0, 89.1)
    assert drifts(runs)["tokens_per_s"] == Drift(100.0, 89.1)


def test_a_figure_that_was_not_measured_has_no_drift() -> None:
    assert set(drifts([run(100.0, None), run(99.0, None)])) == {"tokens_per_s"}
    assert drifts([run(100.0)]) == {}


@pytest.mark.parametrize(
    ("rate", "joules", "accelerator", "told"),
    [
        (99.5, 1.02, "h200", []),
        (98.5, 1.02, "h200", ["tokens_per_s"]),
        (101.5, 0.95, "h200", ["tokens_per_s", "joules_per_token"]),
        (95.0, 1.2, "cpu", []),
        (85.0, 1.2, "cpu", ["tokens_per_s"]),
    ],
)
def test_what_is_told_is_beyond_the_noise(rate: float, joules: float, accelerator: str, told: list[str]) -> None:
    assert beyond_noise(drifts([run(100.0), run(rate, joules)]), accelerator) == told
