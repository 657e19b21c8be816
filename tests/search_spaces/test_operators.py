"""Of what layouts consist, and that predictions are of just that, with what was measured in its place."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from search_spaces.blocks import Cut, Parts, parts_of, update_of
from search_spaces.cost import Coefficients, data_sheet, launch_s, predict
from search_spaces.engines import engine_of
from search_spaces.hardware import ACCELERATORS
from search_spaces.inventory import operators_of
from search_spaces.launches import ENDS, ROUNDS, TRUSTED, launch_of, specimen_of
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.operators import Kind, Operator, OperatorTiming, Timings
from search_spaces.parameters import held
from search_spaces.roofline import INDEXED, passes, priced
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload

AXES: dict[str, list[Any]] = {
    "engine": ["megatron", "deepspeed"],
    "num_gpus": [1, 4],
    "tensor_parallel_size": [1, 2],
    "context_parallel_size": [1, 2],
    "expert_parallel_size": [1, 2],
    "zero_stage": [0, 1, 3],
    "sequence_parallel": [False, True],
    "recompute": ["none", "selective", "full"],
    "compile": [False, True],
    "precision": ["bf16", "fp32", "fp8"],
}
WORKS = [
    Workload(replace(PRESETS[name], layers=4), length, 16, ACCELERATORS["h100"])
    for name, length in (("llama3-8b", 8192), ("gpt3-1.3b", 2048), ("mixtral-8x7b", 4096))
]
WORKS.append(replace(WORKS[0], model=replace(WORKS[0].shape, head_dim=96)))


def sheet() -> Coefficients:
    found = data_sheet("h100")
    assert found is not None
    return found


SHEET = sheet()


@cache
def legal() -> list[tuple[Workload, Layout]]:
    return [(work, layout) for work in WORKS for layout in enumerate_space(AXES, work).layouts]


LAYOUTS = st.deferred(lambda: st.sampled_from(legal()))
PARTS = ("matmul", "attention", "elementwise")


def consists(layout: Layout, work: Workload) -> Parts:
    return parts_of(Cut.of(layout, work), work.shape, work.sequence_length)


def with_timings(*rows: OperatorTiming) -> Coefficients:
    return replace(SHEET, operators=Timings(rows))


def as_priced(operator: Operator, cut: Cut, factor: float) -> OperatorTiming:
    """What a machine would show on which an operator takes so many times what it is foretold to."""
    forward, backward = priced(operator, cut, SHEET)
    return OperatorTiming(operator, factor * forward.seconds, factor * backward.seconds)


def spared_casts(layout: Layout, work: Workload) -> tuple[float, float]:
    """Seconds of a block, forward and backward, of eager casts which ranks that split products do once for several that
    are given the same, and of split tokens for their own alone: 5 bytes a value."""
    if layout.precision != "fp8" or layout.compile or layout.tensor_parallel_size == 1:
        return 0.0, 0.0
    hidden, tokens = work.shape.hidden, Cut.of(layout, work).tokens(work.sequence_length)
    own = tokens // layout.tensor_parallel_size if layout.sequence_parallel else tokens
    given = [
        operator.dims[0]
        for operator, count in consists(layout, work).block
        for _ in range(count)
        if operator.kind == Kind.PRODUCT and operator.dims[1] == hidden
    ]
    cast = [own] * (1 if work.shape.num_experts else 2)  # what attention is given, and a network that is not of experts
    there, back = sum(given) - sum(cast), tokens * len(cast) - sum(cast)
    return 5 * hidden * there / SHEET.memory_bytes_per_s, 5 * hidden * back / SHEET.memory_bytes_per_s


def last_product_s(layout: Layout, work: Workload) -> float:
    """Seconds of the product forward that a block without experts ends with."""
    cut = Cut.of(layout, work)
    shape = (work.shape.ffn_hidden // layout.tensor_parallel_size, work.shape.hidden)
    last = [operator for operator, _ in consists(layout, work).block if operator.dims[1:] == shape]
    return sum(priced(operator, cut, SHEET)[0].matmul for operator in last if operator.kind == Kind.PRODUCT)


@settings(deadline=None, max_examples=60)
@given(LAYOUTS)
def test_all_work_of_a_part_is_that_of_its_operators(drawn: tuple[Workload, Layout]) -> None:
    """But for the casts that eager ranks which split products do once for several, what DeepSpeed's ranks do besides,
    the copies around exchanges of experts' tokens, and what recomputation leaves out."""
    work, layout = drawn
    assume(layout.engine == "megatron" or layout.context_parallel_size == 1)
    assume(work.shape.family == "llama" or layout.zero_stage < 3 or layout.compile or layout.engine == "megatron")
    cut, found = Cut.of(layout, work), consists(layout, work)
    priced_parts = passes(cut, work.shape, work.sequence_length, SHEET)
    for part, through in zip(found, priced_parts, strict=True):
        forward, backward = (
            [
                sum(count * getattr(priced(operator, cut, SHEET)[way], name) for operator, count in part)
                for name in PARTS
            ]
            for way in (0, 1)
        )
        if part is found.block:
            there, back = spared_casts(layout, work)
            forward[2] += regrouped_s(layout, work) - there
            backward[2] += 2 * regrouped_s(layout, work) - back
        again = [0.0, 0.0, 0.0]
        if part is found.block and layout.recompute != "none":
            again = [*forward] if layout.recompute == "full" else [0.0, 0.0, forward[2]]
            if layout.recompute == "full" and engine_of(layout.engine).leaves_out_last(layout):
                again[0] -= last_product_s(layout, work)
        total = [sum(seconds) for seconds in zip(forward, backward, again, strict=True)]
        assert [getattr(through, name) for name in PARTS] == pytest.approx(total)


