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

PERSISTENT = 100_000
"""A parameter of no more values is not let go of once the order of a microbatch is known:
`stage3_param_persistence_threshold`, as it is by default."""

WIDTH = 2


@dataclass(frozen=True)
class Module:
    """One that DeepSpeed has its hooks on, with its `own` parameters and `all` of it and of what is in it. A `leaf` has
    no hooks in it: what is in it is gathered with it."""

    own: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    leaf: bool = False

    @property
    def gathered(self) -> tuple[str, ...]:
        return self.all if self.leaf else self.own


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

    Up to `ahead` parameters are gathered before their turn.
    """

    def __init__(self, allocator: Allocator, sizes: Mapping[str, int], ahead: int, stream: int) -> None:
        self.allocator, self.sizes, self.ahead, self.stream = allocator, sizes, ahead, stream
        self.there: dict[str, Piece] = {}
        self.coming: dict[str, Handle] = {}
        self.order: list[Module] = []
        self.knows_order = False
        self.done_with: dict[int, list[str]] = {}
        self._begin()

    def _begin(self) -> None:
        """A microbatch."""
        self.turn = self.live = 0
        self.queue = deque((name, turn) for turn, module in enumerate(self.order) for name in module.gathered)
        self.asked: dict[str, int] = {}

    def fetch(self, module: Module) -> None:
        """Have a module's parameters, and send for those of the next ones."""
        if not self.knows_order:
            self.order.append(module)
        names = module.gathered
        self._send_for(names)
        handles = dict.fromkeys(self._have(name) for name in names if name in self.coming)
        # A module's parameters come in no order, so that one of several handles is hardly done with before the next.
        for handle in handles:
            if not handle.left and handle.together is not None:
                self.allocator.give_back(handle.together)
        if self.knows_order:
            fresh = {name for name in names if self.asked.get(name, -1) < self.turn}
            while fresh and self.queue and self.queue[0][0] in fresh:
                name, self.asked[name] = self.queue.popleft()
                fresh.discard(name)
            self._send_for(self._next())
        self.turn += 1

    def let_go(self, module: Module) -> None:
        """Of a module's parameters that are not soon needed again."""
        for name in self._done_with(module):
            if name in self.there:
                self.allocator.give_back(self.there.pop(name))
                self.live -= self.sizes[name]

    def end(self) -> None:
        """A microbatch: nothing stays gathered, but the small ones once the order is known."""
        for name in list(self.there):
            if not self.knows_order or self.sizes[name] > PERSISTENT:
                self.allocator.give_back(self.there.pop(name))
        self.knows_order = True
        self._begin()

    def gather_small(self) -> None:
        """As after each update."""
        for name, size in self.sizes.items():
            if size <= PERSISTENT and name not in self.there:
                self.there[name] = self.allocator.take(WIDTH * size)

    def _send_for(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self.there and name not in self.coming]
        if missing:
            count = sum(self.sizes[name] for name in missing)
            self.live += count
            handle = Handle(missing, self.allocator.take(WIDTH * count, self.stream), len(missing))
            self.coming |= dict.fromkeys(missing, handle)

    def _have(self, name: str) -> Handle:
        handle = self.coming.pop(name)
        handle.left -= 1
        if handle.together is not None and len(handle.names) == 1:
            self.there[name], handle.together = handle.together, None
        elif not handle.copied:
            handle.copied = True
            for each in handle.names:
                self.there[each] = self.allocator.take(WIDTH * self.sizes[each], self.stream)
        return handle

    def _next(self) -> list[str]:
        """Parameters to send for ahead of their turn."""
        room, count, found = min(MOST_LIVE - self.live, self.ahead), 0, dict[str, None]()
        while self.queue and count < room:
            name, turn = self.queue.popleft()
            self.asked[name] = max(self.asked.get(name, -1), turn)
            if name not in self.there and name not in self.coming and name not in found:
                found[name] = None
                count += self.sizes[name]
        return list(found)

    def _done_with(self, module: Module) -> list[str]:
        """What is let go of after a module's turn, which DeepSpeed works out once for each."""
        if not self.knows_order:
            return list(module.gathered)
        if self.turn not in self.done_with:
            near = self._near(module)
            self.done_with[self.turn] = [
                name
                for name in module.gathered
                if self.sizes[name] > PERSISTENT and self.asked.get(name, -1) <= self.turn and name not in near
            ]
        return self.done_with[self.turn]

    def _near(self, module: Module) -> set[str]:
        """Those that are needed again soon, as DeepSpeed looks for them: of later modules it counts all that is in them
        where the one that is done is a leaf, and else only what is their own, which of leaves is nothing."""
        found: set[str] = set()
        count = 0
        for later in self.order[self.turn :]:
            if count >= NEAR:
                break
            names = later.all if module.leaf else later.own
            found.update(names)
            count += sum(self.sizes[name] for name in names)
        return found
