"""What is said of a search, from records made by hand: each sentence with the record that bears it and one that does
not, or that turns it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from search_spaces.layout import Layout
from service.answers import findings
from service.answers.findings import Found
from service.metrics import DIRECTIONS
from service.record.results import TrialRecord
from service.result import Purpose, SlowCause, Straggler
from telemetry.windows.trial import SATURATED
from tests.service.records import STARTED, search, trial

TWO = {name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token")}
PLAIN = Layout("megatron", 4, 32, zero_stage=1, sequence_parallel=False)
ZERO, TENSOR = replace(PLAIN, zero_stage=3), replace(PLAIN, tensor_parallel_size=4, zero_stage=0)
RUN = (f"t{number}" for number in itertools.count())


def ran(layout: Layout, speed: float, **metrics: Any) -> TrialRecord:
    """A trial of half an hour, the `number`-th of its search."""
    number = metrics.pop("number", 0)
    changes = {name: metrics.pop(name) for name in ("purpose", "status") if name in metrics}
    start = STARTED + number * timedelta(minutes=30)
    made = trial(next(RUN), tokens_per_s=speed, **metrics)
    label = layout.label
    return replace(made, layout=layout, label=label, started=start, ended=start + timedelta(minutes=30), **changes)


def found(*trials: TrialRecord, baseline: Layout | None = None, legal: int | None = None, **facts: Any) -> Found:
    made = search(*trials, objectives=TWO)
    return Found(replace(made, params=made.params | facts), baseline, legal)


def again(layout: Layout, *speeds: float) -> list[TrialRecord]:
    return [ran(layout, speed, purpose=Purpose.FINALIST) for speed in speeds]


def test_the_winner_is_held_against_the_users_own_layout_and_against_defaults() -> None:
    trials = [ran(PLAIN, 100.0), ran(ZERO, 80.0), ran(TENSOR, 50.0), ran(replace(PLAIN, micro_batch_size=2), 125.0)]
    told = findings.winner(found(*trials, baseline=PLAIN))
    assert told == (
        "megatron 4gpu dp4 zero1 mbs2 is the best on tokens_per_s: 125 tokens/s (measured once); +25.0% against your "
        "own layout (megatron 4gpu dp4 zero1 mbs1), +56.2% against ZeRO-3 alone (megatron 4gpu dp4 zero3 mbs1), "
        "+150.0% against tensor parallelism alone (megatron 4gpu dp1 tp4 zero0 mbs1)."
    )
    own = findings.winner(found(*trials, baseline=trials[-1].layout))
    assert own is not None
    assert "; it is your own layout, +56.2%" in own
    other = findings.winner(found(*trials[:3], ran(ZERO, 200.0)))
    assert other is not None
    assert other.startswith(f"{ZERO.label} is the best")
    assert "ZeRO-3 alone" not in other
    assert findings.winner(found(ran(PLAIN, 1.0, status="oom"))) is None


def test_a_gain_between_repeated_layouts_has_the_interval_of_their_ratio() -> None:
    one, other = replace(PLAIN, micro_batch_size=2), PLAIN
    told = findings.winner(found(*again(one, 119, 120, 121), *again(other, 99, 100, 101), baseline=other))
    # Half widths are t(2) * s / sqrt(3) = 4.303 / 1.732 = 2.484; of the ratio 1.2 * hypot(2.484 / 120, 2.484 / 100).
    assert told is not None
    assert "+20.0% ± 3.9% against your own layout" in told
    assert "(mean of 3 trials, 95% interval)" in told


STEP = {"breakdown_span_s": 1.0, "breakdown_compute_s": 0.9}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"exposed": 0.05, "idle": 0.05}, "computation itself, 90% of a step"),
        ({"exposed": 0.35, "idle": 0.05}, "communication that nothing hides, 35% of a step"),
        ({"exposed": 0.05, "idle": 0.45}, "ranks without work, which wait for the host or for each other, 45%"),
        (
            {"exposed": 0.05, "idle": 0.05, "power_cap_ratio": 0.97, "mean_sm_clock_mhz": 1500.0},
            "97% of the time, at 1,500",
        ),
        ({"exposed": 0.05, "idle": 0.05, "peak_memory_gib": 135.0}, "memory, of which it takes 135 of 140 GiB"),
    ],
)
def test_what_limits_the_best_layout(metrics: dict[str, float], words: str) -> None:
    step = dict(STEP)
    step["breakdown_exposed_communication_s"] = metrics.pop("exposed")
    step["breakdown_idle_s"] = metrics.pop("idle")
    told = findings.limit(found(ran(PLAIN, 1.0, **step, **metrics), accelerator="h200"))
    assert told is not None
    assert words in told


def test_nothing_limits_where_nothing_is_known() -> None:
    assert findings.limit(found(ran(PLAIN, 1.0))) is None


def test_where_microbatches_stop_paying() -> None:
    sizes = [replace(PLAIN, micro_batch_size=size) for size in (1, 2, 4)]
    stops = [
        ran(one, speed, peak_memory_gib=gib)
        for one, speed, gib in zip(sizes, (100, 120, 121), (10, 20, 40), strict=True)
    ]
    told = findings.microbatch(found(*stops))
    assert told == (
        "Microbatches stop paying at 2: from 2 to 4, tokens_per_s changes by +0.8% for +20.0 GiB of memory "
        "(megatron 4gpu dp4 zero1)."
    )
    pays = findings.microbatch(found(*stops[:2], ran(sizes[2], 150.0)))
    assert pays is not None
    assert pays.startswith("Microbatches paid up to the largest: from 1 to 4")
    assert "+50.0%" in pays
    assert findings.microbatch(found(*stops[:1])) is None


def test_which_fabric_saturates() -> None:
    assert findings.SATURATED == SATURATED
    busy = ran(PLAIN, 1.0, link_utilisation=0.97, pcie_utilisation=0.1)
    idle = ran(ZERO, 2.0, link_utilisation=0.3, pcie_utilisation=0.2)
    told = findings.fabric(found(busy, idle))
    assert told == (
        f"Saturated: links between GPUs in 1 of 2 layouts, at 97% of the peak in {PLAIN.label}; "
        "not saturated: PCIe, at 20% of the peak at most."
    )
    assert findings.fabric(found(idle)) == (
        "Not saturated: links between GPUs, at 30% of the peak at most; PCIe, at 20% of the peak at most."
    )
    assert findings.fabric(found(ran(PLAIN, 1.0))) is None


def test_what_recomputation_costs_is_a_median_over_pairs_and_their_range() -> None:
    trials = []
    for size, speed, change in ((1, 100.0, 0.8), (2, 100.0, 0.9), (4, 100.0, 0.7)):
        plain = replace(PLAIN, micro_batch_size=size)
        trials += [ran(plain, speed, peak_gpu_temp_c=60.0)]
        trials += [ran(replace(plain, recompute="full"), speed * change, peak_gpu_temp_c=62.0)]
    told = findings.recomputation(found(*trials))
    assert told == (
        "Recomputation, by 3 pairs of layouts alike but for it, changes tokens_per_s by -20.0% (-30.0% to -10.0%), "
        "the hottest GPU by +2 degC."
    )
    faster = findings.recomputation(found(trials[0], replace(trials[1], metrics={"tokens_per_s": 130.0})))
    assert faster is not None
    assert "by one pair of layouts" in faster
    assert "+30.0%" in faster
    assert findings.recomputation(found(*trials[::2])) is None
    assert findings.overlap(found(*trials)) is None


def test_what_overlap_gains() -> None:
    off = replace(PLAIN, overlap_grad_reduce=False)
    told = findings.overlap(found(ran(off, 100.0), ran(PLAIN, 110.0)))
    assert told is not None
    assert told.startswith("Reducing gradients beside computation, by one pair")
    assert "tokens_per_s by +10.0%" in told
    slower = findings.overlap(found(ran(off, 100.0), ran(PLAIN, 90.0)))
    assert slower is not None
    assert "-10.0%" in slower


def test_a_layout_that_was_explored_twice_makes_no_pair_of_itself() -> None:
    assert findings.overlap(found(ran(PLAIN, 100.0), ran(PLAIN, 110.0))) is None
    assert findings.microbatch(found(ran(PLAIN, 100.0), ran(PLAIN, 110.0))) is None


def test_what_the_hottest_gpu_costs_at_most() -> None:
    spread = {"gpu_temp_spread_c": 12.0, "sm_clock_spread_mhz": 100.0, "mean_sm_clock_mhz": 1500.0}
    told = findings.hottest(found(ran(PLAIN, 1.0, **spread)))
    assert told is not None
    assert "12.0 degC above the coolest, and clocks were 100 MHz apart" in told
    assert "costs 6.2% of the speed at most" in told
    even = findings.hottest(found(ran(PLAIN, 1.0, **spread | {"sm_clock_spread_mhz": 0.0})))
    assert even is not None
    assert "costs 0.0%" in even
    assert findings.hottest(found(ran(PLAIN, 1.0))) is None
    assert findings.hottest(found(ran(replace(PLAIN, num_gpus=1, zero_stage=0), 1.0, **spread))) is None


def test_uneven_stages_are_told_where_no_other_cut_was_tried() -> None:
    pipe = replace(PLAIN, pipeline_parallel_size=4, zero_stage=0)
    waits = {"stage_imbalance": 0.064, "bubble_ratio": 0.25}
    told = findings.uneven(found(ran(pipe, 1.0, **waits)))
    assert told is not None
    assert "the pipeline rank with most to do computes 6.4% longer" in told
    assert "25.0% of the time" in told
    assert findings.uneven(found(ran(pipe, 1.0, **waits | {"stage_imbalance": 0.01}))) is None
    assert findings.uneven(found(ran(pipe, 1.0))) is None
    cut = replace(pipe, stage_layers=(5, 4, 4, 3))
    assert findings.uneven(found(ran(cut, 1.0, **waits))) is None
    rounds = [ran(one, 1.0, purpose=Purpose.PLACEMENT, **waits) for one in (pipe, cut) * 6]
    assert findings.uneven(found(ran(pipe, 2.0, **waits), *rounds)) is None


def test_what_the_next_gpu_hours_are_for() -> None:
    grows = [ran(replace(PLAIN, micro_batch_size=2**i), 100.0 + 10 * i, number=i) for i in range(4)]
    told = findings.next_hours(found(*grows, legal=10))
    assert told is not None
    assert told.startswith("Spend the next GPU hours on more trials")
    assert told.endswith("6 legal layouts are untried.")
    settled = [ran(replace(PLAIN, micro_batch_size=2**i), 200.0 - i, number=i) for i in range(8)]
    assert (findings.next_hours(found(*settled, legal=10)) or "").startswith("The front has settled")
    assert findings.next_hours(found(*settled[:7], legal=10)) == (
        "Spend the next GPU hours on more trials: 7 do not tell whether the front has settled, and 3 legal layouts are "
        "untried."
    )
    assert (findings.next_hours(found(*grows, legal=4)) or "").startswith("Nothing is left to try")
    level = [*again(PLAIN, 99, 100, 101), *again(ZERO, 99, 100, 101.5)]
    undecided = findings.next_hours(found(*level))
    assert undecided == (
        f"Spend the next GPU hours on repeats of {ZERO.label} and {PLAIN.label}: tokens_per_s is not decided yet."
    )
    assert findings.next_hours(found(ran(PLAIN, 1.0, status="oom"))) is None


def test_findings_are_those_that_the_record_bears() -> None:
    assert findings.findings(found()) == []
    told = findings.findings(found(ran(PLAIN, 100.0), ran(replace(PLAIN, micro_batch_size=2), 120.0)))
    assert [sentence.split()[0] for sentence in told] == ["megatron", "Microbatches", "Spend"]


def test_the_gpu_for_which_others_waited_is_named_with_what_slows_it() -> None:
    slow = Straggler(2, "node", "GPU-2", 0.03, SlowCause.HEAT, 0.999)
    waited = [slow, replace(slow, cost=0.02), replace(slow, device="GPU-0", cause=SlowCause.HOST), None]
    trials = [replace(ran(PLAIN, 100.0), straggler=one) for one in waited]
    assert findings.slowest(found(*trials)) == (
        "In 2 of 4 trials the others waited for GPU-2, for 2.5% of a step by the median; what slows it: heat (2x)."
    )
    assert findings.slowest(found(ran(PLAIN, 100.0))) is None
