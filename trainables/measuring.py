"""Measuring operators: kernels on the device, while tiny models get ready, and then what the CPU takes for these.

To get ready takes the models about as long as all kernels take to be compiled and timed, and is mostly the compiler's
work. So both go on side by side; but while a kernel is timed, nothing else happens on the device, nor on the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from search_spaces.operators import Operator, OperatorTiming
from trainables import kernels
from trainables.forks import Fork
from trainables.laps import Laps
from trainables.operators import Operators
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.specimens import Specimen, take_turns

AT_ONCE = 12
"""Tiny models that get ready beside each other, at most: each takes half a GiB of a GPU."""

PATIENCE_S = 100.0
"""After which the process that times kernels is ended, if none came of it."""


class _Findings:
    """What came of it so far, which is handed over each time."""

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self.on_progress = on_progress
        self.device = kernels.Device(None, {})
        self.measured: list[OperatorTiming] = []
        self.problems: list[str] = []
        self.laps = Laps()

    def take(self, phase: str, *findings: OperatorTiming | str) -> None:
        """What an operator takes, or why that is not known."""
        for one in findings:
            if isinstance(one, str):
                self.problems.append(one)
            else:
                self.measured.append(one)
        self.on_progress(Progress(phase, self.device.identity, report=self.report()))

    def report(self) -> RankReport:
        return RankReport(
            rank=0,
            coordinates={},
            device=self.device.identity,
            timings={},
            losses=(),
            grad_norms=(),
            peak_memory_gib=None,
            environment=self.device.environment,
            operators=tuple(self.measured),
            problems=tuple(self.problems),
            spent_s=dict(self.laps.seconds),
        )


def measure(
    program: Operators, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
) -> RankReport:
    """`Operators.run`, which says more."""
    found = _Findings(on_progress)
    began = found.laps.began
    kernels_until, launches_until = began + program.kernels_s, began + program.launches_s
    launches = program.launches if program.launches_s > 0 else ()
    at_once = max(1, min(AT_ONCE, len(os.sched_getaffinity(0)) // program.processes))
    first, *others = [launches[n : n + at_once] for n in range(0, len(launches), at_once)] or [()]
    with _getting_ready(first, request, place) as specimens:
        forks = [specimen.fork for specimen in specimens]
        short = _time_kernels(program.kernels, kernels_until, place, found, beside=forks)
        found.laps.end("kernels")
        _time_launches(specimens, found)
    for group in others:
        if time.monotonic() < launches_until:
            with _getting_ready(group, request, place) as specimens:
                _time_launches(specimens, found)
    found.laps.end("launches")
    _time_kernels(short, launches_until, place, found)
    found.laps.end("kernels")
    return found.report()


@contextlib.contextmanager
def _getting_ready(launches: Sequence[Operator], request: TrialRequest, place: Place) -> Iterator[list[Specimen]]:
    """Specimens of launches, which are there until the end. No device has been used by this process."""
    specimens = list[Specimen]()
    try:
        for launch in launches:
            specimens.append(Specimen(launch, request, place))
        yield specimens
    finally:
        for specimen in specimens:
            specimen.fork.end()


def _time_launches(specimens: Sequence[Specimen], found: _Findings) -> None:
    found.take("launches")
    take_turns(specimens)
    found.take("launches", *(specimen.found for specimen in specimens))


def _time_kernels(
    wanted: Sequence[Operator], until: float, place: Place, found: _Findings, beside: Sequence[Fork] = ()
) -> list[Operator]:
    """Have a process time kernels, those that begin in time. Returns those for which memory was short beside others."""
    left, short = list(wanted), list[Operator]()
    if not wanted:
        return short
    found.take("kernels")
    fork = Fork(lambda messages: kernels.serve(messages, wanted, until, place, beside))
    try:
        while (said := fork.hear(PATIENCE_S)) is not None:
            if isinstance(said, str):
                found.take("kernels", f"{left[0].label}: {said}")
                break
            if isinstance(said, kernels.Device):
                found.device = said
                continue
            operator = left.pop(0)
            if said.out_of_memory and beside:
                short.append(operator)
            else:
                found.take("kernels", said.found)
    finally:
        fork.end()
        for other in beside:
            other.signal(signal.SIGCONT)  # which it may have halted when it ended
    return short
