"""Parameters that GPUs hold: together the model's own, whatever splits it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.cost import data_sheet, predict
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import SCHEDULES, Layout
from search_spaces.memory import estimate
from search_spaces.models import PRESETS, ModelShape
from search_spaces.parameters import held
from search_spaces.workload import Workload

MODELS = st.builds(
    replace,
    st.sampled_from([PRESETS[name] for name in ("tiny-gpt", "tiny-llama", "tiny-moe", "gpt3-1.3b", "mixtral-8x7b")]),
    tie_embeddings=st.booleans(),
    layers=st.just(8),
    head_dim=st.sampled_from([16, 24, 128]),
)


def pipeline(ranks: int, schedule: str, stage_layers: tuple[int, ...] | None = None) -> Layout:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    return Layout(
        "megatron",
        ranks,
        16,
        pipeline_parallel_size=ranks,
        pipeline_schedule=schedule if ranks > 1 else "1f1b",
        virtual_pipeline_stages=virtual if ranks > 1 else 1,
        stage_layers=stage_layers if ranks * virtual == 4 and ranks > 1 else None,
    )


@settings(deadline=None)
@given(MODELS, st.sampled_from([1, 2, 4]), st.sampled_from(SCHEDULES), st.sampled_from([None, (1, 2, 2, 3)]))
def test_pipeline_ranks_hold_the_model_between_them(
    model: ModelShape, ranks: int, schedule: str, cut: tuple[int, ...] | None
) -> None:
    """Of every family, tied or not; a tied table twice, where its ends are on two ranks."""
    layout = pipeline(ranks, schedule, cut)
    twice = model.tie_embeddings and len(set(layout.end_ranks)) == 2
    expected = model.parameters + (model.vocab * model.hidden if twice else 0)
    assert sum(held(layout, model, rank, True).whole for rank in range(ranks)) == expected


@settings(deadline=None)
@given(MODELS, st.sampled_from([1, 2, 4]))
def test_tensor_ranks_hold_the_model_between_them_but_for_what_is_not_split(model: ModelShape, ranks: int) -> None:
    """Norms, routers, and the biases that follow sums over ranks, which each of them has."""
    layout = Layout("megatron", ranks, 16, tensor_parallel_size=ranks)
    gpt, hidden = model.family == "gpt", model.hidden
    norm = (2 if gpt else 1) * hidden
    biases = 2 * hidden if gpt else 0
    unsplit = model.layers * (2 * norm + biases + model.num_experts * hidden) + norm
    assert ranks * held(layout, model, 0, True).whole == model.parameters + (ranks - 1) * unsplit


def test_tables_may_stay_whole() -> None:
    model = PRESETS["tiny-gpt"]
    layout = Layout("deepspeed", 2, 16, tensor_parallel_size=2)
    whole, split = (held(layout, model, 0, splits) for splits in (False, True))
    assert whole.dense - split.dense == (2 * model.vocab + model.max_sequence_length) * model.hidden / 2


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3]), st.sampled_from([1, 2]))
def test_shards_are_the_model_between_them(spread: int, zero: int, copies: int) -> None:
    model = PRESETS["mixtral-8x7b"]
    layout = Layout(
        "megatron",
        8,
        16,
        expert_parallel_size=spread,
        zero_stage=zero,
        data_parallel_replicate_size=copies if zero else 1,
    )
    holds = held(layout, model, 0, True)
    if zero:
        assert holds.sharded(layout) * 8 / copies == model.parameters
    else:
        assert holds.sharded(layout) == holds.whole


@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-moe", "gpt3-1.3b", "llama3-8b"])
def test_the_memory_and_the_cost_model_count_alike(model: str) -> None:
    """What is offloaded by the cost model's reckoning is what the memory model has no optimizer states of."""
    work = Workload(PRESETS[model], 512, 16, ACCELERATORS["h100"])
    sheet = data_sheet("h100")
    assert sheet is not None
    kept = Layout("deepspeed", 4, 16, zero_stage=1)
    (rank,) = estimate(kept, work).ranks.values()
    parts = predict(replace(kept, offload_optimizer=True), work, sheet).parts
    assert parts["offload"] * sheet.offloaded_per_s == pytest.approx(rank.optimizer / 8, rel=1e-12)
    assert rank.optimizer == 8 * PRESETS[model].parameters / 4


def test_more_layers_are_sent_in_more_pieces() -> None:
    """Of stages that are not equal, too."""
    work = Workload(PRESETS["tiny-llama"], 512, 16, ACCELERATORS["h100"])
    sheet = data_sheet("h100")
    assert sheet is not None
    plain = Layout("megatron", 4, 16, pipeline_parallel_size=2, overlap_grad_reduce=False)
    even, uneven = (predict(replace(plain, stage_layers=cut), work, sheet).parts for cut in (None, (1, 3)))
    assert uneven["data_parallel"] > even["data_parallel"]
