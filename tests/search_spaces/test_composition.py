"""Steps put together by hand, and what must follow when a machine differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from search_spaces.composition import Fleet, RankTimes, compose, pauses
from search_spaces.contention import contention
from search_spaces.engines import engine_of
from search_spaces.kinds import RankKind, kinds
from search_spaces.layout import ONE_STAGE_SCHEDULES, SCHEDULES, Layout
from search_spaces.models import PRESETS
from search_spaces.network import Collective, Curve, Network
from search_spaces.schedules import Pass, orders
from search_spaces.workload import Workload

WORK = Workload(PRESETS["tiny-llama"], 128, 4)
MESSAGE = 128 * 64 * 2
"""Bytes of a microbatch's hidden states in bf16."""

QUARTER = Curve(Collective.SEND, 2, 2, (MESSAGE,), (0.25,), (0.25,), (0.0,))
NETWORK = Network("by hand", 8, 1e11, 1e10, 1e-6, 1e-5, measured=(QUARTER,))
"""A message takes a quarter of a second."""

PIPELINE = Layout("megatron", 4, 4, pipeline_parallel_size=2)
"""Two microbatches through two stages, twice side by side."""

TAILS = {0: (1.0, 0.25, 400.0, 10.0), 1: (1.5, 0.5, 500.0, 8.0)}
"""By pipeline rank: seconds of the tail and, of it, of the update, watts at work, and peak memory."""


def pipeline_times(layout: Layout = PIPELINE) -> dict[RankKind, RankTimes]:
    """A forward pass takes a second, a backward pass two."""
    times = {}
    for kind in kinds(layout, WORK):
        tail, update, watts, memory = TAILS[kind.pipeline_rank]
        passes = {action: 1.0 if action.step is Pass.FORWARD else 2.0 for action in orders(layout)[kind.pipeline_rank]}
        times[kind] = RankTimes(passes, tail, watts, 100.0, memory, head_s=0.5, update_s=update)
    return times


def one_rank(seconds: float, **more: object) -> RankTimes:
    return replace(RankTimes({}, seconds, 500.0, 100.0, 20.0), **more)  # type: ignore[arg-type]


def test_without_a_pipeline_the_step_is_the_measured_one() -> None:
    layout = Layout("megatron", 4, 4)
    (kind,) = kinds(layout, WORK)
    step = compose(layout, WORK, {kind: one_rank(0.5, exposed_s={"all_gather": 0.1})}, NETWORK)
    assert (step.step_time_s, step.bubble, step.busy_s, step.waiting_s) == (0.5, 0.0, (0.5,), (0.0,))
    assert step.exposed_s == {"all_gather": 0.1}
    assert step.mean_power_w == pytest.approx(4 * 500.0)
    assert step.energy_j == pytest.approx(4 * 500.0 * 0.5)
    assert step.tokens_per_s == pytest.approx(4 * 128 / 0.5)
    assert step.joules_per_token == pytest.approx(1000.0 / (4 * 128))
    assert step.peak_memory_gib == 20.0


def test_on_a_slower_gpu_all_but_communication_takes_longer() -> None:
    layout = Layout("megatron", 4, 4)
    (kind,) = kinds(layout, WORK)
    slower = one_rank(0.5, exposed_s={"all_gather": 0.1}).on_slower(1.1)
    assert slower.slower == 1.1
    step = compose(layout, WORK, {kind: slower}, NETWORK)
    assert step.step_time_s == pytest.approx(0.1 + 1.1 * 0.4)
    assert step.mean_power_w == pytest.approx(4 * 500.0)
    assert step.exposed_s == {"all_gather": 0.1}
    times = {kind: one.on_slower(1.1) for kind, one in pipeline_times().items()}
    played, asked = (compose(PIPELINE, WORK, each, NETWORK) for each in (times, pipeline_times()))
    assert played.busy_s == pytest.approx([1.1 * busy for busy in asked.busy_s])


