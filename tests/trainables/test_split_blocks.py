"""Blocks that tensor-parallel ranks split: what they keep, what they send, and in which form the compiler has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.fx import Graph

from search_spaces import memory
from search_spaces.engines import facts_of
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Collective
from search_spaces.workload import Workload
from tests.trainables.one_rank import calls_of_a_step, kept_bytes
from tests.trainables.test_parity import GLOBAL_BATCH_SIZE, GPT, SEQUENCE_LENGTH, WIDER, megatron, wide


@pytest.mark.parametrize("model", [GPT, wide(GPT)])
@pytest.mark.parametrize(("ranks", "splits_sequence"), [(1, False), (2, False), (2, True)])
def test_blocks_keep_in_bf16_what_the_memory_model_counts(model: ModelShape, ranks: int, splits_sequence: bool) -> None:
    """But for what norms and attention keep of each token. A llama's norms keep copies on CPUs."""
    layout = megatron(ranks, tp=ranks, sp=splits_sequence, precision="bf16")
    work = Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE)
    counted = memory.estimate(layout, work).ranks[0].activations / model.layers
    assert kept_bytes(model, layout) == pytest.approx(counted, abs=32 * layout.micro_batch_size * SEQUENCE_LENGTH)


def split(**settings: object) -> Layout:
    return replace(megatron(2, tp=2, sp=True, precision="bf16"), **settings)  # type: ignore[arg-type]


NOT_SPLIT: dict[str, object] = {"sequence_parallel": False}
AGAIN: dict[str, object] = {"recompute": "selective"}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *[(model, split(**AGAIN, **tokens)) for model in (wide(WIDER), wide(GPT)) for tokens in ({}, NOT_SPLIT)],
        *[
            pytest.param(wide(WIDER), split(compile=True, **settings), marks=pytest.mark.slow)
            for settings in ({}, AGAIN, NOT_SPLIT, AGAIN | NOT_SPLIT, AGAIN | {"precision": "fp8"})
        ],
    ],
)
def test_blocks_keep_what_is_counted(model: ModelShape, layout: Layout) -> None:
    """But for what norms and attention keep of each token. Of what ranks sum, compiled blocks keep the sums alone."""
    torch.compiler.reset()
    tokens = layout.micro_batch_size * SEQUENCE_LENGTH
    work = Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE)
    counted, _ = memory._block_activations(layout, model, facts_of(layout, work), tokens, SEQUENCE_LENGTH, False)
    assert kept_bytes(model, layout) == pytest.approx(counted, abs=16 * tokens)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, split()),
        (wide(WIDER), split(precision="fp8")),
        (wide(WIDER), split(sequence_parallel=False)),
        pytest.param(wide(WIDER), split(compile=True), marks=pytest.mark.slow),
        pytest.param(wide(GPT), split(compile=True, precision="fp8"), marks=pytest.mark.slow),
    ],
)
def test_what_ranks_summed_is_not_summed_again_where_the_rest_is_computed_again(
    model: ModelShape, layout: Layout
) -> None:
    """What products are given is gathered again."""
    torch.compiler.reset()
    plain, selective = (calls_of_a_step(model, replace(layout, recompute=mode)) for mode in ("none", "selective"))
    again = selective - plain
    assert not plain - selective
    assert {call.kind for call in again} == ({Collective.ALL_GATHER} if layout.sequence_parallel else set())
    assert sum(again.values()) == layout.sequence_parallel * 2 * model.layers * layout.gradient_accumulation_steps


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 2])
def test_products_beside_what_is_sent_are_found_by_the_compiler(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, as async tensor parallelism splits them. The gradients of what several products are given
    are sums already before they are scattered. A product with a bias it does not know."""
    found = []

    def look(graph: Graph) -> None:
        gathers = micro_pipeline_tp.find_all_gather_patterns(graph)
        scatters = micro_pipeline_tp.find_reduce_scatter_patterns(graph)
        found.append(
            (
                [len(micro_pipeline_tp._find_consumer_matmuls(gather.res_node)) for gather in gathers],
                [micro_pipeline_tp._find_producer_matmul(scatter.input_node) is not None for scatter in scatters],
            )
        )

    monkeypatch.setattr(config, "post_grad_custom_pre_pass", look)
    monkeypatch.setattr(config, "force_disable_caches", True)
    monkeypatch.setattr("trainables.engines.megatron.parallelize.enable_symm_mem_for_group", lambda _: None)
    monkeypatch.setattr(config, "_micro_pipeline_tp", False)  # what the engine sets it to is set back
    torch.compiler.reset()
    calls_of_a_step(wide(WIDER), split(compile=True, async_tensor_parallel=True, micro_batch_size=sequences))
    assert found == [([3, 2], [True, True]), ([1, 1], [False, False])]


@pytest.mark.slow
@pytest.mark.parametrize("family", [wide(WIDER), wide(GPT)])
@pytest.mark.parametrize("splits_sequence", [False, True])
def test_compiled_blocks_keep_in_8_bits_what_they_gathered_alone(family: ModelShape, splits_sequence: bool) -> None:
    """Of so many tokens that weights, which a few keep in 8 bits as well, count for little."""
    torch.compiler.reset()
    sequence = 1024
    model = replace(family, max_sequence_length=sequence)
    layout = split(compile=True, precision="fp8", sequence_parallel=splits_sequence)
    tokens = layout.micro_batch_size * sequence
    facts = facts_of(layout, Workload(model, sequence, GLOBAL_BATCH_SIZE))
    counted, _ = memory._block_activations(layout, model, facts, tokens, sequence, False)
    assert kept_bytes(model, layout, sequence) == pytest.approx(counted, abs=40 * tokens)
