"""The memory model: exact parameters, orders that must hold, and every committed measurement."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks import DATA
from benchmarks.judge.memory import MeasuredMemory, measured_memory, tabled
from search_spaces import memory
from search_spaces.engines.deepspeed import ZERO3_BYTES, sums_apart
from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.layout import SCHEDULES, Layout
from search_spaces.memory import (
    MEASURED_SHARE,
    OUTSIDE_BYTES,
    SAFE_SHARE,
    UNMEASURED_SHARE,
    MemoryModel,
    RankMemory,
    band,
    estimate,
    passes_in_flight,
)
from search_spaces.models import PRESETS, ModelShape
from search_spaces.rules import refusal
from search_spaces.workload import Workload

SEQUENCE = 2048
ROUNDS = 8


def ranks_of(layout: Layout, model: str = "llama3-8b") -> tuple[RankMemory, ...]:
    """Of a layout on GPUs of which nothing is known, by pipeline rank."""
    work = Workload(PRESETS[model], SEQUENCE, layout.global_batch_size)
    return tuple(estimate(layout, work, range(layout.pipeline_parallel_size)).ranks.values())


def layout_of(engine: str = "megatron", dp: int = 1, **settings: object) -> Layout:
    """A layout of `dp` replicas and `ROUNDS` microbatches."""
    layout = replace(Layout(engine, 0, 0), **settings)  # type: ignore[arg-type]
    sequences = ROUNDS * dp * layout.micro_batch_size
    return replace(layout, num_gpus=dp * layout.model_parallel_size, global_batch_size=sequences)


def largest_states(layout: Layout, model: str = "llama3-8b") -> float:
    return max(rank.parameters + rank.gradients + rank.optimizer for rank in ranks_of(layout, model))


@pytest.mark.parametrize("model", ["llama3-1b", "llama3-8b", "gpt3-1.3b", "mixtral-8x7b"])
def test_one_gpu_holds_every_parameter_once(model: str) -> None:
    """Master copies in fp32 and gathered ones in bf16; bf16 gradients, and Adam's two states in fp32."""
    (rank,) = ranks_of(layout_of(reduce_precision="bf16"), model)
    parameters = PRESETS[model].parameters
    assert rank.parameters == 6 * parameters
    assert rank.gradients == 2 * parameters
    assert rank.optimizer == 8 * parameters


def test_zero_shards_what_its_stage_says() -> None:
    """Rajbhandari et al. 2020, figure 1, for eight ranks and the bytes of each engine."""
    whole = PRESETS["llama3-8b"].parameters
    (megatron,) = ranks_of(layout_of(dp=8, zero_stage=2))
    assert megatron.parameters == whole * (2 + 4 / 8)
    assert megatron.gradients == whole * 4 / 8
    assert megatron.optimizer == whole * 8 / 8


@pytest.mark.parametrize(
    ("zero", "reduced", "parameters", "gradients", "optimizer", "slack"),
    [
        (0, "fp32", 6, 4, 8, 0),  # torch's autocast, which keeps what it cast
        (1, "fp32", 2 + 4 / 8, 4, 1, 0),
        (1, "bf16", 2 + 4 / 8, 2, 1, 4 / 8),
        (2, "bf16", 2 + 4 / 8, 2 / 8, 1, 4 / 8),
        (3, "bf16", 6 / 8, 2 / 8, 1, 4 / 8),
    ],
)
def test_states_of_deepspeed(
    zero: int, reduced: str, parameters: float, gradients: float, optimizer: float, slack: float
) -> None:
    """Bytes a parameter of the whole model; with ZeRO-3 two parts are gathered besides, one of them held once more."""
    shape = PRESETS["llama3-8b"]
    (rank,) = ranks_of(layout_of("deepspeed", dp=8, zero_stage=zero, reduce_precision=reduced, compile=True))
    table = shape.vocab * shape.hidden + shape.hidden
    gathered = 2 * (table + shape.block_parameters) + ZERO3_BYTES * table if zero == 3 else 0
    assert rank.parameters == parameters * shape.parameters + gathered
    assert rank.gradients == gradients * shape.parameters
    assert rank.optimizer == optimizer * shape.parameters
    assert rank.slack == slack * shape.parameters