def test_two_stages_by_hand() -> None:
    """The second stage has its first microbatch from 1.75 on, its gradients come with the exchange from 4.75 to 5, the
    second one's at 8.25; the first rank is through with its passes at 10.25, and clips at 11."""
    step = compose(PIPELINE, WORK, pipeline_times(), NETWORK)
    assert [(span.begin, span.end) for span in step.played.spans[0]] == [(0.5, 1.5), (1.5, 2.5), (5, 7), (8.25, 10.25)]
    assert [(span.begin, span.end) for span in step.played.spans[1]] == [(1.75, 2.75), (2.75, 4.75), (5, 6), (6, 8)]
    assert step.step_time_s == pytest.approx(10.25 + 0.75 + 0.5)
    assert step.busy_s == pytest.approx((0.5 + 6 + 1.0, 0.5 + 6 + 1.5))
    assert step.waiting_s == pytest.approx((4.0, 3.5))
    assert step.bubble == pytest.approx(7.5 / 23)
    assert step.exposed_s == pytest.approx({"send_recv": 3 * 0.25})
    assert step.energy_j == pytest.approx(2 * (7.5 * 400 + 4.0 * 100) + 2 * (8.0 * 500 + 3.5 * 100))
    assert step.mean_power_w == pytest.approx(step.energy_j / step.step_time_s)
    assert (step.memory_gib, step.peak_memory_gib) == ((10.0, 8.0), 10.0)


def test_a_kind_stands_for_others() -> None:
    """Of eight ranks in a V all but the first are of one kind, whose stages are taken for those of the others."""
    layout = Layout(
        "megatron", 8, 16, pipeline_parallel_size=8, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2
    )
    work = replace(WORK, model=replace(WORK.shape, layers=16))
    found = kinds(layout, work)
    times = {}
    for kind, seconds in zip(found, (1.0, 3.0), strict=True):
        actions = orders(layout)[kind.pipeline_rank]
        down = min(layout.stages_of(kind.pipeline_rank))
        passes = {action: seconds if action.stage == down else seconds + 1 for action in actions}
        times[kind] = RankTimes(passes, 1.0, 500.0, 100.0, 20.0)
    step = compose(layout, work, times, NETWORK)
    for rank, spans in enumerate(step.played.spans):
        for action, begin, end in spans:
            expected = (3.0 if rank else 1.0) + (action.stage >= 8)
            assert end - begin == pytest.approx(expected)
    assert len(found) == 2


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_kind_that_was_not_measured_is_an_error(lacking: int) -> None:
    times = {kind: each for kind, each in pipeline_times().items() if kind.pipeline_rank != lacking}
    with pytest.raises(KeyError, match=f"pipeline rank {lacking}"):
        compose(PIPELINE, WORK, times, NETWORK)


def test_a_slow_gpu_lets_all_others_wait() -> None:
    layout = Layout("megatron", 4, 4)
    (kind,) = kinds(layout, WORK)
    step = compose(layout, WORK, {kind: one_rank(1.0)}, NETWORK, Fleet(gpus={2: 1.1}))
    assert step.step_time_s == pytest.approx(1.1)
    assert step.energy_j == pytest.approx(1.1 * 500 + 3 * (500 + 0.1 * 100))


def test_where_all_gpus_differ_alike_nobody_waits() -> None:
    layout = Layout("megatron", 4, 4)
    (kind,) = kinds(layout, WORK)
    step = compose(layout, WORK, {kind: one_rank(1.0)}, NETWORK, Fleet(gpus=dict.fromkeys(range(4), 0.5)))
    assert step.step_time_s == pytest.approx(0.5)
    assert step.energy_j == pytest.approx(4 * 0.5 * 500)


