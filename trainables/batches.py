"""Which sequences each data-parallel rank trains on: the same global batch in every layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from search_spaces.layout import Layout
from trainables.data import TokenStream
from trainables.engines.base import Microbatch


def microbatches(
    stream: TokenStream, layout: Layout, sequence_length: int, step: int, rank: int, device: torch.device
) -> Iterator[Microbatch]:
    """The microbatches of one optimizer step for data-parallel rank `rank`.

    Step s trains on the samples s * B to (s + 1) * B - 1 of the stream, B the global batch size, dealt out in rounds:
    a microbatch to each rank in turn.
    """
    size, ranks = layout.micro_batch_size, layout.data_parallel_size
    for index in range(layout.gradient_accumulation_steps):
        first = step * layout.global_batch_size + (index * ranks + rank) * size
        rows = np.stack([stream.sequence(first + row, sequence_length) for row in range(size)])
        tokens = torch.from_numpy(rows).to(device, non_blocking=True)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
