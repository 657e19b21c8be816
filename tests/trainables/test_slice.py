"""One rank of a layout, run alone: what it reports, and that it needs the memory that it needs among the others."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from search_spaces.hardware import ACCELERATORS
from search_spaces.kinds import first_rank
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Collective, Network
from search_spaces.schedules import Action, Pass, orders
from tests.trainables.conftest import RunRanks
from tests.trainables.live_bytes import Counted, InWholeSteps, Late
from tests.trainables.test_parity import (
    GPIPE,
    INTERLEAVED,
    LLAMA,
    ROWS,
    SEQUENCE_LENGTH,
    STEPS,
    V_SHAPED,
    ZERO_BUBBLE,
    cases,
    deep,
    deepspeed,
    megatron,
    reports,
    request,
)
from trainables import passes
from trainables.engines.base import TrainingEngine
from trainables.measure import AHEAD_S, Step, time_steps
from trainables.passes import Moment, PassClock, PassTimes
from trainables.platforms.base import platform_of
from trainables.platforms.cpu import Instant
from trainables.program import TrialRequest
from trainables.rank import Rank
from trainables.slice import FIRST, Slice
from trainables.slice_rank import WAIT_S, SliceRank
from trainables.training import Training

Marked = tuple[int, Action | Moment | None]

NETWORK = Network("a test", 8, 1e12, 1e11, 1e-6, 1e-5)


def alone(trial: TrialRequest, rank: int) -> TrialRequest:
    """The same trial, of which one rank runs alone."""
    assert isinstance(trial.program, Training)
    return replace(trial, trial_id=f"rank {rank} of {trial.trial_id}", program=Slice(trial.program, rank, NETWORK))


def in_whole_steps(trial: TrialRequest) -> TrialRequest:
    """The same rank alone, whose first step is no shorter than the others."""
    assert isinstance(trial.program, Slice)
    one = trial.program
    program = InWholeSteps(one.training, one.rank, one.network, one.usable_bytes)
    return replace(trial, trial_id=f"{trial.trial_id} in whole steps", program=program)


def counted(trial: TrialRequest) -> TrialRequest:
    """The same trial, in which the bytes of tensors are counted."""
    return replace(trial, trial_id=f"counted {trial.trial_id}", program=Counted(trial.program))


def clocked(
    steps: list[list[Marked]], pauses: dict[Action | Moment, float] | None = None, kept: int | None = None
) -> PassClock:
    """After steps by the nanoseconds of their marks, of which the first and the last of each are its begin and its end.

    What has a pause has two marks one after the other, of which the first is its end of what was before.
    """
    stamps = iter([Instant(ns) for step in steps for ns, _ in step])
    paused: list[float] = []
    clock = PassClock(lambda: next(stamps), paused.append, kept)
    clock.pauses = pauses or {}
    for step in steps:
        clock.begin()
        for _, what in step[1:-1]:
            if what is not None:
                clock.observe(what)
        clock.end()
    assert paused == list(clock.pauses.values()) * len(steps)
    return clock


def times(steps: list[list[Marked]], latest: int, pauses: dict[Action | Moment, float] | None = None) -> PassTimes:
    return clocked(steps, pauses).mean(latest)


def test_a_pass_lasts_until_the_next_begins_or_its_stage_is_reduced() -> None:
    first, second, third = Action(0, Pass.FORWARD, 0), Action(0, Pass.BACKWARD, 0), Action(1, Pass.FORWARD, 0)
    marks: list[Marked] = [(0, None), (5, first), (15, second), (18, Moment.PASSED), (20, third), (50, Moment.PASSED)]
    step = times([[*marks, (60, Moment.PASSED), (64, Moment.AGREED), (71, None)]], 1)
    assert (step.head_s, step.tail_s, step.update_s) == pytest.approx((5e-9, 21e-9, 7e-9))
    assert step.passes_s == pytest.approx({first: 10e-9, second: 3e-9, third: 30e-9})
    assert step.reduces_s == pytest.approx({second: 2e-9}), "that of the last pass is in the tail"


def test_pauses_are_no_part_of_the_passes() -> None:
    first, second = Action(0, Pass.FORWARD, 0), Action(0, Pass.BACKWARD, 0)
    pauses: dict[Action | Moment, float] = {first: 4e-9, second: 7e-9, Moment.AGREED: 9e-9}
    marks: list[Marked] = [(0, None), (5, first), (9, None), (15, second), (22, None), (30, Moment.PASSED)]
    step = times([[*marks, (32, Moment.AGREED), (41, None), (50, None)]], 1, pauses)
    assert (step.head_s, step.tail_s, step.update_s) == pytest.approx((5e-9, 11e-9, 9e-9))
    assert step.passes_s == pytest.approx({first: 6e-9, second: 8e-9})
    assert step.waited_s == pytest.approx(20e-9)


def test_a_pass_computes_until_it_is_done_with_its_loss_and_not_while_the_next_is_awaited() -> None:
    """Passes of a step's first microbatch apart from the others; of the latest steps that are kept."""

    def step(forward: int) -> list[Marked]:
        marks: list[Marked] = [(0, None)]
        for number, microbatch in enumerate((0, 1, 2)):
            began, more = 1000 * number, 7 if microbatch == 0 else 0
            marks += [(began + 5, Action(3, Pass.FORWARD, microbatch)), (began + forward, Moment.DONE)]
            marks += [(began + 20 + forward + more, Moment.DONE), (began + 300, Action(3, Pass.BACKWARD, microbatch))]
            marks += [(began + 340, Moment.DONE)]
        return [*marks, (2900, Moment.PASSED), (2950, Moment.AGREED), (2990, None)]

    steps = [step(900), step(100), step(120)]
    expected = [
        (3, Pass.BACKWARD, pytest.approx(40e-9), pytest.approx(40e-9)),
        (3, Pass.FORWARD, pytest.approx(132e-9), pytest.approx(125e-9)),
    ]
    assert list(clocked(steps).computing(2)) == expected
    assert list(clocked(steps, kept=2).computing(3)) == expected
    assert clocked([[(0, None), (9, None)]]).computing(1) == ()
    whole = times(steps, 1)
    assert whole.passes_s[Action(3, Pass.FORWARD, 1)] == pytest.approx(295e-9), "until the next begins, as before"