def test_a_slow_link_lengthens_messages_and_what_nothing_hides() -> None:
    layout = Layout("megatron", 4, 4)
    (kind,) = kinds(layout, WORK)
    times = {kind: one_rank(1.0, exposed_s={"all_reduce": 0.2})}
    slow = compose(layout, WORK, times, NETWORK, Fleet(links=1.25))
    assert slow.step_time_s == pytest.approx(1.05)
    assert slow.exposed_s == pytest.approx({"all_reduce": 0.25})
    slow = compose(PIPELINE, WORK, pipeline_times(), NETWORK, Fleet(links=2.0))
    assert slow.exposed_s == pytest.approx({"send_recv": 3 * 0.5})


@pytest.mark.parametrize("gpus", [{0: 1.2}, {3: 1.2}, {0: 1.2, 1: 1.1, 3: 1.3}])
def test_a_slow_gpu_never_shortens_a_pipeline(gpus: Mapping[int, float]) -> None:
    before = compose(PIPELINE, WORK, pipeline_times(), NETWORK)
    after = compose(PIPELINE, WORK, pipeline_times(), NETWORK, Fleet(gpus=gpus))
    assert before.step_time_s < after.step_time_s <= before.step_time_s * max(gpus.values()) * (1 + 1e-9)
    assert after.energy_j > before.energy_j


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_beside_messages_take_longer_by_their_products(schedule: str) -> None:
    layout = replace(PIPELINE, pipeline_schedule=schedule, num_gpus=2)
    if schedule not in ONE_STAGE_SCHEDULES:
        layout = replace(layout, virtual_pipeline_stages=2)
    alone = pipeline_times(layout)
    share = 0.3 * contention(layout, WORK)
    before = compose(layout, WORK, alone, NETWORK)
    after = compose(layout, WORK, {kind: replace(one, products=0.3) for kind, one in alone.items()}, NETWORK)
    assert before.slowed_s == (0.0, 0.0)
    for rank, spans in enumerate(after.played.spans):
        slowed = 0.0
        for span in spans:
            messages = after.played.messages[rank]
            together = sum(max(0.0, min(end, span.end) - max(begin, span.begin)) for begin, end in messages)
            usual = 1.0 if span.action.step is Pass.FORWARD else 2.0
            assert span.end - span.begin == pytest.approx(usual + share * together, abs=0.02)
            slowed += share * together
        assert after.slowed_s[rank] == pytest.approx(slowed)
        assert after.busy_s[rank] == pytest.approx(before.busy_s[rank] + slowed)
    assert after.slowed_s[0] > 0, "its first message is not awaited before the next pass, whatever the schedule"
    assert after.step_time_s > before.step_time_s or schedule in ONE_STAGE_SCHEDULES, "the first rank is ahead"
    assert after.energy_j > before.energy_j


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_known_of_schedules_is_near_what_playing_them_gives(schedule: str) -> None:
    """Messages of a fiftieth of a forward pass; backward passes of twice as much, or as much where they are apart."""
    backward = 1.0 if "zero_bubble" in schedule else 2.0
    stages = 1 if schedule in ONE_STAGE_SCHEDULES else 2
    layout = Layout(
        "megatron", 2, 32, pipeline_parallel_size=2, virtual_pipeline_stages=stages, pipeline_schedule=schedule
    )
    times = {}
    for kind in kinds(layout, WORK):
        order = orders(layout)[kind.pipeline_rank]
        passes = {action: backward if action.step is Pass.BACKWARD else 1.0 for action in order}
        times[kind] = RankTimes(passes, 1.0, 500.0, 100.0, 8.0, products=1e-6)
    network = replace(NETWORK, measured=(replace(QUARTER, seconds=(0.02,), beside_s=(0.02,)),))
    played = compose(layout, WORK, times, network)
    share = sum(played.slowed_s) / sum(played.busy_s) / (1e-6 * contention(layout, WORK))
    assert share == pytest.approx(engine_of(layout).beside_messages.get(schedule, 0.0), abs=0.1)


