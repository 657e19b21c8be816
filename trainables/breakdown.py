"""Where the time of one optimizer step goes on one rank: kernels sorted by name, their times joined as intervals."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from search_spaces.hardware import LINKS_AWAKE_S

COMPUTE = ("matmul", "attention", "other")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all", "other_communication")
MEMORY_COPY = "memory_copy"
GENERIC = "generic_communication"
"""A kernel whose name does not tell its collective, such as RCCL's: `GENERIC` until the caller knows better."""

COMPILED = "## Call CompiledFxGraph"
"""The name under which Inductor's fused loops run on the CPU."""

STANDIN = "standin"
"""How the names begin of what stands in for collectives: `standin_all_reduce`."""

FEWEST = 3
"""Steps of which one can be told from the others."""

BESIDE = 0.2
"""The share of the time in which a GPU computes beside communication, or beside its waiting for others, that computing
takes it more for that: 0.198 and 0.209 where two GPUs computed the same beside now more, now less of it, and 0.18 over
45 layouts (benchmarks/results/README.md, "A slow GPU, found while it trains")."""

_COLLECTIVE = re.compile(r"(allreduce)|(allgather)|(reducescatter)|(send|recv)|(alltoall)")
_OF_NCCL = re.compile(rf"nccl|rccl|nvshmem|^{STANDIN}_")
_SYMMETRIC_MEMORY = re.compile(r"symm(etric)?_mem|multimem_|one_shot_|two_shot_|(barrier|(put|wait)_signal)_kernel")
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn_(fwd|bwd)|bwd_(kernel_d|preprocess)|dot_do_o|convert_dq")
_MATMUL = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitkreduce|matmul|^cijk_")
_CPU_ATTENTION = re.compile(r"::_?(scaled_dot_product|flash_attention|efficient_attention|flex_attention)")
_CPU_MATMUL = re.compile(
    r"::_?(mm|addmm|bmm|baddbmm|mv|addmv|scaled_mm|grouped_mm|scaled_grouped_mm|mkldnn_linear|linear_pointwise)(_|$|\.)"
)
_CPU_COPY = re.compile(r"^aten::(copy_|fill_|zero_)$")


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one optimizer step on one rank; a time is that during which at least one such kernel ran.

    - `span_s` is the whole step, to the end of the slowest rank; `idle_s` what of it nothing at all ran here.
    - `compute_s` is `matmul_s` (grouped and fp8 as well), `attention_s` and `other_s` together.
    - `communication_s` is all the collectives together. It is `overlapped` while this rank computes, else `exposed`,
      in total and for each collective.
    - `other_communication_s` is broadcasts, copies from GPU to GPU, and waiting for signals between GPUs.
    - `memory_copy_s` is copies and fills by the copy engines or their like; neither compute nor communication.
    """

    span_s: float
    compute_s: float
    matmul_s: float
    attention_s: float
    other_s: float
    memory_copy_s: float
    idle_s: float
    communication_s: float
    overlapped_communication_s: float
    exposed_communication_s: float
    all_reduce_s: float
    all_gather_s: float
    reduce_scatter_s: float
    send_recv_s: float
    all_to_all_s: float
    other_communication_s: float
    exposed_all_reduce_s: float
    exposed_all_gather_s: float
    exposed_reduce_scatter_s: float
    exposed_send_recv_s: float
    exposed_all_to_all_s: float
    exposed_other_communication_s: float

    @property
    def own_s(self) -> float:
        """In which the rank did not just communicate, of which waiting for others is a part."""
        return self.span_s - self.exposed_communication_s

    @property
    def compute_alone_s(self) -> float:
        """What `compute_s` would be without communication beside it. A GPU for which others wait has less of that, and
        by `compute_s` looks faster than it is."""
        return self.compute_s - BESIDE * self.overlapped_communication_s


@dataclass(frozen=True)
class Profile:
    """The breakdown of a step, or the `problem` for which there is none, and the seconds that it took to have it.

    Neither where it is another rank that had the problem. Of several steps it is the mean, `own_s` the seconds of each
    in which the rank did not just communicate, `compute_alone_s` as `Breakdown` has it, of each, and `interrupted_s`
    what kernels took longer in a step than the same ones took in most of them; None where that is not known.
    `linked_s`: seconds of a step in which links between GPUs are awake for its collectives (`awake_s`).
    """

    breakdown: Breakdown | None
    problem: str | None
    time_s: float
    own_s: tuple[float, ...] = ()
    interrupted_s: float | None = None
    compute_alone_s: tuple[float, ...] = ()
    linked_s: float | None = None


def break_down(
    categories: Sequence[str], starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], span_s: float
) -> Breakdown:
    """Join the intervals of a step, each of one of `COMPUTE`, `COLLECTIVES` or `MEMORY_COPY`."""
    labels = np.asarray(categories, dtype=object)

    def taken(*names: str) -> int:
        """Length of the union of all intervals of these categories, in ns, whose differences are exact."""
        chosen = np.isin(labels, names)
        return union_ns(starts_ns[chosen], ends_ns[chosen])

    compute = taken(*COMPUTE)
    times = {f"{name}_s": taken(name) / 1e9 for name in (*COMPUTE, MEMORY_COPY, *COLLECTIVES)}
    # What lies outside compute is what it adds to the union.
    exposed = {f"exposed_{name}_s": (taken(name, *COMPUTE) - compute) / 1e9 for name in COLLECTIVES}
    communication = taken(*COLLECTIVES)
    exposed_communication = taken(*COLLECTIVES, *COMPUTE) - compute
    return Breakdown(
        span_s=span_s,
        compute_s=compute / 1e9,
        communication_s=communication / 1e9,
        overlapped_communication_s=(communication - exposed_communication) / 1e9,
        exposed_communication_s=exposed_communication / 1e9,
        idle_s=max(0.0, span_s - taken(*COMPUTE, MEMORY_COPY, *COLLECTIVES) / 1e9),
        **times,
        **exposed,
    )


def mean(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """The mean of several steps, one at least."""
    return Breakdown(
        **{field.name: statistics.fmean(getattr(one, field.name) for one in breakdowns) for field in fields(Breakdown)}
    )


def interrupted_s(steps: Sequence[Mapping[str, Sequence[float]]]) -> float | None:
    """What kernels took longer in a step than each of them in most steps, in s, on average.

    `steps` are of the same work, three at least: the durations of each kernel in order, by its name. A slow device
    takes longer for all kernels, in every step; one that others use for a while for those alone that it has just then.
    None where that cannot be told: of fewer steps, or such as do not have the same kernels.
    """
    if len(steps) < FEWEST or any(
        {name: len(times) for name, times in step.items()} != {name: len(times) for name, times in steps[0].items()}
        for step in steps
    ):
        return None
    longer = 0.0
    for name in steps[0]:
        times = np.array([step[name] for step in steps])
        longer += float((times.mean(axis=0) - np.median(times, axis=0)).sum())
    return max(0.0, longer)


def awake_s(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], begin_ns: int, span_s: float) -> float:
    """Seconds of a step of `span_s` from `begin_ns` in which links are awake that carry something in these intervals:
    from then until `LINKS_AWAKE_S` later, also in the next step, which is like it."""
    if not len(starts_ns):
        return 0.0
    end_ns, awake_ns = begin_ns + round(1e9 * span_s), ends_ns + round(1e9 * LINKS_AWAKE_S)
    before = np.array([begin_ns, begin_ns + max(0, int(awake_ns.max()) - end_ns)], dtype=np.int64)
    starts, ends = np.append(starts_ns, before[0]), np.append(awake_ns, before[1])
    return union_ns(np.minimum(starts, end_ns), np.minimum(ends, end_ns)) / 1e9


def union_ns(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """Length of the union of the intervals [start, end)."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    covered = np.concatenate((starts[:1], reached[:-1]))  # up to where the intervals before each one reach
    return int(np.maximum(0, reached - np.maximum(starts, covered)).sum())


