"""One optimizer step under torch's profiler, for the `Breakdown` of its time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile

from search_spaces.layout import Layout
from trainables.breakdown import COMPILED, GENERIC, Breakdown, break_down, collective, kernel_category, own_times


@dataclass(frozen=True)
class Profile:
    """The breakdown of a step, or the `problem` for which there is none, and the seconds that it took to have it."""

    breakdown: Breakdown | None
    problem: str | None
    time_s: float


def profile_step(
    step: Callable[[], object],
    layout: Layout,
    use_gpu: bool,
    meet: Callable[[], None],
    slowest: Callable[[float], float],
) -> Profile:
    """Run `step` once under the profiler. Collective over the trial's ranks.

    `meet` returns once all ranks have called it and uses no GPU; `slowest` is the largest of the ranks' seconds.
    Raises what `step` raises. What goes wrong with the profiler itself is told in the result.
    """
    began = time.monotonic()
    # NCCL exchanges between stages and between experts by the same kernel: where a layout has both, and for RCCL, whose
    # kernels have no telling names, the host's record of the collectives is needed as well. It costs host time.
    ulysses = layout.engine == "deepspeed" and layout.context_parallel_size > 1
    both = layout.pipeline_parallel_size > 1 and (layout.expert_parallel_size > 1 or ulysses)
    by_record = both or torch.version.hip is not None
    recorder: profile | None = None
    breakdown, problem = None, None
    try:
        recorder = profile(
            use_device="cuda" if use_gpu else None, use_cpu=not use_gpu or by_record, use_kineto=True
        ).__enter__()
    except Exception as error:
        problem = _told(error)
    meet()
    start = time.monotonic()
    step()
    if use_gpu:
        torch.cuda.synchronize()
    own_s = time.monotonic() - start
    try:
        if recorder is not None:
            recorder.__exit__(None, None, None)
    except Exception as error:
        recorder, problem = None, _told(error)
    span_s = slowest(own_s)
    try:
        if recorder is not None:
            events = recorder.kineto_results.events()  # type: ignore[union-attr]
            if use_gpu:
                exchange = None if by_record else "send_recv" if layout.pipeline_parallel_size > 1 else "all_to_all"
                breakdown = _of_kernels(events, exchange, span_s)
            else:
                breakdown = _of_operators(events, span_s)
    except Exception as error:
        problem = _told(error)
    return Profile(breakdown, problem, time.monotonic() - began)


def _told(error: Exception) -> str:
    return f"the profiler failed: {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _of_kernels(events: list[Any], exchange: str | None, span_s: float) -> Breakdown:
    """From what ran on the GPU. `exchange` is what send-receive kernels are; None: as the host's record says."""
    kernels = [e for e in events if e.device_type() != DeviceType.CPU and not e.is_user_annotation()]
    if not kernels:
        raise RuntimeError("it saw no kernel")
    categories = [kernel_category(e.name()) for e in kernels]
    unclear = [i for i, category in enumerate(categories) if category in (GENERIC, "send_recv")]
    recorded = _recorded_collectives(events) if exchange is None else {}
    for i in unclear:
        known = exchange if categories[i] == "send_recv" else None
        fallback = "send_recv" if categories[i] == "send_recv" else "other_communication"
        categories[i] = known or recorded.get(kernels[i].linked_correlation_id(), fallback)
    starts = np.array([e.start_ns() for e in kernels], dtype=np.int64)
    return break_down(categories, starts, starts + np.array([e.duration_ns() for e in kernels], dtype=np.int64), span_s)


def _recorded_collectives(events: list[Any]) -> dict[int, str]:
    """The collective by the correlation id of each host operator that ran within one of c10d's on the same thread."""
    host = [e for e in events if e.device_type() == DeviceType.CPU and e.correlation_id() and not e.is_async()]
    calls: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for e in host:
        if e.name().startswith("c10d::"):
            calls[e.start_thread_id()].append((e.start_ns(), e.end_ns(), e.name()))
    for of_thread in calls.values():
        of_thread.sort()
    found = {}
    for e in host:
        of_thread = calls[e.start_thread_id()]
        before = bisect_right(of_thread, (e.start_ns() + 1,)) - 1
        if before >= 0 and e.end_ns() <= of_thread[before][1]:
            found[e.correlation_id()] = collective(of_thread[before][2])
    return found


def _of_operators(events: list[Any], span_s: float) -> Breakdown:
    """From the operators' own times on the CPU, and the collectives that gloo's threads carry out meanwhile."""
    background = [e for e in events if e.is_async() and e.name().startswith("gloo:")]
    categories, starts, ends = own_times(
        (e.start_thread_id(), e.start_ns(), e.end_ns(), e.name())
        for e in events
        if not e.is_async() and (not e.is_user_annotation() or e.name().startswith(COMPILED))
    )
    if not categories:
        raise RuntimeError("it saw no operator")
    categories += [collective(e.name()) for e in background]
    starts = np.append(starts, np.array([e.start_ns() for e in background], dtype=np.int64))
    ends = np.append(ends, np.array([e.end_ns() for e in background], dtype=np.int64))
    return break_down(categories, starts, ends, span_s)
