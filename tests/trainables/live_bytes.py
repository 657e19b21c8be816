"""Bytes of tensors that live in a process, for hosts, whose memory torch does not count."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_leaves

from search_spaces.layout import Layout
from trainables.measure import Step
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.rank import Rank
from trainables.slice import Slice
from trainables.slice_rank import SliceRank
from trainables.training import Training
from trainables.world import GangWorld

SETTLE_S = 0.01


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operators make, for as long as they live.

    Not what operators need within themselves, nor what a process group does: its threads keep tensors for a moment
    after a collective is over, and are left the time to drop them before a new maximum counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._communicated = False
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # they are asked first, and come back with the tensors that they wrap
        outputs = func(*args, **(kwargs or {}))
        known = len(self._storages)
        if all(returned.alias_info is None for returned in func._schema.returns):
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not is_wrapper(tensor):
                    storage = tensor.untyped_storage()
                    self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self._communicated |= "c10d" in func.namespace
        if len(self._storages) > known and self._now() > self.most:
            if self._communicated:
                time.sleep(SETTLE_S)
                self._communicated = False
            self.most = max(self.most, self._now())
        return outputs

    def _now(self) -> int:
        live = {cdata: storage for cdata in self._storages if (storage := _of(cdata)) is not None}
        self._storages = {cdata: self._storages[cdata] for cdata in live}
        return sum(storage.nbytes() for storage in live.values())


def _of(reference: int) -> Any:
    """The storage that a weak reference is to; None if it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(reference)


@dataclass(frozen=True)
class Counted(RankProgram):
    """Another program, in whose reports the peak of memory is that of `LiveBytes`."""

    program: RankProgram

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        return []

    def ranks(self, layout: Layout) -> Sequence[int]:
        return self.program.ranks(layout)

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        gc.disable()  # or when tensors in cycles go would depend on what else there is
        with LiveBytes() as live:
            report = self.program.run(request, place, on_progress)
        return replace(report, peak_memory_gib=live.most / 2**30)


@dataclass(frozen=True)
class InWholeSteps(Slice):
    """A rank alone whose first step has as many microbatches as the others, and the scalars of their losses."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        return _RankInWholeSteps(self, request, place, on_progress).report()


class _RankInWholeSteps(SliceRank):
    def first_step(self) -> Step:
        return self.timed_step()


@dataclass(frozen=True)
class Late(Slice):
    """A rank alone whose host, so it takes it, was late for its device in every step."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        return _LateRank(self, request, place, on_progress).report()


class _LateRank(SliceRank):
    late = True


@dataclass(frozen=True)
class Left(Counted):
    """Of which it is what is left whenever progress is told, at most: between two steps."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        left = [0]

        def tell(progress: Progress) -> None:
            gc.collect()
            left.append(live._now())
            on_progress(progress)

        with LiveBytes() as live:
            report = self.program.run(request, place, tell)
        return replace(report, peak_memory_gib=max(left) / 2**30)


@dataclass(frozen=True)
class MomentsAtStart(Training):
    """Trains, and reports as the peak of memory the bytes of Adam's moments that were there before the first step."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        rank = Rank(self, request, place, on_progress, GangWorld)
        states = rank.engine.engine.optimizer.optimizer.state.values()  # type: ignore[attr-defined]
        size = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
        return replace(rank.report(), peak_memory_gib=size / 2**30)
