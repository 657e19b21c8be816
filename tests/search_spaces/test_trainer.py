"""Programs of the user's as data: the command of a layout, their rules, and what is taken to hold for them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from search_spaces import memory
from search_spaces.coefficients import data_sheet
from search_spaces.cost import predicted_metrics
from search_spaces.engines import engine_of, facts_of
from search_spaces.engines.foreign import names_of
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import AXES, Layout
from search_spaces.memory import MemoryModel
from search_spaces.models import PRESETS
from search_spaces.rules import refusal
from search_spaces.space import Space, canonical, enumerate_space, varying
from search_spaces.trainer import Conditional, Trainer
from search_spaces.workload import Workload

TRAINER = Trainer(
    name="mine",
    command=(
        "python",
        "train.py",
        "--micro-batch={micro_batch_size}",
        "--accumulate",
        "{gradient_accumulation_steps}",
        Conditional("recompute == 'full'", ("--recompute", "{'all' if compile else None}")),
        "{'--compile' if compile else None}",
    ),
    environment=(("NCCL_ALGO", "{nccl_algo}"), ("FLASH", "{'1' if nccl_algo == 'Ring' else None}")),
    files=(("config.json", json.dumps({"tp": "{tensor_parallel_size}", "name": "{nccl_algo} {hidden}"})),),
    axes=(
        ("tensor_parallel_size", None),
        ("micro_batch_size", (1, 2, 4)),
        ("recompute", None),
        ("compile", None),
        ("nccl_algo", ("Ring", "Tree")),
        ("buckets", (1, 8)),
    ),
    rules=(
        "heads % tensor_parallel_size == 0",
        "nccl_algo == 'Ring' or data_parallel_size > 1",
        "gradient_accumulation_steps >= buckets",
    ),
)
WORK = Workload(PRESETS["llama3-8b"], 8192, 16, ACCELERATORS["h200"], trainer=TRAINER)
LAYOUT = Layout("mine", 8, 16, 2, 4).having("nccl_algo", "Ring").having("buckets", 1)


def enumerated(work: Workload = WORK, **axes: list[Any]) -> Space:
    """With the values of the trainer for its own axes, and single ones for others."""
    own: dict[str, list[Any]] = {name: list(values) for name, values in TRAINER.own.items()}
    return enumerate_space({"engine": ["mine"], "num_gpus": [8], **own, **axes}, work)


def test_the_command_of_a_layout() -> None:
    names = names_of(LAYOUT, WORK)
    assert TRAINER.arguments(names) == ("python", "train.py", "--micro-batch=2", "--accumulate", "4")
    assert TRAINER.variables(names) == (("NCCL_ALGO", "Ring"), ("FLASH", "1"))
    assert TRAINER.documents(names) == {"config.json": {"tp": 4, "name": "Ring 4096"}}
    other = names_of(replace(LAYOUT, recompute="full", compile=True).having("nccl_algo", "Tree"), WORK)
    assert TRAINER.arguments(other)[-3:] == ("--recompute", "all", "--compile")
    assert TRAINER.variables(other) == (("NCCL_ALGO", "Tree"),)


def test_names_of_a_model_are_there_where_it_is_known() -> None:
    known, unknown = names_of(LAYOUT, WORK), names_of(LAYOUT, replace(WORK, model=None))
    assert (known["hidden"], known["head_dim"], known["kv_heads"]) == (4096, 128, 8)
    assert "hidden" not in unknown
    assert unknown["sequence_length"] == 8192
    assert not {"stage_layers", "rank_order"} & set(known)


def test_rules_refuse_with_their_text() -> None:
    space = enumerated(tensor_parallel_size=[1, 3, 8], micro_batch_size=[1, 2])
    assert space.refused == {
        "heads % tensor_parallel_size == 0": 1,
        "gradient_accumulation_steps >= buckets": 2,  # on eight replicas
        "nccl_algo == 'Ring' or data_parallel_size > 1": 4,  # on one, beside two microbatches and two buckets
    }
    assert space.reasons["gradient_accumulation_steps >= buckets"] == (
        "the trainer's rule gradient_accumulation_steps >= buckets does not hold: buckets 8, "
        "gradient_accumulation_steps 2"
    )
    assert {layout.setting("nccl_algo") for layout in space.layouts if layout.data_parallel_size == 1} == {"Ring"}
    for layout in space.layouts:
        assert refusal(layout, WORK) is None
        assert canonical(layout, WORK) == layout


def test_a_rule_that_cannot_be_worked_out_refuses() -> None:
    work = replace(WORK, trainer=replace(TRAINER, rules=("8 // (micro_batch_size - 1) > 1",)))
    space = enumerated(work, micro_batch_size=[1, 2])
    assert {layout.micro_batch_size for layout in space.layouts} == {2}
    assert "division by zero" in space.reasons["8 // (micro_batch_size - 1) > 1"]


def test_only_what_holds_for_any_program_is_a_rule_for_it() -> None:
    """A program may well split 32 heads over 7 GPUs, or shard gradients of a pipeline; sizes multiply everywhere."""
    work = replace(WORK, trainer=replace(TRAINER, rules=()), global_batch_size=14)
    layout = replace(LAYOUT, num_gpus=14, tensor_parallel_size=7, global_batch_size=14, zero_stage=2)
    layout = replace(layout, micro_batch_size=7)
    assert refusal(layout, work) is None
    assert refusal(replace(layout, engine="megatron"), work) is not None
    assert (refusal(replace(layout, num_gpus=15), work) or "")[0] == "gpus_divide"
    assert (refusal(replace(layout, micro_batch_size=4), work) or "")[0] == "batch_divides"


def test_a_program_without_a_known_model_has_rules_and_no_predictions() -> None:
    work = replace(WORK, model=None, trainer=replace(TRAINER, rules=TRAINER.rules[1:]))
    space = enumerated(work, tensor_parallel_size=[1, 3, 8], recompute=["none", "full"])
    assert space.refused["gpus_divide"] == 1
    model = MemoryModel(work)
    assert {model.share(layout) for layout in space.layouts} == {None}
    assert model.band(space.layouts[0]) is None
    model.observe(space.layouts[0], 10.0, fits=True)
    model.observe(space.layouts[0], None, fits=False)
    assert work.speed(1000.0, 8) == {"tokens_per_s": 1000.0, "tokens_per_s_per_gpu": 125.0, "mfu": None}


def test_axes_of_wattune_s_meaning_have_its_models_as_a_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is predicted does not depend on the user's own axes, and fits no layout out of the space. In which order a
    program allocates nobody knows, so that the formula alone is taken for its memory."""
    sheet = data_sheet("h200")
    assert sheet is not None
    space = enumerated(micro_batch_size=[1, 2, 8], zero_stage=[0, 3])
    shares = {layout: memory.estimate(layout, WORK).share for layout in space.layouts}
    predicted = {layout: predicted_metrics(layout, WORK, sheet) for layout in space.layouts}
    assert max(share or 0.0 for share in shares.values()) > 1
    monkeypatch.setattr(memory, "replayed", lambda *_: None)
    for layout in space.layouts:
        plain = layout.having("nccl_algo", "Ring").having("buckets", 1)
        assert (shares[layout], predicted[layout]) == (shares[plain], predicted[plain])
        like = memory.estimate(replace(layout, engine="megatron", own=()), replace(WORK, trainer=None))
        assert shares[layout] == like.share
    assert len(set(shares.values())) == len({replace(layout, own=()) for layout in space.layouts})