def test_small_products_and_those_of_experts_feel_messages_most() -> None:
    """As was measured of a Llama's products of 32 Ki and 16 Ki tokens, of GPT-3's of 8 Ki, and of a mixture's."""
    llama = replace(WORK, model=replace(WORK.shape, hidden=2560), sequence_length=4096)
    gpt = replace(llama, model=replace(WORK.shape, hidden=2048))
    mixture = replace(llama, model=replace(llama.shape, num_experts=8))
    shares = [
        contention(replace(PIPELINE, micro_batch_size=size), work)
        for size, work in ((8, llama), (4, llama), (2, gpt), (8, mixture))
    ]
    assert shares == pytest.approx([0.07, 0.12, 0.25, 0.45], abs=0.01)
    assert contention(PIPELINE, WORK) == pytest.approx(0.45), "and no product more than those of experts"


def test_messages_between_nodes_cost_products_nothing() -> None:
    """NCCL has one or two channels for them, and for all others of the same group."""
    assert contention(PIPELINE, replace(WORK, gpus_per_node=4)) > 0
    assert contention(PIPELINE, replace(WORK, gpus_per_node=2)) == 0
    paired = replace(PIPELINE, rank_order=(0, 2, 1, 3))
    assert contention(paired, replace(WORK, gpus_per_node=2)) > 0, "both stages of a replica are on one node"


@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule not in ONE_STAGE_SCHEDULES])
def test_what_a_stage_sends_leaves_before_its_gradients_are_reduced(schedule: str) -> None:
    """All of them hold up their own rank. Were they a part of the passes that they follow, which are all backward
    passes that send or weights' passes after them, ranks before would wait for those as well."""
    layout = replace(PIPELINE, pipeline_schedule=schedule, virtual_pipeline_stages=2)
    alone, apart, within = pipeline_times(layout), {}, {}
    for kind, times in alone.items():
        *others, last = times.passes
        lasts = {action.stage: action for action in others}
        reduces = {action: 3.0 for stage, action in lasts.items() if stage != last.stage}
        apart[kind] = replace(times, reduces=reduces)
        within[kind] = replace(times, passes={a: s + reduces.get(a, 0.0) for a, s in times.passes.items()})
    before, after, held_up = (compose(layout, WORK, times, NETWORK) for times in (alone, apart, within))
    for rank in range(2):
        assert after.busy_s[rank] == held_up.busy_s[rank] == before.busy_s[rank] + 3.0
    assert before.step_time_s < after.step_time_s
    if schedule == "interleaved_1f1b":
        assert after.step_time_s < held_up.step_time_s
    else:
        assert after.step_time_s <= held_up.step_time_s, "weights' passes have nothing to send"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pauses_are_where_a_pipeline_of_ranks_alike_waits(schedule: str) -> None:
    stages = 1 if schedule in ONE_STAGE_SCHEDULES else 2
    layout = replace(PIPELINE, pipeline_schedule=schedule, virtual_pipeline_stages=stages)
    step = compose(layout, WORK, pipeline_times(layout), NETWORK)
    for rank, spans in enumerate(step.played.spans):
        passes = {span.action: span.end - span.begin for span in spans}
        before, last = pauses(layout, WORK, rank, passes, NETWORK)
        ends = [step.played.begins[rank], *(span.end for span in spans)]
        assert before == pytest.approx(
            {span.action: span.begin - end for span, end in zip(spans, ends, strict=False)}, abs=1e-9
        )
        assert last == pytest.approx(step.played.seconds - ends[-1])
        assert sum(before.values()) + last == pytest.approx(step.played.waiting[rank])


def test_power_was_measured_with_pauses() -> None:
    layout = Layout("megatron", 4, 4)
    (kind,) = kinds(layout, WORK)
    step = compose(layout, WORK, {kind: one_rank(1.0, waited_s=0.25)}, NETWORK)
    assert step.energy_j == pytest.approx(4 * (1.25 * 500 - 0.25 * 100))
