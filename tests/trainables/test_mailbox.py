from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.network import Network
from trainables.breakdown import Profile
from trainables.child import ABORTED, Outcome
from trainables.mailbox import SILENT_S, Mailbox, Member, Order
from trainables.measure import Procedure, Stretch
from trainables.program import Progress, RankReport, TrialRequest
from trainables.slice import Slice
from trainables.status import Status
from trainables.training import Training

T = TypeVar("T")
Evaluated = tuple[list[Outcome], list[Member], float]

OK = Outcome(Status.OK, phase="report")
LAYOUT = Layout("megatron", 2, 4, precision="fp32")
TRAINING = Training(PRESETS["tiny-llama"], "synthetic", 32, seed=0)
REQUEST = TrialRequest("t0", LAYOUT, TRAINING, Procedure(3, 0.02, 1.0, 1.0, 5), deadline_s=60)


def member(rank: int, store_port: int = 4000) -> Member:
    return Member(rank, "node", "host", store_port + rank, f"GPU-{rank}")


async def gang(size: int = 2) -> Mailbox:
    mailbox = Mailbox(size)
    for rank in range(size):
        await mailbox.join(member(rank))
    return mailbox


def lost(cause: str) -> Outcome:
    """What befalls a trial whose gang is gone; what its ranks say themselves is never put down to the machines."""
    return Outcome(Status.CRASH, cause, infrastructure=True)


async def hand_in(mailbox: Mailbox, worker: int, number: int, outcome: Outcome, *left: str) -> None:
    """As a worker does: what came of a trial and, once its process has ended, what that left."""
    await mailbox.hand_in(worker, number, outcome)
    await mailbox.leave(worker, number, left)


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 60)


