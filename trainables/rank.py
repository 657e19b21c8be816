"""One rank of a training, from an empty process to a report. Runs in a process that ends with the trial."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from search_spaces.schedules import PassTime
from trainables.batches import microbatches
from trainables.breakdown import Profile
from trainables.data import open_tokens
from trainables.engines.base import Job, Microbatch, StepOutput
from trainables.engines.build import build_engine
from trainables.losses import check_learning
from trainables.measure import Step, Stretch, Timing, time_steps
from trainables.passes import PassClock
from trainables.profiling import MOST_STEPS, profile_steps
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.training import Training
from trainables.world import GangWorld, World

PASSES_KEPT = 16
"""Steps of which the latest ones' passes are looked at."""


def train(
    training: Training, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
) -> RankReport:
    """`Training.run`, which says more."""
    return Rank(training, request, place, on_progress, GangWorld).report()


class Rank:
    """One rank of a training: its engine, how far it is and what it has seen so far."""

    def __init__(
        self,
        training: Training,
        request: TrialRequest,
        place: Place,
        on_progress: Callable[[Progress], None],
        join: Callable[[TrialRequest, Place], World],
        clock: PassClock | None = None,
    ) -> None:
        """`join` the other ranks and build the engine. `clock`: of the passes of a pipeline. Collective."""
        gc.freeze()  # the libraries: half a million objects, which a full collection would go through in some step
        _quieten()
        self.training, self.request, self.platform = training, request, place.platform
        self.batches = request.batches or (request.layout.global_batch_size,)
        self.layout = replace(request.layout, global_batch_size=self.batches[0])
        self.clock = clock or PassClock(self.platform.mark, kept=PASSES_KEPT)
        self.progress, self.on_progress = Progress(), on_progress
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []
        self.enter("start")
        if request.layout.compile:
            _wake_compilers()
        self.world = join(request, place)
        self.progress = replace(self.progress, device=self.platform.identity(self.world.device))
        self.enter("build")
        self.engine = build_engine(self.job())
        self.stream = open_tokens(training.data, training.model.vocab)
        self.step_began_ns = time.monotonic_ns()

    def job(self) -> Job:
        """What the engine is given."""
        training, world = self.training, self.world
        return Job(
            self.layout,
            training.model,
            training.sequence_length,
            training.seed,
            world.rank,
            world.device,
            self.clock.observe,
        )

    def report(self) -> RankReport:
        """Time all batches, and profile steps of the first if that is asked for. Collective."""
        report = self.measure()
        if self.request.procedure.breakdown:
            report = replace(report, profile=self.profile(report))
        dist.barrier()
        return report

    def measure(self) -> RankReport:
        """Time all batches. Collective."""
        timings: dict[int, Timing] = {}
        passes: tuple[PassTime, ...] = ()
        for batch in self.order:
            if timings:
                self.change_batch(batch)
            timing = self.time_steps()
            timings[self.layout.global_batch_size] = timing
            reclaims = self.platform.reclaims(self.world.device) - self.reclaimed
            passes = passes or self.clock.computing(len(timing.window_steps_s))
            self.enter("report")
            losses = tuple(self.world.total(torch.stack(self.losses)).tolist())
            self.check(losses)
        return RankReport(
            rank=self.world.rank,
            coordinates=self.layout.coordinates(self.world.rank),
            device=self.progress.device,
            timings=timings,
            losses=losses,
            grad_norms=tuple(float(norm) for norm in self.grad_norms),
            peak_memory_gib=self.platform.peak_memory_gib(self.world.device),
            environment={"torch": str(torch.__version__)} | self.platform.versions(self.world.device),
            passes=passes,
            reclaims=reclaims,
        )

    def profile(self, report: RankReport) -> Profile:
        """Profile steps of the first batch, once all ranks have handed over their `report` of all else. Collective."""
        self.progress = replace(self.progress, report=report)
        self.enter("breakdown")
        self.world.meet("measured")
        if self.layout.global_batch_size != self.batches[0]:
            self.change_batch(self.batches[0])
        # Where processors compute, which vary by more than a few steps would tell, one says as much.
        return self.profiled("profiling", 1 if self.platform.profiler_device is None else MOST_STEPS)

    def profiled(self, occasion: str, most: int = MOST_STEPS) -> Profile:
        """The next steps under the profiler, so many at most; an occasion's name serves once. Collective."""
        return profile_steps(
            self.step,
            self.layout,
            self.platform,
            lambda number: self.world.meet(f"{occasion} {number}"),
            self.world.slowest,
            most,
        )

    @property
    def order(self) -> Iterable[int]:
        """The batches to time one after the other, each asked for when the one before it was timed."""
        return self.batches

    @property
    def apart(self) -> Sequence[Callable[[], Step]]:
        """What trains the first steps with the present batch, which are unlike its others."""
        return (self.timed_step,)

    def time_steps(self) -> Timing:
        """Time steps of the present batch. Collective."""
        procedure, compiled = self.request.procedure, self.layout.compile
        apart, began_ns = self.apart, self.step_began_ns
        return time_steps(self.timed_step, procedure, compiled, self.enter, self.agreed, apart, began_ns)

    def check(self, losses: tuple[float, ...]) -> None:
        """Raise `InvalidTrial` if this is no training."""
        check_learning(losses)

    def enter(self, phase: str) -> None:
        if phase == "window":
            self.reclaimed = self.platform.reclaims(self.world.device)
        self.progress = replace(self.progress, phase=phase)
        self.on_progress(self.progress)

    def agreed(self, steps: Stretch) -> None:
        """Note the steps that ended the warm-up; they are passed on with the next phase."""
        self.progress = replace(self.progress, steady=steps)

    def change_batch(self, global_batch_size: int) -> None:
        self.layout = replace(self.layout, global_batch_size=global_batch_size)
        self.engine.set_global_batch_size(global_batch_size)
        self.step_began_ns = time.monotonic_ns()

    def step(self) -> StepOutput:
        """Train on the next global batch."""
        self.clock.begin()
        output = self.engine.step(self.deal())
        self.clock.end()
        return output

    def deal(self) -> Iterator[Microbatch]:
        """The rank's microbatches of the next global batch."""
        number, length, rank = len(self.losses), self.training.sequence_length, self.engine.data_parallel_rank
        return microbatches(self.stream, self.layout, length, number, rank, self.world.device)

    def timed_step(self) -> Step:
        """Train one step."""
        output = self.step()
        self.losses.append(output.loss.float())
        self.grad_norms.append(output.grad_norm)
        self.platform.synchronize()
        # The exchange of times keeps the ranks in step, too.
        seconds = self.world.slowest((time.monotonic_ns() - self.step_began_ns) / 1e9)
        self.step_began_ns = time.monotonic_ns()
        tokens = self.layout.global_batch_size * self.training.sequence_length
        self.progress = replace(self.progress, tokens_per_s=tokens / seconds)
        self.on_progress(self.progress)
        if len(self.losses) == 1:
            settle()
            self.step_began_ns = time.monotonic_ns()
        return Step(seconds, self.step_began_ns)


def settle() -> None:
    """Leave what was built and compiled so far out of Python's collections, which would halt one rank in some step."""
    gc.collect()
    gc.freeze()


def _wake_compilers() -> None:
    """Have the processes come up, while the engine is built, in which torch compiles kernels: that takes them seconds.

    torch starts them with the first graph, and compiles kernels one after the other until they are there.
    """
    from torch._inductor.async_compile import AsyncCompile  # takes as long to import as torch itself

    AsyncCompile.wakeup()


def _quieten() -> None:
    """Keep torch's advice to its developers out of the logs; errors reach the report."""
    os.environ["KINETO_LOG_LEVEL"] = "99"
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