def test_buckets_of_deepspeed() -> None:
    """Two in bf16, one on its way while the other is filled: by the formula, which those with such segments have."""
    settings: dict[str, Any] = {"zero_stage": 2, "compile": True, "expandable_segments": True}
    small, large = (
        ranks_of(layout_of("deepspeed", dp=4, context_parallel_size=2, bucket_size=size, **settings))
        for size in (10**8, 5 * 10**8)
    )
    assert large[0].communication - small[0].communication == 4 * 4 * 10**8


@pytest.mark.parametrize("model", ["llama3-8b", "gpt3-1.3b", "mixtral-8x7b"])
def test_pipeline_ranks_hold_the_model_between_them(model: str) -> None:
    ranks = ranks_of(layout_of(pipeline_parallel_size=4), model)
    shape = PRESETS[model]
    twice = shape.vocab * shape.hidden if shape.tie_embeddings else 0  # both ends hold a tied table
    assert sum(rank.optimizer for rank in ranks) == 8 * (shape.parameters + twice)


def test_tensor_ranks_split_all_but_norms() -> None:
    (rank,) = ranks_of(layout_of(tensor_parallel_size=4))
    shape = PRESETS["llama3-8b"]
    norms = (2 * shape.layers + 1) * shape.hidden
    assert rank.optimizer == 8 * ((shape.parameters - norms) / 4 + norms)


def test_spread_experts_are_held_once_in_a_group() -> None:
    shape = PRESETS["mixtral-8x7b"]
    experts = shape.layers * shape.num_experts * shape.expert_parameters
    (rank,) = ranks_of(layout_of(dp=8, expert_parallel_size=4), "mixtral-8x7b")
    assert rank.optimizer == 8 * (shape.parameters - experts + experts / 4)
    (sharded,) = ranks_of(layout_of(dp=8, expert_parallel_size=4, zero_stage=1), "mixtral-8x7b")
    assert sharded.optimizer == shape.parameters


def test_offloaded_states_are_not_on_the_gpu() -> None:
    whole = PRESETS["llama3-8b"].parameters
    for zero, gradients in ((1, 2 * whole), (2, 0)):
        (away,) = ranks_of(layout_of("deepspeed", dp=4, zero_stage=zero, offload_optimizer=True))
        assert (away.parameters, away.gradients, away.optimizer) == (2 * whole, gradients, 0)


ENGINES = st.sampled_from(["megatron", "deepspeed"])
SIZES = st.sampled_from([2, 4, 8])
LAYOUTS = {
    "dp": SIZES,
    "micro_batch_size": st.sampled_from([1, 2, 4]),
    "compile": st.booleans(),
    "reduce_precision": st.sampled_from(["bf16", "fp32"]),
    "precision": st.sampled_from(["bf16", "fp32"]),
}


@settings(max_examples=60, deadline=None)
@given(engine=ENGINES, more=st.fixed_dictionaries(LAYOUTS))
def test_more_zero_never_needs_more(engine: str, more: dict[str, object]) -> None:
    """DeepSpeed's ZeRO-3 apart, which takes more of two ranks than its ZeRO-2."""
    stages = range(4 if engine == "megatron" else 3)
    states = [largest_states(layout_of(engine, zero_stage=stage, **more)) for stage in stages]  # type: ignore[arg-type]
    assert states == sorted(states, reverse=True)


