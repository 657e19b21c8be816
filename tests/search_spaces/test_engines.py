"""What is known of engines: it stands in their own files alone, and a third engine needs no other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import search_spaces
from search_spaces import memory
from search_spaces.cost import data_sheet, predict
from search_spaces.engines import ENGINES, engine_of
from search_spaces.engines.base import EngineFacts, States
from search_spaces.engines.others import OTHERS
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import AXES, SETTLING, Layout
from search_spaces.models import PRESETS
from search_spaces.parameters import Held
from search_spaces.rules import all_rules, layers_divide, pipeline_fills, refusal
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload

WORK = Workload(PRESETS["llama3-8b"], 8192, 64, ACCELERATORS["h200"])
PARTS: dict[str, list[Any]] = {
    "num_gpus": [8],
    "tensor_parallel_size": [1, 2],
    "pipeline_parallel_size": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "bucket_size": [500_000_000, 1_000],
    "offload_optimizer": [False, True],
    "precision": ["bf16", "fp8"],
    "compile": [True],
}


class Plain(EngineFacts):
    """Data parallelism that sums whole gradients in fp32."""

    name = "plain"

    def states(self, layout: Layout, held: Held) -> States:
        return States(4 * held.whole, 4 * held.whole, 8 * held.whole, 0.0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> EngineFacts:
    facts = Plain()
    monkeypatch.setitem(ENGINES, facts.name, facts)
    return facts


def test_an_engine_is_found_by_its_name_or_by_a_layout() -> None:
    for name, facts in ENGINES.items():
        assert facts.name == name
        assert engine_of(name) is engine_of(Layout(name, 1, 1)) is facts


@pytest.mark.parametrize("unknown", ["fsdp", "", "Megatron"])
def test_an_unknown_engine_raises(unknown: str) -> None:
    """Wherever an engine is asked after, and not taken for one of those that there are."""
    layout = Layout(unknown, 8, 64)
    asked = (
        lambda: engine_of(unknown),
        lambda: enumerate_space({"engine": [unknown], "num_gpus": [8]}, WORK),
        lambda: memory.estimate(layout, WORK),
        lambda: predict(layout, WORK, data_sheet("h200")),  # type: ignore[arg-type]
    )
    for ask in asked:
        with pytest.raises(ValueError, match=rf"unknown engine '{unknown}'; must be one of megatron, deepspeed"):
            ask()


def test_no_other_module_knows_an_engine_by_name() -> None:
    """`default` is the one word of an engine in the row of its axis."""
    package = Path(search_spaces.__file__).parent
    named = [
        f"{path.name}: {line.strip()}"
        for path in package.glob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"engine [!=]=|[\"'](megatron|deepspeed)[\"']", line)
    ]
    assert named == ['layout.py: default="megatron",']


def test_facts_are_of_axes_that_there_are() -> None:
    for facts in ENGINES.values():
        assert {*facts.unused, *facts.same, *facts.lacks, *facts.rules} <= set(AXES)


def test_rules_of_an_engine_judge_its_layouts_alone() -> None:
    of = {name: set(all_rules([facts])) for name, facts in ENGINES.items()}
    assert {rule.__name__ for rule in of["deepspeed"] - of["megatron"]} >= {"deepspeed_pipeline_alone"}
    assert {rule.__name__ for rule in of["megatron"] - of["deepspeed"]} == {"megatron_overlaps_no_casts"}


def test_a_third_engine_is_tried_judged_and_predicted(plain: EngineFacts) -> None:
    """By what it says of itself, and otherwise like one of torch's own primitives."""
    space = enumerate_space(PARTS | {"engine": ["megatron", plain.name]}, WORK)
    layouts = [layout for layout in space.layouts if layout.engine == plain.name]
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    assert {layout.offload_optimizer for layout in layouts} == {False, True}  # of which megatron has no use
    assert {layout.precision for layout in layouts} == {"bf16"}
    for layout in layouts:
        (rank, *_) = memory.estimate(layout, WORK).ranks.values()
        assert rank.optimizer == 2 * rank.parameters
        assert predict(layout, WORK, data_sheet("h200")).step_time_s > 0  # type: ignore[arg-type]
        assert not plain.memory_is_measured(layout, WORK.shape)


