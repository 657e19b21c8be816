"""One point of a search: everything that says how a training step is split over the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

ENGINES = ("megatron", "deepspeed")
RECOMPUTE = ("none", "full")
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True)
class TrialConfig:
    """A layout of one training run.

    `global_batch_size` and `micro_batch_size` count sequences; `micro_batch_size` is per data-parallel rank.
    `zero_stage` shards over the data-parallel ranks (Rajbhandari et al. 2020): 0 nothing, 1 optimizer states,
    2 gradients too, 3 parameters too. `sequence_parallel` shards the activations between the tensor-parallel
    regions along the sequence (Korthikanti et al. 2022).
    """

    engine: str
    num_gpus: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    zero_stage: int
    micro_batch_size: int
    global_batch_size: int
    recompute: str
    sequence_parallel: bool
    compile: bool
    precision: str

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model: the GPUs that tensor and pipeline parallelism leave."""
        return self.num_gpus // (self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Microbatches that each replica runs in one optimizer step."""
        return self.global_batch_size // (self.data_parallel_size * self.micro_batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-safe, the two derived sizes included."""
        return asdict(self) | {
            "data_parallel_size": self.data_parallel_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrialConfig:
        """Inverse of `to_dict`; derived and foreign keys are ignored."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def label(self) -> str:
        """A short name for people: ``megatron 4gpu dp2 tp2 pp1 zero1 mbs2 sp``."""
        parts = [
            self.engine,
            f"{self.num_gpus}gpu",
            f"dp{self.data_parallel_size}",
            f"tp{self.tensor_parallel_size}",
            f"pp{self.pipeline_parallel_size}",
            f"zero{self.zero_stage}",
            f"mbs{self.micro_batch_size}",
        ]
        flags = {"sp": self.sequence_parallel, "recompute": self.recompute == "full", "compile": self.compile}
        return " ".join(parts + [name for name, on in flags.items() if on])
