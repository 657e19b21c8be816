"""One rank of a layout, run in one process under a stand-in for the others."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from search_spaces.composition import pauses
from search_spaces.engines import engine_of
from search_spaces.network import Collective
from search_spaces.workload import Workload
from trainables.breakdown import Profile
from trainables.engines.base import Job, Microbatch, StepOutput
from trainables.losses import check_finite
from trainables.measure import AHEAD_S, Step, Timing
from trainables.passes import Moment, PassClock, PassTimes
from trainables.program import Place, Progress, RankReport, SliceReport, Traffic, TrialRequest
from trainables.rank import Rank
from trainables.slice import FIRST, UNNAMED, Slice
from trainables.standin.join import join, tell_compiler
from trainables.standin.ledger import Call
from trainables.world import World

WAIT_S, SETTLES_S = 0.5, 0.2
"""Long enough for some samples of the power of waiting, and for none of them to be of what came before."""

ONCE = 0.03
"""Up to what share of a step, which is done once for all microbatches, its mean power is taken for theirs. They differ
by no more than that share, and by a third of it where what is done once draws two thirds of their power."""

TELLING = 3
"""Microbatches of which one, the first, which carries what happens once, does not tell in the median."""

FURTHER = 4
"""How many times as many microbatches a step has where the host was not ahead of its device in the shorter one."""


def run_slice(
    program: Slice, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
) -> RankReport:
    """`Slice.run`, which says more."""
    return SliceRank(program, request, place, on_progress).report()


class StandInWorld(World):
    """One process in the place of all ranks, one of which it is. `peers`: those that are not there."""

    def __init__(self, program: Slice, request: TrialRequest, place: Place) -> None:
        super().__init__(request, place)
        if program.usable_bytes is not None:
            place.platform.limit_memory(self.device, program.usable_bytes)
        if request.layout.compile:
            tell_compiler()
        in_place = engine_of(request.layout).keeps_parameters(request.layout)
        self.peers = join(self.rank, self.size, program.network.seconds, self.device, in_place)

    def slowest(self, seconds: float) -> float:
        return seconds

    def total(self, values: Tensor) -> Tensor:
        return values

    def meet(self, occasion: str) -> None:
        pass

    def wait(self, seconds: float) -> None:
        """Give the device what a rank's does that waits for a message."""
        self.peers.messages.pause(seconds)