def test_who_has_fp8_is_said_by_the_engines(plain: EngineFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = PARTS | {"engine": [plain.name], "tensor_parallel_size": [1], "precision": ["fp8"]}
    assert enumerate_space(axes, WORK).reasons["fp8_is_supported"] == "fp8 is in the megatron engine alone"
    monkeypatch.setattr(Plain, "fp8", True)
    assert "fp8_is_supported" not in enumerate_space(axes, WORK).reasons


LAYOUTS = enumerate_space(
    PARTS
    | {
        "engine": list(ENGINES),
        "context_parallel_size": [1, 2],
        "sequence_parallel": [True, False],
        "overlap_grad_reduce": [True, False],
        "overlap_param_gather": [True, False],
        "reduce_precision": ["fp32", "bf16"],
    },
    WORK,
).layouts


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(LAYOUTS))
def test_what_an_engine_has_no_use_for_is_idle(layout: Layout) -> None:
    facts = engine_of(layout)
    for axis in SETTLING:
        if not facts.has_use(axis.name, layout) or not axis.matters(layout):
            assert getattr(layout, axis.name) == axis.idle


def test_gradients_are_summed_in_fp32_under_autocast() -> None:
    """DeepSpeed without ZeRO has torch's autocast, with weights and gradients in fp32."""
    layout = Layout("deepspeed", 8, 64, reduce_precision="bf16")
    facts = engine_of(layout)
    assert facts.autocasts(layout)
    assert facts.sum_width(layout) == 4
    alone = Layout("deepspeed", 1, 64, reduce_precision="bf16")
    assert not facts.autocasts(alone)
    assert facts.sum_width(alone) == 2