def regrouped_s(layout: Layout, work: Workload) -> float:
    """Of two copies of each token that came to its expert from another rank, forward."""
    if layout.expert_parallel_size == 1 or layout.engine != "megatron":
        return 0.0
    rows = layout.micro_batch_size * work.sequence_length * work.shape.experts_per_token / layout.context_parallel_size
    width = 4 if layout.precision == "fp32" else 2
    return 2 * 2 * width * rows * work.shape.hidden / SHEET.eager_bytes_per_s


def besides(layout: Layout, work: Workload) -> float:
    """Seconds of kernels that only move memory which a block takes more than one GPU's that has no ZeRO."""
    alone = replace(layout, num_gpus=1, context_parallel_size=1, zero_stage=0, micro_batch_size=1)
    one = passes(Cut.of(alone, work), work.shape, work.sequence_length, SHEET).block.elementwise
    tokens = layout.micro_batch_size / layout.context_parallel_size
    return passes(Cut.of(layout, work), work.shape, work.sequence_length, SHEET).block.elementwise - tokens * one


@pytest.mark.parametrize(
    ("ranks", "settings", "times"),
    [
        (2, {"micro_batch_size": 2}, 16),  # q, k, v and output, before and after, there and back
        (2, {}, 8),
        (2, {"micro_batch_size": 2, "recompute": "full"}, 24),
        (2, {"micro_batch_size": 2, "recompute": "selective", "compile": True}, 24),
        (1, {"micro_batch_size": 2}, 0),
    ],
)
def test_heads_that_are_exchanged_for_tokens_are_copied(ranks: int, settings: dict[str, Any], times: int) -> None:
    """Of GPT-3 1.3B each copy is of a token's hidden states, which it reads and writes."""
    work = WORKS[1]
    layout = Layout("deepspeed", ranks, 8, context_parallel_size=ranks, zero_stage=1, **settings)
    copy = 2 * 2 * Cut.of(layout, work).tokens(work.sequence_length) * work.shape.hidden / SHEET.eager_bytes_per_s
    assert besides(layout, work) == pytest.approx(times * INDEXED * copy)
    fewer = replace(work, model=replace(work.shape, kv_heads=work.shape.heads // 4))
    assert besides(layout, fewer) == pytest.approx(times * INDEXED * copy * (1 + 1 / 4) / 2)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_zero3_add_their_biases_apart(recompute: str) -> None:
    work, forward = WORKS[1], {"none": 1, "full": 2}[recompute]
    layout = Layout("deepspeed", 2, 8, zero_stage=3, recompute=recompute)
    wide = 4 * work.shape.hidden + work.shape.ffn_hidden + work.shape.hidden
    added = 2 * 2 * work.sequence_length * wide / SHEET.eager_bytes_per_s
    assert besides(layout, work) == pytest.approx(forward * INDEXED * added)
    assert besides(replace(layout, zero_stage=2), work) == pytest.approx(0)
    assert besides(replace(layout, compile=True), work) == pytest.approx(0), "the compiler fuses them"
    assert besides(layout, WORKS[0]) == pytest.approx(0), "a Llama has none"


def test_heads_are_exchanged_again_where_only_products_are_kept() -> None:
    work, layout = WORKS[1], Layout("deepspeed", 2, 8, context_parallel_size=2, zero_stage=1)
    once, again = (
        passes(Cut.of(one, work), work.shape, work.sequence_length, SHEET).block.context
        for one in (layout, replace(layout, recompute="selective"))
    )
    assert again == pytest.approx(1.5 * once)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 0),
        ({"micro_batch_size": 2}, 1),
        ({"micro_batch_size": 2, "sequence_parallel": False}, 0),
        ({"async_tensor_parallel": True, "compile": True}, 1),
        ({"engine": "megatron-earlier"}, 1),
        ({"engine": "torchtitan"}, 1),
        ({"engine": "megatron-lm", "micro_batch_size": 2}, 0),
    ],
    ids=str,
)
def test_tokens_are_copied_where_gathers_are_not_along_the_first_dimension(
    settings: dict[str, Any], copies: int
) -> None:
    layout = replace(Layout("megatron", 4, 16, tensor_parallel_size=4, sequence_parallel=True), **settings)
    assert sum(operator.kind is Kind.COPIES for operator, _ in consists(layout, WORKS[0]).block) == copies


