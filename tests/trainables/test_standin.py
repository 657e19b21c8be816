"""One rank of many, alone: what arrives, what is written down, how long it takes, and that both engines train on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Collective
from tests.trainables.conftest import RunRanks
from tests.trainables.ledgers import CPU, Nothing, Written, calls_of, no_time
from tests.trainables.test_parity import (
    GPIPE,
    INTERLEAVED,
    LLAMA,
    MIXTURE,
    ROWS,
    SEQUENCE_LENGTH,
    V_SHAPED,
    ZERO_BUBBLE,
    cases,
    deep,
    deepspeed,
    megatron,
    reference,
    reports,
    request,
    tied,
)
from trainables.breakdown import COLLECTIVES, kernel_category
from trainables.program import RankReport, TrialRequest
from trainables.standin.group import Peers, StandIn
from trainables.standin.join import join, tell_compiler
from trainables.standin.ledger import Call, Ledger
from trainables.standin.moves import GRADIENT

RANK, SIZE = 1, 4
WORLD = tuple(range(SIZE))


@pytest.fixture
def world() -> Iterator[Ledger]:
    yield join(RANK, SIZE, no_time, CPU).ledger
    dist.destroy_process_group()


def numbers(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)


def each(form: Callable[..., Any], tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """What the collective made of the tensor, in place."""
    form(tensor, *arguments, **named)
    return tensor


def to(size: int, form: Callable[..., Any], *arguments: Any, **named: Any) -> Tensor:
    """What the collective put in a tensor that had no numbers."""
    output = torch.full((size,), math.nan)
    form(output, *arguments, **named)
    return output


def into(sizes: list[int], form: Callable[..., Any], *arguments: Any, **named: Any) -> Tensor:
    """The same of a list of them."""
    outputs = [torch.full((size,), math.nan) for size in sizes]
    form(outputs, *arguments, **named)
    return torch.cat(outputs)


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def coalesced(form: Callable[..., Any], outputs: list[Tensor], inputs: list[Tensor]) -> Tensor:
    with _coalescing_manager(device=CPU, async_ops=True) as works:
        for output, mine in zip(outputs, inputs, strict=True):
            form(output, mine)
    works.wait()
    return torch.cat(outputs)


X = numbers(4, first=1)
TWICE = X.repeat(SIZE)
KIND = Collective
FORMS: dict[str, tuple[Callable[[], Tensor], Tensor, Collective, int]] = {
    "all_reduce": (lambda: each(dist.all_reduce, numbers(4)), 2 * numbers(4), KIND.ALL_REDUCE, 16),
    "all_reduce of one": (lambda: each(dist.all_reduce, torch.ones(1)), torch.tensor([4.0]), KIND.ALL_REDUCE, 4),
    "all_reduce of integers": (
        lambda: each(dist.all_reduce, torch.tensor([2, 3])),
        torch.tensor([8, 12]),
        KIND.ALL_REDUCE,
        16,
    ),
    "mean": (lambda: each(dist.all_reduce, numbers(4), ReduceOp.AVG), numbers(4), KIND.ALL_REDUCE, 16),
    "largest": (lambda: each(dist.all_reduce, numbers(4), ReduceOp.MAX), numbers(4), KIND.ALL_REDUCE, 16),
    "functional all_reduce": (
        lambda: functional.all_reduce(numbers(4), "sum", everyone()) + 0,
        2 * numbers(4),
        KIND.ALL_REDUCE,
        16,
    ),
    "reduce": (lambda: each(dist.reduce, numbers(4), RANK), 2 * numbers(4), KIND.BROADCAST, 16),
    "broadcast": (lambda: each(dist.broadcast, numbers(4), 0), numbers(4), KIND.BROADCAST, 16),
    "all_gather": (lambda: into([4] * SIZE, dist.all_gather, X), TWICE, KIND.ALL_GATHER, 64),
    "all_gather_into_tensor": (lambda: to(16, dist.all_gather_into_tensor, X), TWICE, KIND.ALL_GATHER, 64),
    "functional all_gather": (
        lambda: functional.all_gather_tensor(X, 0, everyone()) + 0,
        TWICE,
        KIND.ALL_GATHER,
        64,
    ),
    "coalesced all_gather": (
        lambda: coalesced(dist.all_gather_into_tensor, [torch.empty(16), torch.empty(8)], [X, X[:2].clone()]),
        torch.cat((TWICE, X[:2].repeat(SIZE))),
        KIND.ALL_GATHER,
        96,
    ),
    "gather": (lambda: gathered(), TWICE, KIND.ALL_GATHER, 64),
    "scatter": (lambda: to(2, dist.scatter, list(numbers(8).split(2)), RANK), numbers(2, 2), KIND.REDUCE_SCATTER, 32),
    "reduce_scatter": (
        lambda: to(2, dist.reduce_scatter, list(numbers(8).split(2))),
        2 * numbers(2, 2),
        KIND.REDUCE_SCATTER,
        32,
    ),
    "reduce_scatter_tensor": (
        lambda: to(2, dist.reduce_scatter_tensor, numbers(8)),
        2 * numbers(2, 2),
        KIND.REDUCE_SCATTER,
        32,
    ),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(numbers(8), "avg", 0, everyone()) + 0,
        numbers(2, 2),
        KIND.REDUCE_SCATTER,
        32,
    ),
    "coalesced reduce_scatter": (
        lambda: coalesced(dist.reduce_scatter_tensor, [torch.empty(2), torch.empty(2)], [numbers(8), numbers(8, 8)]),
        2 * torch.cat((numbers(2, 2), numbers(2, 10))),
        KIND.REDUCE_SCATTER,
        64,
    ),
    "all_to_all": (
        lambda: into([2] * SIZE, dist.all_to_all, list(numbers(8).split(2))),
        numbers(8),
        KIND.ALL_TO_ALL,
        32,
    ),
    "all_to_all_single": (
        lambda: to(8, dist.all_to_all_single, numbers(8)),
        numbers(8),
        KIND.ALL_TO_ALL,
        32,
    ),
    "all_to_all of uneven pieces": (
        lambda: to(7, dist.all_to_all_single, numbers(6), [1, 3, 0, 3], [1, 2, 3, 0]),
        torch.tensor([0.0, 1, 2, 3, 4, 5, 0]),
        KIND.ALL_TO_ALL,
        24,
    ),
    "all_to_all with nothing for this rank": (
        lambda: to(4, dist.all_to_all_single, numbers(3), [1, 1, 1, 1], [1, 0, 2, 0]),
        torch.tensor([0.0, 1, 2, 0]),
        KIND.ALL_TO_ALL,
        12,
    ),
}


def gathered() -> Tensor:
    pieces = [torch.empty(4) for _ in range(SIZE)]
    dist.gather(X, pieces, RANK)
    return torch.cat(pieces)


@pytest.mark.parametrize(("form", "arrives", "kind", "size"), FORMS.values(), ids=FORMS)
def test_a_collective_brings_what_ranks_alike_would(
    form: Callable[[], Tensor], arrives: Tensor, kind: Collective, size: int, world: Ledger
) -> None:
    torch.testing.assert_close(form(), arrives)
    assert world == [Call(kind, size, WORLD)]


def test_groups_are_known_by_their_ranks_in_the_world(world: Ledger) -> None:
    pair, without = dist.new_group([1, 3]), dist.new_group([0, 2])
    assert without is dist.GroupMember.NON_GROUP_MEMBER
    dist.all_reduce(torch.ones(2), group=pair)
    dist.barrier(pair)
    exchange = [dist.P2POp(dist.isend, X, 3, pair), dist.P2POp(dist.irecv, numbers(2), 3, pair)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    assert world == [
        Call(KIND.ALL_REDUCE, 8, (1, 3)),
        Call(KIND.BARRIER, 0, (1, 3)),
        Call(KIND.SEND, 16, (1, 3)),
        Call(KIND.SEND, 8, (3, 1)),
    ]


def test_objects_of_all_ranks_are_this_ones(world: Ledger) -> None:
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": RANK}] * SIZE


def test_a_message_is_normal_and_others_draws_stay_the_same(world: Ledger) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    hidden, gradient = (torch.full((64, 64), math.nan, dtype=torch.bfloat16, requires_grad=of) for of in (True, False))
    count = torch.zeros(1, dtype=torch.int32)
    for received in (hidden, gradient, count):
        dist.recv(received, 0)
    for received, scale in ((hidden.detach(), 1.0), (gradient, GRADIENT)):
        assert received.float().mean().abs() < 0.1 * scale
        assert received.float().std() == pytest.approx(scale, rel=0.1)
    assert count.item() == 1
    torch.testing.assert_close(torch.rand(3), expected)


def test_autograd_takes_no_notice_of_what_is_reduced_in_place(world: Ledger) -> None:
    x = torch.ones(4, requires_grad=True)
    y = x.exp()  # keeps its result for the way back
    dist.all_reduce(y.detach())
    y.sum().backward()
    assert x.grad is not None


def test_as_many_tokens_come_to_every_expert() -> None:
    """Of 14 tokens three ranks are sent 3, 6 and 5, for two experts each."""
    join(0, 3, no_time, CPU)
    received = torch.empty(6, dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor([1, 2, 4, 2, 0, 5]))
    dist.destroy_process_group()
    assert received.tolist() == [3, 3, 2, 2, 2, 2]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_gathered_in_place_may_be_there_already(in_place: bool) -> None:
    """As DeepSpeed's parameters are, whose ranks keep them all and update a part."""
    join(RANK, SIZE, no_time, CPU, in_place=in_place)
    kept, gathered = numbers(2 * SIZE), torch.empty(2 * SIZE)
    mine = kept[2 * RANK : 2 * RANK + 2].mul_(10)
    before = kept.clone()
    dist.all_gather_into_tensor(gathered, mine)
    dist.all_gather_into_tensor(kept, mine)
    dist.destroy_process_group()
    copies = mine.repeat(SIZE)
    torch.testing.assert_close(gathered, copies)
    torch.testing.assert_close(kept, before if in_place else copies)