@settings(max_examples=60, deadline=None)
@given(axis=st.sampled_from(["tensor", "pipeline"]), zero=st.integers(0, 1), more=st.fixed_dictionaries(LAYOUTS))
def test_more_model_parallelism_never_needs_more(axis: str, zero: int, more: dict[str, object]) -> None:
    axis += "_parallel_size"
    states = [largest_states(layout_of(zero_stage=zero, **{axis: size}, **more)) for size in (1, 2, 4)]  # type: ignore[arg-type]
    assert states == sorted(states, reverse=True)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(["llama3-8b", "gpt3-13b", "mixtral-8x7b"]),
    schedule=st.sampled_from(SCHEDULES),
    pipeline=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
    sequence=st.booleans(),
    more=st.fixed_dictionaries(LAYOUTS),
)
def test_less_kept_and_fewer_sequences_need_less(
    model: str, schedule: str, pipeline: int, tensor: int, sequence: bool, more: dict[str, object]
) -> None:
    layout = layout_of(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        pipeline_schedule=schedule if pipeline > 1 else "1f1b",
        virtual_pipeline_stages=1 if pipeline == 1 or schedule in ("gpipe", "1f1b") else 2,
        sequence_parallel=sequence and tensor > 1,
        **more,  # type: ignore[arg-type]
    )
    work = Workload(PRESETS[model], SEQUENCE, layout.global_batch_size)
    assume(refusal(layout, work) is None)
    by_mode = [ranks_of(replace(layout, recompute=mode), model) for mode in ("none", "selective", "full")]
    for none, selective, full in zip(*by_mode, strict=True):
        assert none.activations >= selective.activations >= full.activations > 0
    twice = replace(
        layout, micro_batch_size=2 * layout.micro_batch_size, global_batch_size=2 * layout.global_batch_size
    )
    assert estimate(twice, work).peak_bytes > estimate(layout, work).peak_bytes


def test_what_the_loss_gives_back_is_used_again() -> None:
    """Where it is not compiled, gradients on their way, and what is computed again, fit in its tensors."""
    settings: dict[str, Any] = {
        "recompute": "full",
        "micro_batch_size": 8,
        "reduce_precision": "bf16",
    }  # which is not replayed
    layouts = (layout_of(dp=2, compile=on, **settings) for on in (True, False))
    compiled, eager = (ranks_of(layout)[0] for layout in layouts)
    assert eager.logits > compiled.logits
    assert eager.communication < compiled.communication
    assert eager.activations < compiled.activations


def test_pipeline_ends_are_the_heaviest() -> None:
    """Embedding and most microbatches in flight on the first stage, output projection, logits and loss on the last."""
    layout = layout_of(pipeline_parallel_size=4, compile=True)
    found = estimate(layout, Workload(PRESETS["llama3-8b"], 8192, layout.global_batch_size), range(4))
    first, *middle, last = (found.reserved(rank) for rank in range(4))
    assert min(first, last) > max(middle)


@pytest.mark.parametrize(
    ("schedule", "virtual", "passes"),
    [
        ("gpipe", 1, (8, 8)),
        ("1f1b", 1, (2, 1)),
        ("interleaved_1f1b", 2, (5, 3)),
        ("interleaved_zero_bubble", 2, (4, 4)),
        ("zbv_zero_bubble", 2, (4, 4)),
    ],
)
def test_microbatches_in_flight(schedule: str, virtual: int, passes: tuple[int, ...]) -> None:
    """Counts of passes whose backward pass is not complete, as the papers' figures have them for two ranks."""
    layout = layout_of(pipeline_parallel_size=2, pipeline_schedule=schedule, virtual_pipeline_stages=virtual)
    (alone,) = ranks_of(layout_of())
    share = PRESETS["llama3-8b"].layers // layout.pipeline_stages
    block = alone.activations / PRESETS["llama3-8b"].layers
    assert [rank.activations / (block * share) for rank in ranks_of(layout)] == pytest.approx(passes)


def test_a_short_step_has_fewer_passes_down_the_v_in_flight() -> None:
    """With two microbatches the first of two ranks goes back before the second is up the V again (Qi et al. 2023)."""
    layout = layout_of(pipeline_parallel_size=2, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2)
    short = replace(layout, global_batch_size=2)
    assert [passes_in_flight(short, rank) for rank in range(2)] == [3, 4]