def test_eager_ranks_copy_less_without_dtensors() -> None:
    """A gather's pieces are read and written once, where DTensors needed more kernels for it."""
    split = Layout("megatron", 4, 16, micro_batch_size=2, tensor_parallel_size=4, sequence_parallel=True)
    blocks = [
        passes(Cut.of(layout, WORKS[0]), WORKS[0].shape, 8192, SHEET).block.elementwise
        for layout in (split, replace(split, engine="megatron-earlier"))
    ]
    values = 2 * 8192 * 4096 * 3  # of hidden states, forward and twice backward
    assert blocks[1] - blocks[0] == pytest.approx(12 * values * 2 / SHEET.eager_bytes_per_s)


def test_heads_need_not_share_the_width_of_the_model() -> None:
    """Of 32 heads 96 wide and 8 of keys, half of each on either rank."""
    layout = Layout("megatron", 2, 16, tensor_parallel_size=2)
    found = [operator for operator, count in consists(layout, WORKS[-1]).block for _ in range(count)]
    products = [operator.dims[1:] for operator in found if operator.kind == Kind.PRODUCT]
    assert sorted(products) == sorted(
        [(4096, 1536), (4096, 384), (4096, 384), (1536, 4096)] + 2 * [(4096, 7168)] + [(7168, 4096)]
    )
    (attention,) = (operator for operator in found if operator.kind == Kind.ATTENTION)
    assert attention.dims == (1, 8192, 1536, 384, 96, 1)


@settings(deadline=None, max_examples=60)
@given(LAYOUTS, st.data())
def test_what_was_measured_of_an_operator_counts_in_place_of_its_formula_alone(
    drawn: tuple[Workload, Layout], data: st.DataObject
) -> None:
    work, layout = drawn
    layout = replace(layout, recompute="none")
    cut, found = Cut.of(layout, work), consists(layout, work)
    operator, count = data.draw(st.sampled_from(found.block))
    plain, measured = (
        passes(cut, work.shape, work.sequence_length, c) for c in (SHEET, with_timings(as_priced(operator, cut, 3.0)))
    )
    fullest = 1.0
    if operator.kind == Kind.EXPERTS:
        fullest = SHEET.expert_imbalance if cut.is_uneven else 1.0
    took = sum(load.seconds for load in priced(operator, cut, SHEET))
    factor = 3 * SHEET.operators_in_step * fullest
    assert measured.block.seconds - plain.block.seconds == pytest.approx(count * took * (factor - 1))
    for name in ("flops", "moved", "sent", "tensor", "context", "experts"):
        assert getattr(measured.block, name) == getattr(plain.block, name)
    assert (measured.embedding, measured.head) == (plain.embedding, plain.head)


