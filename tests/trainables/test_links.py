"""Messages between pipeline ranks wait for none that go elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from trainables.engines.megatron.links import Links
from trainables.standin.join import join

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    join(5, 24, lambda *call: 0.0, CPU)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_in_a_group_a_rank_only_sends_to_one_neighbour_or_only_receives_from_one(ranks: int) -> None:
    stride = 24 // ranks
    links = Links([range(first, 24, stride) for first in range(stride)], CPU)
    neighbours = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    uses = defaultdict(set)
    for sender, receiver in neighbours | {(after, rank) for rank, after in neighbours}:
        group = links.group(sender, receiver)
        assert dist.get_process_group_ranks(group) == list(range(5 % stride, 24, stride))
        for rank in (sender, receiver):
            uses[group, rank].add((sender, receiver))
    assert all(len(ends) == 1 for ends in uses.values())
