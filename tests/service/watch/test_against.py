"""A run against its search: what is worse than measured, and when another layout would do better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.layout import Layout
from service.errors import InputError, NoAnswerError
from service.metrics import Direction
from service.watch.against import Against, Attained
from service.watch.findings import Finding
from tests.service.records import search, trial

WHOLE = Layout("megatron", 4, 16, zero_stage=1, sequence_parallel=False)
SPLIT = replace(WHOLE, tensor_parallel_size=2)
FEW = replace(WHOLE, num_gpus=2)
AHEAD = replace(WHOLE, micro_batch_size=2)
FIGURES = {WHOLE: (1000.0, 1.0), SPLIT: (960.0, 0.9), FEW: (800.0, 0.7)}
SPEED, ENERGY = {"tokens_per_s": Direction.MAXIMIZE}, {"joules_per_token": Direction.MINIMIZE}


def against(figures: dict[Layout, tuple[float, float]] = FIGURES, goals: Any = SPEED, **choices: Any) -> Against:
    """A search in which GPUs ran at 1,500 MHz."""
    trials = [
        replace(
            trial(layout.label, tokens_per_s=speed, joules_per_token=joules, mean_sm_clock_mhz=1500.0),
            layout=layout,
            label=layout.label,
        )
        for layout, (speed, joules) in figures.items()
    ]
    record = search(*trials, objectives=goals)
    return Against.of(replace(record, params=record.params | {"sequence_length": 64}), choices)


def found(
    run: Against, speed: float, clock: float | None, sound: int = 4, joules: float | None = None
) -> list[Finding]:
    return run.judge(Attained([0.999 * speed, speed, 1.001 * speed], joules, clock, sound))


def test_the_best_layout_is_the_run_s_unless_its_values_say_otherwise() -> None:
    assert against().used.layout == WHOLE
    assert against(tensor_parallel_size=2).used.layout == SPLIT
    assert against(num_gpus=[2, 3]).used.layout == FEW
    assert against(goals=ENERGY).used.layout == FEW
    assert against().tokens == 16 * 64
    with pytest.raises(InputError, match="layout: there is no axis 'tensors'"):
        against(tensors=2)
    with pytest.raises(NoAnswerError, match="no layout with a result is the run's"):
        against(tensor_parallel_size=4)


def test_a_run_that_does_what_was_measured_is_no_finding() -> None:
    assert found(against(), 995.0, 1500.0) == []
    assert found(against(), 975.0, 1500.0) == []
    assert found(against(), 1100.0, None) == []
    assert against().judge(Attained([500.0] * 2, None, None, 4)) == [], "too early to tell"


def test_where_all_are_slowed_alike_the_layout_stays_the_best() -> None:
    """At 1,350 of 1,500 MHz the next best would have 864 tokens/s, and the one on fewer GPUs 720."""
    (below,) = found(against(), 900.0, 1350.0)
    assert (below.kind, below.details) == (
        "below",
        {"metric": "tokens_per_s", "now": pytest.approx(900.0), "measured": 1000.0},
    )


def test_where_the_clocks_are_what_they_were_the_next_best_would_do_better() -> None:
    below, outdated = found(against(), 900.0, 1500.0)
    assert (below.kind, outdated.kind) == ("below", "outdated")
    assert outdated.details["layout"] == SPLIT.label
    assert outdated.details["expected"] == 960.0
    assert outdated.text.startswith(f"{WHOLE.label} is no longer the best: 900.0 ± ")
    assert outdated.text.endswith(f"{SPLIT.label} would have 960 tokens/s, as the search measured it")


def test_a_layout_that_can_do_without_the_slow_gpu_is_not_slowed_by_it() -> None:
    """At half the clock the others have 480 tokens/s at most; that on two GPUs has 800, if two are sound."""
    (_, outdated) = found(against(), 500.0, 750.0, sound=3)
    assert (outdated.details["layout"], outdated.details["expected"]) == (FEW.label, 800.0)
    (below,) = found(against(), 500.0, 750.0, sound=1)
    assert below.kind == "below", "no two are sound"


def test_a_layout_that_was_ahead_in_the_search_has_not_come_to_be_so() -> None:
    run = against(FIGURES | {AHEAD: (1050.0, 1.0)}, micro_batch_size=1, tensor_parallel_size=1)
    assert run.used.layout == WHOLE
    assert found(run, 1000.0, 1500.0) == []
    assert [one.details.get("layout") for one in found(run, 940.0, 1500.0)] == [None, SPLIT.label]


def test_energy_is_held_against_energy() -> None:
    run = against(goals=ENERGY, num_gpus=4, tensor_parallel_size=2)
    assert found(run, 960.0, 1500.0) == [], "what it draws is not known"
    below, outdated = found(run, 960.0, 1500.0, joules=1.1)
    assert (below.details["now"], outdated.details["layout"]) == (1.1, WHOLE.label)
