"""Has torch record what a rank asks its allocator for: programs for the ranks of a trial, and for one that is alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainables.measure import Step
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank
from trainables.slice import Slice
from trainables.slice_rank import SliceRank
from trainables.training import Training
from trainables.world import GangWorld

MOST_EVENTS = 10_000_000
"""Of which torch keeps no more: some 40,000 a step are made."""

FRAMES = 3
"""Of the functions that an allocation is made by, the innermost ones outside torch."""

OWN = ("deepspeed", "trainables", "search_spaces")


@dataclass(frozen=True)
class Traced(Training):
    """Trains while torch records what it allocates in the first `steps` steps, told in `folder`; `named`: and by which
    functions."""

    steps: int
    folder: str
    named: bool

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """As `Training.run`."""
        record(self.named)
        return TracedRank(self, request, place, on_progress, GangWorld).report()


@dataclass(frozen=True)
class TracedSlice(Slice):
    """Likewise one rank, alone, whose `training` is traced."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """As `Slice.run`."""
        assert isinstance(self.training, Traced)
        record(self.training.named)
        return TracedAlone(self, request, place, on_progress).report()


class TracedRank(Rank):
    """A rank whose allocations are recorded."""

    training: Traced

    def timed_step(self) -> Step:
        timed = super().timed_step()
        if len(self.losses) == self.training.steps:
            device = self.world.device
            told = {"reserved": torch.cuda.max_memory_reserved(device)}
            traces = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(None)
            told |= events(max(traces, key=len))
            (Path(self.training.folder) / f"{self.world.rank}.json").write_text(json.dumps(told))
            self.world.slowest(0.0)
        return timed


class TracedAlone(TracedRank, SliceRank):
    """A rank that is alone, whose allocations are recorded. Its steps are those of the others."""

    def first_step(self) -> Step:
        return self.timed_step()


def record(named: bool) -> None:
    """From now on."""
    context = "alloc" if named else None
    torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=MOST_EVENTS)


def events(trace: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`events`, `places` and `addresses` of a device's trace in torch's snapshot."""
    made: list[list[Any]] = []
    addresses: list[int] = []
    places: dict[str, int] = {}
    streams: dict[int, int] = {}
    there: dict[int, int] = {}
    for one in trace:
        stream = streams.setdefault(one["stream"], len(streams))
        if one["action"] == "alloc":
            there[one["addr"]] = len(made)
            made.append([one["size"], stream, places.setdefault(_place(one.get("frames", ())), len(places))])
        elif one["action"] in ("segment_alloc", "segment_free"):
            if one["action"] == "segment_alloc":
                addresses.append(one["addr"])
            made.append([one["size"] if one["action"] == "segment_alloc" else -one["size"], stream])
        elif one["action"] == "free_requested" and one["addr"] in there:
            made.append([there[one["addr"]]])
        elif one["action"] == "free_completed":
            index = there.pop(one["addr"], None)
            if index is not None and made[-1] != [index]:
                made.append([index, "late"])
    return {"events": made, "places": list(places), "addresses": addresses}


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    own = [one for one in frames if any(name in one["filename"] for name in OWN)]
    return " < ".join(f"{Path(one['filename']).stem}.{one['name']}:{one['line']}" for one in (own or frames)[:FRAMES])