async def settle() -> None:
    """Let all that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def waits(task: asyncio.Task[Any]) -> bool:
    await settle()
    return not task.done()


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


async def take(mailbox: Mailbox, rank: int, after: int) -> Order:
    order = await soon(mailbox.next(rank, after))
    assert order is not None
    return order


@in_a_loop
async def test_trials_reach_every_rank_in_order() -> None:
    mailbox = await gang()
    taken: dict[int, list[str]] = {0: [], 1: []}

    async def worker(rank: int) -> None:
        number = 0
        while (order := await mailbox.next(rank, number)) is not None:
            number = order.number
            taken[rank].append(order.request.trial_id)
            assert order.members == (member(0), member(1))
            await hand_in(mailbox, rank, number, replace(OK, cause=f"{order.request.trial_id} on {rank}"))

    workers = [asyncio.create_task(worker(rank)) for rank in range(2)]
    for trial in ("a", "b", "c"):
        outcomes, members, seconds = await soon(mailbox.evaluate(replace(REQUEST, trial_id=trial)))
        assert [outcome.cause for outcome in outcomes] == [f"{trial} on 0", f"{trial} on 1"]
        assert members == [member(0), member(1)]
        assert 0 <= seconds < 5
    await mailbox.close()
    await soon(asyncio.gather(*workers))
    assert taken == {0: ["a", "b", "c"], 1: ["a", "b", "c"]}


@in_a_loop
async def test_ranks_beyond_the_trial_s_are_left_out() -> None:
    mailbox = await gang(3)
    idle = asyncio.create_task(mailbox.next(2, 0))
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    for rank in (1, 0):
        await hand_in(mailbox, rank, (await take(mailbox, rank, 0)).number, OK)
    outcomes, members, _ = await soon(trial)
    assert outcomes == [OK, OK]
    assert len(members) == 3
    assert await waits(idle)
    asyncio.create_task(mailbox.evaluate(replace(REQUEST, layout=replace(LAYOUT, num_gpus=3))))  # noqa: RUF006
    order = await soon(idle)
    assert order is not None
    assert order.number == 2


@in_a_loop
async def test_one_worker_may_run_any_rank_of_a_layout() -> None:
    mailbox = await gang(1)
    program = Slice(TRAINING, 5, Network("a test", 8, 1e12, 1e11, 1e-6, 1e-5))
    trial = asyncio.create_task(mailbox.evaluate(replace(REQUEST, layout=replace(LAYOUT, num_gpus=8), program=program)))
    order = await take(mailbox, 0, 0)
    assert order.request.ranks == (5,)
    await hand_in(mailbox, 0, order.number, Outcome(Status.OOM, "memory", "window"))
    assert (await soon(trial))[0] == [Outcome(Status.OOM, "rank 5 on worker 0: memory", "window")]


@in_a_loop
async def test_a_rank_that_failed_stops_the_others_and_is_named() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    stopped = asyncio.create_task(mailbox.aborted(number))
    assert await waits(stopped)
    await hand_in(mailbox, 1, number, Outcome(Status.OOM, "warmup: OutOfMemoryError: CUDA out of memory", "warmup"))
    await soon(stopped)
    assert await waits(trial)  # until rank 0 is free, too
    await hand_in(mailbox, 0, number, Outcome(ABORTED, None, "warmup"))
    outcomes, *_ = await soon(trial)
    assert outcomes == [Outcome(Status.OOM, "rank 1: warmup: OutOfMemoryError: CUDA out of memory", "warmup")]


@in_a_loop
async def test_a_worker_that_took_another_rank_is_named_by_both() -> None:
    mailbox = await gang()
    permuted = replace(REQUEST, layout=replace(LAYOUT, rank_order=(1, 0)))
    trial = asyncio.create_task(mailbox.evaluate(permuted))
    number = (await take(mailbox, 0, 0)).number
    await hand_in(mailbox, 1, number, Outcome(Status.OOM, "memory", "warmup"))
    await hand_in(mailbox, 0, number, Outcome(ABORTED, None, "warmup"))
    outcomes, *_ = await soon(trial)
    assert outcomes == [Outcome(Status.OOM, "rank 0 on worker 1: memory", "warmup")]


@in_a_loop
async def test_the_first_failure_is_the_cause() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await hand_in(mailbox, 1, number, Outcome(Status.OOM, "memory", "warmup"))
    await hand_in(mailbox, 0, number, Outcome(Status.CRASH, "Connection closed by peer", "warmup"))
    outcomes, *_ = await soon(trial)
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("oom", "rank 1: memory")]


def measured(rank: int, problem: str | None) -> RankReport:
    return RankReport(rank, {}, None, {}, (6.0,), (1.0,), None, {}, Profile(None, problem, 60.0))


@in_a_loop
async def test_a_trial_that_fails_once_all_its_ranks_have_measured_ends_well() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    stopped = asyncio.create_task(mailbox.aborted(number))
    problem = "no result after 60 s, in phase breakdown"
    hung = Outcome(Status.HANG, problem, "breakdown", measured(1, problem), traceback="in profile_step")
    await hand_in(mailbox, 1, number, hung)
    await soon(stopped)
    await hand_in(mailbox, 0, number, Outcome(ABORTED, None, "breakdown", measured(0, None)))
    outcomes, *_ = await soon(trial)
    assert outcomes == [
        Outcome(Status.OK, None, "breakdown", measured(0, None)),
        Outcome(Status.OK, None, "breakdown", measured(1, problem), traceback="in profile_step"),
    ]


@in_a_loop
async def test_a_trial_of_which_one_rank_has_not_measured_has_failed() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await hand_in(mailbox, 1, number, Outcome(Status.CRASH, "killed", "breakdown", measured(1, "killed")))
    await hand_in(mailbox, 0, number, Outcome(ABORTED, None, "report"))
    outcomes, *_ = await soon(trial)
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("crash", "rank 1: killed")]


@in_a_loop
async def test_a_trial_that_is_over_needs_not_go_on() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    watch = asyncio.create_task(mailbox.aborted(number))
    for rank in range(2):
        await hand_in(mailbox, rank, number, OK)
    await soon(trial)
    await soon(watch)
    await soon(mailbox.aborted(number))


@in_a_loop
async def test_a_worker_that_starts_anew_crashes_the_trial_that_it_had_begun() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 1, 0)).number
    await mailbox.join(member(1, store_port=5000))
    outcomes, *_ = await soon(trial)
    assert outcomes == [lost("a worker process of the gang died; it was started anew")]

    following = asyncio.create_task(mailbox.evaluate(REQUEST))
    await hand_in(mailbox, 0, number, OK)  # from before
    for rank in range(2):
        order = await take(mailbox, rank, 0)
        assert order.members == (member(0), member(1, store_port=5000))
        assert order.number > number
        await hand_in(mailbox, rank, order.number, OK)
    outcomes, members, _ = await soon(following)
    assert outcomes == [OK, OK]
    assert members == [member(0), member(1, store_port=5000)]


@in_a_loop
async def test_a_worker_that_was_dead_when_a_trial_began_takes_part_once_it_is_back() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await mailbox.join(member(1, store_port=5000))
    for rank in range(2):
        assert (await take(mailbox, rank, 0)).number == number
        await hand_in(mailbox, rank, number, OK)
    assert (await soon(trial))[0] == [OK, OK]


@in_a_loop
async def test_ranks_do_not_meet_at_the_store_of_a_worker_that_was_dead_when_a_trial_began() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    await take(mailbox, 1, 0)
    await mailbox.join(member(0, store_port=5000))
    assert (await soon(trial))[0] == [lost("a worker process of the gang died; it was started anew")]

    following = asyncio.create_task(mailbox.evaluate(REQUEST))
    await settle()
    await mailbox.join(member(0, store_port=6000))  # before anybody knows of the trial
    for rank in range(2):
        order = await take(mailbox, rank, 1)
        assert order.members[0] == member(0, store_port=6000)
        await hand_in(mailbox, rank, order.number, OK)
    assert (await soon(following))[0] == [OK, OK]


@in_a_loop
async def test_a_trial_is_over_once_its_workers_are_done_with_it_and_what_is_left_is_told() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await hand_in(mailbox, 1, number, OK, "process 7 (sleep)")
    await mailbox.hand_in(0, number, OK)
    assert await waits(trial)
    await mailbox.leave(0, number, ("process 6 (sleep)",))
    assert (await soon(trial))[0] == [replace(OK, left=("process 6 (sleep)", "process 7 (sleep)")), OK]


@in_a_loop
async def test_what_came_of_a_trial_stands_though_a_worker_dies_over_what_it_left() -> None:
    mailbox = await gang()
    for outcome in (OK, Outcome(Status.OOM, "memory", "warmup")):
        trial = asyncio.create_task(mailbox.evaluate(REQUEST))
        await settle()
        (number,) = mailbox.rounds
        for rank in range(2):
            await take(mailbox, rank, number - 1)
            await mailbox.hand_in(rank, number, outcome)
        await mailbox.join(member(1, store_port=5000))
        assert (await soon(trial))[0][0].status == outcome.status
        assert not (await trial)[0][0].infrastructure


@in_a_loop
async def test_a_worker_that_is_silent_is_out_until_it_joins_anew() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await hand_in(mailbox, 0, number, Outcome(Status.HANG, "no result"))
    assert await soon(mailbox.expire(REQUEST.trial_id, "no answer")) == [member(0), member(1)]
    assert await mailbox.outcasts() == [member(1)]
    assert await mailbox.outcasts() == [], "it is to be killed once"
    assert (await soon(trial))[0][0] == lost("no answer")
    with pytest.raises(LookupError, match="worker 1 was silent"):
        await soon(mailbox.next(1, number))
    ready, waiting = (asyncio.create_task(mailbox.ready(workers)) for workers in ([0], [1]))
    assert await soon(ready) == [member(0), member(1)]
    following = asyncio.create_task(mailbox.evaluate(replace(REQUEST, trial_id="next")))
    assert await waits(waiting)
    assert await waits(following)
    await mailbox.join(member(1, store_port=5000))
    assert await soon(waiting) == [member(0), member(1, store_port=5000)]
    assert (await take(mailbox, 1, number)).request.trial_id == "next"
    following.cancel()


@in_a_loop
async def test_a_worker_that_says_nothing_ends_its_trial_and_is_out() -> None:
    mailbox = await gang()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainables.mailbox.LISTEN_S", 0.01)
        trial = asyncio.create_task(mailbox.evaluate(REQUEST))
        await take(mailbox, 0, 0)
        assert await waits(trial)
        mailbox.heard = dict.fromkeys(range(2), time.monotonic() - 2 * SILENT_S)
        await mailbox.beat(0)
        (outcome,) = (await soon(trial))[0]
    assert (outcome.status, outcome.infrastructure) == (Status.HANG, True)
    assert outcome.cause == "worker 1 of the gang said nothing for 60 s"
    assert await mailbox.outcasts() == [member(1)]
    with pytest.raises(LookupError, match="worker 1 was silent"):
        await soon(mailbox.next(1, 0))


@in_a_loop
async def test_a_trial_that_is_given_up_before_it_began_never_begins() -> None:
    mailbox = await gang()
    mailbox.out.add(1)
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    assert await waits(trial)
    assert await soon(mailbox.expire(REQUEST.trial_id, "no answer")) == []
    assert await mailbox.outcasts() == []
    with pytest.raises(LookupError, match="given up before it began"):
        await soon(trial)
    await mailbox.join(member(1))
    assert not mailbox.rounds


def alone(trial_id: str) -> TrialRequest:
    return replace(REQUEST, trial_id=trial_id, layout=replace(LAYOUT, num_gpus=1))


@in_a_loop
async def test_trials_of_other_workers_go_on_side_by_side() -> None:
    """Of four, a pair in another order trains, two train alone: one of these is lost, one fails."""
    mailbox = await gang(4)
    pair = asyncio.create_task(mailbox.evaluate(REQUEST, (3, 1)))
    single = asyncio.create_task(mailbox.evaluate(alone("t1"), [2]))
    other = asyncio.create_task(mailbox.evaluate(alone("t2"), [0]))
    orders = [await take(mailbox, worker, 0) for worker in range(4)]
    assert [order.request.trial_id for order in orders] == ["t2", "t0", "t1", "t0"]
    assert orders[1].members == (member(3), member(1))
    assert [orders[1].place(worker) for worker in (3, 1)] == [0, 1]

    await mailbox.join(member(2))
    assert (await soon(single))[0] == [lost("a worker process of the gang died; it was started anew")]
    await hand_in(mailbox, 0, orders[0].number, Outcome(Status.OOM, "memory", "build"))
    assert (await soon(other))[0] == [Outcome(Status.OOM, "rank 0: memory", "build")]
    watch = asyncio.create_task(mailbox.aborted(orders[1].number))
    assert await waits(watch)
    again = asyncio.create_task(mailbox.evaluate(alone("t3"), [0]))
    await settle()
    await mailbox.give_up("its lease was over", [0, 2])
    assert (await soon(again))[0] == [lost("its lease was over")]
    for worker in (1, 3):
        await hand_in(mailbox, worker, orders[1].number, replace(OK, cause=f"of {worker}"))
    outcomes, members, _ = await soon(pair)
    assert [outcome.cause for outcome in outcomes] == ["of 3", "of 1"]
    assert members == [member(3), member(1)]


@in_a_loop
async def test_a_rank_is_named_by_its_place_among_those_lent() -> None:
    mailbox = await gang(4)
    trial = asyncio.create_task(mailbox.evaluate(REQUEST, (2, 3)))
    number = (await take(mailbox, 3, 0)).number
    await hand_in(mailbox, 3, number, Outcome(Status.OOM, "memory", "warmup"))
    await hand_in(mailbox, 2, number, Outcome(ABORTED, None, "warmup"))
    assert (await soon(trial))[0] == [Outcome(Status.OOM, "rank 1 on worker 3: memory", "warmup")]


@in_a_loop
async def test_a_trial_given_up_crashes_and_leaves_the_gang_usable() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    watch = asyncio.create_task(mailbox.aborted(number))
    following = asyncio.create_task(_after(mailbox.give_up("its time was up"), mailbox.evaluate(REQUEST)))
    outcomes, *_ = await soon(trial)
    assert outcomes == [lost("its time was up")]
    await soon(watch)
    for rank in range(2):
        await hand_in(mailbox, rank, number, Outcome(ABORTED))  # too late to matter
    for rank in range(2):
        await hand_in(mailbox, rank, (await take(mailbox, rank, number)).number, OK)
    assert (await soon(following))[0] == [OK, OK]


async def _after(first: Awaitable[None], then: Awaitable[Evaluated]) -> Evaluated:
    await first
    return await then


def steady(device: str) -> Progress:
    return Progress("window", device, 1000.0, Stretch((1.0, 1.0), 0, 2_000_000_000))


@in_a_loop
async def test_a_trial_is_told_of_once_all_its_ranks_are_steady() -> None:
    mailbox = await gang(3)
    asked = asyncio.create_task(mailbox.steady("t0"))
    assert await waits(asked)
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await mailbox.note(1, number, steady("GPU-1"))
    await mailbox.note(0, number + 1, steady("GPU-9"))  # of another trial
    assert await waits(asked)
    await mailbox.note(0, number, steady("GPU-0"))
    assert await soon(asked) == ([steady("GPU-0"), steady("GPU-1")], [member(0), member(1)])
    for rank in range(2):
        await hand_in(mailbox, rank, number, OK)
    assert (await soon(trial))[0] == [OK, OK]
    assert await soon(mailbox.steady("t0")) is None  # too late


@in_a_loop
async def test_a_trial_that_ends_unsteady_is_told_of_as_ended() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    asked = asyncio.create_task(mailbox.steady("t0"))
    await mailbox.note(0, number, steady("GPU-0"))
    for rank in range(2):
        await hand_in(mailbox, rank, number, OK)
    await soon(trial)
    assert await soon(asked) is None


@in_a_loop
async def test_a_trial_that_is_pruned_ends_its_ranks_and_no_other_trial() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    watch = asyncio.create_task(mailbox.aborted(number))
    await mailbox.prune("another", "dominated")
    assert await waits(watch)
    await mailbox.prune("t0", "dominated")
    assert (await soon(trial))[0] == [Outcome(Status.PRUNED, "dominated", "window")]
    await soon(watch)
    await mailbox.prune("t0", "dominated")  # it is over
    following = asyncio.create_task(mailbox.evaluate(REQUEST))
    for rank in range(2):
        await hand_in(mailbox, rank, (await take(mailbox, rank, number)).number, OK)
    assert (await soon(following))[0] == [OK, OK]


@in_a_loop
async def test_a_trial_that_is_cancelled_ends_with_all_that_was_still_to_come_of_it() -> None:
    mailbox = await gang()
    probe = asyncio.create_task(mailbox.evaluate(replace(REQUEST, trial_id="t0-probe")))
    number = (await take(mailbox, 0, 0)).number
    watch = asyncio.create_task(mailbox.aborted(number))
    await mailbox.cancel("t", "by somebody")
    assert await waits(watch)
    await mailbox.cancel("t0", "by somebody")
    cancelled = [Outcome(Status.CANCELLED, "by somebody")]
    assert (await soon(probe))[0] == cancelled
    await soon(watch)
    assert (await soon(mailbox.evaluate(REQUEST)))[0] == cancelled
    following = asyncio.create_task(mailbox.evaluate(replace(REQUEST, trial_id="t1")))
    for rank in range(2):
        await hand_in(mailbox, rank, (await take(mailbox, rank, number)).number, OK)
    assert (await soon(following))[0] == [OK, OK]


@in_a_loop
async def test_a_failure_comes_before_pruning() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    number = (await take(mailbox, 0, 0)).number
    await hand_in(mailbox, 1, number, Outcome(Status.OOM, "memory", "window"))
    await mailbox.prune("t0", "dominated")
    await hand_in(mailbox, 0, number, Outcome(ABORTED, None, "window"))
    assert (await soon(trial))[0] == [Outcome(Status.OOM, "rank 1: memory", "window")]


@in_a_loop
async def test_giving_up_without_a_trial_does_nothing() -> None:
    mailbox = await gang()
    await mailbox.give_up("no reason")
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    for rank in range(2):
        await hand_in(mailbox, rank, (await take(mailbox, rank, 0)).number, OK)
    assert (await soon(trial))[0] == [OK, OK]


@in_a_loop
async def test_a_gang_is_ready_once_all_have_joined() -> None:
    mailbox = Mailbox(2)
    ready = asyncio.create_task(mailbox.ready())
    await mailbox.join(member(1))
    assert await waits(ready)
    await mailbox.join(member(0))
    assert await soon(ready) == [member(0), member(1)]


@in_a_loop
async def test_the_time_on_a_trial_counts_from_when_the_gang_was_free() -> None:
    freed = time.monotonic()
    mailbox = await gang()
    for _ in range(2):
        await asyncio.sleep(0.3)
        trial = asyncio.create_task(mailbox.evaluate(REQUEST))
        await settle()
        (number,) = mailbox.rounds
        handing_in = time.monotonic()
        for rank in range(2):
            await hand_in(mailbox, rank, number, OK)
        *_, seconds = await soon(trial)
        assert 0.29 < seconds <= time.monotonic() - freed
        freed = handing_in


@in_a_loop
async def test_closing_ends_the_trial_under_way() -> None:
    mailbox = await gang()
    trial = asyncio.create_task(mailbox.evaluate(REQUEST))
    watch = asyncio.create_task(mailbox.aborted((await take(mailbox, 0, 0)).number))
    await mailbox.close()
    await soon(watch)
    outcomes, *_ = await soon(trial)
    assert outcomes == [lost("the gang was closed")]
    assert await soon(mailbox.next(0, 1)) is None


@in_a_loop
async def test_closing_sends_every_worker_home() -> None:
    mailbox = await gang()
    waiting = [asyncio.create_task(mailbox.next(rank, 0)) for rank in range(2)]
    await settle()
    await mailbox.close()
    assert await soon(asyncio.gather(*waiting)) == [None, None]
    assert await soon(mailbox.next(0, 0)) is None


@in_a_loop
async def test_a_worker_that_has_not_joined_is_turned_away() -> None:
    mailbox = Mailbox(2)  # as one that was started anew
    await mailbox.join(member(0))
    waiting = asyncio.create_task(mailbox.next(0, 0))
    assert await waits(waiting)
    with pytest.raises(LookupError, match="worker 1 has not joined"):
        await soon(mailbox.next(1, 7))
    await mailbox.close()
    assert await soon(waiting) is None
