"""Tells Wattune when an optimizer step of a training ends. Two lines of the program's own:

    import wattune_steps
    ...
    wattune_steps.step(loss=loss)  # after each optimizer step, on every rank

Outside Wattune `step` does nothing, unless the environment's WATTUNE_RUN has it tell a watcher. This file needs nothing
but Python 3.8, and may be copied beside any program; where Wattune starts the program, it can be imported anyway. Under
Apache-2.0.

How times are taken. On the host a step is over when `step` is called. With CUDA (or ROCm) the device is still at work
then, so an event is recorded behind what it was given, which costs microseconds and waits for nothing; when the device
has passed it, its time is told. Times of events are the device's: once a minute, in the first step above all, the
device is waited for, and its clock held against `time.monotonic_ns`. So no step waits for the device because of being
timed, and what the host may run ahead falls out.

How it speaks in a trial. The environment's WATTUNE_STEPS is the path of a Unix stream socket; both sides write lines of
JSON. This side: `{"hello": {"version": 1, "device": UUID}}` once; `{"step": n, "ns": time, "tokens": count}` for each
step; and what it was asked for. The other side: `{"report": true}` asks for `{"report": {"losses": [...], "grad_norms":
[...], "peak_memory_gib": ..., "environment": {...}}}`, for which losses are read from the device, once; and
`{"profile": {"step": n, "path": ..., "device": "cuda" or null, "cpu": true}}` for a profile of step n, which is
answered by `{"profile": {"span_s": seconds, "problem": null or text}}` once the events are in the file.

How it speaks in a run of your own, with `wattune watch --run` listening or not. WATTUNE_RUN is the HOST:PORT of the
watcher, to which each step goes as one UDP datagram, an object as in `_Sender`. Nothing is waited for, and nobody need
listen: what cannot be sent at once is lost, and the watcher, which goes by the steps' numbers, can do without it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import time
from typing import Any

__all__ = ["step"]

VERSION = 1
ANCHOR_S = 60.0

_path = os.environ.get("WATTUNE_STEPS")
_watcher = os.environ.get("WATTUNE_RUN")
_teller: _Reporter | _Sender | None = None


def step(loss: Any = None, tokens: int | None = None, grad_norm: Any = None) -> None:
    """Tell that an optimizer step has just ended on this rank.

    `loss`: of the step, on this rank or over all, as a number or a tensor, which is not waited for. `grad_norm`: the
    norm of its gradient, likewise. `tokens`: of the step over all ranks, where it is not the same in each.
    """
    global _teller
    if _teller is None:
        if _path is not None:
            _teller = _Reporter(_path, loss)
        elif _watcher is not None:
            _teller = _Sender(_watcher, loss)
        else:
            return
    _teller.step(loss, tokens, grad_norm)


class _Stamps:
    """When steps end, told by `tell`: at once, or once the device has ended them."""

    def __init__(self, loss: Any) -> None:
        self.device = _device(loss)
        self.count = 0
        self.pending: list[tuple[int, Any, int | None]] = []  # steps that the device has yet to end, with an event
        self.anchor: tuple[Any, int] | None = None  # an event, and the monotonic time when it happened

    def stamp(self, tokens: int | None) -> None:
        """Another step ended."""
        self.count += 1
        now = time.monotonic_ns()
        if self.device is None:
            self.tell(self.count, now, tokens)
            return
        event = sys.modules["torch"].cuda.Event(enable_timing=True)
        event.record(sys.modules["torch"].cuda.current_stream(self.device))
        self.pending.append((self.count, event, tokens))
        if self.anchor is None or now - self.anchor[1] > ANCHOR_S * 1e9:
            event.synchronize()
            now = time.monotonic_ns()
            self.tell_passed()
            self.anchor = (event, now)
        self.tell_passed()

    def tell_passed(self) -> None:
        """Tell the steps that the device has ended."""
        while self.anchor is not None and self.pending and self.pending[0][1].query():
            number, event, tokens = self.pending.pop(0)
            start, start_ns = self.anchor
            self.tell(number, start_ns + round(start.elapsed_time(event) * 1e6), tokens)

    def tell(self, number: int, ns: int, tokens: int | None) -> None:
        raise NotImplementedError


class _Sender(_Stamps):
    """Tells a watcher: `{"rank": 0, "world": 8, "host": name, "pid": 7, "device": UUID or null, "step": n, "ns": time
    by the host's monotonic clock, "tokens": count or null}`. A training goes on though it cannot be done."""

    def __init__(self, address: str, loss: Any) -> None:
        super().__init__(loss)
        self.socket: socket.socket | None = None
        host, _, port = address.rpartition(":")
        try:
            place: dict[str, Any] = {"rank": int(os.environ.get("RANK", "0"))}
            place["world"] = int(os.environ.get("WORLD_SIZE", "1"))
            if not 0 < int(port) < 2**16:
                raise ValueError(f"there is no port {port}")
            family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            watcher = socket.socket(family, kind)
            watcher.setblocking(False)
            watcher.connect(where)
        except (OSError, ValueError) as error:
            print(f"wattune_steps: WATTUNE_RUN={address}: no watcher can be told: {error}", file=sys.stderr)
            return
        place.update(host=socket.gethostname(), pid=os.getpid(), device=_uuid(self.device))
        self.head, self.socket = json.dumps(place)[:-1], watcher

    def step(self, loss: Any, tokens: int | None, grad_norm: Any) -> None:
        if self.socket is not None:
            self.stamp(tokens)

    def tell(self, number: int, ns: int, tokens: int | None) -> None:
        assert self.socket is not None
        count = "null" if tokens is None else int(tokens)
        with contextlib.suppress(OSError):  # nobody listens, or not fast enough
            self.socket.send(f'{self.head}, "step": {number}, "ns": {ns}, "tokens": {count}}}'.encode())


class _Reporter(_Stamps):
    """Tells a trial of Wattune's, and answers it."""

    def __init__(self, path: str, loss: Any) -> None:
        super().__init__(loss)
        self.losses: list[Any] = []
        self.grad_norms: list[Any] = []
        self.reported = False
        self.profiling: _Profiling | None = None
        self.unread = b""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.say({"hello": {"version": VERSION, "device": _uuid(self.device)}})
        atexit.register(self.close, os.getpid())

    def step(self, loss: Any, tokens: int | None, grad_norm: Any) -> None:
        self.stamp(tokens)
        if not self.reported:
            self.losses.append(_kept(loss))
            self.grad_norms.append(_kept(grad_norm))
        for question in self.heard():
            if "report" in question:
                self.report()
            if "profile" in question:
                self.profiling = _Profiling(**question["profile"])
        if self.profiling is not None and self.profiling.step(self.count):
            self.say({"profile": self.profiling.answer})
            self.profiling = None

    def tell(self, number: int, ns: int, tokens: int | None) -> None:
        self.say({"step": number, "ns": ns, "tokens": tokens})

    def report(self) -> None:
        self.reported = True
        losses, grad_norms = _numbers(self.losses), _numbers(self.grad_norms)
        self.losses, self.grad_norms = [], []
        memory = None
        if self.device is not None:
            memory = sys.modules["torch"].cuda.max_memory_reserved(self.device) / 2**30
        answer = {"losses": losses, "grad_norms": grad_norms, "peak_memory_gib": memory}
        self.say({"report": {**answer, "environment": _environment(self.device)}})

    def close(self, pid: int) -> None:
        """At the program's end: what it has not told yet."""
        if os.getpid() != pid:
            return  # a fork of it
        if self.pending:
            self.pending[-1][1].synchronize()
            self.tell_passed()
        if not self.reported:
            self.report()

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the trial is over, and this process is about to be ended
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> list[Any]:
        """What was asked since the last time."""
        try:
            self.unread += self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError:
            return []
        *lines, self.unread = self.unread.split(b"\n")
        return [json.loads(line) for line in lines]