def test_gradients_come_after_what_all_microbatches_kept() -> None:
    """A step of GPipe, and one of 1F1B of as many microbatches as stages, has no gradients yet when most is kept."""
    long = layout_of(pipeline_parallel_size=2)
    short, gpipe = replace(long, global_batch_size=2), replace(long, pipeline_schedule="gpipe")
    assert ranks_of(short)[0].gradients < ranks_of(long)[0].gradients
    assert ranks_of(short)[1] == ranks_of(long)[1]
    assert all(one.gradients < other.gradients for one, other in zip(ranks_of(gpipe), ranks_of(long), strict=True))


@pytest.mark.parametrize(("zero", "reduce"), [(1, "bf16"), (2, "fp32"), (2, "bf16")])
def test_deepspeed_copies_gradients_for_the_update_where_little_is_given_back(zero: int, reduce: str) -> None:
    """A copy of the shard's, in fp32, with full recomputation in steps of several microbatches."""
    layout = layout_of(
        "deepspeed",
        dp=2,
        context_parallel_size=2,
        zero_stage=zero,
        recompute="full",
        micro_batch_size=2,
        reduce_precision=reduce,
        expandable_segments=True,
    )
    (rank,) = ranks_of(layout)
    assert rank.slack == PRESETS["llama3-8b"].parameters  # 4 bytes for each, of four shards
    for other in (replace(layout, global_batch_size=4), replace(layout, recompute="none")):
        assert ranks_of(other)[0].slack < rank.slack


def test_deepspeed_copies_no_gradients_that_it_sums_apart() -> None:
    """They are in fp32 as they come."""
    (rank,) = ranks_of(layout_of("deepspeed", dp=4, zero_stage=1, recompute="full", micro_batch_size=2))
    assert rank.slack == 0


def test_zero_bubble_holds_whole_stages_that_it_computed_again() -> None:
    plain = layout_of(pipeline_parallel_size=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_stages=2)
    plain = replace(plain, recompute="full")
    held = ranks_of(replace(plain, pipeline_schedule="interleaved_zero_bubble"))
    whole = ranks_of(replace(plain, pipeline_schedule="interleaved_zero_bubble", recompute="none"))
    assert ranks_of(plain)[1].activations < held[1].activations < whole[1].activations


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("engine", "schedule"), [*(("megatron", name) for name in SCHEDULES), ("deepspeed", "1f1b")])
def test_a_pipeline_needs_what_is_in_flight(engine: str, schedule: str, recompute: str) -> None:
    """However many microbatches a step has, but for GPipe, which has them all in flight."""
    layout = layout_of(
        engine,
        pipeline_parallel_size=4,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=1 if schedule in ("gpipe", "1f1b") else 2,
        recompute=recompute,
    )
    few, many = (ranks_of(replace(layout, global_batch_size=rounds)) for rounds in (16, 160))
    assert (few == many) is (schedule != "gpipe")


def test_what_goes_between_stages_is_split_as_sequences_are() -> None:
    """Where nothing is replayed."""
    layout = layout_of(pipeline_parallel_size=2, tensor_parallel_size=2, compile=True, reduce_precision="bf16")
    whole, split = (ranks_of(replace(layout, sequence_parallel=on)) for on in (False, True))
    hidden = 2 * SEQUENCE * PRESETS["llama3-8b"].hidden
    # Two outputs in flight and a gradient on the first rank; what comes next and a gradient that was sent on the last.
    for before, after, count in zip(whole, split, (3, 2), strict=True):
        assert before.communication - after.communication == count * hidden / 2


def test_uneven_stages() -> None:
    even, uneven = (layout_of(pipeline_parallel_size=2, stage_layers=cut) for cut in (None, (12, 20)))
    assert ranks_of(uneven)[1].activations == 20 / 16 * ranks_of(even)[1].activations


