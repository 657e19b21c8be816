"""How many parameters a GPU of a layout holds."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.models import ModelShape


@dataclass(frozen=True)
class Held:
    """Parameters of the parts that a GPU holds, before ZeRO shards them; `largest` and `block` are of one such part.

    `experts` are counted apart from all others, `dense`: they are spread over ranks that hold the same dense ones.
    """

    dense: float
    experts: float
    largest: float
    block: float

    @property
    def whole(self) -> float:
        return self.dense + self.experts

    def sharded(self, layout: Layout) -> float:
        """Those of which a GPU has the optimizer states (Rajbhandari et al. 2020, figure 1)."""
        ranks = layout.shard_group_size
        return self.dense / ranks + self.experts / max(1, ranks // layout.expert_parallel_size)


def held(layout: Layout, model: ModelShape, rank: int, splits_tables: bool) -> Held:
    """Of a GPU of a pipeline rank. `splits_tables`: whether tensor parallelism splits embedding and head, too.

    Tensor parallelism splits all else but norms, routers, and the biases that follow sums over ranks (Shoeybi et al.
    2019, section 3). Where a tied table's two ends are on different ranks, each has a copy.
    """
    tensor, layers = layout.tensor_parallel_size, layout.layers_of(rank, model.layers)
    first, last = (rank == end for end in layout.end_ranks)
    gpt = model.family == "gpt"
    norm = model.hidden * (2 if gpt else 1)
    cut = tensor if splits_tables else 1
    table = model.vocab * model.hidden / cut
    embedding = table + (model.max_sequence_length * model.hidden / cut if gpt else 0) if first else 0.0
    head = norm + (0.0 if model.tie_embeddings and first else table) if last else 0.0
    experts = model.num_experts * model.expert_parameters
    unsplit = 2 * norm + model.num_experts * model.hidden + (2 * model.hidden if gpt and not experts else 0)
    dense = (model.block_parameters - experts - unsplit) / tensor + unsplit
    experts_here = experts / tensor / layout.expert_parallel_size
    return Held(
        dense=layers * dense + embedding + head,
        experts=layers * experts_here,
        largest=max(dense, experts_here, embedding, head),
        block=dense + experts_here,
    )