def test_a_groups_collectives_take_their_time_one_after_the_other() -> None:
    asked = []

    def seconds(kind: Collective, size: int, ranks: tuple[int, ...], beside: bool) -> float:
        asked.append((kind, size, ranks, beside))
        return 0.1

    join(RANK, SIZE, seconds, CPU)
    try:
        pair = dist.new_group([1, 3])
        began = time.monotonic()
        works = [dist.all_reduce(numbers(4), async_op=True) for _ in range(2)]
        works.append(dist.all_reduce(numbers(4), group=pair, async_op=True))
        message = dist.isend(X, 0)
        assert message is not None
        took = []
        for work in works:
            work.wait()
            took.append(time.monotonic() - began)
        assert took[0] >= 0.1
        assert took[1] >= 0.2
        assert took[2] >= 0.1
    finally:
        dist.destroy_process_group()
    assert set(asked) == {(KIND.ALL_REDUCE, 16, WORLD, False), (KIND.ALL_REDUCE, 16, (1, 3), False)}


def test_the_lane_says_what_goes_on_beside_computation() -> None:
    asked = []

    def seconds(kind: Collective, size: int, ranks: tuple[int, ...], beside: bool) -> float:
        asked.append(beside)
        return 0.0

    lane = Nothing()
    group = StandIn((0, 1), 0, "pair", Peers(CPU, seconds, Ledger()), lane)
    for lane.beside in (False, True):
        group.allreduce([numbers(4)])
    assert asked == [False, True]


