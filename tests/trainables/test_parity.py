"""Every layout trains the same model: its losses and gradient norms are those of one process in plain torch.

The ranks run as in a search, each in a child of a nursery, with gloo between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from search_spaces.engines import ENGINES
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import BUCKET_SIZE, SCHEDULES, Layout
from search_spaces.models import ModelShape
from search_spaces.rules import refusal
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload
from tests.trainables.conftest import RunRanks
from trainables.child import Outcome
from trainables.data import SYNTHETIC, open_tokens
from trainables.engines.base import BETAS, GRADIENT_CLIP, WEIGHT_DECAY, learning_rate
from trainables.measure import Procedure
from trainables.model import Parts, Stage, language_model_loss
from trainables.program import RankReport, TrialRequest
from trainables.training import Training

LLAMA = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)  # four heads share two key-value heads
WIDER = replace(LLAMA, ffn_hidden=192)  # of which two ranks have a multiple of 16 each, as fp8 needs it
GPT = ModelShape("gpt", 2, 64, 4, 4, 256, 512, 64)
MIXTURE = ModelShape("llama", 4, 64, 4, 2, 96, 512, 64, num_experts=4)
SEQUENCE_LENGTH = 32
GLOBAL_BATCH_SIZE = 8
STEPS = 3


def deep(model: ModelShape, layers: int = 4) -> ModelShape:
    return replace(model, layers=layers)


def tied(model: ModelShape) -> ModelShape:
    return replace(model, tie_embeddings=True)


def wide(model: ModelShape) -> ModelShape:
    """With heads three times as wide: neither all of them nor those of half the ranks are together as wide as it."""
    return replace(model, head_dim=3 * model.head_dim)


def layout(
    engine: str,
    gpus: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero: int = 0,
    copies: int = 1,
    mbs: int = 2,
    sp: bool = False,
    schedule: str = "1f1b",
    stages: int = 1,
    **more: Any,
) -> Layout:
    """A layout in fp32 unless said otherwise; `more` are fields of `Layout` by name."""
    return Layout(
        engine,
        gpus,
        GLOBAL_BATCH_SIZE,
        micro_batch_size=mbs,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        expert_parallel_size=ep,
        zero_stage=zero,
        data_parallel_replicate_size=copies,
        sequence_parallel=sp,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=stages,
        **{"precision": "fp32"} | more,
    )


megatron = partial(layout, "megatron")
deepspeed = partial(layout, "deepspeed")


def cases(model: ModelShape, *layouts: Layout, slow: bool = False) -> list[Any]:
    """Rows of a table: the same model in several layouts."""
    name = f"{model.family}{model.layers}" + "-experts" * bool(model.num_experts) + "-tied" * model.tie_embeddings
    name += "-wide" * (model.query_width > model.hidden)
    marks = [pytest.mark.slow] if slow else []
    return [pytest.param(model, layout, id=f"{name} {layout.label}", marks=marks) for layout in layouts]


def changed(rows: Iterable[Any], **fields: Any) -> list[Any]:
    """The same rows with other values of some fields of `Layout`."""
    new = []
    for row in rows:
        model, layout = row.values
        new += cases(model, replace(layout, **fields), slow=bool(row.marks))
    return new


@cache
def reference(model: ModelShape, batches: tuple[int, ...] = (GLOBAL_BATCH_SIZE,)) -> tuple[list[float], list[float]]:
    """Losses and gradient norms before clipping of `STEPS` optimizer steps on whole batches of each of these sizes."""
    parts = Parts(model, torch.arange(SEQUENCE_LENGTH), seed=0)
    stage = Stage(parts.embedding(), [parts.block(layer) for layer in range(model.layers)], parts.head())
    if model.tie_embeddings:
        stage.head.output.weight = stage.embedding.tokens.weight  # type: ignore[union-attr]
    rate = learning_rate(model)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    stream = open_tokens(SYNTHETIC, model.vocab)
    losses, norms = [], []
    for step, size in enumerate(size for size in batches for _ in range(STEPS)):
        samples = range(step * size, (step + 1) * size)
        tokens = torch.from_numpy(np.stack([stream.sequence(i, SEQUENCE_LENGTH) for i in samples]))
        optimizer.zero_grad()
        loss = language_model_loss(stage(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(stage.parameters(), GRADIENT_CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def request(layout: Layout, model: ModelShape) -> TrialRequest:
    """A trial of `STEPS` optimizer steps: two of warm-up, however they vary, and the rest in the window."""
    procedure = Procedure(
        steady_steps=1, warmup_tolerance=0.5, warmup_max_s=1e-9, window_s=1e-9, window_min_steps=STEPS - 2
    )
    name = f"{layout.label} {model}"
    return TrialRequest(name, layout, Training(model, SYNTHETIC, SEQUENCE_LENGTH, seed=0), procedure, deadline_s=200)


def reports(outcomes: list[Outcome]) -> list[RankReport]:
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * len(outcomes)
    return [outcome.report for outcome in outcomes if outcome.report is not None]


NO_OVERLAP: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False}
BF16_THROUGHOUT: dict[str, Any] = {"precision": "bf16", "reduce_precision": "bf16"}
SMALL_BUCKETS: dict[str, Any] = {"bucket_size": 4096, "overlap_grad_reduce": False}
GPIPE: dict[str, Any] = {"pp": 2, "schedule": "gpipe"}
INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved_1f1b", "stages": 2}
ZERO_BUBBLE: dict[str, Any] = {"pp": 2, "schedule": "interleaved_zero_bubble", "stages": 2}
V_SHAPED: dict[str, Any] = {"pp": 2, "schedule": "zbv_zero_bubble", "stages": 2}
CUTS = (1, 2, 1, 1)  # of five layers among the four stages of these three

DENSE = [
    *cases(
        LLAMA,
        *(megatron(2, zero=zero) for zero in range(4)),
        megatron(2, zero=2, mbs=1, recompute="selective", **NO_OVERLAP),
        megatron(2, zero=3, mbs=1, recompute="full"),
        *(megatron(4, zero=zero, copies=2, mbs=1) for zero in (1, 2, 3)),
        megatron(4, zero=2, copies=2),
        megatron(2, tp=2),
        megatron(2, tp=2, sp=True),
        megatron(2, cp=2, zero=1),
        megatron(4, cp=4, zero=0, recompute="full"),
    ),
    *cases(
        LLAMA,
        megatron(4, tp=2),
        megatron(4, tp=2, sp=True, zero=3),
        megatron(4, cp=2, tp=2, sp=True, zero=3, recompute="selective"),
        megatron(4, tp=2, zero=2, recompute="full"),
        slow=True,
    ),
    *cases(
        LLAMA,
        deepspeed(1),
        *(deepspeed(2, zero=zero) for zero in range(4)),
        *(deepspeed(2, zero=zero, mbs=1, **SMALL_BUCKETS) for zero in (1, 2)),
        deepspeed(2, zero=3, mbs=1, bucket_size=4096, **NO_OVERLAP),
        *(deepspeed(2, zero=zero, offload_optimizer=True) for zero in (1, 2, 3)),
        deepspeed(2, zero=0, recompute="selective"),
        deepspeed(2, zero=1, recompute="full"),
        deepspeed(2, zero=2, recompute="selective", mbs=1),
        deepspeed(2, zero=3, recompute="selective", **NO_OVERLAP),
        deepspeed(2, zero=3, recompute="full", mbs=1, overlap_grad_reduce=False),
        deepspeed(2, tp=2),
        deepspeed(2, tp=2, recompute="full"),
        deepspeed(4, tp=2),
    ),
    *cases(wide(LLAMA), deepspeed(4, tp=2, zero=1)),
    *cases(
        LLAMA,
        *(deepspeed(4, tp=2, zero=zero) for zero in (2, 3)),
        deepspeed(4, tp=2, zero=2, offload_optimizer=True),
        deepspeed(2, cp=2, recompute="selective"),
        deepspeed(2, cp=2, zero=1),
        deepspeed(2, cp=2, zero=3, recompute="full", overlap_param_gather=False),
    ),
    *cases(wide(LLAMA), deepspeed(4, cp=2, zero=2)),
    *cases(GPT, deepspeed(2, tp=2, mbs=8)),
    *cases(
        LLAMA,
        deepspeed(4, tp=2, zero=1, recompute="full"),
        deepspeed(4, tp=2, zero=3, recompute="full"),
        deepspeed(4, tp=2, zero=3, offload_optimizer=True, bucket_size=4096, **NO_OVERLAP),
        deepspeed(2, cp=2, zero=3, offload_optimizer=True),
        deepspeed(4, cp=2, zero=3),
        slow=True,
    ),
]
PIPELINES = [
    *cases(
        deep(LLAMA),
        megatron(2, pp=2),
        megatron(2, pp=2, mbs=1, recompute="full"),
        megatron(2, **GPIPE, stage_layers=(3, 1)),
        megatron(2, **INTERLEAVED, mbs=1),
        megatron(2, **ZERO_BUBBLE, mbs=1),
        megatron(2, **V_SHAPED, mbs=1),
        megatron(4, pp=2, zero=1),
        megatron(4, pp=2, cp=2, zero=1, stage_layers=(1, 3)),
        megatron(4, pp=4, mbs=1, recompute="selective"),
    ),
    *cases(wide(deep(LLAMA)), megatron(4, **V_SHAPED, tp=2, sp=True)),
    *cases(deep(LLAMA), megatron(4, **ZERO_BUBBLE, zero=1, recompute="full")),
    *cases(deep(GPT), megatron(4, **ZERO_BUBBLE, tp=2, sp=True), slow=True),
    *cases(
        deep(LLAMA),
        megatron(4, pp=2),
        megatron(4, pp=2, tp=2, sp=True),
        slow=True,
    ),
    *cases(
        LLAMA,
        deepspeed(2, pp=2),
        deepspeed(2, pp=2, mbs=1, recompute="full"),
        deepspeed(4, pp=2),
        deepspeed(4, pp=2, zero=1, recompute="selective"),
        deepspeed(4, pp=2, zero=1, offload_optimizer=True),
    ),
    *cases(wide(LLAMA), deepspeed(4, pp=2, cp=2, zero=1)),
    *cases(deep(LLAMA), deepspeed(4, pp=4, mbs=1)),
    *cases(LLAMA, deepspeed(4, pp=2, cp=2), slow=True),
]
EXPERTS = [
    *cases(
        MIXTURE,
        megatron(1),
        megatron(2, zero=1),
        megatron(2, ep=2),
        megatron(4, ep=4, zero=2, mbs=1),
        megatron(4, ep=2, zero=3, recompute="full"),
        megatron(4, ep=2, zero=1, copies=2, mbs=1),
        megatron(4, ep=2, zero=2, copies=2, recompute="selective"),
        megatron(4, zero=3, copies=2, mbs=1),
        megatron(2, tp=2, sp=True),
    ),
    *cases(wide(MIXTURE), megatron(4, tp=2, zero=3)),
    *cases(
        MIXTURE,
        megatron(4, ep=2, pp=2, zero=1),
        megatron(4, ep=2, **GPIPE, zero=1, recompute="selective", overlap_grad_reduce=False),
        megatron(4, ep=2, **V_SHAPED),
    ),
    *cases(
        MIXTURE,
        deepspeed(1),
        *(deepspeed(2, zero=zero, ep=2) for zero in range(3)),
        deepspeed(2, zero=1, mbs=1),
        deepspeed(4, ep=2, mbs=1),
        deepspeed(4, zero=2, ep=2, offload_optimizer=True, recompute="full"),
        deepspeed(4, zero=2, ep=4, **SMALL_BUCKETS),
    ),
    *cases(wide(MIXTURE), deepspeed(2, ep=2, cp=2)),
    *cases(
        MIXTURE,
        megatron(4, ep=2, tp=2),
        megatron(4, ep=2, tp=2, sp=True, zero=1),
        megatron(4, ep=2, cp=2, zero=3),
        megatron(4, cp=2, tp=2, sp=True),
        deepspeed(4, zero=1, ep=2, mbs=1, recompute="selective"),
        deepspeed(4, zero=2, ep=2, cp=2, recompute="full"),
        slow=True,
    ),
    *cases(tied(MIXTURE), megatron(2, ep=2, zero=1, mbs=1), deepspeed(2, ep=2)),
]
TIED = [
    *cases(
        tied(GPT),
        megatron(2, zero=3),
    ),
    *cases(wide(tied(GPT)), megatron(2, tp=2, sp=True)),
    *cases(
        tied(GPT),
        megatron(2, pp=2),
        megatron(4, pp=2, zero=1),
        megatron(2, cp=2),
        megatron(4, cp=2, zero=2, copies=2, mbs=4, recompute="selective", **NO_OVERLAP),
    ),
    *cases(
        tied(deep(GPT)),
        megatron(2, **INTERLEAVED),
        megatron(2, **ZERO_BUBBLE),
    ),
    *cases(
        tied(deep(LLAMA, 5)),
        megatron(4, **INTERLEAVED, cp=2, zero=1, stage_layers=CUTS, recompute="full", overlap_grad_reduce=False),
    ),
    *cases(
        tied(GPT),
        deepspeed(2, zero=2),
        deepspeed(2, zero=3),
        deepspeed(2, tp=2),
        deepspeed(2, pp=2),
        deepspeed(4, pp=2, zero=1),
        deepspeed(4, cp=4, zero=2),
        deepspeed(4, tp=2, cp=2, zero=1),
    ),
    *cases(wide(tied(GPT)), deepspeed(4, tp=2, cp=2, zero=3)),
    *cases(tied(LLAMA), deepspeed(2, cp=2, zero=3, mbs=8, recompute="selective", overlap_param_gather=False)),
    *cases(
        tied(GPT),
        deepspeed(4, tp=2, cp=2),
        deepspeed(4, tp=2, cp=2, zero=2, recompute="full"),
        deepspeed(4, pp=2, cp=2, zero=1, offload_optimizer=True),
        slow=True,
    ),
]
BF16 = changed(
    [
        *cases(
            LLAMA,
            *(megatron(2, zero=zero, mbs=1) for zero in range(4)),
            megatron(2, tp=2, sp=True),
        ),
        *cases(wide(LLAMA), megatron(4, tp=2, cp=2, sp=True, zero=2, mbs=8, overlap_grad_reduce=False)),
        *cases(tied(LLAMA), megatron(1, mbs=8, recompute="selective")),
        *cases(
            deep(LLAMA),
            megatron(2, pp=2),
            megatron(2, **GPIPE),
            megatron(2, **INTERLEAVED),
            megatron(2, **ZERO_BUBBLE),
            megatron(2, **V_SHAPED),
            megatron(4, **V_SHAPED, cp=2, zero=1, recompute="full", overlap_param_gather=False),
        ),
        *cases(
            LLAMA,
            deepspeed(1),
            deepspeed(2, recompute="selective"),
            *(deepspeed(2, zero=zero, mbs=1) for zero in (1, 2, 3)),
            deepspeed(2, zero=1, offload_optimizer=True),
            deepspeed(2, zero=3, offload_optimizer=True),
            deepspeed(4, tp=2),
            deepspeed(4, tp=2, zero=1),
            deepspeed(4, pp=2, zero=1),
            deepspeed(2, cp=2, zero=1),
        ),
        *cases(
            tied(GPT),
            deepspeed(2, tp=2),
            deepspeed(2, pp=2),
        ),
        *cases(MIXTURE, *(deepspeed(2, ep=2, zero=zero) for zero in range(3))),
    ],
    precision="bf16",
)
BF16_SUMS = changed(
    [
        *cases(wide(LLAMA), megatron(2, zero=0, mbs=1)),
        *cases(LLAMA, *(megatron(2, zero=zero, mbs=1) for zero in (1, 2, 3))),
        *cases(
            LLAMA,
            megatron(4, zero=3, copies=2, mbs=1),
            megatron(4, zero=3, copies=2, recompute="full", overlap_param_gather=False),
            slow=True,
        ),
        *cases(
            deep(GPT, 5),
            megatron(4, **V_SHAPED, cp=2, mbs=4, stage_layers=CUTS, recompute="full", overlap_grad_reduce=False),
            slow=True,
        ),
        *cases(
            tied(deep(LLAMA, 5)),
            megatron(4, **GPIPE, tp=2, sp=True, stage_layers=(2, 3), recompute="selective"),
            slow=True,
        ),
        *cases(
            tied(deep(GPT, 5)),
            megatron(4, pp=2, cp=2, zero=1, stage_layers=(2, 3), recompute="full", **NO_OVERLAP),
            megatron(4, **GPIPE, cp=2, zero=1, stage_layers=(2, 3), recompute="full", **NO_OVERLAP),
            megatron(4, **INTERLEAVED, tp=2, sp=True, stage_layers=CUTS),
            slow=True,
        ),
        *cases(MIXTURE, megatron(4, tp=2, cp=2, ep=2, sp=True, zero=3, mbs=8, **NO_OVERLAP), slow=True),
        *cases(
            deep(MIXTURE, 5),
            megatron(4, **INTERLEAVED, ep=2, zero=1, stage_layers=CUTS, recompute="selective", **NO_OVERLAP),
            megatron(4, **ZERO_BUBBLE, ep=2, cp=2, zero=1, stage_layers=CUTS, recompute="full", **NO_OVERLAP),
            slow=True,
        ),
        *cases(
            LLAMA,
            *(deepspeed(2, zero=zero, mbs=1) for zero in range(4)),
            deepspeed(2, zero=2, offload_optimizer=True, recompute="selective"),
        ),
        *cases(
            tied(GPT),
            deepspeed(4, tp=2, cp=2, zero=3, recompute="full", bucket_size=4096, **NO_OVERLAP),
            deepspeed(4, pp=2, zero=1, recompute="selective", bucket_size=4096),
            slow=True,
        ),
        *cases(MIXTURE, deepspeed(4, ep=2, zero=1), slow=True),
    ],
    precision="bf16",
    reduce_precision="bf16",
)
COMPILED = changed(
    [
        *cases(wide(LLAMA), megatron(1)),
        *cases(
            LLAMA,
            megatron(1, recompute="selective"),
            megatron(2, tp=2),
            megatron(2, tp=2, sp=True, recompute="selective"),
            megatron(2, zero=1),
            megatron(2, tp=2, sp=True),
            megatron(2, tp=2, sp=True, recompute="full"),
            megatron(2, cp=2, zero=2, recompute="selective"),
            slow=True,
        ),
        *cases(tied(GPT), megatron(2, cp=2, zero=3, recompute="full"), slow=True),
        *cases(
            GPT,
            megatron(4, cp=2, zero=3, copies=2, mbs=4, recompute="selective", **BF16_THROUGHOUT, **NO_OVERLAP),
            deepspeed(1, mbs=8, recompute="selective"),
            slow=True,
        ),
        *cases(deep(LLAMA), megatron(2, **INTERLEAVED), slow=True),
        *cases(deep(GPT, 5), megatron(2, **GPIPE, stage_layers=(2, 3), **BF16_THROUGHOUT), slow=True),
        *cases(
            MIXTURE,
            megatron(2, ep=2, zero=1),
            megatron(4, ep=2, tp=2, sp=True, recompute="full"),
            megatron(4, ep=2, pp=2),
            slow=True,
        ),
        *cases(
            LLAMA,
            deepspeed(2, recompute="selective", **BF16_THROUGHOUT),
            deepspeed(2, zero=1, recompute="full"),
            deepspeed(2, zero=2, offload_optimizer=True, mbs=1),
            deepspeed(2, zero=3),
            deepspeed(2, zero=3, recompute="full", bucket_size=4096, **NO_OVERLAP),
            deepspeed(2, tp=2),
            deepspeed(2, cp=2, zero=1, recompute="selective"),
            slow=True,
        ),
        *cases(tied(GPT), deepspeed(2, pp=2, recompute="full"), slow=True),
        *cases(MIXTURE, deepspeed(2, ep=2, zero=2, recompute="full"), slow=True),
    ],
    compile=True,
)
FP8 = changed(
    [
        *cases(wide(LLAMA), megatron(2, zero=3, recompute="selective")),
        *cases(LLAMA, megatron(2, cp=2, zero=1)),
        *cases(deep(GPT), megatron(2, **ZERO_BUBBLE)),
        *cases(WIDER, megatron(2, tp=2)),
        *cases(tied(GPT), megatron(2, tp=2, sp=True)),
        *cases(
            LLAMA,
            megatron(2, zero=1, recompute="full", compile=True),
            megatron(2, zero=2, recompute="selective", compile=True),
            slow=True,
        ),
        *cases(wide(WIDER), megatron(2, tp=2, sp=True), slow=True),
        *cases(
            WIDER,
            megatron(2, tp=2, recompute="selective"),
            megatron(2, tp=2, sp=True, recompute="full", mbs=1),
            megatron(4, tp=2, zero=1),
            megatron(4, tp=2, sp=True, zero=2, recompute="selective", overlap_grad_reduce=False),
            megatron(4, tp=2, sp=True, zero=3),
            megatron(4, tp=2, cp=2, sp=True, zero=3, recompute="full", reduce_precision="bf16"),
            megatron(2, tp=2, compile=True),
            megatron(2, tp=2, sp=True, compile=True),
            megatron(2, tp=2, sp=True, recompute="selective", compile=True, mbs=1),
            megatron(4, tp=2, sp=True, zero=3, recompute="full", compile=True),
            slow=True,
        ),
        *cases(GPT, megatron(2, tp=2), megatron(2, tp=2, sp=True, compile=True), slow=True),
        *cases(
            deep(WIDER),
            megatron(4, pp=2, tp=2, sp=True),
            megatron(4, **GPIPE, tp=2),
            megatron(4, **INTERLEAVED, tp=2, sp=True, recompute="selective"),
            megatron(4, **V_SHAPED, tp=2, sp=True),
            slow=True,
        ),
        *cases(deep(GPT), megatron(4, **ZERO_BUBBLE, tp=2, sp=True, recompute="full"), slow=True),
        *cases(deep(WIDER), megatron(4, **INTERLEAVED, tp=2, sp=True, compile=True), slow=True),
    ],
    precision="fp8",
)
SIZES = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "data_parallel_size")
SHOWN = (
    "zero_stage",
    "sequence_parallel",
    "recompute",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "bucket_size",
    "offload_optimizer",
    "compile",
    "precision",
    "reduce_precision",
)
Pair = tuple[tuple[str, Any], ...]


def shown(model: ModelShape, layout: Layout) -> dict[str, Any]:
    """What the layout has of each axis, the kind of model among them; of sizes, whether there is one to split."""
    axes = {axis: getattr(layout, axis) for axis in SHOWN} | {size: getattr(layout, size) > 1 for size in SIZES}
    return axes | {
        "model": (model.family, model.num_experts > 0),
        "tied": model.tie_embeddings,
        "schedule": layout.pipeline_schedule if layout.pipeline_parallel_size > 1 else None,
        "uneven": layout.stage_layers is not None,
        "hybrid": layout.data_parallel_replicate_size > 1,
        "accumulates": layout.gradient_accumulation_steps > 1,
    }


def pairs(model: ModelShape, layout: Layout) -> set[Pair]:
    """What the layout has of each two axes."""
    return set(itertools.combinations(sorted(shown(model, layout).items()), 2))


PARALLEL = ("schedule", "zero_stage", "sequence_parallel", *SIZES)


def together(model: ModelShape, layout: Layout) -> set[Pair]:
    """Each two ways in which the layout spreads work over GPUs."""
    has = shown(model, layout)
    return set(itertools.combinations([(axis, has[axis]) for axis in PARALLEL if has[axis]], 2))


def covering(rows: Iterable[Any]) -> list[Any]:
    """Few of the rows, found greedily, that have every setting, and every pair of ways to spread work, which all of
    them have."""

    def settings(model: ModelShape, layout: Layout) -> set[Any]:
        return {(layout.engine, setting) for setting in (*together(model, layout), *shown(model, layout).items())}

    chosen, left = [], [(row, settings(*row.values)) for row in rows]
    while left:
        row, new = max(left, key=lambda entry: len(entry[1]))
        chosen.append(row)
        left = [(other, rest) for other, own in left if (rest := own - new)]
    return chosen


ROWS = [*DENSE, *PIPELINES, *EXPERTS, *TIED, *BF16, *BF16_SUMS, *COMPILED, *FP8]
# The others are slow: those marked so, since they take long, and those that add nothing to these.
BY_DEFAULT = covering(row for row in ROWS if not row.marks)

# Relative differences of losses and of gradient norms. Weights and sums are in fp32 at every precision.
TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (2e-4, 1e-2), "fp8": (1e-3, 3e-2)}


@pytest.mark.parametrize(
    ("model", "layout"),
    [row if row in BY_DEFAULT else pytest.param(*row.values, id=row.id, marks=pytest.mark.slow) for row in ROWS],
)
def test_layout_trains_as_one_process(model: ModelShape, layout: Layout, run_ranks: RunRanks) -> None:
    losses, norms = reference(model)
    of_losses, of_norms = TOLERANCES[layout.precision]
    for report in reports(run_ranks(request(layout, model))):
        assert report.losses == pytest.approx(losses, rel=of_losses)
        assert report.grad_norms == pytest.approx(norms, rel=of_norms)
        assert (report.timings[GLOBAL_BATCH_SIZE].compile_s > 0) == layout.compile


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *cases(LLAMA, megatron(2, zero=1, mbs=1), deepspeed(2, zero=3, mbs=1), deepspeed(2, pp=2, mbs=1)),
        *cases(deep(LLAMA), megatron(4, **INTERLEAVED, zero=1, mbs=1)),
        *cases(MIXTURE, megatron(2, ep=2, mbs=1), deepspeed(2, ep=2, zero=1, mbs=1)),
        *cases(
            LLAMA,
            megatron(2, zero=3, mbs=1),
            deepspeed(2, zero=2, offload_optimizer=True, mbs=1),
            deepspeed(4, cp=2, zero=2, mbs=1),
            *(deepspeed(2, zero=zero, mbs=1, precision="bf16") for zero in (0, 1)),
            slow=True,
        ),
    ],
)
def test_a_layout_goes_on_as_one_process_with_other_batches(
    model: ModelShape, layout: Layout, run_ranks: RunRanks
) -> None:
    batches: tuple[int, ...] = (GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE // 2)
    if layout.precision == "fp32":  # what bf16 rounds adds up over so many steps
        batches += (GLOBAL_BATCH_SIZE,)
    losses, norms = reference(model, batches)
    of_losses, of_norms = TOLERANCES[layout.precision]
    short = request(layout, model)
    for report in reports(run_ranks(replace(short, trial_id=f"short {short.trial_id}", batches=batches))):
        assert report.losses == pytest.approx(losses, rel=of_losses)
        assert report.grad_norms == pytest.approx(norms, rel=of_norms)
        assert set(report.timings) == set(batches)


def test_every_setting_is_run_by_default_and_ways_to_spread_work_together_but_for_rows_marked_slow() -> None:
    """So whoever adds a layout with anything new in it has it run by default."""

    def shown_by(rows: list[Any]) -> set[Any]:
        return {(axis, value) for row in rows for axis, value in shown(*row.values).items()}

    def together_in(rows: list[Any]) -> set[Any]:
        return {(row.values[1].engine, pair) for row in rows for pair in together(*row.values)}

    def wide_in(rows: list[Any]) -> set[Any]:
        several = [row.values for row in rows if row.values[0].query_width > row.values[0].hidden]
        return {(layout.engine, size) for _, layout in several for size in SIZES[:2] if getattr(layout, size) > 1}

    assert shown_by(ROWS) <= shown_by(BY_DEFAULT)
    assert wide_in(BY_DEFAULT) == set(itertools.product(ENGINES, SIZES[:2]))
    assert together_in([row for row in ROWS if not row.marks]) <= together_in(BY_DEFAULT)


AXES: dict[str, list[Any]] = {
    "num_gpus": [1, 2, 4],
    "tensor_parallel_size": [1, 2],
    "pipeline_parallel_size": [1, 2],
    "context_parallel_size": [1, 2],
    "expert_parallel_size": [1, 2],
    "pipeline_schedule": list(SCHEDULES),
    "virtual_pipeline_stages": [1, 2],
    "micro_batch_size": [1, 2, 4, 8],
    "zero_stage": [0, 1, 2, 3],
    "data_parallel_replicate_size": [1, 2],
    "sequence_parallel": [False, True],
    "recompute": ["none", "selective", "full"],
    "overlap_grad_reduce": [True, False],
    "overlap_param_gather": [True, False],
    "bucket_size": [BUCKET_SIZE, 4096],
    "offload_optimizer": [False, True],
    "compile": [False, True],
    "precision": ["fp32", "bf16"],
    "reduce_precision": ["fp32", "bf16"],
}


def allowed(engine: str) -> set[Pair]:
    """Pairs of all layouts on up to four GPUs of models of four layers, and of five where stages are uneven."""
    found: set[Pair] = set()
    llama = replace(LLAMA, kv_heads=4)  # as many as Ulysses can deal out to four GPUs
    for model in (GPT, tied(GPT), llama, tied(llama), MIXTURE, tied(MIXTURE)):
        for layers, cuts in ((4, [None]), (5, [(2, 3), (1, 2, 1, 1)])):
            work = Workload(deep(model, layers), SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE)
            axes = AXES | {"engine": [engine], "stage_layers": cuts}
            for point in enumerate_space(axes, work).layouts:
                found |= pairs(model, point)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_pair_of_values_that_rules_allow_is_covered(engine: str) -> None:
    covered: set[Pair] = set()
    for row in ROWS:
        model, layout = row.values
        if layout.engine == engine:
            work = Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE, ACCELERATORS["h100"])  # which has fp8
            assert refusal(layout, work) is None
            covered |= pairs(model, layout)
    assert allowed(engine) - covered == set()
