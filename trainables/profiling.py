"""Optimizer steps under torch's profiler, for the `Breakdown` of their time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.autograd.profiler import profile

from search_spaces.engines import engine_of
from search_spaces.layout import Layout
from trainables.breakdown import (
    COLLECTIVES,
    COMPILED,
    COMPUTE,
    GENERIC,
    Breakdown,
    Profile,
    awake_s,
    break_down,
    collective_category,
    interrupted_s,
    kernel_category,
    mean,
    own_times,
    union_ns,
)
from trainables.platforms.base import Platform

PROFILED_S, MOST_STEPS = 0.5, 5
"""Until steps have taken so many seconds together there is another one, so that also of short ones enough is seen to
tell one rank from another; never more of them than this."""


class Event(NamedTuple):
    """What is read of one of the profiler's events. Times are in ns, of the profiler's own clock.

    `correlation` is the id of an operator on the host, `linked_correlation` that of the one which launched a kernel.
    """

    name: str
    on_host: bool
    start_ns: int
    duration_ns: int
    thread: int
    correlation: int
    linked_correlation: int
    is_async: bool
    is_annotation: bool

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


def recorded(events: Iterable[Any]) -> list[Event]:
    """The events of torch's profiler (`kineto_results.events()`)."""
    return [
        Event(
            e.name(),
            e.device_type() == DeviceType.CPU,
            e.start_ns(),
            e.duration_ns(),
            e.start_thread_id(),
            e.correlation_id(),
            e.linked_correlation_id(),
            e.is_async(),
            e.is_user_annotation(),
        )
        for e in events
    ]


def profile_steps(
    step: Callable[[], object],
    layout: Layout,
    platform: Platform,
    meet: Callable[[int], None],
    slowest: Callable[[float], float],
    most: int,
) -> Profile:
    """Run `step` under the profiler, again while that is soon done, `most` times at most. Collective over the ranks.

    `meet` returns once all ranks have called it with the number of the step and uses no GPU; `slowest` is the largest
    of the ranks' seconds. Raises what `step` raises. A profiler that fails is the result's `problem`.
    """
    began, span_s = time.monotonic(), 0.0
    steps: list[_Step] = []
    while len(steps) < most and (not steps or span_s < PROFILED_S):
        steps.append(_profile_step(step, layout, platform, lambda: meet(len(steps)), slowest))
        span_s += steps[-1].span_s
    problem = next((one.problem for one in steps if one.problem is not None), None)
    breakdowns = [one.breakdown for one in steps if one.breakdown is not None]
    if problem is not None:
        return Profile(None, problem, time.monotonic() - began)
    own_s, alone_s = tuple(one.own_s for one in breakdowns), tuple(one.compute_alone_s for one in breakdowns)
    interrupted = interrupted_s([one.kernels_s for one in steps])
    linked = [one.linked_s for one in steps if one.linked_s is not None]
    awake = fmean(linked) if linked else None
    return Profile(mean(breakdowns), None, time.monotonic() - began, own_s, interrupted, alone_s, awake)


@dataclass
class _Step:
    """What a profiled step of `span_s` seconds showed; `kernels_s` are by the names of those that compute, in order."""

    span_s: float
    problem: str | None = None
    breakdown: Breakdown | None = None
    kernels_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    linked_s: float | None = None


def _profile_step(
    step: Callable[[], object],
    layout: Layout,
    platform: Platform,
    meet: Callable[[], None],
    slowest: Callable[[float], float],
) -> _Step:
    device = platform.profiler_device
    exchange = _exchange(layout) if platform.names_kernels else None
    recorder: profile | None = None
    problem = None
    try:
        recorder = profile(use_device=device, use_cpu=device is None or exchange is None, use_kineto=True).__enter__()
    except Exception as error:
        problem = _problem(error)
    meet()
    start = time.monotonic()
    step()
    platform.synchronize()
    own_s = time.monotonic() - start
    try:
        if recorder is not None:
            recorder.__exit__(None, None, None)
    except Exception as error:
        recorder, problem = None, _problem(error)
    span_s = slowest(own_s)
    try:
        if recorder is not None:
            events = recorded(recorder.kineto_results.events())  # type: ignore[union-attr]
            breakdown = of_events(events, device, exchange, span_s)
            return _Step(span_s, problem, breakdown, _computing(events), linked_s(events, span_s))
    except Exception as error:
        problem = _problem(error)
    return _Step(span_s, problem)


def busy_s(task: Callable[[], object], platform: Platform) -> float:
    """Seconds in which the process's device, which is not the host, does something of what a task gives it.

    Raises `RuntimeError` where the profiler saw nothing, and whatever else it does.
    """
    with profile(use_device=platform.profiler_device, use_cpu=False, use_kineto=True) as recorder:
        task()
        platform.synchronize()
    return union_ns(*_spans(_kernels(recorded(recorder.kineto_results.events())))) / 1e9