def test_means_are_of_the_latest_steps_which_without_passes_are_all_tail() -> None:
    step = times([[(0, None), (1000, None)], [(1000, None), (1002, None)], [(2000, None), (2004, None)]], 2)
    assert (step.head_s, step.passes_s, step.tail_s, step.update_s) == (0, {}, pytest.approx(3e-9), 0)
    assert step.waited_s == 0


PIPELINES = [
    (deep(LLAMA), megatron(2, **V_SHAPED, mbs=1), 0),
    (deep(LLAMA), deepspeed(4, pp=4, mbs=1), 2),
    *[
        pytest.param(deep(LLAMA), layout, rank, marks=pytest.mark.slow)
        for layout, rank in [
            (megatron(2, pp=2, mbs=1), 1),
            (megatron(4, **GPIPE, zero=1, mbs=1), 0),
            (megatron(2, **INTERLEAVED, mbs=1), 1),
            (megatron(2, **ZERO_BUBBLE, mbs=1), 0),
        ]
    ],
]


@pytest.mark.parametrize(("model", "layout", "rank"), PIPELINES)
def test_passes_are_those_of_the_schedule(model: ModelShape, layout: Layout, rank: int, run_ranks: RunRanks) -> None:
    (report,) = reports(run_ranks(alone(request(layout, model), rank)))
    assert report.slice is not None
    (step,), (timing,) = report.slice.times.values(), report.timings.values()
    assert tuple(step.passes_s) == orders(layout)[layout.coordinates(rank)["pp"]]
    parts = [step.head_s, *step.passes_s.values(), step.tail_s]
    assert min(parts) > 0
    assert step.tail_s > step.update_s > 0
    assert sum(parts) <= sum(timing.window_steps_s) / len(timing.window_steps_s)


@pytest.mark.parametrize(
    ("layout", "apart", "later"),
    [(megatron(2, pp=2, mbs=1), 1, 1), (megatron(2, pp=2, mbs=4), 2, 2), (megatron(2, zero=1, mbs=4), 1, 0)],
)
def test_pauses_follow_from_the_first_step_unless_too_few_microbatches_tell(
    layout: Layout, apart: int, later: int
) -> None:
    """Without a pipeline only the first step of all is unlike others; with one, the first of each batch."""
    rank = object.__new__(SliceRank)
    rank.layout, rank.losses = layout, []
    assert len(rank.apart) == apart
    rank.losses = [torch.zeros(())]
    assert len(rank.apart) == later


