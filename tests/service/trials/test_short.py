"""Which steps stand for a whole global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.layout import SCHEDULES, Layout
from search_spaces.models import PRESETS
from search_spaces.rules import refusal
from search_spaces.workload import Workload
from service.trials.short import SAVED, batch_alone, batches, sizes

PLAIN = Layout("megatron", 4, 256, zero_stage=1)  # 64 microbatches on each of four replicas
PIPELINE = replace(PLAIN, pipeline_parallel_size=4)  # 256 microbatches


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (PLAIN, (6, 2)),
        (replace(PLAIN, micro_batch_size=2), (6, 2)),
        (replace(PLAIN, engine="deepspeed"), (6, 2)),
        (replace(PLAIN, global_batch_size=96), (6, 2)),
        (replace(PLAIN, global_batch_size=92), None),
        (PIPELINE, (24, 8)),
        (replace(PIPELINE, pipeline_schedule="interleaved_1f1b", virtual_pipeline_stages=2), (24, 8)),
        (replace(PIPELINE, global_batch_size=92), None),
        (replace(PIPELINE, pipeline_schedule="gpipe"), None),
        (replace(PLAIN, pipeline_schedule="gpipe"), (6, 2)),  # without a pipeline that says nothing
    ],
)
def test_two_numbers_of_microbatches_stand_for_many(layout: Layout, counts: tuple[int, int] | None) -> None:
    chosen = batches(layout)
    assert chosen == (counts and tuple(count * layout.micro_batch_size * layout.data_parallel_size for count in counts))


def test_fewer_stand_for_many_where_a_rank_is_alone() -> None:
    assert sizes(PLAIN, alone=False) == (24, 8)
    assert sizes(PLAIN, alone=True) == (16, 8)
    assert sizes(replace(PLAIN, global_batch_size=24), alone=True) == (16, 8)
    assert sizes(replace(PLAIN, global_batch_size=20), alone=True) == ()


@settings(deadline=None, max_examples=50)
@given(
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 3]),
    mbs=st.sampled_from([1, 2, 4]),
    rounds=st.integers(1, 400),
    schedule=st.sampled_from(SCHEDULES),
)
def test_smaller_batches_are_legal_and_save_what_they_should(
    pp: int, dp: int, mbs: int, rounds: int, schedule: str
) -> None:
    stages: dict[str, Any] = {
        "pipeline_schedule": schedule,
        "virtual_pipeline_stages": 1 if schedule in ("1f1b", "gpipe") else 2,
    }
    layout = Layout(
        "megatron",
        pp * dp,
        rounds * dp * mbs,
        micro_batch_size=mbs,
        pipeline_parallel_size=pp,
        **stages if pp > 1 else {},
    )
    chosen = batches(layout)
    if chosen is None:
        assert schedule == "gpipe" or rounds < 24 * pp
        return
    assert chosen[0] % chosen[1] == 0
    assert SAVED * sum(chosen) <= layout.global_batch_size
    for size in chosen:
        smaller = replace(layout, global_batch_size=size)
        assert smaller.gradient_accumulation_steps >= 2 * pp
        assert refusal(smaller, Workload(PRESETS["llama3-8b"], 8192, size)) is None


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (PIPELINE, 9),
        (replace(PIPELINE, micro_batch_size=2), 9),
        (replace(PIPELINE, num_gpus=8), 9),
        (replace(PIPELINE, pipeline_schedule="interleaved_1f1b", virtual_pipeline_stages=2), 12),
        (replace(PIPELINE, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2), 12),
        (replace(PIPELINE, global_batch_size=10), 9),
        (replace(PIPELINE, global_batch_size=9), None),
        (replace(PIPELINE, pipeline_schedule="gpipe"), None),
        (PLAIN, None),
    ],
)
def test_ranks_of_a_pipeline_alone_need_few_microbatches(layout: Layout, count: int | None) -> None:
    assert batch_alone(layout) == (count and count * layout.micro_batch_size * layout.data_parallel_size)
