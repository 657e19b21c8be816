from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.layout import Layout
from trainables.batches import microbatches
from trainables.data import SYNTHETIC, TokenStream, open_tokens

VOCAB = 50_000
SEQUENCE_LENGTH = 4
CPU = torch.device("cpu")


def numbered() -> TokenStream:
    """A stream in which the token at position p is p: a sample's first token tells which one it is."""
    return TokenStream(np.arange(VOCAB), VOCAB, "numbered")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, tp, pp, mbs, accumulated = (
        draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3, 8), (1, 2), (1, 2), (1, 2, 5), (1, 2, 7))
    )
    return Layout(
        "megatron",
        dp * tp * pp,
        dp * mbs * accumulated,
        micro_batch_size=mbs,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        precision="fp32",
    )


@given(layout=layouts(), step=st.integers(0, 50))
def test_data_parallel_ranks_share_out_exactly_the_global_batch(layout: Layout, step: int) -> None:
    stream, found = numbered(), []
    for rank in range(layout.data_parallel_size):
        batch = list(microbatches(stream, layout, SEQUENCE_LENGTH, step, rank, CPU))
        assert len(batch) == layout.gradient_accumulation_steps
        for inputs, labels in batch:
            assert inputs.shape == labels.shape == (layout.micro_batch_size, SEQUENCE_LENGTH)
            assert inputs.dtype == labels.dtype == torch.int64
            assert torch.equal(labels, inputs + 1)
            found += (inputs[:, 0] // SEQUENCE_LENGTH).tolist()
    samples = stream.num_samples(SEQUENCE_LENGTH)
    first = step * layout.global_batch_size
    assert sorted(found) == sorted(i % samples for i in range(first, first + layout.global_batch_size))


def test_every_round_deals_a_microbatch_to_each_rank_in_turn() -> None:
    layout = Layout("megatron", 2, 8, micro_batch_size=2, precision="fp32")
    first_samples = [
        [inputs[0, 0].item() // SEQUENCE_LENGTH for inputs, _ in microbatches(numbered(), layout, 4, 0, rank, CPU)]
        for rank in range(2)
    ]
    assert first_samples == [[0, 4], [2, 6]]


def test_labels_are_the_inputs_one_token_later() -> None:
    layout = Layout("megatron", 1, 4, micro_batch_size=2, precision="fp32")
    stream = open_tokens(SYNTHETIC, 512)
    rows = torch.from_numpy(np.stack([stream.sequence(i, 16) for i in range(4, 8)]))
    (a, b), (c, d) = microbatches(stream, layout, 16, 1, 0, CPU)
    assert torch.equal(torch.cat((a, c)), rows[:, :-1])
    assert torch.equal(torch.cat((b, d)), rows[:, 1:])