def test_what_was_measured_of_another_shape_counts_for_nothing() -> None:
    work, layout = WORKS[0], Layout("megatron", 1, 16)
    other = replace(layout, micro_batch_size=2)
    cut = Cut.of(other, work)
    shapes = {operator for operator, _ in consists(layout, work).block}
    rows = [as_priced(operator, cut, 3.0) for operator, _ in consists(other, work).block]
    assert not shapes & {row.operator for row in rows}
    assert predict(layout, work, with_timings(*rows)) == predict(layout, work, SHEET)
    assert predict(other, work, with_timings(*rows)).step_time_s > 1.5 * predict(other, work, SHEET).step_time_s


def test_measured_launches_and_updates_count_in_place_of_theirs() -> None:
    work, layout = WORKS[1], Layout("deepspeed", 1, 16, recompute="full")
    plain = predict(layout, work, SHEET)
    launch = OperatorTiming(launch_of(layout, work), 1.0)
    waits = predict(layout, work, with_timings(launch))
    assert waits.step_time_s > 16 * work.shape.layers > plain.step_time_s
    shard = held(layout, work.shape, 0, splits_tables=False).sharded(layout)
    update = OperatorTiming(update_of(engine_of(layout), shard), 5.0)
    slow = predict(layout, work, with_timings(update))
    assert slow.parts["model_states"] > 5.0 > plain.parts["model_states"]
    assert {name for name in slow.parts if slow.parts[name] != plain.parts[name]} == {"model_states"}
    both = with_timings(launch, update)
    twice = predict(layout, work, replace(both, launches_in_step=2.0))
    assert twice.step_time_s > 2 * 16 * work.shape.layers
    assert predict(layout, work, replace(both, operators_in_step=2.0)).parts["model_states"] > 10.0


def test_gradients_are_summed_while_the_cpu_launches() -> None:
    """As all is that a GPU does for a microbatch; the update of the parameters comes after."""
    work, layout = WORKS[1], Layout("megatron", 1, 16)
    plain = predict(layout, work, SHEET)
    launch = OperatorTiming(launch_of(layout, work), 10 * plain.step_time_s / 16 / (work.shape.layers + 1))
    update_s = predict(replace(layout, global_batch_size=1), work, SHEET).parts["model_states"]
    waits = predict(layout, work, with_timings(launch))
    launched = SHEET.launches_in_step * 16 * (work.shape.layers + 1) * launch.forward_s
    assert launched < waits.step_time_s < launched + SHEET.step_s + update_s
    assert plain.parts["model_states"] > 2 * update_s


def test_a_gpu_does_nothing_while_deepspeeds_experts_make_the_cpu_wait_for_it() -> None:
    """With as much to do for the CPU as for the GPU: the root of the sum of cubes, not of fifth powers."""
    work = next(work for work in WORKS if work.shape.num_experts)
    unlimited = replace(SHEET, power_limit_w=1e6)  # while it waits it draws less, so that a power limit slows it less
    for engine, waits in (("deepspeed", True), ("megatron", False)):
        layout = Layout(engine, 1, 16)
        computing = predict(layout, work, replace(unlimited, host_time=1e-9)).step_time_s
        block_s = predict(layout, work, unlimited).ahead * launch_s(layout, work, unlimited)  # of the GPU
        launch = OperatorTiming(launch_of(layout, work), block_s / unlimited.launches_in_step)
        alike = replace(unlimited, operators=Timings((launch,)))
        longer = predict(layout, work, alike).step_time_s - computing
        rounds_s = layout.gradient_accumulation_steps * (work.shape.layers + ENDS) * block_s
        assert longer / rounds_s == pytest.approx((2 ** (1 / 3) if waits else 2**0.2) - 1)


def test_a_block_takes_the_cpu_what_its_engine_says() -> None:
    mixture, plain = (next(work for work in WORKS if bool(work.shape.num_experts) is has) for has in (True, False))
    eager = Layout("megatron", 1, 16, recompute="full")
    slow = replace(SHEET, host_time=2.0)
    assert launch_s(eager, plain, slow) == pytest.approx(2 * 6.2e-3)
    assert launch_s(replace(eager, compile=True), mixture, slow) == pytest.approx(2 * 8.5e-3)
    works = [replace(mixture, model=replace(mixture.shape, num_experts=count)) for count in (4, 16)]
    few, many = (launch_s(replace(eager, engine="deepspeed"), work, slow) for work in works)
    assert few == pytest.approx(2 * 16.8e-3)
    assert many == pytest.approx(1.48 * few), "one expert after the other"


