"""Has a program be alone in torch.distributed without knowing: Python imports this before it runs anything.

Lies in a folder that is on `PYTHONPATH` only where one rank of a program runs without the others. What the program
imports is its own: of Wattune there are the packages that stand in for its ranks, if it has none of the same names. A
`sitecustomize` of its environment comes after this one.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("trainables", "search_spaces")
JOINS = "torch.distributed.distributed_c10d"
"""The module that every way into torch.distributed leads through."""

PATIENCE_S = 10.0
"""How long a connection is waited for, which may be from a helper of the program's own."""


class Wattune(MetaPathFinder):
    """Finds `PACKAGES` where this file lies."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)]) if name in PACKAGES else None


class Joining(MetaPathFinder):
    """Has the module `JOINS` join alone, once it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == JOINS else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                module.__dict__["init_process_group"] = alone(module.__dict__["init_process_group"])

            spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def alone(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """What joins no other ranks in place of `init_process_group`. torch is there only when it is called."""

    @functools.wraps(init_process_group)
    def join(*arguments: Any, **named: Any) -> None:
        from trainables.standin.program import join_alone

        join_alone(init_process_group, *arguments, **named)

    return join


def accept(self: socket.socket) -> tuple[socket.socket, Any]:
    """`socket.accept` of a program whose other ranks are not there to connect: it fails rather than wait for ever."""
    waits = self.gettimeout() is None and threading.current_thread() is threading.main_thread()
    if waits and self.family != socket.AF_UNIX and not select.select([self], [], [], PATIENCE_S)[0]:
        address = self.getsockname()
        raise RuntimeError(
            f"a connection to {address[0]}:{address[1]} is waited for, but this rank runs alone: others are stood in "
            "for in torch.distributed, not at sockets of the program's own"
        )
    return _accept(self)


def next_of_this_name() -> None:
    """Execute the `sitecustomize` that this one hides, if there is one."""
    spec = PathFinder.find_spec(__name__, [path for path in sys.path if Path(path).resolve() != HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_accept = socket.socket.accept
if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Joining())
    sys.meta_path.append(Wattune())
    socket.socket.accept = accept  # type: ignore[method-assign]
    next_of_this_name()