def _on_device(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if not e.on_host and not e.is_annotation]


def _kernels(events: Sequence[Event]) -> list[Event]:
    """What the device did. Raises `RuntimeError` where the profiler saw nothing."""
    if kernels := _on_device(events):
        return kernels
    raise RuntimeError("it saw no kernel")


def _spans(kernels: Sequence[Event]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each began and ended, in ns."""
    starts = np.array([e.start_ns for e in kernels], dtype=np.int64)
    return starts, starts + np.array([e.duration_ns for e in kernels], dtype=np.int64)


def linked_s(events: Sequence[Event], span_s: float) -> float | None:
    """Seconds of a step of `span_s` in which links are awake (`breakdown.awake_s`); None where the host computes."""
    if not (kernels := _on_device(events)):
        return None
    communicating = [e for e in kernels if kernel_category(e.name) in (*COLLECTIVES, GENERIC)]
    return awake_s(*_spans(communicating), min(e.start_ns for e in kernels), span_s)


def _computing(events: Sequence[Event]) -> dict[str, list[float]]:
    """Seconds of the kernels that compute, in their order, by name; none where the host computes."""
    kernels = sorted(_on_device(events), key=lambda e: e.start_ns)
    times: dict[str, list[float]] = defaultdict(list)
    for e in kernels:
        if kernel_category(e.name) in COMPUTE:
            times[e.name].append(e.duration_ns / 1e9)
    return times


def _exchange(layout: Layout) -> str | None:
    """What NCCL's one kernel for sends and receives carries in this layout: `send_recv` or `all_to_all`.

    None where it may be either, between stages and between experts or pieces of sequences: only the host's record of
    the collectives then knows, which costs host time.
    """
    ulysses = layout.context_parallel_size > 1 and engine_of(layout).exchanges_heads
    if layout.pipeline_parallel_size == 1:
        return "all_to_all"
    return None if layout.expert_parallel_size > 1 or ulysses else "send_recv"


def _problem(error: Exception) -> str:
    return f"the profiler failed: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def of_events(events: Sequence[Event], device: str | None, exchange: str | None, span_s: float) -> Breakdown:
    """The breakdown of a step of `span_s` seconds on a device as the profiler calls it, None for the host.

    `exchange` is what send-receive kernels are; None: as the host's record says. Raises `RuntimeError` where the
    profiler saw nothing.
    """
    return _of_operators(events, span_s) if device is None else _of_kernels(events, exchange, span_s)


def _of_kernels(events: Sequence[Event], exchange: str | None, span_s: float) -> Breakdown:
    kernels = _kernels(events)
    categories = [kernel_category(e.name) for e in kernels]
    unclear = [i for i, category in enumerate(categories) if category in (GENERIC, "send_recv")]
    launched_by = _recorded_collectives(events) if exchange is None else {}
    for i in unclear:
        known = exchange if categories[i] == "send_recv" else None
        fallback = "send_recv" if categories[i] == "send_recv" else "other_communication"
        categories[i] = known or launched_by.get(kernels[i].linked_correlation, fallback)
    return break_down(categories, *_spans(kernels), span_s)


def _recorded_collectives(events: Sequence[Event]) -> dict[int, str]:
    """The collective by the correlation id of each host operator that ran within one of c10d's on the same thread."""
    host = [e for e in events if e.on_host and e.correlation and not e.is_async]
    calls: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for e in host:
        if e.name.startswith("c10d::"):
            calls[e.thread].append((e.start_ns, e.end_ns, e.name))
    for of_thread in calls.values():
        of_thread.sort()
    by_correlation = {}
    for e in host:
        of_thread = calls[e.thread]
        before = bisect_right(of_thread, (e.start_ns + 1,)) - 1
        if before >= 0 and e.end_ns <= of_thread[before][1]:
            by_correlation[e.correlation] = collective_category(of_thread[before][2])
    return by_correlation


def _of_operators(events: Sequence[Event], span_s: float) -> Breakdown:
    """From the operators' own times on the CPU, and the collectives that gloo's threads carry out meanwhile.

    What stands in for collectives is one of the operators: it has no thread of its own."""
    background = [e for e in events if e.is_async and e.name.startswith("gloo:")]
    categories, starts, ends = own_times(
        (e.thread, e.start_ns, e.end_ns, e.name)
        for e in events
        if not e.is_async and (not e.is_annotation or e.name.startswith(COMPILED))
    )
    if not categories:
        raise RuntimeError("it saw no operator")
    categories += [collective_category(e.name) for e in background]
    starts = np.append(starts, np.array([e.start_ns for e in background], dtype=np.int64))
    ends = np.append(ends, np.array([e.end_ns for e in background], dtype=np.int64))
    return break_down(categories, starts, ends, span_s)