@pytest.mark.parametrize(
    ("split", "compiled", "more_ms"),
    [
        ({"context_parallel_size": 2}, False, {"megatron": 2.0, "deepspeed": 3.2}),
        ({"context_parallel_size": 2}, True, {"megatron": 1.1, "deepspeed": 3.4}),
        ({"context_parallel_size": 2}, True, {"megatron-earlier": 2.9}),
        ({"zero_stage": 1}, False, {"megatron": 0.0, "deepspeed": 0.0}),
        ({"zero_stage": 2}, False, {"megatron": 0.9, "deepspeed": 1.3}),
        ({"zero_stage": 3}, True, {"megatron": 3.5, "deepspeed": 6.0}),
        ({"tensor_parallel_size": 2}, True, {"megatron": 3.9, "deepspeed": 0.7, "megatron-lm": 0.0}),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, True, {"megatron": 5.0, "deepspeed": 4.1}),
    ],
)
def test_a_block_of_several_ranks_takes_the_cpu_more(
    split: dict[str, Any], compiled: bool, more_ms: dict[str, float]
) -> None:
    work, twice = WORKS[0], replace(SHEET, host_time=2.0)
    for engine, more in more_ms.items():
        alone = Layout(engine, 1, 16, compile=compiled)
        several = Layout(engine, 4, 16, compile=compiled, **split)
        added = launch_s(several, work, twice) - launch_s(alone, work, twice)
        assert added == pytest.approx(2e-3 * more)
        again = replace(alone, recompute="full"), replace(several, recompute="full")
        added = launch_s(again[1], work, twice) - launch_s(again[0], work, twice)
        once = engine == "deepspeed" and compiled and "zero_stage" in split  # for it computes again inside a graph
        assert added == pytest.approx((1.0 if once else 1.5) * 2e-3 * more), "forward collectives are repeated"


def test_filled_experts_copy_more_than_grouped_ones() -> None:
    work = next(work for work in WORKS if work.shape.num_experts)
    grouped, filled = (Cut.of(Layout(engine, 1, 16), work) for engine in ("megatron", "deepspeed"))
    (one,) = (
        operator for operator in operators_of([Layout("deepspeed", 1, 16)], work, SHEET) if operator.kind == "experts"
    )
    other = one._replace(form=tuple("grouped" if word == "filled" else word for word in one.form))
    more, even = priced(one, filled, SHEET)[0], priced(other, grouped, SHEET)[0]
    assert more.matmul == pytest.approx(even.matmul, rel=0.05)
    assert more.flops == even.flops
    assert more.elementwise > 1.2 * even.elementwise
    for operator, cut in (one, filled), (other, grouped):
        there, back = priced(operator, cut, with_timings(OperatorTiming(operator, 1e-3, 2e-3)))
        assert there.seconds == pytest.approx(1e-3 * SHEET.operators_in_step)
        assert back.seconds == pytest.approx(2e-3 * SHEET.operators_in_step)
    compiled = operators_of([Layout("deepspeed", 1, 16, compile=True)], work, SHEET)
    assert one in compiled, "the compiler leaves DeepSpeed's routing alone"


@settings(deadline=None, max_examples=60)
@given(LAYOUTS)
def test_a_tiny_model_is_launched_in_the_mode_that_it_stands_for(drawn: tuple[Workload, Layout]) -> None:
    work, layout = drawn
    launch = launch_of(layout, work)
    specimen = specimen_of(launch)
    few, many = (replace(specimen.layout, global_batch_size=batch) for batch in specimen.batches)
    assert launch_of(few, replace(work, model=specimen.model)) == launch
    assert many.gradient_accumulation_steps - few.gradient_accumulation_steps == ROUNDS
    assert few.gradient_accumulation_steps == 1
    assert specimen.launch_s((0.5, 0.5 + 0.001 * ROUNDS * (specimen.model.layers + 1))) == pytest.approx(0.001)