class SliceRank(Rank):
    """A rank that keeps the times of its passes and what it sent, and waits in the end."""

    world: StandInWorld

    def __init__(
        self, program: Slice, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
    ) -> None:
        self.program = program
        self.steps_of_batch = 0
        self.times: dict[int, PassTimes] = {}
        self.traffic: dict[int, tuple[Traffic, ...]] = {}
        world = partial(StandInWorld, program)
        clock = PassClock(place.platform.mark, lambda seconds: self.world.wait(seconds))
        super().__init__(program.training, request, place, on_progress, world, clock)

    def job(self) -> Job:
        return replace(super().job(), alone=True)

    def measure(self) -> RankReport:
        report = super().measure()
        check_finite("norm of the gradient", report.grad_norms)
        timings = {batch: report.timings[batch] for batch in self.batches if batch in report.timings}
        self.enter("waiting")
        start_ns, end_ns = map(self.waited, (SETTLES_S, WAIT_S))
        self.enter("report")
        return replace(report, timings=timings, slice=SliceReport(self.times, self.traffic, (start_ns, end_ns)))

    def waited(self, seconds: float) -> int:
        """The moment at which the rank has waited so long, on the node's monotonic clock, in ns."""
        self.world.wait(seconds)
        self.platform.synchronize()
        return time.monotonic_ns()

    def profile(self, report: RankReport) -> Profile:
        """Profile a step without pauses: what a pipeline adds, its schedule tells."""
        if self.platform.profiler_device is not None and not self.platform.names_kernels:
            return Profile(None, UNNAMED, 0.0)
        self.clock.pauses = {}
        return super().profile(report)

    def time_steps(self) -> Timing:
        timing = super().time_steps()
        batch = self.layout.global_batch_size
        self.times[batch] = self.clock.mean(len(timing.window_steps_s))
        self.traffic[batch] = summed(self.world.peers.ledger)
        return timing

    def check(self, losses: tuple[float, ...]) -> None:
        check_finite("loss", losses)

    def change_batch(self, global_batch_size: int) -> None:
        super().change_batch(global_batch_size)
        self.steps_of_batch, self.clock.pauses = 0, {}

    def step(self) -> StepOutput:
        if self.pipelined and self.steps_of_batch == self.steps_apart:
            self.pause()
        self.steps_of_batch += 1
        self.world.peers.ledger.clear()
        return super().step()

    @property
    def pipelined(self) -> bool:
        return self.layout.pipeline_parallel_size > 1

    @property
    def order(self) -> Iterable[int]:
        """The largest, and the others only where enough of its step is done once a step for its power to tell little of
        that of a microbatch."""
        yield self.batches[0]
        whole = self.times[self.batches[0]]
        if self.layout.gradient_accumulation_steps * whole.microbatch_s < (1 - ONCE) * whole.tail_s:
            yield from self.batches[1:]

    @property
    def apart(self) -> Sequence[Callable[[], Step]]:
        """Likewise; of a pipeline those without pauses, by the last of which these are set. Without one the first step
        of all alone: microbatches are like those of other batches."""
        if self.pipelined:
            return (self.timed_step,) * self.steps_apart
        return () if self.losses else (self.first_step,)

    @property
    def steps_apart(self) -> int:
        """How many those of a pipeline are."""
        return 2 if self.layout.gradient_accumulation_steps < TELLING else 1

    def first_step(self) -> Step:
        """Train one step of no more microbatches than warm up, or of the most that there are."""
        batch = self.layout.global_batch_size
        size = min(self.batches[0], FIRST * batch // self.layout.gradient_accumulation_steps)
        if size == batch:
            return self.timed_step()
        self.change_batch(size)
        step = self.timed_step()
        self.change_batch(batch)
        return step._replace(ended_ns=self.step_began_ns)

    def deal(self) -> Iterator[Microbatch]:
        """The same, but for tokens whose embeddings other tensor ranks hold, in whose place are others that this one
        does: its own zeros for them stay zeros in a sum, and by norms of such rows gradients grow without bounds.
        Without a pipeline, the clock is told of each microbatch."""
        ranks, vocab = self.layout.tensor_parallel_size, self.training.model.vocab
        held = math.ceil(vocab / ranks)
        first = self.layout.coordinates(self.world.rank)["tp"] * held

        def own(microbatch: Microbatch) -> Microbatch:
            if not self.pipelined:
                self.clock.observe(Moment.DEALT)
            inputs, labels = microbatch
            return (inputs % min(held, vocab - first) + first, labels) if ranks > 1 else microbatch

        # A loop would keep the tokens in whose place these are.
        return map(own, super().deal())

    def timed_step(self) -> Step:
        """Train one step. If the host was late in the first one of the largest batch, a larger one takes its place."""
        asked, batch = self.request.batches, self.layout.global_batch_size
        step = super().timed_step()._replace(ahead_s=self.clock.ahead_s, sequences=batch)
        further = min(FURTHER * batch, self.request.layout.global_batch_size)
        is_first = self.batches == asked and batch == asked[0] and self.steps_of_batch == 1
        if is_first and further > batch and self.late:
            self.enter("warmup")  # as that step was: the window begins anew, and counters are read as it does
            self.batches = (further, *asked[1:])
            self.change_batch(further)
            self.enter("window")
            return step._replace(ended_ns=self.step_began_ns)
        return step

    @property
    def late(self) -> bool:
        """Whether a device beside the host may have waited for it in the latest step, which is not a probe's. A longer
        one gives a host that is faster than its device the time to get ahead, as it does among the other ranks. A
        pipeline's is as it is."""
        if self.pipelined or self.platform.profiler_device is None:
            return False
        return math.isfinite(self.request.procedure.alike_s) and self.clock.ahead_s() < AHEAD_S

    def pause(self) -> None:
        """Have the device wait from now on where other pipeline ranks would have it wait: by what the last step took.

        GPUs that pause cool down and draw less, so that those at their power limit are faster between.
        """
        passes = self.clock.mean(1).passes_s
        work = Workload(self.training.model, self.training.sequence_length, self.layout.global_batch_size)
        stage = self.layout.coordinates(self.world.rank)["pp"]
        before, last = pauses(self.layout, work, stage, passes, self.program.network)
        self.clock.pauses = dict(before) | {Moment.AGREED: last}


def summed(calls: Iterable[Call]) -> tuple[Traffic, ...]:
    """The calls of each kind in groups of each size."""
    count: Counter[tuple[Collective, int]] = Counter()
    size: Counter[tuple[Collective, int]] = Counter()
    for call in calls:
        count[call.kind, len(call.ranks)] += 1
        size[call.kind, len(call.ranks)] += call.size
    return tuple(Traffic(kind, ranks, count[kind, ranks], size[kind, ranks]) for kind, ranks in sorted(count))