def test_slack_is_given_back_where_memory_is_short() -> None:
    layout = layout_of(dp=4, zero_stage=1, micro_batch_size=8, compile=True, reduce_precision="bf16")
    work = Workload(PRESETS["llama3-8b"], SEQUENCE, layout.global_batch_size, ACCELERATORS["h200"])
    found = estimate(layout, work)
    (rank,) = found.ranks.values()
    assert found.usable_bytes is not None
    assert found.share is not None
    assert rank.needed < found.usable_bytes < rank.needed + rank.slack
    assert found.peak_bytes == found.usable_bytes
    assert found.share < 1
    assert estimate(layout, replace(work, accelerator=ACCELERATORS["gpu"])).share is None


STAGES = st.lists(st.integers(1, 9), min_size=8, max_size=8).map(tuple)


def test_experts_one_after_the_other_are_replayed_near_the_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space has hundreds of such layouts, and to replay one takes a tenth of a second."""
    asked: list[Layout] = []
    monkeypatch.setattr(memory, "replayed", lambda layout, *_: asked.append(layout))
    mixture = ModelShape("llama", 8, 2048, 16, 8, 5632, 32_000, 4096, num_experts=8)
    layout = Layout("deepspeed", 2, 16, micro_batch_size=4, zero_stage=1)
    work = Workload(mixture, 4096, 16, accelerator=ACCELERATORS["h100"])
    share = memory.glance(layout, work).share
    assert share is not None
    assert memory.CLEAR_SHARE < share < memory.NEAR_SHARES[0]
    assert not asked
    monkeypatch.setattr(memory, "NEAR_SHARES", (share - 0.01, share + 0.01))
    memory.glance(layout, work)
    assert asked == [layout]


@settings(max_examples=50, deadline=None)
@given(
    model=st.sampled_from(["llama3-8b", "gpt3-13b", "mixtral-8x7b"]),
    schedule=st.sampled_from(SCHEDULES),
    pipeline=st.sampled_from([2, 4, 8]),
    uneven=st.none() | STAGES,
    zero=st.integers(0, 1),
    recompute=st.sampled_from(["none", "selective", "full"]),
    more=st.fixed_dictionaries(LAYOUTS),
)
def test_the_ranks_looked_at_are_the_fullest(
    model: str,
    schedule: str,
    pipeline: int,
    uneven: tuple[int, ...] | None,
    zero: int,
    recompute: str,
    more: dict[str, object],
) -> None:
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    layout = layout_of(
        pipeline_parallel_size=pipeline,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=virtual,
        stage_layers=uneven if pipeline * virtual == 8 else None,
        zero_stage=zero,
        recompute=recompute,
        **more,  # type: ignore[arg-type]
    )
    for accelerator in (ACCELERATORS["gpu"], ACCELERATORS["h100"]):
        work = Workload(PRESETS[model], SEQUENCE, layout.global_batch_size, accelerator)
        some, every = estimate(layout, work), estimate(layout, work, range(pipeline))
        assert (some.peak_bytes, some.share, some.needs) == (every.peak_bytes, every.share, every.needs)


H200 = Workload(PRESETS["llama3-8b"], 8192, 8, ACCELERATORS["h200"])


def replicas(engine: str = "megatron", **settings: Any) -> Layout:
    """Of the work of `H200`: four GPUs, ZeRO-1."""
    return replace(Layout(engine, 4, 8, zero_stage=1, compile=True), **settings)


def share_of(layout: Layout, source: MemoryModel | Workload = H200) -> float:
    """By the formula, or as a search has corrected it."""
    found = source.share(layout) if isinstance(source, MemoryModel) else estimate(layout, source.run).share
    assert found is not None
    return found


def test_what_a_layout_needs_is_named_largest_first() -> None:
    found = estimate(replicas(micro_batch_size=2, compile=False), H200)
    assert found.needs == ("needs 151 GiB of 139 GiB: 82 activations, 32 logits, 22 parameters, 15 optimizer")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"micro_batch_size": 1, "recompute": "full"}, "fits"),
        ({"micro_batch_size": 1}, "borderline"),
        ({"micro_batch_size": 2, "compile": False}, "too big"),
    ],
)
def test_bands(settings: dict[str, Any], expected: str) -> None:
    layout = replicas(**settings)
    assert band(layout, H200) == MemoryModel(H200).band(layout) == expected
    unknown = replace(H200, accelerator=ACCELERATORS["gpu"])
    assert band(layout, unknown) is MemoryModel(unknown).band(layout) is None


def test_what_was_never_measured_is_refused_later() -> None:
    """Fewer points are lost to an error of the formula, which launches would find."""
    work = replace(H200, accelerator=Accelerator(memory_gib=100.0))
    for layout, limit in ((replicas(), MEASURED_SHARE), (replicas(recompute="selective"), UNMEASURED_SHARE)):
        needed = max(rank.needed for rank in estimate(layout, work).ranks.values())
        for share, expected in ((limit * 0.99, "borderline"), (limit * 1.01, "too big")):
            memory_gib = (needed / share + OUTSIDE_BYTES) / 2**30
            assert band(layout, replace(work, accelerator=Accelerator(memory_gib))) == expected


def test_no_rank_has_more_tokens_than_there_are() -> None:
    """The fullest of two has twice an even share at most, of four and more the 2.8 times that were fitted; of a token
    and expert it keeps a hidden state and four values as wide as the network within."""
    work = Workload(replace(PRESETS["mixtral-8x7b"], layers=2), 4096, 8, ACCELERATORS["h200"])
    two, four, eight = (
        estimate(Layout("megatron-earlier", ranks, 8, expert_parallel_size=ranks, zero_stage=1), work)
        .ranks[0]
        .activations
        for ranks in (2, 4, 8)
    )
    model = work.shape
    chosen = model.layers * work.sequence_length * model.experts_per_token
    assert four - two == pytest.approx((2.8 - 2) * chosen * 2 * (model.hidden + 4 * model.ffn_hidden))
    assert eight == four


def test_spread_experts_are_never_safe_that_get_what_routers_choose() -> None:
    work = Workload(PRESETS["mixtral-8x7b"], 128, 8, ACCELERATORS["h200"], depths=(1, 2))
    spread = replicas(engine="megatron-earlier", expert_parallel_size=4)
    assert share_of(spread, work) < SAFE_SHARE / 2
    assert band(spread, work) == "borderline"
    assert band(replace(spread, engine="megatron"), work) == band(replicas(), work) == "fits"


def test_of_proxies_the_deeper_has_to_fit() -> None:
    work = replace(H200, model=PRESETS["llama3-70b"])
    layout = replicas()
    assert band(layout, work) == "too big"
    assert [band(layout, replace(work, depths=depths)) for depths in ((1, 2), (1, 40))] == ["fits", "too big"]


def test_trials_correct_their_engine() -> None:
    model, layout, other = MemoryModel(H200), replicas(), replicas("deepspeed")
    predicted_gib = estimate(layout, H200).peak_bytes / 2**30
    shares = [share_of(layout, model)]
    for _ in range(40):
        model.observe(layout, 1.1 * predicted_gib, fits=True)
        shares.append(share_of(layout, model))
    assert shares == sorted(shares)
    assert shares[0] == share_of(layout)
    assert shares[0] < shares[1] < 1.05 * shares[0]
    assert shares[-1] == pytest.approx(1.1 * shares[0], rel=0.01)
    assert share_of(other, model) == share_of(other)


def test_one_odd_trial_corrects_nothing() -> None:
    model, layout = MemoryModel(H200), replicas()
    for measured in (1.0, 1.0, 3.0, 1.0, 1.0):
        model.observe(layout, measured * estimate(layout, H200).peak_bytes / 2**30, fits=True)
    assert share_of(layout, model) == share_of(layout)


def test_running_out_says_that_more_was_needed() -> None:
    model, layout, hopeless = MemoryModel(H200), replicas(), replicas(micro_batch_size=2, compile=False)
    model.observe(hopeless, None, fits=False)  # which was known
    assert share_of(layout, model) == share_of(layout)
    for _ in range(3):
        model.observe(layout, None, fits=False)
    assert share_of(layout, model) > share_of(layout)


def test_nothing_is_learnt_of_machines_whose_memory_is_not_known() -> None:
    model, layout = MemoryModel(replace(H200, accelerator=ACCELERATORS["gpu"])), replicas()
    model.observe(layout, None, fits=False)
    model.observe(layout, 100.0, fits=True)
    assert model.share(layout) is None


@pytest.fixture(scope="module")
def measured() -> list[MeasuredMemory]:
    return measured_memory()


def test_committed_measurements(measured: list[MeasuredMemory]) -> None:
    """Of layouts that do not spread experts; see docs/memory.md for those that do."""
    errors = {point: abs(point.error) for point in measured if point.error is not None and not point.spread_experts}
    assert len(errors) >= 40
    assert {point.layout.engine for point in errors} == {"megatron", "deepspeed"}
    for held_out in (False, True):
        some = [error for point, error in errors.items() if held_out is not point.fitted]
        assert statistics.mean(some) < 0.03
    assert max(errors.values()) < 0.09


def test_what_ran_out_is_never_called_safe(measured: list[MeasuredMemory]) -> None:
    ran_out = [point for point in measured if point.reserved_gib is None]
    assert len(ran_out) == 3
    assert min(point.share for point in ran_out) > 1
    assert max(point.share for point in measured if point.reserved_gib is not None) < 1


def two_of_zero_bubble(layout: Layout) -> bool:
    """They do not fill the pipeline, and the replay finds no place for one tensor of logits that has one."""
    return layout.splits_backward and layout.gradient_accumulation_steps == 2


@pytest.mark.slow
def test_a_second_sweep_with_other_kinds_of_layouts() -> None:
    """Context parallelism and pipeline schedules, on two GPUs."""
    sweep = tabled(DATA / "llama3_12l_2xh200.csv")
    new = [point for point in sweep if not point.fitted]
    assert len(new) == 65
    assert not any(point.ran_out for point in new)
    errors = {point: abs(point.error) for point in new if point.error is not None}
    assert statistics.mean(errors.values()) < 0.035
    assert (
        max(
            error
            for point, error in errors.items()
            if not (two_of_zero_bubble(point.layout) or lacked_room(point.layout))
        )
        < 0.1
    )
    assert max(errors.values()) < 0.125
    assert {band(point.layout, point.work) for point in new} == {"fits", "borderline"}


@pytest.mark.slow
def test_a_sweep_of_layouts_that_are_not_compiled() -> None:
    sweep = tabled(DATA / "llama3_12l_4xh200.csv")
    errors = {point: abs(point.error) for point in sweep if point.error is not None}
    assert len(errors) > 100
    assert statistics.mean(errors.values()) < 0.03
    assert max(error for point, error in errors.items() if not lacked_room(point.layout)) < 0.1
    assert max(errors.values()) < 0.18
    bands = {point.layout.label: band(point.layout, point.work) for point in sweep if point.ran_out}
    assert bands.pop("deepspeed 2gpu dp1 tp2 zero0 mbs4") == "borderline"
    assert set(bands.values()) == {"too big"}
    assert {band(point.layout, point.work) for point in sweep if not point.ran_out} == {"fits", "borderline"}


def lacked_room(layout: Layout) -> bool:
    """Whether DeepSpeed made moments where logits had been, and these were nearly all that a step held."""
    return sums_apart(layout) and layout.recompute == "full" and layout.gradient_accumulation_steps == 1
