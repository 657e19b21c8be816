"""One layout: everything that says how a training step is split over the GPUs, axis by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import Any, get_type_hints

from search_spaces.axis import Axis, Range, Scale, axis, own_axis, row_of

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")

BUCKET_SIZE = 500_000_000
"""DeepSpeed's own default, in elements."""

SIZES = Range(1)
LABEL = (
    "engine",
    "num_gpus",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "zero_stage",
    "micro_batch_size",
)
"""What a label begins with, in this order; all other axes follow in that of the fields."""

ALWAYS_LABELLED = ("engine", "num_gpus", "data_parallel_size", "zero_stage", "micro_batch_size")


def _pipelined(layout: Layout) -> bool:
    return layout.pipeline_parallel_size > 1


def _sharded(layout: Layout) -> bool:
    return layout.zero_stage > 0


def _several_hold_the_same(layout: Layout) -> bool:
    return layout.shard_ranks > 1


def _joined(word: str) -> Any:
    return lambda numbers: word + "-".join(map(str, numbers))


def _stages(counts: tuple[int, ...]) -> str:
    """``layers7-9``; three or more alike are ``7-8x14-7``."""
    runs = [(count, len(list(alike))) for count, alike in groupby(counts)]
    return "layers" + "-".join(f"{n}x{times}" if times > 2 else "-".join([str(n)] * times) for n, times in runs)


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
    - `expandable_segments` has torch's allocator map memory piece by piece, so that less lies idle between tensors.
    - `rank_order[i]` is the worker of the gang, and so the GPU, that takes rank i; None for i itself.
    - `power_limit_w` is set on each of its GPUs while it runs; None leaves what they have.
    - `own` are the settings of axes of the user's own, by the axis's name in the order of names.
    """

    engine: str = field(
        metadata=axis(
            "`megatron`: Megatron-style layouts on torch's own primitives. `deepspeed`: the DeepSpeed engine.",
            settled=0,
            label="{}".format,
            default="megatron",
        )
    )
    num_gpus: int = field(
        metadata=axis(
            "GPUs of a trial, at most the cluster's; the whole cluster if left out.",
            settled=1,
            label="{}gpu".format,
            default=None,
            allowed=SIZES,
        )
    )
    global_batch_size: int
    micro_batch_size: int = field(
        default=1,
        metadata=axis(
            "Sequences a replica takes at once; the global batch must be a multiple of it times the replicas.",
            settled=5,
            label="mbs{}".format,
            allowed=SIZES,
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=axis(
            "GPUs that share each layer; divisors of heads and key-value heads.",
            settled=2,
            label="tp{}".format,
            allowed=SIZES,
        ),
    )
    pipeline_parallel_size: int = field(
        default=1,
        metadata=axis(
            "GPUs that share the layers; divisors of the layers, unless `stage_layers` says otherwise. With more than "
            "one: ZeRO-0 or 1, and at least as many microbatches.",
            settled=4,
            label="pp{}".format,
            allowed=SIZES,
        ),
    )
    context_parallel_size: int = field(
        default=1,
        metadata=axis(
            "GPUs that share each sequence: `megatron` gathers keys and values, `deepspeed` exchanges heads for tokens "
            "(Ulysses).",
            settled=3,
            label="cp{}".format,
            allowed=SIZES,
        ),
    )
    expert_parallel_size: int = field(
        default=1,
        metadata=axis(
            "GPUs, of those that hold the same dense parameters, over which experts are spread; divisors of "
            "`num_experts`.",
            settled=11,
            label="ep{}".format,
            allowed=SIZES,
        ),
    )
    pipeline_schedule: str = field(
        default="1f1b",
        metadata=axis(
            "`gpipe`, `1f1b`, `interleaved_1f1b`, `interleaved_zero_bubble` or `zbv_zero_bubble`.",
            settled=6,
            label="{}".format,
            allowed=SCHEDULES,
            matters=_pipelined,
        ),
    )
    virtual_pipeline_stages: int = field(
        default=1,
        metadata=axis(
            "Stages that each pipeline rank holds: one of `gpipe` and `1f1b`, two of `zbv_zero_bubble`, two or more of "
            "the interleaved ones.",
            settled=7,
            label="vpp{}".format,
            allowed=SIZES,
            matters=_pipelined,
        ),
    )
    stage_layers: tuple[int, ...] | None = field(
        default=None,
        metadata=axis(
            "Layers of each stage in the model's order, such as `[[7, 9], [9, 7]]`; `null` for equal ones. `auto` has "
            "the search try what [slow GPUs](#slow-gpus) ask for.",
            settled=8,
            label=_stages,
            allowed=SIZES,
            matters=_pipelined,
        ),
    )
    zero_stage: int = field(
        default=0,
        metadata=axis(
            "What GPUs that hold the same parameters shard: `0` nothing, `1` optimizer states, `2` gradients too, `3` "
            "parameters too.",
            settled=9,
            label="zero{}".format,
            allowed=Range(0, 3),
            scale=Scale.LINEAR,
            matters=_several_hold_the_same,
        ),
    )
    data_parallel_replicate_size: int = field(
        default=1,
        metadata=axis(
            "Times that the ZeRO shards are kept, each copy over neighbouring GPUs: hybrid sharding.",
            settled=10,
            label="x{}".format,
            allowed=SIZES,
            matters=_sharded,
        ),
    )
    sequence_parallel: bool = field(
        default=True,
        metadata=axis(
            "Shard activations along the sequence between tensor-parallel regions; `megatron` with tensor parallelism "
            "only.",
            settled=16,
            label="sp".format,
            idle=False,
            matters=lambda layout: layout.tensor_parallel_size > 1,
        ),
    )
    async_tensor_parallel: bool = field(
        default=False,
        metadata=axis(
            "Overlap the communication of these regions with their matrix products; only with `sequence_parallel` and "
            "`compile`, on NVIDIA's GPUs.",
            settled=19,
            label="async-tp".format,
            # The compiler makes it of the synchronous one.
            matters=lambda layout: layout.splits_sequence and layout.compile,
        ),
    )
    recompute: str = field(
        default="none",
        metadata=axis(
            "What of each block's activations is computed again in the backward pass: `none`, all but matrix products "
            "and attention (`selective`), or all (`full`).",
            settled=17,
            label={"selective": "selective", "full": "recompute"}.__getitem__,
            allowed=("none", "selective", "full"),
        ),
    )
    overlap_grad_reduce: bool = field(
        default=True,
        metadata=axis(
            "Reduce gradients while the backward pass goes on.",
            settled=21,
            label="no-grad-overlap".format,
            matters=_several_hold_the_same,
        ),
    )
    overlap_param_gather: bool = field(
        default=True,
        metadata=axis(
            "Gather parameters ahead of the blocks that need them.",
            settled=22,
            label="no-param-overlap".format,
            matters=_sharded,
        ),
    )
    bucket_size: int = field(
        default=BUCKET_SIZE,
        metadata=axis(
            "Elements that DeepSpeed's ZeRO sends at once.",
            settled=18,
            label=lambda size: f"bucket{size:.0e}".replace("e+0", "e"),
            allowed=SIZES,
            matters=_sharded,
        ),
    )
    offload_optimizer: bool = field(
        default=False,
        metadata=axis(
            "Keep DeepSpeed's optimizer states, and the update, on the CPU.",
            settled=12,
            label="offload".format,
        ),
    )
    compile: bool = field(
        default=False,
        metadata=axis(
            "Compile each block with `torch.compile`; on GPUs `true` is the faster.",
            settled=15,
            label="compile".format,
        ),
    )
    precision: str = field(
        default="bf16",
        metadata=axis(
            "Of matrix products: `bf16` (mixed precision), `fp32` or `fp8` (of `megatron`, but for mixtures of "
            "experts, on H100 and H200).",
            settled=13,
            label="{}".format,
            allowed=("bf16", "fp32", "fp8"),
        ),
    )
    reduce_precision: str = field(
        default="fp32",
        metadata=axis(
            "In which gradients are summed over GPUs, and over the microbatches before that: `fp32` or `bf16`.",
            settled=14,
            label="reduce-{}".format,
            allowed=("fp32", "bf16"),
            matters=lambda layout: layout.precision != "fp32",
        ),
    )
    expandable_segments: bool = field(
        default=False,
        metadata=axis(
            "Let torch's allocator grow its blocks of memory (`expandable_segments` of `PYTORCH_CUDA_ALLOC_CONF`), on "
            "NVIDIA's GPUs: some GiB less for about half a per cent of time, or far more where memory is nearly full.",
            settled=23,
            label="expandable".format,
        ),
    )
    rank_order: tuple[int, ...] | None = field(
        default=None,
        metadata=axis(
            "Which worker, and so GPU, takes each rank, such as `[[0, 2, 1, 3]]`; `null` for their own order. "
            "Tensor-parallel ranks are neighbours, then context, data and pipeline ranks. `auto` has the search try "
            "what [slow GPUs](#slow-gpus) ask for.",
            settled=20,
            label=_joined("order"),
            allowed=Range(0),
        ),
    )
    power_limit_w: int | None = field(
        default=None,
        metadata=axis(
            "Watts that each GPU is limited to while a trial runs, put back afterwards; `null` leaves the limit as it "
            "is. Only with `--allow-power-limits`: [power limits](power_limits.md).",
            settled=24,
            label="{}W".format,
            allowed=SIZES,
            scale=Scale.CATEGORY,
        ),
    )
    own: tuple[tuple[str, Any], ...] = ()

    def setting(self, axis: str) -> Any:
        """What it has of an axis, which may be one of the user's own. Raises KeyError for one that it has not."""
        return getattr(self, axis) if axis in AXES else dict(self.own)[axis]

    def having(self, axis: str, value: Any) -> Layout:
        """The layout with another setting of an axis, which may be one of the user's own."""
        if axis in AXES:
            return replace(self, **{axis: value})
        return replace(self, own=tuple(sorted((dict(self.own) | {axis: value}).items())))

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
    def shard_group_size(self) -> int:
        """Ranks over which ZeRO shards one copy of the model's states, 1 where it shards nothing."""
        return self.shard_ranks // self.data_parallel_replicate_size if self.zero_stage else 1

    @property
    def gradient_accumulation_steps(self) -> int:
        """Microbatches that each replica runs in one optimizer step."""
        return self.global_batch_size // (self.data_parallel_size * self.micro_batch_size)

    def microbatch_tokens(self, sequence_length: int) -> int:
        """Tokens of a microbatch that a GPU has of its sequences."""
        return self.micro_batch_size * sequence_length // self.context_parallel_size

    @property
    def pipeline_stages(self) -> int:
        """Stages of the whole pipeline, virtual ones counted."""
        return self.pipeline_parallel_size * self.virtual_pipeline_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule makes the gradients of inputs and of weights apart: zero bubble."""
        return self.pipeline_schedule.endswith("zero_bubble")

    @property
    def splits_sequence(self) -> bool:
        """Whether activations between tensor-parallel regions are split along the sequence."""
        return self.sequence_parallel and self.tensor_parallel_size > 1

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation in matrix products. Those in fp8 are kept in bf16."""
        return 4 if self.precision == "fp32" else 2

    @property
    def end_ranks(self) -> tuple[int, int]:
        """The pipeline ranks that hold the embedding and the head."""
        return 0, 0 if self.pipeline_schedule == "zbv_zero_bubble" else self.pipeline_parallel_size - 1

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

    def layers_of(self, pipeline_rank: int, layers: int) -> int:
        """How many of a model's `layers` blocks a pipeline rank holds."""
        if self.stage_layers is None:
            return layers // self.pipeline_parallel_size
        return sum(self.stage_layers[stage] for stage in self.stages_of(pipeline_rank))

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
        """Flat and JSON-safe, the two derived sizes included; axes of the user's own beside the others, and their names
        as `own` if there are any."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        own = {"own": [name for name, _ in self.own]} if self.own else {}
        del values["own"]
        derived = {
            "data_parallel_size": self.data_parallel_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        return values | derived | dict(self.own) | own

    @classmethod
    def plain(cls, engine: str, num_gpus: int, global_batch_size: int) -> Layout:
        """A layout of which all axes but the first two are idle."""
        return cls.from_dict({"engine": engine, "num_gpus": num_gpus, "global_batch_size": global_batch_size})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """Inverse of `to_dict`, also after a round trip through JSON.

        Derived and foreign keys are ignored; an axis that an older record lacks is idle. Raises TypeError for a record
        without engine, number of GPUs or batch.
        """
        known: dict[str, Any] = {
            declared.name: AXES[declared.name].idle
            for declared in fields(cls)
            if declared.default is not MISSING and declared.name in AXES
        }
        known |= {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        known["own"] = tuple((name, values[name]) for name in sorted(values.get("own", ())))
        return cls(**known)

    @property
    def label(self) -> str:
        """A short name of what differs from the simplest layout: ``megatron 4gpu dp2 tp2 zero1 mbs2 sp``."""
        parts = {"data_parallel_size": f"dp{self.data_parallel_size}"}
        for declared in fields(self):
            if (row := AXES.get(declared.name)) is not None:
                value = getattr(self, row.name)
                if row.name in ALWAYS_LABELLED or (value != row.idle and row.matters(self)):
                    parts[row.name] = row.label(value)
        first = [parts.pop(name) for name in LABEL if name in parts]
        own = [own_axis(name, [value]).label(value) for name, value in self.own]
        return " ".join([*first, *parts.values(), *own])


def _axes() -> dict[str, Axis]:
    types = get_type_hints(Layout)
    rows = [row_of(declared, types[declared.name]) for declared in fields(Layout) if "axis" in declared.metadata]
    return {row.name: row for row in rows}


AXES: dict[str, Axis] = _axes()
"""The axes by name, in the order of the fields: all of a layout but its global batch."""

SETTLING: tuple[Axis, ...] = tuple(sorted(AXES.values(), key=lambda row: row.settled))
"""The axes in the order in which a layout is settled."""


def axis_of(name: str, values: Sequence[Any]) -> Axis:
    """The axis of this name, or the user's own that has these values."""
    return AXES[name] if name in AXES else own_axis(name, values)
