"""Which parameters a rank of DeepSpeed's ZeRO-3 has gathered, and in what memory, by `zero/partition_parameters.py` and
`zero/partitioned_param_coordinator.py` of DeepSpeed 0.19."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_spaces.replay.allocator import Allocator, Piece

MOST_LIVE = NEAR = 1_000_000_000
"""Parameters that are there at once, at most, and how many others may come between two uses of one that is kept in the
meantime: `stage3_max_live_parameters` and `stage3_max_reuse_distance`, as they are by default."""

WIDTH = 2


@dataclass(eq=False)
class Handle:
    """What is gathered by one call, in one piece (`together`), which stays until each of the parameters is needed. With
    the first that is, all are copied out of it, but a single one, which is in it."""

    names: list[str]
    together: Piece | None
    left: int
    copied: bool = False


class Gathering:
    """Of parameters with sizes, in the order of a microbatch, which the first one shows.

    Up to `ahead` parameters are gathered before their turn. What is let go of waits until the GPU is through with it:
    where the CPU is `hurried`, it is ahead of the GPU until it has to `catch_up`.
    """

    def __init__(
        self, allocator: Allocator, sizes: Mapping[str, int], ahead: int, stream: int, hurried: bool = False
    ) -> None:
        self.allocator, self.sizes, self.ahead, self.stream, self.hurried = allocator, sizes, ahead, stream, hurried
        self.going: list[Piece] = []
        self.there: dict[str, Piece] = {}
        self.coming: dict[str, Handle] = {}
        self.order: list[tuple[str, ...]] = []
        self.begin()

    def begin(self) -> None:
        """A microbatch."""
        self.turn = self.live = 0
        self.queue = deque((name, turn) for turn, names in enumerate(self.order) for name in names)
        self.asked: dict[str, int] = {}

    def fetch(self, names: Sequence[str]) -> None:
        """Have a module's parameters, and send for those of the next ones."""
        if self.turn == len(self.order):  # in the first microbatch
            self.order.append(tuple(names))
        self._send_for(names)
        for name in names:
            if name in self.coming:
                self._have(name)
        fresh = {name for name in names if self.asked.get(name, -1) < self.turn}
        while self.queue and self.queue[0][0] in fresh:
            name, self.asked[name] = self.queue.popleft()
        self._send_for(self._next())
        self.turn += 1

    def let_go(self, names: Sequence[str]) -> None:
        """Of a module's parameters that are not soon needed again."""
        near = self._near()
        for name in names:
            if name in self.there and self.asked.get(name, -1) <= self.turn and name not in near:
                self.going.append(self.there.pop(name))
                self.live -= self.sizes[name]
        if not self.hurried:
            self.catch_up()

    def catch_up(self) -> None:
        """The GPU is where the CPU is."""
        for piece in self.going:
            self.allocator.give_back(piece)
        self.going.clear()

    def end(self) -> None:
        """A microbatch: nothing stays gathered."""
        self.going += self.there.values()
        self.there.clear()
        for handle in dict.fromkeys(self.coming.values()):
            if handle.together is not None:
                self.going.append(handle.together)
        self.coming.clear()
        self.catch_up()
        self.begin()

    def _send_for(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self.there and name not in self.coming]
        if missing:
            count = sum(self.sizes[name] for name in missing)
            self.live += count
            handle = Handle(missing, self.allocator.take(WIDTH * count, self.stream), len(missing))
            self.coming |= dict.fromkeys(missing, handle)

    def _have(self, name: str) -> None:
        handle = self.coming.pop(name)
        handle.left -= 1
        if handle.together is not None and len(handle.names) == 1:
            self.there[name], handle.together = handle.together, None
        elif not handle.copied:
            handle.copied = True
            for each in handle.names:
                self.there[each] = self.allocator.take(WIDTH * self.sizes[each], self.stream)
        if not handle.left and handle.together is not None:
            self.allocator.give_back(handle.together)

    def _next(self) -> list[str]:
        """Parameters to send for ahead of their turn."""
        room, count, found = min(MOST_LIVE - self.live, self.ahead), 0, []
        while self.queue and count < room:
            name, turn = self.queue.popleft()
            self.asked[name] = max(self.asked.get(name, -1), turn)
            if name not in self.there and name not in self.coming and name not in found:
                found.append(name)
                count += self.sizes[name]
        return found

    def _near(self) -> set[str]:
        """Those that are needed again soon."""
        found: set[str] = set()
        count = 0
        for names in self.order[self.turn :]:
            if count >= NEAR:
                break
            found.update(names)
            count += sum(self.sizes[name] for name in names)
        return found
