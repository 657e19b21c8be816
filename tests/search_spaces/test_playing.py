"""Playing a pipeline's step comes to the papers' closed forms, and to what follows from how engines wait."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.layout import Layout
from search_spaces.messages import Message, Post, Run, Wait, scripts
from search_spaces.playing import Played, play
from search_spaces.schedules import Action, Pass

PASSES = {Pass.FORWARD: 1.0, Pass.BACKWARD: 2.0, Pass.INPUT: 1.0, Pass.WEIGHT: 1.0}


def layout_of(schedule: str, ranks: int, microbatches: int, engine: str = "megatron") -> Layout:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    return Layout(
        engine,
        ranks,
        microbatches,
        pipeline_parallel_size=ranks,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=virtual,
    )


def played(layout: Layout, transfer: float = 0.0, unit: float = 1.0) -> Played:
    """Every microbatch takes a rank `unit` seconds forward, and twice that backward."""
    part = unit / layout.virtual_pipeline_stages
    return play(scripts(layout), lambda rank, action: part * PASSES[action.step], lambda sender, receiver: transfer)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("engine", "schedule"), [("megatron", "gpipe"), ("megatron", "1f1b"), ("deepspeed", "1f1b")])
def test_bubble_of_one_stage_a_rank(engine: str, schedule: str, ranks: int) -> None:
    """Narayanan et al. 2021, section 2.2.1: (p - 1) / m of the work."""
    microbatches = 3 * ranks
    step = played(layout_of(schedule, ranks, microbatches, engine))
    assert step.busy == pytest.approx([3.0 * microbatches] * ranks)
    assert step.seconds == pytest.approx(3.0 * microbatches * (1 + (ranks - 1) / microbatches))
    assert step.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "passes"),
    [
        ("interleaved_1f1b", 3.0),  # Narayanan et al. 2021, section 2.2.2: (p - 1) / v passes each way
        ("interleaved_zero_bubble", 1.0),  # Qi et al. 2023, table 1: forward + inputs - weights
        ("zbv_zero_bubble", 1.0),  # the last rank begins a pass later
    ],
)
def test_bubble_of_several_stages_a_rank(schedule: str, passes: float, ranks: int) -> None:
    step = played(layout_of(schedule, ranks, 8 * ranks))
    assert step.seconds == pytest.approx(3.0 * 8 * ranks + (ranks - 1) / 2 * passes)


def test_in_one_line_what_is_awaited_from_one_side_would_hold_up_what_has_come_from_the_other() -> None:
    """As with one group for all messages of more than two ranks."""
    layout = layout_of("interleaved_1f1b", 4, 8)
    together = [
        tuple(step._replace(line=()) if isinstance(step, Post) else step for step in script)
        for script in scripts(layout)
    ]
    held_up = play(together, lambda rank, action: PASSES[action.step] / 2, lambda sender, receiver: 0.0)
    assert held_up.seconds > 1.05 * played(layout).seconds


def test_gpipe_hides_no_message_that_is_awaited() -> None:
    """What is on its way was posted by the rank that awaits it, after all its work before."""
    step = played(layout_of("gpipe", 2, 4), transfer=0.25)
    assert step.seconds == pytest.approx(1.0 + 4 * (0.25 + 1.0) + 2.0 + 4 * (0.25 + 2.0))


def test_1f1b_exchanges_and_deepspeed_takes_turns() -> None:
    """Between two ranks torch sends both ways at once, DeepSpeed one after the other."""
    torch = played(layout_of("1f1b", 2, 16), transfer=0.25).seconds
    deepspeed = played(layout_of("1f1b", 2, 16, "deepspeed"), transfer=0.25).seconds
    assert deepspeed - torch == pytest.approx(15 * 0.25)


def test_stages_on_one_rank_hand_over_at_once() -> None:
    """The bottom of the V sends nothing: its rank's first microbatch goes down and up without a message."""
    step = played(layout_of("zbv_zero_bubble", 2, 4), transfer=10.0)
    ends = {span.action: span.end for span in step.spans[1]}
    begins = {span.action: span.begin for span in step.spans[1]}
    assert begins[Action(2, Pass.FORWARD, 0)] == ends[Action(1, Pass.FORWARD, 0)]
    assert begins[Action(1, Pass.FORWARD, 0)] == pytest.approx(0.5 + 10.0)