def test_an_inventory_has_each_operator_once_and_what_takes_most_first() -> None:
    work = WORKS[0]
    layouts = [layout for drawn, layout in legal() if drawn is work and layout.num_gpus == 1]
    found = operators_of(layouts, work, SHEET)
    assert len(set(found)) == len(found)
    used = {operator for layout in layouts for part in consists(layout, work) for operator, _ in part}
    assert used < set(found)
    assert {operator.kind for operator in set(found) - used} == {Kind.LAUNCH, Kind.UPDATE}
    model = work.shape
    widest = {(8192, model.hidden, model.ffn_hidden), (8192, model.ffn_hidden, model.hidden)}
    assert found[0].kind == Kind.PRODUCT
    assert found[0].dims in widest | {(8192, model.hidden, model.vocab)}
    busy = operators_of([Layout("megatron", 1, 16, micro_batch_size=8)], work, SHEET)
    assert all(operator.kind != Kind.LAUNCH for operator in busy), "a GPU with so much to do waits for no CPU"
    faster = replace(SHEET, matmul_flops=1e6 * SHEET.matmul_flops, memory_bytes_per_s=1e6 * SHEET.memory_bytes_per_s)
    assert operators_of(layouts, work, faster)[0].kind != Kind.PRODUCT


PRODUCT = Operator(Kind.PRODUCT, (8, 4, 2), "bf16", False, ("bias",))
FAST, SLOW = OperatorTiming(PRODUCT, 1e-6, 2e-6), OperatorTiming(PRODUCT, 1e-5, 2e-5)
LAUNCHED = OperatorTiming(PRODUCT._replace(kind=Kind.LAUNCH, dims=()), 1e-3)


def test_timings_are_values_and_newer_ones_count() -> None:
    for row in (FAST, LAUNCHED):
        assert OperatorTiming.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    before = Timings((SLOW, LAUNCHED))
    after = before.updated([FAST])
    assert after.rows == (FAST, LAUNCHED)
    assert (after.of(PRODUCT), before.of(PRODUCT)) == (FAST, SLOW)
    assert after.of(PRODUCT._replace(compiled=True)) is None
    assert {after, Timings((FAST, LAUNCHED))} == {after}
    assert with_timings(FAST, LAUNCHED).told == f"{SHEET.source}; 2 operators measured"
    assert SHEET.told == SHEET.source
    assert PRODUCT.label == "product 8x4x2 bias bf16"


def test_a_host_that_is_slow_at_some_launches_is_so_at_others() -> None:
    work, layouts = WORKS[0], [Layout("megatron", 1, 16, recompute=each) for each in ("none", "selective", "full")]
    slower = (2.0, 3.0, 10.0)
    rows = [
        OperatorTiming(launch_of(one, work), by * launch_s(one, work, SHEET))
        for one, by in zip(layouts, slower, strict=True)
    ]
    known = replace(SHEET, operators=Timings((FAST, *rows)))

    def times(layout: Layout, c: Coefficients = known) -> float:
        return launch_s(layout, work, c) / launch_s(layout, work, SHEET)

    in_step = SHEET.launches_in_step
    assert [times(one) for one in layouts] == pytest.approx([in_step * 3 * (by / 3) ** TRUSTED for by in slower])
    other, foreign = replace(layouts[2], compile=True), replace(layouts[0], engine="deepspeed")
    assert [times(other), times(foreign)] == pytest.approx([3 * in_step] * 2)
    assert times(other, replace(known, launches_in_step=2.0)) == pytest.approx(6)
    assert times(other, replace(known, host_time=2.0)) == pytest.approx(3 * in_step), "slower already, not once more"
    assert times(other, with_timings(FAST)) == 1


def test_a_launch_of_which_no_other_tells_is_as_it_was_measured() -> None:
    """Of tensor-parallel blocks, or in fp32."""
    work = WORKS[0]
    split, precise = Layout("megatron", 2, 16, tensor_parallel_size=2), Layout("megatron", 1, 16, precision="fp32")
    row, one = OperatorTiming(launch_of(split, work), 0.1), OperatorTiming(launch_of(precise, work), 0.3)
    known, in_step = with_timings(row, one), SHEET.launches_in_step
    assert launch_s(split, work, known) == pytest.approx(0.1 * in_step)
    assert launch_s(precise, work, known) == pytest.approx(0.3 * in_step)
    usual = Layout("megatron", 1, 16)
    slow_s = 5 * launch_s(usual, work, SHEET)
    both = with_timings(row, one, OperatorTiming(launch_of(usual, work), slow_s))
    assert launch_s(usual, work, both) == pytest.approx(slow_s * in_step), "those that are known decide"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), "1", None])
def test_what_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        OperatorTiming.from_dict(FAST.to_dict() | {"forward_s": seconds})