def others_layout(engine: str, **settings: Any) -> Layout:
    return Layout(
        engine, 64, 256, **{"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "compile": True, **settings}
    )


def test_programs_of_others_are_predicted_and_never_tried() -> None:
    assert not set(OTHERS) & set(ENGINES)
    work = replace(WORK, accelerator=ACCELERATORS["h100"], global_batch_size=256)
    sheet = data_sheet("h100")
    assert sheet is not None
    for name in OTHERS:
        layout = others_layout(name, sequence_parallel=True)
        assert predict(layout, work, sheet).step_time_s > 0
        assert memory.estimate(layout, work).peak_bytes > 0
    with pytest.raises(ValueError, match=r"must be one of megatron, deepspeed$"):
        engine_of("another")


def test_what_programs_of_others_do_otherwise() -> None:
    """Each fact that one of them has moves what it is about, and that way."""
    work = replace(WORK, accelerator=ACCELERATORS["h100"], global_batch_size=256)
    sheet = data_sheet("h100")
    assert sheet is not None

    def parts(engine: str, **settings: Any) -> dict[str, float]:
        return predict(others_layout(engine, **settings), work, sheet).parts

    whole, split = (parts(name, sequence_parallel=False) for name in ("megatron", "megatron-lm"))
    assert split["between_stages"] < whole["between_stages"] / 2
    interleaved = {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_stages": 2}
    hidden, shown = (parts(name, **interleaved) for name in ("megatron-lm", "megatron-lm-2022"))
    assert hidden["between_stages"] < shown["between_stages"]
    assert parts("megatron-lm-2022")["elementwise"] > 1.5 * parts("megatron-lm")["elementwise"]  # scores
    assert parts("composer")["attention"] > parts("torchtitan")["attention"] > parts("megatron-lm")["attention"]
    ring, gathered = (parts(name, context_parallel_size=2) for name in ("megatron-lm", "megatron"))
    assert ring["attention"] < gathered["attention"]
    earlier = parts("megatron-earlier", context_parallel_size=2)  # and a key for each head of queries
    assert earlier["attention"] > 1.3 * gathered["attention"]
    merged, one_by_one = (parts("torchtitan", context_parallel_size=2, compile=value) for value in (True, False))
    assert one_by_one["context_parallel"] > 4 * ring["context_parallel"]  # keys once a head go around
    waiting = merged["context_parallel"] / one_by_one["context_parallel"]  # beside nothing, where it is compiled
    assert waiting == pytest.approx(1 / sheet.contention, rel=0.01)
    fused, apart = (parts("torchtitan", compile=value)["elementwise"] / 2 for value in (True, False))
    assert 1.02 * fused < merged["elementwise"]  # kernels merge in fp32
    assert merged["elementwise"] - fused < 0.6 * (one_by_one["elementwise"] - apart)  # or one does
    eager = {"precision": "fp8", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    slow, fast = (parts(name, **eager)["matmul"] for name in ("megatron", "composer"))
    assert fast < 0.9 * slow

    kept, again = (
        memory.estimate(others_layout(name, sequence_parallel=True), work).ranks[0].activations
        for name in ("megatron", "megatron-lm")
    )
    assert again < kept
    held_then, held_now = (
        memory.estimate(others_layout(name, context_parallel_size=2), work).ranks[0].activations
        for name in ("megatron-earlier", "megatron")
    )
    assert held_now < 0.9 * held_then
    eagerly = {"context_parallel_size": 2, "tensor_parallel_size": 1, "compile": False}
    before_hopper = [
        predict(others_layout(name, **eagerly), replace(work, accelerator=ACCELERATORS["a100"]), sheet)
        for name in ("megatron-earlier", "megatron")
    ]
    assert before_hopper[0] == before_hopper[1]
    dtensors, plain = (parts(name, compile=False)["launch"] for name in ("megatron-earlier", "megatron"))
    assert plain < 0.7 * dtensors
    fp8 = others_layout("megatron-lm", precision="fp8", virtual_pipeline_stages=1)
    mixture = replace(work, model=PRESETS["mixtral-8x7b"])
    assert refusal(fp8, mixture) is None
    assert refusal(replace(fp8, engine="megatron"), mixture) == ("fp8_is_supported", ANY)
    beside = replace(fp8, engine="torchtitan", sequence_parallel=True, async_tensor_parallel=True)
    assert refusal(beside, work) is None
    assert refusal(replace(beside, engine="megatron"), work) == ("megatron_overlaps_no_casts", ANY)
    names = ("megatron-lm", "megatron-bridge")
    young, even = (replace(fp8, engine=name, expert_parallel_size=4) for name in names)
    sent, dealt_out = (predict(layout, mixture, sheet).parts for layout in (young, even))
    assert sent["expert_parallel"] / dealt_out["expert_parallel"] == pytest.approx(sheet.expert_imbalance, rel=0.01)
    assert sent["matmul"] > dealt_out["matmul"]
    together = replace(fp8, expert_parallel_size=1)
    fullest, share, all_of_them = (
        memory.estimate(layout, mixture).ranks[0].activations for layout in (young, even, together)
    )
    assert fullest > share == all_of_them
    ends = others_layout("megatron-lm", stage_layers=(0, 16, 16, 0))
    assert layers_divide(ends, work) is None
    assert layers_divide(replace(ends, engine="megatron"), work) is not None
    assert pipeline_fills(others_layout("megatron-lm", micro_batch_size=32), work) is None
    assert pipeline_fills(others_layout("megatron", micro_batch_size=32), work) is not None
    spread = Layout("internevo", 1024, 4096, zero_stage=1)
    assert (engine_of(spread).gathers(spread, 32, 2.0**30), engine_of(spread).messages(spread, 32, 2.0**30)) == (291, 3)
    names = ("internevo", "megatron")
    broadcast, sharded = (predict(replace(spread, engine=name), work, sheet).parts for name in names)
    assert broadcast["data_parallel"] > sharded["data_parallel"]
    alone: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    kept, selected, scaled = (
        parts(name, recompute="selective", precision=precision, **alone)["matmul"]
        / parts(name, precision=precision, **alone)["matmul"]
        for name, precision in (("megatron", "bf16"), ("torchtitan", "bf16"), ("torchtitan", "fp8"))
    )
    # A third of a block's products are forward, and wk, wo and w3 are 36% of those; w2, which nothing needs again, 27%.
    assert kept < 1.01
    assert 1.05 < selected < 1.15
    assert 1.2 < scaled < 1.25
    all_of_it = Held(dense=9.0, experts=0.0, largest=3.0, block=2.0)  # of three blocks and a table
    for name in ("torchtitan", "megatron-bridge"):  # blocks are gathered in 8 bits
        widths = (others_layout(name, precision=precision) for precision in ("fp8", "bf16"))
        assert [engine_of(name).gathered_bytes(one, 3, all_of_it) for one in widths] == [12.0, 18.0]
    for some in (alone, {"pipeline_parallel_size": 1}, {"compile": False, **alone}):
        then, now = (parts(name, **some) for name in ("torchtitan-2024", "torchtitan"))
        assert then["elementwise"] > now["elementwise"]  # the loss was not compiled, and norms were several kernels
    complex_ones, real_ones = (parts(name, **alone) for name in ("torchtitan", "megatron"))
    assert complex_ones["elementwise"] > real_ones["elementwise"]  # rotary positions, of which nothing is compiled
    halves, places = (parts(name, sequence_parallel=True) for name in ("megatron", "megatron-lm"))
    assert places["elementwise"] < 0.8 * halves["elementwise"]


def test_what_programs_did_when_their_layouts_were_measured() -> None:
    """InternEvo in July 2023, and Composer on two versions of torch."""
    work = replace(WORK, accelerator=ACCELERATORS["a100"], global_batch_size=256)
    sheet = data_sheet("a100")
    assert sheet is not None

    def parts(engine: str, **settings: Any) -> dict[str, float]:
        return predict(Layout(engine, 64, 256, **settings), work, sheet).parts

    # All gradients come to all ranks, in two rounds of a ring in place of one, and nothing hides the broadcasts.
    whole = parts("internevo", zero_stage=1)["data_parallel"]
    beside = parts("internevo", zero_stage=1, overlap_grad_reduce=False)["data_parallel"]
    model, rate = work.shape, min(sheet.link_bytes_per_s, 8 * sheet.network_bytes_per_s)
    assert whole > 2 * model.parameters / rate
    assert beside - 2 * model.parameters / rate == pytest.approx(2 * 4 * model.parameters / rate, rel=0.2)
    assert not engine_of("internevo").has_use("overlap_param_gather", Layout("internevo", 64, 256, zero_stage=1))
    # A rank has at least the largest tensor to update, however many there are.
    many, few = (predict(Layout("internevo", size, 1024, zero_stage=1), work, sheet).parts for size in (1024, 256))
    table = 124 * model.vocab * model.hidden / sheet.states_bytes_per_s
    assert min(many["model_states"], few["model_states"]) > table
    assert parts("internevo")["elementwise"] < 0.7 * parts("megatron")["elementwise"]
    assert parts("internevo")["attention"] == pytest.approx(2 * parts("megatron")["attention"], rel=0.2)

    again = {"zero_stage": 3, "recompute": "full"}
    young, old = (parts(name, **again) for name in ("composer", "composer-torch-1"))
    assert 1.05 < old["matmul"] / young["matmul"] < 1.12
    eight = {**again, "precision": "fp8"}
    assert parts("composer", **eight)["matmul"] == parts("composer-torch-1", **eight)["matmul"]
    casts = {
        name: parts(name, precision="fp8")["elementwise"] - parts(name)["elementwise"]
        for name in ("megatron", "composer")
    }
    assert 0 < casts["composer"] < 0.5 * casts["megatron"]  # 4 bytes an input and a gradient, and weights once a step
    assert engine_of("composer").sum_width(Layout("composer", 64, 256, reduce_precision="fp32")) == 2
    # By DeepSpeed's source, in bf16 on two ranks; FSDP2's write them once.
    sent = [
        engine_of(name).sent_bytes(Layout(name, 2, 2, zero_stage=zero))
        for name in ("deepspeed", "megatron")
        for zero in (2, 3)
    ]
    assert sent == [22, 28, 6, 6]
    # FSDP2 copies what it gathers, twice a microbatch; both read gradients in bf16 and write them to be sent.
    copying = parts("megatron", zero_stage=3, reduce_precision="bf16")["model_states"]
    in_place = parts("composer", zero_stage=3)["model_states"]
    copied = 2 * 4 * (2 + 2) * model.parameters - (98 - 46) * model.parameters / 64
    assert copying - in_place == pytest.approx(copied / sheet.states_bytes_per_s, rel=0.01)