def test_a_program_that_is_known_is_predicted_as_such() -> None:
    """Under its own name, and with its trainer's rules alone."""
    sheet = data_sheet("h200")
    assert sheet is not None
    split = replace(LAYOUT, pipeline_parallel_size=2)
    for name in ("megatron-lm", "torchtitan-0.2"):
        known = replace(WORK, trainer=replace(TRAINER, predicted_as=name))
        facts, unknown = facts_of(split, known), facts_of(split, WORK)
        assert (facts.name, facts.is_ours, list(facts.rules)) == ("mine", False, list(unknown.rules))
        as_such = predicted_metrics(replace(split, engine=name, own=()), replace(WORK, trainer=None), sheet)
        assert predicted_metrics(split, known, sheet) == as_such != predicted_metrics(split, WORK, sheet)


def test_own_axes_vary_like_others() -> None:
    space = enumerated(micro_batch_size=[1, 2], tensor_parallel_size=[4])
    assert varying(space.layouts) == {"micro_batch_size": [1, 2], "buckets": [1, 8], "nccl_algo": ["Ring", "Tree"]}


def test_facts_come_with_the_work() -> None:
    """And so reach every process that has the problem: no registry needs to know of a trainer."""
    work, layout = pickle.loads(pickle.dumps((WORK, LAYOUT)))
    assert facts_of(layout, work) is facts_of(LAYOUT, WORK)
    assert facts_of(layout, work).name == "mine"
    with pytest.raises(ValueError, match="unknown engine 'mine'"):
        engine_of(layout)
    with pytest.raises(ValueError, match="unknown engine 'mine'"):
        facts_of(layout, replace(work, trainer=None))
    assert facts_of(replace(layout, engine="megatron"), work) is engine_of("megatron")


FAULTS: dict[str, dict[str, Any]] = {
    "command[2]: '--tp={tensor_paralel_size}': unknown name 'tensor_paralel_size'": {
        "command": ("python", "x.py", "--tp={tensor_paralel_size}")
    },
    "command[1].when: 'recompute': it is 'none', not true or false": {
        "command": ("python", Conditional("recompute", ("x",)))
    },
    "command[1]: '{x}': unknown name 'x'": {"command": ("python", Conditional("compile", ("y", "{x}")))},
    "environment.A: '{nccl_algo * 2}': 'Ring' is a text, not a number": {"environment": (("A", "{nccl_algo * 2}"),)},
    "files.c.json: '{y}': unknown name 'y'": {"files": (("c.json", '{"a": [{"b": "{y}"}]}'),)},
    "rules[0]: 'seed == 0': unknown name 'seed'": {"rules": ("seed == 0",)},
    "rules[0]: 'heads': it is 32, not true or false": {"rules": ("heads",)},
    "rules[0]: 'heads ** 2 > 1': 'heads ** 2' is not let in": {"rules": ("heads ** 2 > 1",)},
    "rules[0]: 'compile or nccl_algo == 3': 'Ring' is a text and 3 a number": {"rules": ("compile or nccl_algo == 3",)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_their_place(fault: str) -> None:
    of_layouts = names_of(LAYOUT, WORK)
    names = of_layouts | {"seed": 0}
    assert not list(TRAINER.faults(names, of_layouts))
    (found,) = replace(TRAINER, **FAULTS[fault]).faults(names, of_layouts)
    assert found.startswith(fault)


def test_axes_of_a_trainer() -> None:
    assert TRAINER.own == {"nccl_algo": ("Ring", "Tree"), "buckets": (1, 8)}
    assert not set(TRAINER.own) & set(AXES)