def test_ranks_begin_when_they_can() -> None:
    layout = layout_of("1f1b", 2, 2)
    late = play(scripts(layout), lambda rank, action: 1.0, lambda sender, receiver: 0.0, [0.0, 5.0])
    assert late.spans[1][0].begin == 5.0
    assert late.seconds == 5.0 + 4 + 1  # the first rank's last backward pass follows the second's
    assert late.waiting == pytest.approx((10.0 - 4, 5.0 - 4))


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    forth, back = Message(0, 1, Action(0, Pass.FORWARD, 0)), Message(1, 0, Action(1, Pass.BACKWARD, 0))
    sending = tuple(step for message in (forth, back) for step in (Post((message,)), Wait((message,))))
    receiving = tuple(step for message in (back, forth) for step in (Post((message,)), Wait((message,))))
    with pytest.raises(ValueError, match="wait for each other"):
        play([sending, receiving], lambda rank, action: 1.0, lambda sender, receiver: 1.0)
    together = (Post((forth, back)), Wait((forth, back)), Run(Action(0, Pass.FORWARD, 1)))
    ended = play([together, together], lambda rank, action: 1.0, lambda sender, receiver: 2.0)
    assert ended.finishes == (3.0, 3.0)


SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, dict[Action, float], float]:
    ranks, rounds = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    layout = layout_of(draw(SCHEDULES), ranks, ranks * rounds)
    if layout.pipeline_schedule == "1f1b" and draw(st.booleans()):
        layout = replace(layout, engine="deepspeed")
    actions = [step.action for script in scripts(layout) for step in script if isinstance(step, Run)]
    each = draw(st.lists(st.floats(0.0, 3.0), min_size=len(actions), max_size=len(actions)))
    return layout, dict(zip(actions, each, strict=True)), draw(st.floats(0.0, 1.0))


def play_case(layout: Layout, seconds: dict[Action, float], transfer: float) -> Played:
    return play(scripts(layout), lambda rank, action: seconds[action], lambda sender, receiver: transfer)


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_what_holds_of_every_step(case: tuple[Layout, dict[Action, float], float], data: st.DataObject) -> None:
    layout, seconds, transfer = case
    step = play_case(*case)
    assert all(step.seconds >= busy - 1e-9 for busy in step.busy)
    assert 0.0 <= step.bubble + 1e-9 <= 1.0 + 1e-9
    for spans in step.spans:
        assert all(one.end <= other.begin for one, other in itertools.pairwise(spans))
    # What comes from another stage is there before it is needed.
    times = {span.action: span for spans in step.spans for span in spans}
    rank_of = {stage: r for r in range(layout.pipeline_parallel_size) for stage in layout.stages_of(r)}
    for action, span in times.items():
        source = action._replace(stage=action.stage + (-1 if action.step is Pass.FORWARD else 1))
        if action.step is not Pass.WEIGHT and source in times:
            way = transfer if rank_of[source.stage] != rank_of[action.stage] else 0.0
            assert span.begin >= times[source].end + way - 1e-9
    # A longer action or a slower way never shortens the step.
    longer = data.draw(st.sampled_from(sorted(seconds)))
    assert play_case(layout, seconds | {longer: seconds[longer] + 1.0}, transfer).seconds >= step.seconds - 1e-9
    assert play_case(layout, seconds, transfer + 0.5).seconds >= step.seconds - 1e-9


def test_a_rank_communicates_from_when_it_posts_until_the_other_end_has_come() -> None:
    """The first sends what it made at 1 and at 2, the second awaits each from where it is done with what was before."""
    step = played(layout_of("gpipe", 2, 2), transfer=0.25)
    ends = [(span.action.step, span.end) for span in step.spans[1]]
    assert ends[:2] == [(Pass.FORWARD, 2.25), (Pass.FORWARD, 3.5)]
    assert step.messages[0][:2] == ((1.0, 1.25), (2.0, 2.5))
    assert step.messages[1][:2] == ((0.0, 1.25), (2.25, 2.5))
