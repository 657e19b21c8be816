"""One point of a search: everything that says how a training step is split over the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

ENGINES = ("megatron", "deepspeed")
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp32", "fp8")
REDUCE_PRECISIONS = ("fp32", "bf16")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")

BUCKET_SIZE = 500_000_000
"""DeepSpeed's own default, in elements."""


@dataclass(frozen=True)
class Layout:
    """A layout of one training run.

    `global_batch_size` and `micro_batch_size` count sequences; `micro_batch_size` is per data-parallel rank.
    A rank's place in the mesh has the coordinates (pipeline, data, context, tensor), tensor innermost.

    - `context_parallel_size` splits each sequence: `megatron` gathers keys and values (Grattafiori et al. 2024,
      section 3.3), `deepspeed` exchanges heads for tokens (Ulysses, Jacobs et al. 2023).
    - `expert_parallel_size` spreads the experts of a mixture over that many data- and context-parallel ranks
      (Lepikhin et al. 2020).
    - `pipeline_schedule` is one of `SCHEDULES`: GPipe (Huang et al. 2019), 1F1B and its interleaved form (Narayanan
      et al. 2021), zero bubble and its V form (Qi et al. 2023); `virtual_pipeline_stages` is the number of stages each
      pipeline rank holds, and `stage_layers` the layers of every stage in the model's order, None for equal ones.
    - `zero_stage` shards over the data- and context-parallel ranks (Rajbhandari et al. 2020): 0 nothing, 1 optimizer
      states, 2 gradients too, 3 parameters too. Shards are kept `data_parallel_replicate_size` times, each copy spread
      over as many neighbouring ranks as that leaves: hybrid sharding, when a copy stays within a node.
    - `sequence_parallel` shards the activations between the tensor-parallel regions along the sequence (Korthikanti
      et al. 2022); `async_tensor_parallel` overlaps the communication of these regions with their matrix products.
    - `recompute`: `selective` keeps the outputs of matrix products and attention and computes the rest of a block again
      in the backward pass, `full` keeps a block's input alone.
    - `overlap_grad_reduce`, `overlap_param_gather`: whether gradients are reduced, and parameters gathered, while the
      GPUs compute. `bucket_size` is the number of elements that DeepSpeed sends at once.
    - `offload_optimizer` keeps optimizer states and their update on the CPU (Ren et al. 2021).
    - `precision` is that of matrix products; `reduce_precision` that in which gradients are summed over ranks.
    - `rank_order[i]` is the worker of the gang, and so the GPU, that takes rank i; None for i itself.
    """

    engine: str
    num_gpus: int
    global_batch_size: int
    micro_batch_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_schedule: str = "1f1b"
    virtual_pipeline_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    zero_stage: int = 0
    data_parallel_replicate_size: int = 1
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    recompute: str = "none"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    bucket_size: int = BUCKET_SIZE
    offload_optimizer: bool = False
    compile: bool = False
    precision: str = "bf16"
    reduce_precision: str = "fp32"
    rank_order: tuple[int, ...] | None = None

    @property
    def model_parallel_size(self) -> int:
        """GPUs that share one replica of the model."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model: the GPUs that tensor, context and pipeline parallelism leave."""
        return self.num_gpus // self.model_parallel_size

    @property
    def shard_ranks(self) -> int:
        """Ranks that hold the same parameters, over which ZeRO may shard."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Microbatches that each replica runs in one optimizer step."""
        return self.global_batch_size // (self.data_parallel_size * self.micro_batch_size)

    @property
    def pipeline_stages(self) -> int:
        """Stages of the whole pipeline, virtual ones counted."""
        return self.pipeline_parallel_size * self.virtual_pipeline_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule makes the gradients of inputs and of weights apart: zero bubble."""
        return self.pipeline_schedule.endswith("zero_bubble")

    def layers_by_stage(self, layers: int) -> tuple[range, ...]:
        """The blocks of each stage, in the model's order; `layers` is the model's number of blocks."""
        counts = self.stage_layers or (layers // self.pipeline_stages,) * self.pipeline_stages
        starts = [sum(counts[:stage]) for stage in range(len(counts))]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in the model's order."""
        ranks = self.pipeline_parallel_size
        if self.pipeline_schedule == "zbv_zero_bubble":
            return [pipeline_rank, 2 * ranks - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.pipeline_stages, ranks))

    def worker_rank(self, worker: int) -> int:
        """The rank that worker `worker` of the gang takes in the trial."""
        return worker if self.rank_order is None else self.rank_order.index(worker)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank in the mesh by axis: pp, dp, cp, tp."""
        tp, cp, dp = self.tensor_parallel_size, self.context_parallel_size, self.data_parallel_size
        return {
            "pp": rank // (tp * cp * dp),
            "dp": rank // (tp * cp) % dp,
            "cp": rank // tp % cp,
            "tp": rank % tp,
        }

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-safe, the two derived sizes included."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return values | {
            "data_parallel_size": self.data_parallel_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """Inverse of `to_dict`, also after a round trip through JSON.

        Derived and foreign keys are ignored; what an older record lacks has its default.
        """
        known: dict[str, Any] = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known)

    @property
    def label(self) -> str:
        """A short name of what differs from the simplest layout: ``megatron 4gpu dp2 tp2 zero1 mbs2 sp``."""
        sizes = {
            "dp": self.data_parallel_size,
            "tp": self.tensor_parallel_size,
            "pp": self.pipeline_parallel_size,
            "cp": self.context_parallel_size,
            "ep": self.expert_parallel_size,
        }
        flags = {
            self.pipeline_schedule: self.pipeline_parallel_size > 1 and self.pipeline_schedule != "1f1b",
            f"vpp{self.virtual_pipeline_stages}": self.virtual_pipeline_stages > 1,
            "layers" + "-".join(map(str, self.stage_layers or ())): self.stage_layers is not None,
            f"x{self.data_parallel_replicate_size}": self.data_parallel_replicate_size > 1,
            "sp": self.sequence_parallel,
            "async-tp": self.async_tensor_parallel,
            "recompute": self.recompute == "full",
            "selective": self.recompute == "selective",
            "no-grad-overlap": not self.overlap_grad_reduce,
            "no-param-overlap": not self.overlap_param_gather,
            f"bucket{self.bucket_size:.0e}".replace("e+0", "e"): self.bucket_size != BUCKET_SIZE,
            "offload": self.offload_optimizer,
            "compile": self.compile,
            self.precision: self.precision != "bf16",
            "reduce-bf16": self.reduce_precision == "bf16",
            "order" + "-".join(map(str, self.rank_order or ())): self.rank_order is not None,
        }
        parts = [self.engine, f"{self.num_gpus}gpu"]
        parts += [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "dp"]
        parts += [f"zero{self.zero_stage}", f"mbs{self.micro_batch_size}"]
        return " ".join(parts + [name for name, on in flags.items() if on])