def collective_category(name: str) -> str:
    """The collective that a kernel's or an operator's name speaks of, in NCCL's, gloo's or c10d's spelling."""
    match = _COLLECTIVE.search(name.lower().replace("_", ""))
    return COLLECTIVES[match.lastindex - 1] if match and match.lastindex else "other_communication"


@lru_cache(maxsize=4096)
def kernel_category(name: str) -> str:
    """Category of a GPU kernel or copy by its name; `GENERIC` if only the host knows which collective it is."""
    lower = name.lower()
    if lower.startswith("memcpy"):
        return "other_communication" if "ptop" in lower else MEMORY_COPY
    if lower.startswith("memset"):
        return MEMORY_COPY
    if lower.startswith("triton_"):  # Inductor's: fused ones bear the names of whatever they are fused with
        if not lower.startswith("triton_tem_"):
            return "other"
        return "attention" if "attention" in lower else "matmul"
    if _OF_NCCL.search(lower):
        return GENERIC if "generic" in lower else collective_category(name)
    if _ATTENTION.search(lower):
        return "attention"
    if _SYMMETRIC_MEMORY.search(lower):
        return collective_category(name)
    return "matmul" if _MATMUL.search(lower) else "other"


@lru_cache(maxsize=4096)
def operator_category(name: str) -> str | None:
    """Category of a CPU operator's own time; None for what only waits or wraps others."""
    if name.startswith(("gloo:", "c10d::", "record_param_comms", f"{STANDIN}_")):
        return None if "barrier" in name else collective_category(name)
    if name.startswith(COMPILED):
        return "other"
    if "::" not in name or name.startswith(("_c10d_functional::", "autograd::", "torch::autograd::")):
        return None
    if _CPU_ATTENTION.search(name):
        return "attention"
    if _CPU_MATMUL.search(name):
        return "matmul"
    return MEMORY_COPY if _CPU_COPY.match(name) else "other"


def own_times(
    operators: Iterable[tuple[int, int, int, str]],
) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Cut nested CPU operators, as (thread, start, end, name) in ns, into the intervals of each one's own time.

    Within attention, a matrix product or a collective, everything is theirs.
    """
    categories: list[str] = []
    edges: list[tuple[int, int]] = []
    open_: list[tuple[int, str | None]] = []  # the end and the category of what is under way, outermost first
    thread, cursor = -1, 0

    def run_to(time: int) -> None:
        """Attribute the time from the cursor up to `time`, closing what ends before."""
        nonlocal cursor
        while open_ and cursor < time:
            end, category = open_[-1]
            until = min(end, time)
            if category is not None and until > cursor:
                categories.append(category)
                edges.append((cursor, until))
            cursor = max(cursor, until)
            if end <= time:
                open_.pop()

    for owner, start, end, name in sorted(operators, key=lambda o: (o[0], o[1], -o[2])):
        if owner != thread:
            run_to(1 << 62)
            open_.clear()
            thread, cursor = owner, start
        run_to(start)
        while open_ and open_[-1][0] <= start:
            open_.pop()
        cursor = max(cursor, start)
        around, category = open_[-1][1] if open_ else None, operator_category(name)
        if around in COLLECTIVES or (around in ("matmul", "attention") and category in (*COMPUTE, MEMORY_COPY)):
            category = around
        open_.append((end, category))
    run_to(1 << 62)
    times = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return categories, times[:, 0], times[:, 1]
