"""A layout's step, put together from what each kind of its ranks was measured to do alone.

Ranks of a pipeline wait for each other as their schedule has it (`search_spaces.playing`), and once more where they
agree on the norm by which gradients are clipped. All other ranks do the same at the same time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

from search_spaces.contention import contention
from search_spaces.disturbances import undisturbed
from search_spaces.kinds import RankKind, first_rank
from search_spaces.layout import Layout
from search_spaces.memory import hidden_between
from search_spaces.messages import Script, scripts
from search_spaces.network import Collective, Network
from search_spaces.playing import Played, play
from search_spaces.schedules import Action, Pass, order
from search_spaces.workload import Workload

SETTLED, ROUNDS = 1e-3, 8


@dataclass(frozen=True)
class RankTimes:
    """What one rank did in a step in which nobody let it wait.

    - `head_s`: from the step's begin to the first pass. `passes`: seconds of every action, from its begin to that of
      the next on this rank, or until the gradients of its stage are reduced. `reduces`: seconds of that, by the action
      that it follows, where the rank goes on with another stage. `tail_s`: from the last pass to the step's end;
      `update_s` of it comes after the gradients' norm is agreed on. Without a pipeline the whole step is in the tail.
    - `exposed_s`: of all these seconds, those in which the rank did nothing but communicate, by kind of collective.
    - `waited_s`: in addition to all these, seconds in which it paused where a pipeline would let it wait (`pauses`).
    - `busy_power_w`: its GPU's mean power over the step, pauses among it; `waiting_power_w`: while it waits for others.
    - `memory_gib`: the peak of what torch reserved.
    - `products`: of these seconds, the share in which it does matrix products and attention; 0 in records that lack it.
    - `microbatch_s`, `microbatch_power_w`: without a pipeline, what a microbatch takes of the step that is neither the
      first nor the last, and the GPU's mean power meanwhile; the seconds are 0 where there is none.
    - `slower`: these are the seconds of a GPU that takes so much longer than the one that was measured (`on_slower`),
      as it has less power, computes less with it, or waits for others that do just then.
    """

    passes: Mapping[Action, float]
    tail_s: float
    busy_power_w: float
    waiting_power_w: float
    memory_gib: float
    head_s: float = 0.0
    update_s: float = 0.0
    waited_s: float = 0.0
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    products: float = 0.0
    slower: float = 1.0
    reduces: Mapping[Action, float] = field(default_factory=dict)
    microbatch_s: float = 0.0
    microbatch_power_w: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.head_s + sum(self.passes.values()) + sum(self.reduces.values()) + self.tail_s

    def on_slower(self, slower: float) -> RankTimes:
        """On a GPU that takes `slower` times as long for all but communication, which is taken to be spread evenly, at
        the same power."""
        longer = slower - (slower - 1) * sum(self.exposed_s.values()) / self.busy_s
        return replace(
            self,
            passes={action: longer * seconds for action, seconds in self.passes.items()},
            tail_s=longer * self.tail_s,
            head_s=longer * self.head_s,
            update_s=longer * self.update_s,
            slower=slower,
            reduces={action: longer * seconds for action, seconds in self.reduces.items()},
            microbatch_s=longer * self.microbatch_s,
        )


@dataclass(frozen=True)
class Fleet:
    """How machines differ from those that were measured.

    `gpus`: what work takes on the GPU of a rank, by global rank, in what it was measured to take: 1.05 on a GPU that is
    5% slower. `links`: the same of all communication. What others hid of it is taken to stay hidden, so that a step
    comes out too short rather than too long.
    """

    gpus: Mapping[int, float] = field(default_factory=dict)
    links: float = 1.0


AS_MEASURED = Fleet()


@dataclass(frozen=True)
class Composed:
    """One optimizer step of a layout on all its GPUs.

    - `busy_s`, `waiting_s`: of a GPU of each pipeline rank, which together are the step. `slowed_s` of `busy_s` is what
      passes beside messages take longer.
    - `bubble`: share of the GPUs' time in which they wait for other pipeline ranks.
    - `exposed_s`: seconds of a GPU, on average, in which it does nothing but communicate, by kind of collective; with
      `send_recv`, by which the step is longer than if messages between stages took no time.
    - `energy_j`, `mean_power_w`: of all GPUs together.
    - `memory_gib`: of each pipeline rank; measured where the rank was, else no less than it will be.
    - `played`: the passes of all pipeline ranks.
    """

    step_time_s: float
    tokens_per_s: float
    joules_per_token: float
    energy_j: float
    mean_power_w: float
    peak_memory_gib: float
    bubble: float
    busy_s: tuple[float, ...]
    slowed_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    exposed_s: Mapping[str, float]
    memory_gib: tuple[float, ...]
    played: Played


def compose(
    layout: Layout,
    work: Workload,
    measured: Mapping[RankKind, RankTimes],
    network: Network,
    fleet: Fleet = AS_MEASURED,
) -> Composed:
    """The step of a legal layout of the model of `work`, of all whose kinds of ranks (`kinds.kinds`) there are times.

    Raises KeyError if a kind or a pass is missing.
    """
    typical = {kind: _typical(times, layout, kind.pipeline_rank) for kind, times in measured.items()}
    ranks = [_Rank(layout, work, typical, fleet, rank) for rank in range(layout.pipeline_parallel_size)]
    every = scripts(layout)
    played, slowed, step = _step(every, ranks, transfers(layout, work, network, fleet.links))
    busy = tuple(rank.busy_s + seconds for rank, seconds in zip(ranks, slowed, strict=True))
    exposed: dict[str, float] = {}
    for rank in ranks:
        for kind, seconds in rank.times.exposed_s.items():
            exposed[kind] = exposed.get(kind, 0.0) + seconds * fleet.links / len(ranks)
    if len(ranks) > 1:
        exposed["send_recv"] = step - _step(every, ranks, lambda sender, receiver: 0.0)[-1]
    energy = sum(rank.energy_j(step, seconds) for rank, seconds in zip(ranks, slowed, strict=True))
    tokens = layout.global_batch_size * work.sequence_length
    memory = tuple(rank.times.memory_gib for rank in ranks)
    return Composed(
        step_time_s=step,
        tokens_per_s=tokens / step,
        joules_per_token=energy / tokens,
        energy_j=energy,
        mean_power_w=energy / step,
        peak_memory_gib=max(memory),
        bubble=1 - sum(busy) / len(busy) / step,
        busy_s=busy,
        slowed_s=slowed,
        waiting_s=tuple(step - seconds for seconds in busy),
        exposed_s=exposed,
        memory_gib=memory,
        played=played,
    )


def _typical(times: RankTimes, layout: Layout, pipeline_rank: int) -> RankTimes:
    return replace(times, passes=undisturbed(times.passes, order(layout, pipeline_rank)))


class _Rank:
    """One pipeline rank, by the kind that stands for it."""

    def __init__(
        self, layout: Layout, work: Workload, measured: Mapping[RankKind, RankTimes], fleet: Fleet, rank: int
    ) -> None:
        # Of a trainer's model, which has no pipeline, nothing need be known.
        self.contention = contention(layout, work) if layout.pipeline_parallel_size > 1 else 0.0
        kind = next((kind for kind in measured if rank in kind.stands_for), None)
        if kind is None:
            raise KeyError(f"no measured kind stands for pipeline rank {rank}")
        self.times = measured[kind]
        self.stage = dict(zip(layout.stages_of(rank), layout.stages_of(kind.pipeline_rank), strict=True))
        """Of the rank's stages, those that were measured."""
        first, self.gpus = first_rank(layout, rank), layout.num_gpus // layout.pipeline_parallel_size
        self.slow = [fleet.gpus[gpu] for gpu in range(first, first + self.gpus) if gpu in fleet.gpus]
        # The slowest of the GPUs that do the same lets the others wait.
        slowest = max([*self.slow, 1.0] if len(self.slow) < self.gpus else self.slow)
        self.longer = slowest + (fleet.links - 1) * sum(self.times.exposed_s.values()) / self.times.busy_s

    @property
    def head_s(self) -> float:
        return self.longer * self.times.head_s

    @property
    def tail_s(self) -> float:
        return self.longer * self.times.tail_s

    @property
    def update_s(self) -> float:
        return self.longer * self.times.update_s

    @property
    def busy_s(self) -> float:
        return self.longer * self.times.busy_s

    def slowed_s(self, played: Played, rank: int) -> dict[Action, float]:
        """Seconds by which passes take longer for what their rank sends and receives beside them."""
        share = self.contention * self.times.products
        return {action: share * seconds for action, seconds in beside(played, rank)} if share else {}

    def seconds(self, action: Action) -> float:
        return self.longer * self.times.passes[action._replace(stage=self.stage[action.stage])]

    def reducing(self, action: Action) -> float:
        return self.longer * self.times.reduces.get(action._replace(stage=self.stage[action.stage]), 0.0)

    def energy_j(self, step: float, slowed: float) -> float:
        """Of the rank's GPUs, which work as long as each needs, `slowed` seconds more than alone, and then wait."""
        times = self.times
        measured = times.busy_s + times.waited_s + slowed
        worked = [measured * slow for slow in self.slow] + [measured] * (self.gpus - len(self.slow))
        return sum(times.busy_power_w * busy + times.waiting_power_w * (step - busy) for busy in worked)


