"""Timing how long the CPU takes to launch blocks: trainings of tiny models, which take turns.

Each is a process of its own, as a second engine in one process goes wrong. To make one ready takes seconds, most of
them the compiler's, and many get ready at once. To time it takes a fraction of a second, in which the others do
nothing, and is done several times: what else the host does, and how fast it is just then, befalls all of them alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import torch._inductor.config

from search_spaces.launches import specimen_of
from search_spaces.network import Network
from search_spaces.operators import Operator, OperatorTiming
from trainables.engines.base import Job
from trainables.forks import Fork
from trainables.program import Place, TrialRequest
from trainables.slice import Slice
from trainables.slice_rank import SliceRank
from trainables.training import Training

ROUNDS = 5
"""Turns of each, for the median."""

PATIENCE_S = 100.0
"""After which a process that has yet to get ready, or to end its turn, is left out."""

AWAKE_S, TURN_S = 0.05, 0.15
"""Seconds in which a process gets going that has slept, and for which steps of a batch are then timed."""

AT_NO_TIME = Network("collectives that take no time", 8, 1e30, 1e30, 1e-30, 1e-30)


def take_turns(specimens: Sequence[Specimen]) -> None:
    """Have each be timed `ROUNDS` times, once all are ready or have failed."""
    until = time.monotonic() + PATIENCE_S
    for specimen in specimens:
        specimen.hear(until)
    for _ in range(ROUNDS):
        for specimen in specimens:
            if specimen.problem is None:
                specimen.take_turn()


class Specimen:
    """A process that trains a tiny model: `seconds` of a block's launch, by each of its turns, and what its `problem`
    was, if there was one."""

    def __init__(self, launch: Operator, request: TrialRequest, place: Place) -> None:
        """Start it. No device has been used by this process."""
        self.launch, self.specimen = launch, specimen_of(launch)
        self.seconds: list[float] = []
        self.problem: str | None = None
        training = Training(self.specimen.model, "synthetic", self.specimen.sequence_length, seed=0)
        program = Slice(training, rank=0, network=AT_NO_TIME)
        request = replace(request, layout=self.specimen.layout, program=program, batches=self.specimen.batches)
        self.fork = Fork(lambda messages: _serve(messages, program, request, place))

    @property
    def found(self) -> OperatorTiming | str:
        """What came of its turns, or why nothing did."""
        if self.problem is not None:
            return f"{self.launch.label}: {self.problem}"
        if (seconds := statistics.median(self.seconds)) > 0:
            return OperatorTiming(self.launch, seconds)
        return f"{self.launch.label}: more microbatches took no longer"

    def take_turn(self) -> None:
        self.fork.tell(None)
        self.hear(time.monotonic() + PATIENCE_S)

    def hear(self, until: float) -> None:
        """Wait for what it says: a problem, the seconds of a step with each batch, or that it is ready."""
        said = self.fork.hear(until - time.monotonic())
        if isinstance(said, str):
            self.problem = said
        elif said is not None:
            self.seconds.append(self.specimen.launch_s(said))


class SpecimenRank(SliceRank):
    """The rank of a tiny model that stands for large ones."""

    def job(self) -> Job:
        return replace(super().job(), is_specimen=True)


def _serve(messages: Connection, program: Slice, request: TrialRequest, place: Place) -> None:
    """The life of a specimen's process."""
    torch._inductor.config.compile_threads = 1  # the others compile at the same time
    rank = SpecimenRank(program, request, place, lambda progress: None)
    for batch in rank.batches:  # and no more: a slice would go on to have the device wait, which nothing halts
        rank.change_batch(batch)
        rank.time_steps()
    messages.send(None)
    while True:
        messages.recv()
        messages.send(_turn_s(rank))


def _turn_s(rank: SliceRank) -> tuple[float, ...]:
    """Seconds of a step with each batch, the median of some, once the process has got going."""
    seconds = list[float]()
    for batch in rank.batches:
        rank.change_batch(batch)
        if not seconds:
            _steps(rank, AWAKE_S, 1)
        seconds.append(statistics.median(_steps(rank, TURN_S, 2)))
    return tuple(seconds)


def _steps(rank: SliceRank, least_s: float, least: int) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < least or math.fsum(seconds) < least_s:
        seconds.append(rank.timed_step().seconds)
    return seconds