@pytest.mark.parametrize(
    ("largest", "count", "trained"),
    [(4, 4, [3, 4]), (4, 2, [3, 2]), (12, 12, [3, 12]), (3, 3, []), (2, 2, [])],
)
def test_the_first_step_of_all_has_three_microbatches_if_there_are_any(
    largest: int, count: int, trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[int] = []
    monkeypatch.setattr(SliceRank, "change_batch", lambda rank, size: changed.append(size))
    monkeypatch.setattr(SliceRank, "timed_step", lambda rank: Step(1.0, 5))
    rank = object.__new__(SliceRank)
    rank.layout, rank.step_began_ns = Layout("megatron", 4, 8 * count, micro_batch_size=2), 7
    rank.batches = (8 * largest, 8 * count)
    step = rank.first_step()
    assert changed == [8 * microbatches for microbatches in trained]
    assert step.ended_ns == (7 if changed else 5)


@pytest.mark.parametrize(
    ("microbatch_s", "timed"),
    [(0.25, (32,)), (0.2425, (32,)), (0.24, (32, 16)), (0.0, (32, 16))],  # of a step of four that takes 1 s
)
def test_a_smaller_batch_tells_power_where_much_of_the_larger_is_done_once(
    microbatch_s: float, timed: tuple[int, ...]
) -> None:
    rank = timing_batches(32, of=32)
    rank.times = {32: PassTimes(0.0, {}, 1.0, 0.0, 0.0, microbatch_s=microbatch_s)}
    assert tuple(rank.order) == timed


@pytest.mark.parametrize(
    ("accelerator", "ahead_s", "of", "alike_s", "trained"),
    [
        ("h200", [0.9 * AHEAD_S] * 3, 512, 1.5, [24, 32, 128, 128]),
        ("h200", [0.9 * AHEAD_S] * 3, 96, 1.5, [24, 32, 96, 96]),
        ("h200", [0.9 * AHEAD_S] * 3, 32, 1.5, [24, 32, 32]),
        ("h200", [0.9 * AHEAD_S, AHEAD_S, AHEAD_S], 512, 1.5, [24, 32, 32]),  # the first step tells nothing
        ("h200", [AHEAD_S, AHEAD_S, 0.9 * AHEAD_S], 512, 1.5, [24, 32, 32]),  # windows begin before this one
        ("h200", [0.9 * AHEAD_S] * 3, 512, math.inf, [24, 32, 32, 32, 32]),  # a probe
        ("cpu", [0.0] * 3, 512, 1.5, [24, 32, 32]),  # the host is the device
    ],
)
def test_more_microbatches_are_timed_where_the_host_was_late(
    accelerator: str, ahead_s: list[float], of: int, alike_s: float, trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of 1 s, of which a window has two."""
    rank = timing_batches(32, of=of)
    procedure = replace(rank.request.procedure, steady_steps=2, window_s=2.0, window_min_steps=2)
    rank.request = replace(rank.request, procedure=replace(procedure, alike_s=alike_s))
    rank.platform = platform_of(ACCELERATORS[accelerator])
    steps: list[int] = []
    phases: list[str | int] = []

    def step(rank: SliceRank) -> Step:
        steps.append(rank.layout.global_batch_size)
        rank.steps_of_batch += 1
        return Step(1.0, len(steps))

    monkeypatch.setattr(Rank, "timed_step", step)
    monkeypatch.setattr(rank.clock, "ahead_s", lambda: (ahead_s + [ahead_s[-1]] * 9)[len(steps) - 1])
    monkeypatch.setattr(rank, "enter", lambda phase: phases.extend([phase, *steps[-1:]]))
    timing = time_steps(rank.timed_step, rank.request.procedure, False, rank.enter, apart=rank.apart)
    assert steps == trained
    assert phases[-2:] == ["window", trained[-3]], "it begins with the first of the two steps"
    assert len(timing.window_steps_s) == 2
    assert rank.batches == (trained[-1], 16)


def timing_batches(largest: int, of: int) -> SliceRank:
    """A rank that times a step of `largest` sequences, eight a microbatch of all ranks, in place of one `of` more."""
    rank = object.__new__(SliceRank)
    layout = Layout("megatron", 4, of, micro_batch_size=2)
    rank.request = replace(request(layout, LLAMA), batches=(largest, 16))
    rank.layout, rank.batches = replace(layout, global_batch_size=largest), (largest, 16)
    rank.platform, rank.clock = platform_of(ACCELERATORS["cpu"]), clocked([])
    rank.engine = cast(TrainingEngine, SimpleNamespace(set_global_batch_size=lambda size: None))
    rank.losses, rank.steps_of_batch = [], 0
    return rank


def test_microbatches_but_the_first_and_the_last_tell_what_others_take() -> None:
    marks: list[Marked] = [(0, None), (1, Moment.DEALT), (9, Moment.DEALT), (12, Moment.DEALT), (17, Moment.DEALT)]
    step = times([[*marks, (30, None)], [*marks, (30, None)]], 2)
    assert (step.tail_s, step.microbatch_s) == pytest.approx((30e-9, 4e-9))
    assert times([[(0, None), (1, Moment.DEALT), (9, Moment.DEALT), (30, None)]], 1).microbatch_s == 0.0


def test_a_rank_alone_times_its_microbatches(run_ranks: RunRanks) -> None:
    layout = megatron(2, zero=1, mbs=1)
    many = replace(layout, global_batch_size=8 * layout.data_parallel_size)
    few = replace(layout, global_batch_size=2 * layout.data_parallel_size)
    trial = replace(request(many, LLAMA), batches=(many.global_batch_size, few.global_batch_size))
    (report,) = reports(run_ranks(alone(replace(trial, trial_id="two batches alone"), 0)))
    assert report.slice is not None
    assert tuple(report.timings) == tuple(report.slice.times)
    step = report.slice.times[many.global_batch_size]
    assert 0 < 6 * step.microbatch_s < step.tail_s
    assert all(one.microbatch_s == 0 for batch, one in report.slice.times.items() if batch == few.global_batch_size)


def test_of_a_late_rank_the_longer_step_is_reported(run_ranks: RunRanks) -> None:
    layout = megatron(2, zero=1, mbs=1)
    short, longer = (count * layout.data_parallel_size for count in (3, 10))
    trial = request(replace(layout, global_batch_size=longer), LLAMA)
    assert isinstance(trial.program, Training)
    program = Late(trial.program, 0, NETWORK)
    trial = replace(trial, batches=(short,), procedure=replace(trial.procedure, breakdown=True, alike_s=0.1))
    (report,) = reports(run_ranks(replace(trial, trial_id="late alone", program=program)))
    assert report.slice is not None
    assert report.profile is not None
    assert tuple(report.timings) == tuple(report.slice.times) == (longer,)


def test_the_host_is_ahead_by_the_least_that_it_was_at_a_pass_or_a_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = (Action(0, Pass.FORWARD, index) for index in range(3))
    told = iter([1000, 1000, 1003, 1004, 1007, 2000, 2000, 2005, 3000])
    monkeypatch.setattr(passes, "time", SimpleNamespace(monotonic_ns=lambda: next(told)))
    marks: list[Marked] = [(0, None), (0, first), (10, second), (11, Moment.PASSED), (12, third), (20, None)]
    assert clocked([marks]).ahead_s() == pytest.approx(5e-9), "the third, of which the host told at 7"
    dealt: list[Marked] = [(0, None), (0, Moment.DEALT), (9, Moment.DEALT), (20, None)]
    assert clocked([dealt]).ahead_s() == pytest.approx(4e-9)
    assert clocked([[(0, None), (20, None)]]).ahead_s() == 0.0, "of which nothing is known"


def test_a_rank_of_a_pipeline_pauses_where_others_would_let_it_wait(run_ranks: RunRanks) -> None:
    trial = replace(request(megatron(2, pp=2, mbs=1), deep(LLAMA)), trial_id="pausing")
    (report,) = reports(run_ranks(alone(trial, 0)))
    assert report.slice is not None
    (step,) = report.slice.times.values()
    assert step.waited_s > 0


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (deep(LLAMA), megatron(2, **V_SHAPED, mbs=1)),
        *[
            pytest.param(deep(LLAMA), layout, marks=pytest.mark.slow)
            for layout in (megatron(4, **GPIPE, zero=1, mbs=1), deepspeed(2, pp=2, mbs=1))
        ],
    ],
)
def test_ranks_of_a_pipeline_tell_how_long_their_passes_compute(
    model: ModelShape, layout: Layout, run_ranks: RunRanks
) -> None:
    for report in reports(run_ranks(request(layout, model))):
        passes = {(one.stage, one.step): one for one in report.passes}
        actions = orders(layout)[report.coordinates["pp"]]
        assert set(passes) == {(action.stage, action.step) for action in actions}
        assert len(passes) == len(report.passes)
        seconds = [passes[action.stage, action.step].of(action.microbatch) for action in actions]
        (timing,) = report.timings.values()
        assert min(seconds) > 0
        assert sum(seconds) < sum(timing.window_steps_s) / len(timing.window_steps_s)


def test_a_rank_reports_what_others_were_called_for_and_how_long_it_waited(run_ranks: RunRanks) -> None:
    layout = Layout("megatron", 1024, 1024, micro_batch_size=2, tensor_parallel_size=2, precision="fp32")
    trial = replace(request(layout, LLAMA), trial_id="one of 1024")
    (report,) = reports(run_ranks(alone(trial, 701)))
    assert (report.rank, report.coordinates) == (701, {"pp": 0, "dp": 350, "cp": 0, "tp": 1})
    assert report.slice is not None
    (timing,), (traffic,) = report.timings.values(), report.slice.traffic.values()
    assert report.slice.waited_ns is not None
    began_ns, ended_ns = report.slice.waited_ns
    assert began_ns >= timing.end_ns
    assert ended_ns - began_ns >= WAIT_S * 1e9
    gradients = [entry.size for entry in traffic if (entry.kind, entry.ranks) == (Collective.ALL_REDUCE, 512)]
    split = LLAMA.layers * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176) + 2 * 64 * 512
    norms = (2 * LLAMA.layers + 1) * 64
    assert gradients == [4 * (split / 2 + norms)]


BY_DEFAULT = [
    *cases(LLAMA, megatron(2, zero=3), deepspeed(2, zero=2)),
    *cases(deep(LLAMA), megatron(2, pp=2)),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [row if row in BY_DEFAULT else pytest.param(*row.values, id=row.id, marks=pytest.mark.slow) for row in ROWS],
)
def test_tensors_take_as_much_memory_as_among_others(model: ModelShape, layout: Layout, run_ranks: RunRanks) -> None:
    """A send of gloo's keeps what it sent until it is deleted, which torch's GPipe does after the step; NCCL's and that
    which is stood in for let go of it once they were waited for. Where experts are spread nothing else keeps it."""
    kept = 4 * layout.microbatch_tokens(SEQUENCE_LENGTH) * model.hidden / 2**30
    trial = request(layout, model)
    among = reports(run_ranks(counted(trial)))
    for rank in (first_rank(layout, stage) for stage in range(layout.pipeline_parallel_size)):
        (own,) = reports(run_ranks(counted(in_whole_steps(alone(trial, rank)))))
        alone_gib, among_gib = own.peak_memory_gib, among[rank].peak_memory_gib
        assert alone_gib is not None
        assert among_gib is not None
        more = among_gib - alone_gib
        is_kept = layout.pipeline_schedule == "gpipe" and layout.expert_parallel_size > 1
        assert more == 0 or (is_kept and more == kept)


def test_a_shorter_first_step_lacks_no_more_than_the_scalars_of_some_losses(run_ranks: RunRanks) -> None:
    trial = alone(request(megatron(2, zero=1, mbs=1), LLAMA), 0)
    (whole,), (own,) = (reports(run_ranks(counted(one))) for one in (in_whole_steps(trial), trial))
    assert whole.peak_memory_gib is not None
    assert own.peak_memory_gib is not None
    shorter_by = trial.layout.gradient_accumulation_steps - FIRST
    assert shorter_by > 0
    assert 0 <= whole.peak_memory_gib - own.peak_memory_gib <= 4 * shorter_by / 2**30


def test_the_last_of_ranks_that_sum_up_their_own_gradients_has_as_much_memory_alone(run_ranks: RunRanks) -> None:
    """DeepSpeed's ZeRO-2, of which ranks differ in when their own gradients come."""
    trial = replace(request(deepspeed(2, zero=2), LLAMA), trial_id="the last of them")
    among = reports(run_ranks(counted(trial)))
    (own,) = reports(run_ranks(counted(in_whole_steps(alone(trial, 1)))))
    assert own.peak_memory_gib == among[1].peak_memory_gib


def test_a_rank_alone_keeps_the_model_as_it_was_drawn(run_ranks: RunRanks) -> None:
    """DeepSpeed's gathers the parameters of others in place."""
    layouts = megatron(2), deepspeed(2, zero=1), deepspeed(2, zero=2)
    found = [report for layout in layouts for report in reports(run_ranks(alone(request(layout, LLAMA), 0)))]
    first, *others = (report.losses for report in found)
    assert len(set(first)) == STEPS
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)


def test_gradients_of_a_tensor_rank_alone_stay_bounded(run_ranks: RunRanks) -> None:
    """It sums zeros of its own for tokens whose embeddings others hold: norms of such rows made these 40 and 42."""
    layout = replace(megatron(2, tp=2, mbs=1, recompute="full"), precision="bf16", sequence_parallel=True)
    model = replace(deep(LLAMA), layers=4)
    (report,) = reports(run_ranks(alone(replace(request(layout, model), trial_id="bounded"), 0)))
    assert max(report.grad_norms) < 20