def beside(played: Played, rank: int) -> Iterator[tuple[Action, float]]:
    """A rank's passes, and the seconds of each in which it sends or receives as well. Both follow one after another."""
    spans, messages = played.spans[rank], iter(played.messages[rank])
    begin, end = next(messages, (math.inf, math.inf))
    for span in spans:
        together = 0.0
        while begin < span.end:
            together += max(0.0, min(end, span.end) - max(begin, span.begin))
            if end > span.end:
                break
            begin, end = next(messages, (math.inf, math.inf))
        yield span.action, together


def _step(
    every: Sequence[Script], ranks: Sequence[_Rank], transfer: Callable[[int, int], float]
) -> tuple[Played, tuple[float, ...], float]:
    """The passes, the seconds by which those of each rank take longer, and those of the whole step. Ranks wait for each
    other before they update.

    Passes beside messages take longer, by which the messages change, too: they are played until no rank's passes change
    by more than the share `SETTLED` of a step.
    """
    begins = [rank.head_s for rank in ranks]
    longer: list[dict[Action, float]] = [{} for _ in ranks]

    def seconds(rank: int, action: Action) -> float:
        return ranks[rank].seconds(action) + longer[rank].get(action, 0.0)

    for _ in range(ROUNDS):
        played = play(every, seconds, transfer, begins, lambda rank, action: ranks[rank].reducing(action))
        before, longer = longer, [rank.slowed_s(played, number) for number, rank in enumerate(ranks)]
        changes = [
            sum(abs(now[action] - then.get(action, 0.0)) for action in now)
            for now, then in zip(longer, before, strict=True)
        ]
        if max(changes) <= SETTLED * played.seconds:
            break
    agreed = max(end + rank.tail_s - rank.update_s for end, rank in zip(played.finishes, ranks, strict=True))
    slowed = tuple(sum(seconds.values()) for seconds in longer)
    return played, slowed, agreed + max(rank.update_s for rank in ranks)