class _Profiling:
    """A step under torch's profiler. The step before it warms the profiler up."""

    def __init__(self, step: int, path: str, device: str | None, cpu: bool) -> None:
        self.wanted, self.path, self.device, self.cpu = step, path, device, cpu
        self.profiler: Any = None
        self.answer: dict[str, Any] | None = None
        self.start = 0.0

    def step(self, ended: int) -> bool:
        """To be called at the end of each step. Whether there is an answer."""
        try:
            self.follow(ended)
        except Exception as error:
            text = (str(error).splitlines() or ["no message"])[0]
            self.answer = {"span_s": None, "problem": f"the profiler failed: {type(error).__name__}: {text}"}
        return self.answer is not None

    def follow(self, ended: int) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            raise RuntimeError("the program does not use torch")
        if self.profiler is None and ended > self.wanted - 2:
            raise RuntimeError(f"it was asked for too late, at the end of step {ended}")
        if ended == self.wanted - 2:
            from torch.profiler import ProfilerActivity, profile, schedule

            activities = [ProfilerActivity.CPU] * self.cpu + [ProfilerActivity.CUDA] * (self.device == "cuda")
            self.profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1))
            self.profiler.__enter__()
        elif ended == self.wanted - 1:
            self.synchronize(torch)
            self.profiler.step()
            self.start = time.monotonic()
        elif ended == self.wanted:
            self.synchronize(torch)
            span_s = time.monotonic() - self.start
            self.profiler.__exit__(None, None, None)
            self.save(self.profiler.profiler.kineto_results.events())
            self.answer = {"span_s": span_s, "problem": None}

    def synchronize(self, torch: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def save(self, events: Any) -> None:
        """Write the events, a list for each, in the order of `trainables.profiling.Event`."""
        from torch.autograd import DeviceType

        rows = [
            [
                event.name(),
                event.device_type() == DeviceType.CPU,
                event.start_ns(),
                event.duration_ns(),
                event.start_thread_id(),
                event.correlation_id(),
                event.linked_correlation_id(),
                event.is_async(),
                event.is_user_annotation(),
            ]
            for event in events
        ]
        with open(self.path, "w") as file:
            json.dump(rows, file)


def _device(loss: Any) -> Any:
    """The CUDA device that the program trains on, or ROCm's under that name; None if it does not, or not yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    if getattr(loss, "is_cuda", False):
        return loss.device
    return torch.device("cuda", torch.cuda.current_device())


def _uuid(device: Any) -> str | None:
    if device is None:
        return None
    uuid = getattr(sys.modules["torch"].cuda.get_device_properties(device), "uuid", None)  # since torch 2.4
    return None if uuid is None else f"GPU-{uuid}"


def _environment(device: Any) -> dict[str, str]:
    found = {}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    if torch is not None and device is not None:
        found["gpu_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _kept(value: Any) -> Any:
    """A number as such, a tensor as a copy: the program may change its own, and to read it would be to wait for it."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach()
    if hasattr(value, "to_local"):  # a DTensor: to make it whole would be a collective
        value = value.to_local()
    return value.clone()


def _numbers(values: list[Any]) -> list[float | None]:
    """The values as they are by now, tensors on a device by one copy; a tensor of several numbers is their mean."""
    tensors = [value.float().mean() for value in values if hasattr(value, "detach")]
    read = iter(sys.modules["torch"].stack(tensors).tolist() if tensors else ())
    return [next(read) if hasattr(value, "detach") else None if value is None else float(value) for value in values]
