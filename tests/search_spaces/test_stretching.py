"""Steps of few microbatches, stretched, are those of many, as long as passes depend on what is around them alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from search_spaces.composition import RankTimes, compose
from search_spaces.kinds import RankKind, kinds
from search_spaces.layout import ONE_STAGE_SCHEDULES, SCHEDULES, Layout
from search_spaces.models import PRESETS
from search_spaces.network import Network
from search_spaces.rules import refusal
from search_spaces.schedules import Action, Order, Pass, order
from search_spaces.stretching import overlap, stretch
from search_spaces.workload import Workload
from service.trials.short import batch_alone

NETWORK = Network("by hand", 8, 1e11, 1e10, 1e-6, 1e-5)
WORK = Workload(replace(PRESETS["tiny-llama"], layers=48), 128, 64)
BASE = {Pass.FORWARD: 1.0, Pass.BACKWARD: 2.0, Pass.INPUT: 1.1, Pass.WEIGHT: 0.9}


def pipeline(ranks: int, schedule: str, virtual: int, microbatches: int, **more: object) -> Layout:
    """One whose memory, which is no matter here, is told by the formula: replays of so many passes take seconds."""
    stages = 1 if schedule in ONE_STAGE_SCHEDULES else 2 if schedule == "zbv_zero_bubble" else virtual
    return Layout(
        "megatron",
        ranks,
        microbatches,
        pipeline_parallel_size=ranks,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=stages,
        reduce_precision="bf16",
        **more,  # type: ignore[arg-type]
    )


def by_what_is_around(passes: Order) -> dict[Action, float]:
    """Seconds by a pass's kind and stage, whether it is the first or the last of these, and what kind ran before it."""
    last = max(action.microbatch for action in passes)
    seconds = {}
    for before, action in pairwise((None, *passes)):
        assert action is not None
        factor = 1.0 if before is None else 1.1 + 0.1 * BASE[before.step]
        ends = 1.3 * (action.microbatch == 0) + 1.7 * (action.microbatch == last)
        seconds[action] = (1 + 0.05 * action.stage) * BASE[action.step] * factor + ends
    return seconds


def times_of(
    layout: Layout, seconds: Callable[[Order], dict[Action, float]] = by_what_is_around
) -> dict[RankKind, RankTimes]:
    return {
        kind: RankTimes(
            seconds(order(layout, kind.pipeline_rank)), 2.0, 500.0, 100.0, 20.0, head_s=0.5, update_s=0.75, waited_s=0.0
        )
        for kind in kinds(layout, WORK)
    }


def stretched(few: Layout, many: Layout, times: dict[RankKind, RankTimes]) -> dict[RankKind, RankTimes]:
    return {kind: stretch(one, few, many, kind.pipeline_rank) for kind, one in times.items()}


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.sampled_from([2, 3, 4, 8]),
    schedule=st.sampled_from([name for name in SCHEDULES if name != "gpipe"]),
    virtual=st.sampled_from([2, 3]),
    microbatches=st.integers(8, 100),
    uneven=st.booleans(),
)
def test_a_stretched_step_is_the_whole_one(
    ranks: int, schedule: str, virtual: int, microbatches: int, uneven: bool
) -> None:
    many = pipeline(ranks, schedule, virtual, microbatches)
    if uneven:
        stages, layers = many.pipeline_stages, 48
        counts = [layers // stages] * stages
        counts[0], counts[-1] = counts[0] - 1, layers - sum(counts[:-1]) + 1
        many = replace(many, stage_layers=tuple(counts))
    assume(refusal(many, replace(WORK, global_batch_size=microbatches)) is None)
    assume((size := batch_alone(many)) is not None)
    assert size is not None
    few = replace(many, global_batch_size=size)
    assert refusal(few, replace(WORK, global_batch_size=size)) is None
    for rank in range(ranks):
        found = overlap(few, many, rank)
        assert found.passes(by_what_is_around(found.few)) == pytest.approx(by_what_is_around(found.many))
    whole, after = times_of(many), stretched(few, many, times_of(few))
    assert set(whole) == set(after)
    one, other = compose(many, WORK, whole, NETWORK), compose(many, WORK, after, NETWORK)
    assert other.step_time_s == pytest.approx(one.step_time_s)
    assert other.energy_j == pytest.approx(one.energy_j)
    assert other.bubble == pytest.approx(one.bubble)
    assert other.played.finishes == pytest.approx(one.played.finishes)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "gpipe"])
def test_noise_of_single_passes_is_averaged(schedule: str) -> None:
    """Each pass varies by 2%, once in the step of few microbatches and otherwise in that of many."""
    many = pipeline(4, schedule, 2, 64)
    few = replace(many, global_batch_size=batch_alone(many) or 0)
    draw = random.Random(0)

    def noisy(passes: Order) -> dict[Action, float]:
        return {action: seconds * draw.gauss(1, 0.02) for action, seconds in by_what_is_around(passes).items()}

    whole = compose(many, WORK, times_of(many, noisy), NETWORK).step_time_s
    after = compose(many, WORK, stretched(few, many, times_of(few, noisy)), NETWORK).step_time_s
    assert after == pytest.approx(whole, rel=0.02)


def test_too_few_microbatches_say_nothing_of_a_full_pipeline() -> None:
    few, many = (pipeline(4, "1f1b", 1, count) for count in (4, 64))
    with pytest.raises(KeyError):
        stretched(few, many, times_of(few))


def test_pauses_are_left_out_and_the_power_between_them_stays() -> None:
    many = pipeline(2, "1f1b", 1, 64)
    few = replace(many, global_batch_size=8)
    one = replace(times_of(few)[kinds(few, WORK)[0]], waited_s=3.0)
    longer = stretch(one, few, many, 0)
    assert longer.waited_s == 0
    busy_j = one.busy_power_w * (one.busy_s + 3.0) - one.waiting_power_w * 3.0
    assert longer.busy_power_w == pytest.approx(busy_j / one.busy_s)
    assert (longer.head_s, longer.tail_s, longer.update_s) == (one.head_s, one.tail_s, one.update_s)


def test_exposed_communication_keeps_its_share() -> None:
    many = pipeline(2, "1f1b", 1, 64)
    few = replace(many, global_batch_size=8)
    one = replace(times_of(few)[kinds(few, WORK)[0]], exposed_s={"all_gather": 1.5})
    longer = stretch(one, few, many, 0)
    assert longer.exposed_s["all_gather"] / longer.busy_s == pytest.approx(1.5 / one.busy_s)


def test_without_a_pipeline_a_longer_step_has_more_microbatches_of_their_own_power() -> None:
    many = Layout("megatron", 2, 32, micro_batch_size=1)
    few = replace(many, global_batch_size=8)
    exposed = {"all_gather": 0.5}
    one = RankTimes({}, 5.0, 500.0, 100.0, 20.0, exposed_s=exposed, microbatch_s=1.0, microbatch_power_w=600.0)
    longer = stretch(one, few, many, 0)
    assert (longer.busy_s, longer.memory_gib) == (5.0 + 12, 20.0)
    assert longer.busy_power_w * longer.busy_s == pytest.approx(500 * 5 + 600 * 12)
    assert longer.exposed_s["all_gather"] / longer.busy_s == pytest.approx(0.1)
    with pytest.raises(KeyError, match="neither the first nor the last"):
        stretch(replace(one, microbatch_s=0.0), few, many, 0)
