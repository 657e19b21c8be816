"""Collectives on a GPU of NVIDIA's: where NCCL's would run, for as long, with as many of the GPU's processors.

AMD's GPUs copy as fast as they can, and then wait.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor
from torch.futures import Future
from triton.language.extra.cuda import globaltimer

from search_spaces.network import Collective
from trainables.breakdown import STANDIN
from trainables.standin.lane import HostLane
from trainables.standin.moves import Move, fill

BLOCKS = 24
"""Thread blocks of a collective: the channels that NCCL opens for collectives among H100 of one node, as its log has it
("24 coll channels")."""

WARPS = 16
"""Warps of a block, as in NCCL."""

REGISTERS = 96
"""At most so many of a thread, as in NCCL."""

BYTES = 16
"""What a thread moves with one instruction."""

UNROLLED = 8
"""Such instructions that a thread has under way at a time: with fewer, so few blocks do not come to the bytes a second
of NVLink."""

PASSES = 1
"""How often what has arrived is read and written once more, as NCCL's kernels pass it on through buffers of their own.

Matrix products beside 256 MiB of NCCL's collectives, on two H200 at their power limit (torch 2.11, CUDA 13), take
longer by 47 to 58% of the collective's own time, beside these by 43 to 60%. With another pass the copies cannot keep
NCCL's pace (`benchmarks.measure.contention`)."""

ALL_REDUCE_PASSES = 2
"""`PASSES` of an all-reduce, which moves everything twice: it is scattered and then gathered."""

GRID = (BLOCKS, 1, 1)

ALIGNED, INT32 = 16, 2**31 - 1
"""What numbers and addresses are multiples of, and up to which they go, for Triton to take another form of a kernel."""

_forms: dict[tuple[Any, ...], Callable[..., None]] = {}

MESSAGES_HOLD = Version(torch.__version__) >= Version("2.12")
"""Whether what a message returns holds its tensor. Up to 2.11 torch's pipelines send batches, which hold none."""

WALL_CLOCK_HZ = 100_000_000
"""Of AMD's GPUs, in whose ticks `torch.cuda._sleep` counts there."""


class DeviceLane:
    """A stream of the group's own, which begins when the caller's has come so far.

    As with NCCL, what is not asynchronous runs on the caller's stream, and all of a group one after the other, whatever
    their streams. Tensors are kept until their collective is waited for, or is over when another comes, in place of
    `record_stream`; those of messages are recorded, and the allocator has their memory once the GPU is past them: so
    torch has it with NCCL (`ProcessGroupNCCL::pointToPoint`), and the allocator takes as much memory. What lies on the
    host goes as it does without a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, HostLane()
        self._stream, self._computing = torch.cuda.Stream(device), torch.cuda.default_stream(device)
        self._streams = {stream.cuda_stream: stream for stream in (self._stream, self._computing)}
        self._called = torch.cuda.Event()
        self._latest: DeviceWork | None = None
        self._keeping: deque[DeviceWork] = deque()

    @property
    def beside(self) -> bool:
        """On another stream than that of computation, as FSDP2 and DeepSpeed overlap what they gather and reduce."""
        return self._current is not self._computing

    def carry(self, kind: Collective, moves: Sequence[Move], seconds: float, asynchronous: bool) -> dist.Work:
        if moves and moves[0].target.device.type == "cpu":
            return self._host.carry(kind, moves, seconds, asynchronous)
        while self._keeping and self._keeping[0].event.query():
            self._keeping.popleft().release()
        current = self._current
        stream = self._stream if asynchronous else current
        if asynchronous:
            self._called.record(current)
            stream.wait_event(self._called)
        if self._latest is not None and self._latest.stream != stream:
            stream.wait_event(self._latest.event)
        transfer(kind, moves, seconds, stream)
        if kind is Collective.SEND:
            for move in moves:
                move.target.record_stream(stream)
            moves = moves if MESSAGES_HOLD else ()
        self._latest = DeviceWork(stream, stream.record_event(), moves if asynchronous else ())
        if asynchronous:
            self._keeping.append(self._latest)
        return self._latest

    @property
    def _current(self) -> torch.cuda.Stream:
        """The caller's stream, by the only way to it that takes no microseconds."""
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self._device)
        return self._streams[handle]

    def pause(self, seconds: float) -> None:
        """On the group's stream: what of its messages was let go of meanwhile is not there for others before that."""
        current = self._current
        self._stream.wait_stream(current)
        spin(Collective.SEND, seconds, self._stream)
        current.wait_stream(self._stream)


class DeviceWork(dist.Work):
    """Is over when the GPU is past `event` on `stream`; `moves` are what must live until then."""

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event, moves: Sequence[Move]) -> None:
        super().__init__()
        self.stream, self.event = stream, event
        self._moves = moves

    def is_completed(self) -> bool:
        over: bool = self.event.query()
        return over

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    @cached_property
    def _future(self) -> Future[list[Tensor]]:
        """Has what arrives, for a stream that waits for it, as those of torch's DistributedDataParallel do."""
        future: Future[list[Tensor]] = Future(devices=[self.stream.device])
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.event)
            future.set_result([move.target for move in self._moves])
        return future

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Have the current stream wait. What it does with the tensors' memory then comes after the collective."""
        if torch._C._cuda_getCurrentRawStream(self.stream.device_index) != self.stream.cuda_stream:
            torch.cuda.current_stream(self.stream.device).wait_event(self.event)
        self.release()
        return True

    def release(self) -> None:
        self._moves = ()


