"""Context parallelism of the `megatron` engine: each rank holds an early and a late piece of every sequence.

Keys and values are gathered, queries stay where they are (Grattafiori et al. 2024, section 3.3.2). Of 2 N pieces rank r
of N holds pieces r and 2 N - 1 - r, so that all ranks have the same share of the causal triangle.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, _functional_collectives

from trainables.merged import is_fast, merged_parts


def positions(sequence_length: int, size: int, rank: int, device: torch.device) -> Tensor:
    """Where the tokens of rank `rank` of `size` lie in a sequence, ascending, int64 (sequence_length / size,)."""
    whole = torch.arange(sequence_length, device=device)
    if size == 1:
        return whole
    pieces = whole.chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


def attend_to_the_ends(q: Tensor, keys_values: Tensor, rank: int) -> Tensor:
    """What `merged_parts` gives, by a kernel for each piece of the queries. It takes no grouped ones, and keys in the
    order of the sequence."""
    early, late = keys_values.chunk(2, dim=4)
    whole = torch.cat((*early, *late.flip(0)), dim=3)
    repeats = q.shape[1] // whole.shape[2]
    if repeats > 1:
        whole = whole.unsqueeze(3).expand(-1, -1, -1, repeats, -1, -1).flatten(2, 3)
    outputs = []
    for piece, query in zip((rank, 2 * len(keys_values) - 1 - rank), q.chunk(2, dim=2), strict=True):
        outputs.append(_attend_to_the_end(query, *whole[..., : (piece + 1) * query.shape[2], :]))
    return torch.cat(outputs, dim=2)


def _attend_to_the_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of queries that are the last of the positions that `k` and `v` have."""
    queries, keys = q.shape[2], k.shape[2]
    if q.is_cuda and q.dtype == torch.bfloat16:
        # FlashAttention-2 aligns causal masks with the end; no function of torch says so without making the mask.
        output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return output
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


COMPILED: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
"""What the compiler is told of blocks with `GatheredAttention`: to send as early as it can, and wait as late. Queries
are then computed while keys and values are gathered, and gradients of weights while theirs are summed."""


class GatheredAttention:
    """Causal attention of this rank's queries to the keys and values of whole sequences. Collective over `group`."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: (batch, heads, sequence / size, head_dim), keys and values with as many or fewer heads; like q."""
        keys_values = self._gather(torch.stack((k, v)))
        if is_fast(q, k):
            merged: Tensor = merged_parts(q, keys_values, self.rank)[0]
            return merged
        return attend_to_the_ends(q, keys_values, self.rank)

    def _gather(self, local: Tensor) -> Tensor:
        """What each rank has, (size, *shape). Collective."""
        gather = getattr(_functional_collectives, "all_gather_single_autograd", None)
        if gather is None:  # its name before torch 2.13
            gather = _functional_collectives.all_gather_tensor_autograd
        gathered = _functional_collectives.wait_tensor(gather(local.contiguous(), 0, self.group))
        whole: Tensor = gathered.unflatten(0, (self.size, local.shape[0]))
        return whole