def test_what_waits_for_a_message_waits_in_the_group_that_received_last() -> None:
    peers, lane = Peers(CPU, no_time, Ledger()), Nothing()
    group, of_nobody = StandIn((0, 1), 0, "pair", peers, lane), peers.messages
    group.send([numbers(4)], 1, 0)
    assert peers.messages is of_nobody
    group.recv([numbers(4)], 1, 0)
    assert peers.messages is lane


def test_a_compiled_graph_does_not_end_at_a_collective(world: Ledger) -> None:
    tell_compiler()
    group = everyone()

    @torch.compile(backend="eager", fullgraph=True)
    def summed(x: Tensor) -> Tensor:
        y = x + 1
        dist.all_reduce(y, group=group)
        return y * 2

    torch.testing.assert_close(summed(numbers(4)), 2 * math.sqrt(SIZE) * (numbers(4) + 1))
    assert [call.kind for call in world] == [Collective.ALL_REDUCE]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("asked_s", [0.0, 0.005])
def test_a_gpu_is_busy_for_as_long(asked_s: float) -> None:
    device = torch.device("cuda", 0)
    join(RANK, SIZE, lambda *call: asked_s, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    whole = torch.randn(SIZE, 1_000_003, device=device)
    summed, gathered, exchanged = torch.empty_like(whole[0]), torch.empty_like(whole), torch.empty_like(whole)
    begin.record()
    dist.reduce_scatter_tensor(summed, whole)
    dist.all_gather_into_tensor(gathered, summed)
    work = dist.all_to_all_single(exchanged, whole, async_op=True)
    dist.barrier()
    assert work is not None
    work.wait()
    reduced = summed.clone()
    dist.all_reduce(reduced)
    end.record()
    end.synchronize()
    dist.destroy_process_group()
    assert begin.elapsed_time(end) >= 5 * asked_s * 1e3
    torch.testing.assert_close(reduced, 2 * summed)
    torch.testing.assert_close(summed, 2 * whole[RANK])
    assert torch.equal(gathered, summed.expand_as(gathered))
    assert torch.equal(exchanged, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_kernels_on_a_gpu_bear_the_names_of_their_collectives() -> None:
    device = torch.device("cuda", 0)
    join(RANK, SIZE, lambda *call: 1e-3, device)
    x, whole = torch.randn(100_000, device=device), torch.randn(SIZE, 100_000, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        dist.all_reduce(x)
        dist.reduce_scatter_tensor(x, whole)
        dist.all_gather_into_tensor(whole, x)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        dist.broadcast(x, 0)
        torch.cuda.synchronize()
    dist.destroy_process_group()
    found = {kernel_category(event.name) for event in profiled.events()} & {*COLLECTIVES}
    assert found == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "other_communication"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_the_allocator_waits_for_messages_on_a_gpu() -> None:
    """As with NCCL: even for one that was waited for, as long as the GPU has not come so far."""
    device = torch.device("cuda", 0)
    join(RANK, SIZE, no_time, device)
    torch.cuda.empty_cache()
    free, sent = (torch.empty(5_000_000, device=device) for _ in range(2))
    places = free.data_ptr(), sent.data_ptr()
    torch.cuda._sleep(1_000_000_000)
    message = dist.isend(sent, 0)
    assert message is not None
    message.wait()
    del free, sent, message
    again = [torch.empty(5_000_000, device=device).data_ptr() for _ in range(2)]
    torch.cuda.synchronize()
    after = torch.empty(5_000_000, device=device), torch.empty(5_000_000, device=device)
    dist.destroy_process_group()
    assert again == [places[0], places[0]]
    assert places[1] in [tensor.data_ptr() for tensor in after]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_the_allocator_waits_for_a_message_that_is_long_in_coming() -> None:
    """What was sent is let go of when the GPU waits for the next message, as a last stage's gradients in DeepSpeed."""
    device = torch.device("cuda", 0)
    peers = join(RANK, SIZE, no_time, device)
    torch.cuda.empty_cache()
    sent, received = (torch.empty(5_000_000, device=device) for _ in range(2))
    dist.send(sent, 0)
    torch.cuda.synchronize()
    dist.recv(received, 0)
    peers.messages.pause(0.5)
    place = sent.data_ptr()
    del sent
    soon = torch.empty(5_000_000, device=device)
    torch.cuda.synchronize()
    later = torch.empty(5_000_000, device=device)
    dist.destroy_process_group()
    assert soon.data_ptr() != place
    assert later.data_ptr() == place


def written(model: ModelShape, layout: Layout, alone: int | None = None) -> TrialRequest:
    trial = request(layout, model)
    program = Written(model, SEQUENCE_LENGTH, alone)
    return replace(trial, trial_id=f"written {alone} {trial.trial_id}", program=program)


def is_finite(report: RankReport) -> bool:
    return all(map(math.isfinite, report.losses + report.grad_norms)) and min(report.grad_norms) > 0


THOUSAND: dict[str, Any] = {"num_gpus": 1024, "global_batch_size": 1024, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("model", "layout", "rank"),
    [
        (deep(LLAMA, 16), replace(megatron(8, tp=2, sp=True, zero=1, **INTERLEAVED), **THOUSAND), 515),
        (deep(LLAMA, 8), replace(deepspeed(8, pp=8, zero=1), **THOUSAND), 1000),
    ],
    ids=["megatron", "deepspeed"],
)
def test_one_of_a_thousand_trains(model: ModelShape, layout: Layout, rank: int, run_ranks: RunRanks) -> None:
    (report,) = reports(run_ranks(written(model, layout, rank)))
    assert is_finite(report)
    assert len({call.ranks for call in calls_of(report)[-1]}) >= 3
    assert all(rank in call.ranks for call in calls_of(report)[-1])


BY_DEFAULT = [
    *cases(LLAMA, megatron(2, tp=2, sp=True, zero=3)),
    *cases(tied(deep(LLAMA)), megatron(2, **INTERLEAVED)),
    *cases(MIXTURE, megatron(2, ep=2, zero=2, mbs=1)),
    *cases(LLAMA, deepspeed(4, pp=2, cp=2, zero=1)),
]
OTHERS = [row for row in ROWS if row.values not in [chosen.values for chosen in BY_DEFAULT]]


def stand_ins(layout: Layout) -> range:
    """Ranks that can run alone: without pipelines DeepSpeed's wait for rank 0 to say whether they do as it does."""
    asks = layout.engine == "deepspeed" and (layout.zero_stage == 3 or layout.tensor_parallel_size > 1)
    return range(1 if asks else layout.num_gpus)


def comparable(calls: list[Call], model: ModelShape) -> list[Call]:
    """How many tokens go to which expert is up to the tokens of others."""
    return [replace(c, size=0) if model.num_experts and c.kind is KIND.ALL_TO_ALL else c for c in calls]


@pytest.mark.parametrize(
    ("model", "layout"),
    [*BY_DEFAULT, *(pytest.param(*row.values, id=row.id, marks=pytest.mark.slow) for row in OTHERS)],
)
def test_a_rank_alone_calls_for_what_it_calls_for_among_others(
    model: ModelShape, layout: Layout, run_ranks: RunRanks
) -> None:
    gang = reports(run_ranks(written(model, layout)))
    with ThreadPoolExecutor(2) as pool:
        alone = list(pool.map(lambda rank: run_ranks(written(model, layout, rank)), stand_ins(layout)))
    for outcomes, among in zip(alone, gang, strict=False):
        (report,) = reports(outcomes)
        assert is_finite(report)
        for mine, real in zip(calls_of(report), calls_of(among), strict=True):
            assert comparable(mine, model) == comparable(real, model)
            assert any(len(call.ranks) > 1 for call in comparable(mine, model)) == (layout.num_gpus > 1)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (megatron(2, **V_SHAPED, mbs=1), 1),
        (deepspeed(4, pp=4, mbs=1), 2),
        *[
            pytest.param(layout, rank, marks=pytest.mark.slow)
            for layout, rank in [
                (megatron(2, pp=2, mbs=1), 0),
                (megatron(2, **GPIPE, mbs=1), 0),
                (megatron(2, **INTERLEAVED, mbs=1), 0),
                (megatron(2, **ZERO_BUBBLE, mbs=1), 1),
                (megatron(4, pp=4, mbs=1), 1),
                (deepspeed(2, pp=2, mbs=1), 0),
            ]
        ],
    ],
)
def test_gradients_that_arrive_are_no_larger_than_those_of_the_model(
    layout: Layout, rank: int, run_ranks: RunRanks
) -> None:
    model = deep(LLAMA)
    (report,) = reports(run_ranks(written(model, layout, rank)))
    assert is_finite(report)
    assert max(report.grad_norms) < 2 * max(reference(model)[1])
    assert max(report.grad_norms) < 10 * min(report.grad_norms)