def transfer(kind: Collective, moves: Sequence[Move], seconds: float, stream: torch.cuda.Stream) -> None:
    """Do the moves on a stream in that many seconds; in no time at all, as fast as it goes."""
    if seconds <= 0 or torch.version.hip is not None:
        with torch.cuda.stream(stream):
            for move in moves:
                fill(move)
        if seconds > 0:
            spin(kind, seconds, stream)
        return
    total = sum(move.size for move in moves)
    if total == 0:
        spin(kind, seconds, stream)
        return
    for move in moves:
        _pace(kind, move, seconds * move.size / total, stream)


def spin(kind: Collective, seconds: float, stream: torch.cuda.Stream) -> None:
    """Keep a stream busy as a collective is that waits for others: with all its blocks, moving nothing."""
    if torch.version.hip is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * WALL_CLOCK_HZ))
        return
    nothing = torch.empty(0, dtype=torch.uint8, device=stream.device)
    _pace(kind, Move(nothing, nothing), seconds, stream)


def _pace(kind: Collective, move: Move, seconds: float, stream: torch.cuda.Stream) -> None:
    """One move at an even pace by `BLOCKS` thread blocks, which are busy to its end."""
    assert move.source is not None
    if not move.target.is_contiguous():
        raise ValueError("what arrives in a collective must be contiguous, as with NCCL")
    source = move.source.data
    if not source.is_contiguous():
        with torch.cuda.stream(stream):
            source = source.contiguous()
    target, source = _known(move.target.data), _known(source)
    count = target.numel() if source.numel() else 0
    period = max(1, min(count, source.numel()))
    _launch(
        stream,
        (target, source, count, period, float(move.factor), int(seconds * 1e9)),
        KIND=kind.value,
        SCALED=move.factor != 1,
        PASSES=ALL_REDUCE_PASSES if kind is Collective.ALL_REDUCE else PASSES,
        TILE=32 * WARPS * UNROLLED * BYTES // target.element_size(),
    )
    if count < target.numel():
        with torch.cuda.stream(stream):
            fill(move)


def _known(tensor: Tensor) -> Tensor:
    """The same, of a type that Triton knows if its elements are bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _launch(stream: torch.cuda.Stream, arguments: tuple[Any, ...], **constants: Any) -> None:
    """Triton takes longer to find the form of a kernel that suits its arguments than NCCL for a whole call, so that
    ranks which wait for the CPU would wait longer: what it found is kept by what it goes by."""
    target, source, count, period, _, nanoseconds = arguments
    aligned = [number % ALIGNED == 0 for number in (target.data_ptr(), source.data_ptr(), count, period)]
    wide = [number > INT32 for number in (count, period, nanoseconds)]
    form = (target.dtype, source.dtype, *aligned, *wide, count == 1, period == 1, *constants.values())
    if (launch := _forms.get(form)) is not None:
        launch(*arguments, *constants.values(), stream=stream.cuda_stream)
        return
    with torch.cuda.stream(stream):
        kernel = _paced[GRID](*arguments, **constants, num_warps=WARPS, maxnreg=REGISTERS)
    _forms[form] = kernel[GRID]


def _name(specialization: Any) -> str:
    """The kernel's name, by which `trainables.breakdown` knows its collective."""
    return f"{STANDIN}_{specialization.constants['KIND']}"


@triton.jit(do_not_specialize=["factor", "nanoseconds"], repr=_name)
def _paced(  # type: ignore[no-untyped-def]
    target,
    source,
    count,
    period,
    factor,
    nanoseconds,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    PASSES: tl.constexpr,
    TILE: tl.constexpr,
):
    """target[i] = source[i % period] * factor for i < count, tile after tile, each not before its share of the time.

    Each whole tile is then read, and written as it is, `PASSES` times more.
    """
    began = globaltimer()
    duration = nanoseconds.to(tl.int64)
    tiles_of_period = tl.cdiv(period, TILE)
    tiles = tl.cdiv(count, period) * tiles_of_period
    lanes = tl.arange(0, TILE)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        within = (tile % tiles_of_period).to(tl.int64) * TILE
        place = (tile // tiles_of_period).to(tl.int64) * period + within
        left = tl.minimum(period - within, count - place)
        if left >= TILE:  # without a mask, which would have values moved one by one
            values = tl.load(source + within + lanes)
            if SCALED:
                values = (values.to(tl.float32) * factor).to(target.dtype.element_ty)
            tl.store(target + place + lanes, values)
            for _ in tl.static_range(PASSES):
                tl.load(target + place + lanes, volatile=True)  # or it would be left out
                tl.store(target + place + lanes, values)
        else:
            values = tl.load(source + within + lanes, mask=lanes < left)
            if SCALED:
                values = (values.to(tl.float32) * factor).to(target.dtype.element_ty)
            tl.store(target + place + lanes, values, mask=lanes < left)
        due = began + duration * (tile + 1) // tiles
        now = globaltimer()
        while now < due:
            now = globaltimer()
    now = globaltimer()
    while now < began + duration:
        now = globaltimer()
