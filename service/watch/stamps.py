"""What ranks of a run tell of their steps, each in one UDP datagram: see `trainables/hook/wattune_steps.py`."""

from __future__ import annotations

import json
import math
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from service.errors import InputError

DEFAULT = "127.0.0.1:7171"
"""Where a watcher listens: to runs on its own machine."""

LONGEST = 4096
"""Bytes of a datagram that are looked at, several times as many as a stamp has."""

BUFFER_BYTES = 4 * 2**20
"""Asked of the kernel for what has come and was not read yet."""

MOST_RANKS = 100_000
"""Ranks that are kept: more are nobody's run."""


@dataclass(frozen=True)
class Stamp:
    """A rank's step has ended at `ns` of its host's monotonic clock. `device`: the UUID of its GPU, None on CPU.

    `pid` tells a process from the one that took its place, whose steps are counted from 1 again. `tokens` are of the
    step over all ranks, None where the program does not say.
    """

    rank: int
    world: int
    host: str
    pid: int
    device: str | None
    step: int
    ns: int
    tokens: int | None


_KINDS: dict[str, tuple[type, ...]] = {"host": (str,), "device": (str, type(None)), "tokens": (int, type(None))}


def parse(datagram: bytes) -> Stamp | None:
    """A stamp, None of anything else that may have come."""
    try:
        values: Any = json.loads(datagram)
        stamp = Stamp(**{field.name: values[field.name] for field in fields(Stamp)})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    for field in fields(Stamp):
        value = getattr(stamp, field.name)
        if not isinstance(value, _KINDS.get(field.name, (int,))) or isinstance(value, bool):
            return None
    sane = 0 <= stamp.rank < stamp.world <= MOST_RANKS and stamp.step > 0 and stamp.ns > 0
    return stamp if sane and (stamp.tokens is None or stamp.tokens > 0) else None


class Listener:
    """Hears stamps at an address such as ``127.0.0.1:7171`` or, on all interfaces, ``0.0.0.0:7171``."""

    def __init__(self, address: str = DEFAULT) -> None:
        """Raises `InputError` for what is no address, and one that cannot be listened at."""
        host, colon, port = address.rpartition(":")
        try:
            if not (colon and host):
                raise ValueError("give HOST:PORT")
            if not 0 <= int(port) < 2**16:
                raise ValueError(f"there is no port {port}")
            where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)[0]
            self._socket = socket.socket(where[0], where[1])
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            self._socket.bind(where[4])
        except (OSError, ValueError) as error:
            raise InputError(f"listen: {address!r} cannot be listened at: {error}") from None

    @property
    def address(self) -> str:
        """HOST:PORT, as bound."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def until(self, deadline: float) -> Iterator[Stamp]:
        """The stamps that come until then, by `time.monotonic`, and those that came before."""
        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.0))
            try:
                stamp = parse(self._socket.recv(LONGEST))
            except (TimeoutError, BlockingIOError):
                return
            if stamp is not None:
                yield stamp

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Pace:
    """Steps of a run between two looks: how many, the seconds of one on the slowest rank, and its tokens if told.

    `of_ranks`: seconds of a step by rank.
    """

    steps: int
    step_s: float
    tokens: float | None
    of_ranks: dict[int, float]


class Ranks:
    """The ranks of a run, by their stamps. Some may be lost: what counts is numbers of steps and times."""

    def __init__(self) -> None:
        self._latest: dict[int, Stamp] = {}
        self._since: dict[int, Stamp] = {}
        self._tokens: deque[int] = deque(maxlen=64)
        self.heard_s = -math.inf

    def hear(self, stamp: Stamp) -> bool:
        """Take a stamp; whether it is of a process that was not known, so that a run begins, or begins again."""
        before = self._latest.get(stamp.rank)
        begins = before is None or (before.host, before.pid) != (stamp.host, stamp.pid)
        if not begins and before is not None and stamp.step <= before.step:
            return False  # out of order
        if begins and (before is not None or any(one.world != stamp.world for one in self._latest.values())):
            self._latest.clear()  # of processes that are no more
            self._since.clear()
        self._latest[stamp.rank] = stamp
        if begins:
            self._since[stamp.rank] = stamp
        if stamp.tokens is not None:
            self._tokens.append(stamp.tokens)
        self.heard_s = time.monotonic()
        return begins

    @property
    def stamps(self) -> list[Stamp]:
        """The latest of each rank."""
        return [stamp for _, stamp in sorted(self._latest.items())]

    def pace(self, least: int) -> Pace | None:
        """Since the last pace that there was; None as long as not all ranks have made so many steps."""
        made = {rank: (self._since[rank], stamp) for rank, stamp in self._latest.items()}
        counts = [last.step - first.step for first, last in made.values()]
        if not counts or min(counts) < max(least, 1):
            return None
        seconds = {rank: (last.ns - first.ns) / 1e9 / (last.step - first.step) for rank, (first, last) in made.items()}
        self._since = dict(self._latest)
        tokens = sum(self._tokens) / len(self._tokens) if self._tokens else None
        self._tokens.clear()
        return Pace(min(counts), max(seconds.values()), tokens, seconds)