def transfers(layout: Layout, work: Workload, network: Network, longer: float = 1.0) -> Callable[[int, int], float]:
    """Seconds that hidden states of a microbatch, or their gradients, take from one pipeline rank to another."""

    @cache
    def transfer(sender: int, receiver: int) -> float:
        ends = first_rank(layout, sender), first_rank(layout, receiver)
        return longer * network.seconds(Collective.SEND, message_bytes(layout, work), ends, beside=True)

    return transfer


def message_bytes(layout: Layout, work: Workload) -> int:
    """Of the hidden states of a microbatch that a rank sends to another stage, or their gradients."""
    tokens = layout.microbatch_tokens(work.sequence_length)
    return round(tokens * hidden_between(layout, work.shape) * layout.width)


def pauses(
    layout: Layout, work: Workload, pipeline_rank: int, passes: Mapping[Action, float], network: Network
) -> tuple[dict[Action, float], float]:
    """Seconds that a pipeline rank waits for others before each of its passes, and after the last.

    If all ranks take for theirs what it takes for its own, in the median of microbatches: `passes` are those of a step.
    """
    ranks = range(layout.pipeline_parallel_size)
    place = {stage: index for rank in ranks for index, stage in enumerate(layout.stages_of(rank))}
    taken: defaultdict[tuple[int, Pass], list[float]] = defaultdict(list)
    for action, seconds in passes.items():
        taken[place[action.stage], action.step].append(seconds)
    usual = {kind: median(each) for kind, each in taken.items()}
    played = play(
        scripts(layout), lambda _, action: usual[place[action.stage], action.step], transfers(layout, work, network)
    )
    spans, end, before = played.spans[pipeline_rank], 0.0, {}
    for span in spans:
        before[span.action] = span.begin - end
        end = span.end
    return before, played.seconds - end
