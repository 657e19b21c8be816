"""The one object that knows which ranks work together: a trial's device meshes and process groups."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from search_spaces.layout import ONE_STAGE_SCHEDULES, Layout
from trainables.engines.megatron.links import Links
from trainables.tensor_ranks import TensorRanks


class Mesh:
    """Ranks by their coordinates, tensor parallel innermost, then context, data and pipeline parallel.

    ZeRO shards over the data- and the context-parallel ranks alike: both hold the same parameters. Experts are spread
    over the innermost of these, and sharded over the rest.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.device = device
        pp, tp, cp, ep = (
            layout.pipeline_parallel_size,
            layout.tensor_parallel_size,
            layout.context_parallel_size,
            layout.expert_parallel_size,
        )
        copies = layout.data_parallel_replicate_size if layout.zero_stage else layout.shard_ranks
        shards = layout.shard_ranks // copies
        self.hybrid = copies > 1
        self.dense = self._mesh(pp=pp, replicate=copies, shard=shards, tp=tp)
        self.pipeline_links = None
        if layout.pipeline_schedule not in ONE_STAGE_SCHEDULES:
            self.pipeline_links = Links(self.dense.mesh.view(pp, -1).T.tolist(), device)
        self.tensor_ranks = None
        if tp > 1:
            group = self.tensor.get_group()
            self.tensor_ranks = TensorRanks.of(group, layout.sequence_parallel, layout.async_tensor_parallel)
        self.context = self._mesh(outer=layout.num_gpus // (cp * tp), cp=cp, tp=tp) if cp > 1 else None
        self.experts = None
        if ep > 1 and shards > 1:
            self.experts = self._mesh(pp=pp, replicate=copies, shard=shards // ep, ep=ep, tp=tp)
        elif ep > 1:  # nothing is sharded: the copies hold different experts
            self.experts = self._mesh(pp=pp, replicate=copies // ep, shard=1, ep=ep, tp=tp)

    @property
    def sharding(self) -> DeviceMesh:
        """Over which FSDP2 replicates and shards the parameters of a part."""
        return self.dense["replicate", "shard"] if self.hybrid else self.dense["shard"]

    @property
    def expert_sharding(self) -> DeviceMesh:
        """Over which FSDP2 replicates and shards the parameters of experts."""
        if self.experts is None:
            return self.sharding
        return self.experts["replicate", "shard"] if self.hybrid else self.experts["shard"]

    @property
    def tensor(self) -> DeviceMesh:
        return self.dense["tp"]

    @property
    def pipeline_group(self) -> ProcessGroup:
        return self.dense.get_group("pp")

    @property
    def context_group(self) -> ProcessGroup | None:
        return None if self.context is None else self.context.get_group("cp")

    @property
    def expert_group(self) -> ProcessGroup | None:
        return None if self.experts is None else self.experts.get_group("ep")

    def _mesh(self, **sizes: int) -> DeviceMesh:
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
