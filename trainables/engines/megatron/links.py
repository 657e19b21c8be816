"""Process groups for messages that pipeline ranks post ahead of the passes that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

CHANNELS = 4
"""Of NCCL's, each of which has a thread block, and with it one of the GPU's processors. Up to 32 of these would wait
beside the passes for a message that is awaited."""


class Links:
    """The ring of a pipeline's ranks: from each to the next, and back, messages go by a group of their own.

    What NCCL is asked for in one group it does one after the other, so that a message whose other end has not come
    would hold up those behind it. Of the groups here a rank only sends in some, and only receives in others, each to or
    from one neighbour.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], device: torch.device) -> None:
        """`pipelines`: of each the global ranks in their order, all as many. Collective, for the ranks of all."""
        self.ranks = len(pipelines[0])
        self.groups: dict[tuple[int, bool], ProcessGroup] = {
            line: dist.new_subgroups_by_enumeration(pipelines, pg_options=_options(device))[0]
            for line in sorted({self._line(*ends) for ends in self._ends()})
        }

    def group(self, sender: int, receiver: int) -> ProcessGroup:
        """For messages between two ranks of the pipeline, by their places in it, of which this one is one."""
        return self.groups[self._line(sender, receiver)]

    def _ends(self) -> list[tuple[int, int]]:
        nexts = [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]
        return nexts + [(after, rank) for rank, after in nexts]

    def _line(self, sender: int, receiver: int) -> tuple[int, bool]:
        """Links that share a rank have different lines: every second one the same, but that from an odd last rank."""
        onward = receiver == (sender + 1) % self.ranks and not (self.ranks == 2 and sender == 1)
        link = sender if onward else receiver
        return (2 if self.ranks % 2 and link == self.ranks - 1 else link % 2), onward


def _options(device: torch.device) -> Any:
    if device.type != "cuda" or dist.get_backend() != dist.Backend.NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = CHANNELS
    return options
