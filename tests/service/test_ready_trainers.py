"""The trainers that come with Wattune: what they make is what their programs read."""

from __future__ import annotations

import json
import sys
import tokenize
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from search_spaces.models import PRESETS
from service.answers.transformers_model import configuration_of
from service.problem import Problem
from service.spec import make_problem
from service.trainers import load, ready_trainers
from service.trials.command import command_of
from trainables.command import Command
from trainables.trainers import FOLDER

ROOT = Path(__file__).parents[2]
PROGRAMS = ["trainables/trainers/huggingface_lm.py", "trainables/trainers/torchtitan_llama.py"]
LAYERS = 16
SPEC: dict[str, Any] = {
    "name": "ready",
    "model": {"family": "llama", "layers": LAYERS, "hidden": 256, "heads": 8, "kv_heads": 2, "ffn_hidden": 704}
    | {"vocab": 512, "max_sequence_length": 128, "rope_theta": 500000.0},
    "data": "synthetic",
    "sequence_length": 128,
    "global_batch_size": 64,
    "cluster": {"gpus_per_node": 8, "accelerator": "h100"},
    "space": {
        "pipeline_parallel_size": [1, 2],
        "tensor_parallel_size": [1, 2],
        "context_parallel_size": [1, 2],
        "pipeline_schedule": ["1f1b", "interleaved_1f1b"],
        "virtual_pipeline_stages": [1, 2],
        "zero_stage": [0, 2, 3],
        "micro_batch_size": [1, 2],
        "recompute": ["none", "selective", "full"],
    },
}
TITAN = {"num_gpus": [1, 2, 8], "tensor_parallel_size": [1, 2], "zero_stage": [0, 3], "micro_batch_size": 1}

pytestmark = pytest.mark.xdist_group("frameworks")  # the frameworks are imported once


def commands(name: str, **changes: Any) -> list[tuple[Any, Command]]:
    """Every legal layout of a spec with the trainer, and the command that it becomes."""
    space = {axis: values for axis, values in SPEC["space"].items() if axis in dict(load(name).axes)}
    if name == "huggingface":
        space |= {"recompute": ["none", "full"], "lora_rank": [0, 8], "attention": "sdpa", "precision": "bf16"}
    problem: Problem = make_problem({**SPEC, "trainer": name, "space": space, **changes})
    assert problem.trainer is not None
    return [(layout, command_of(layout, problem.trainer, problem)) for layout in problem.legal.layouts]


def test_those_that_come_with_wattune() -> None:
    ready = {one.name: one for one in ready_trainers()}
    assert list(ready) == ["huggingface", "megatron-lm", "torchtitan"]
    assert [one.fault for one in ready.values()] == [None] * 3
    for name in ("huggingface", "torchtitan"):
        trainer = ready[name].trainer
        assert trainer is not None
        assert Path(trainer.directory).resolve() == FOLDER.resolve()


@pytest.mark.parametrize("program", ["examples/plain_pytorch.py", *PROGRAMS])
def test_programs_know_of_wattune_in_as_many_lines_as_the_documentation_says(program: str) -> None:
    with tokenize.open(ROOT / program) as source:
        names = [token for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.NAME]
    lines = {token.start[0] for token in names if "wattune" in token.string.lower()}
    table = (ROOT / "docs" / "trainers.md").read_text()
    assert f"| `{program}` | {len(lines)} |" in table
    assert len(lines) <= 10


def families() -> list[Any]:
    gpt = PRESETS["gpt3-175b"]
    wide = replace(PRESETS["mixtral-8x7b"], head_dim=192)
    return [PRESETS["llama3-8b"], PRESETS["mixtral-8x7b"], replace(gpt, layers=4), wide]


@pytest.mark.parametrize("shape", families(), ids=["llama", "mixtral", "gpt2", "wide heads"])
def test_transformers_reads_the_model_as_that_of_an_export(shape: Any, tmp_path: Path) -> None:
    import transformers

    _, command = commands("huggingface", model=vars(shape))[0]
    (tmp_path / "model.json").write_text(dict(command.files)["model.json"])
    read = transformers.AutoConfig.from_pretrained(tmp_path / "model.json")
    exported = transformers.AutoConfig.for_model(**configuration_of(shape)).to_dict()
    made = read.to_dict()
    assert {name for name, value in exported.items() if made[name] != value} <= {"use_cache", "_name_or_path"}


def test_transformers_takes_the_arguments(tmp_path: Path) -> None:
    import transformers

    made = commands("huggingface")
    assert len(made) > 20
    for layout, command in made:
        files = {name: text.replace("{trial_dir}", str(tmp_path)) for name, text in command.files}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        fields = yaml.safe_load(files["run.yaml"])
        own = {name: fields.pop(name) for name in ("model", "tokens", "sequence_length", "attention", "lora_rank")}
        assert own["lora_rank"] == layout.setting("lora_rank")
        if fields.pop("deepspeed") is not None:
            assert json.loads(files["deepspeed.json"])["zero_optimization"]["stage"] == layout.zero_stage
        read = transformers.TrainingArguments(use_cpu=True, **fields)
        batch = read.per_device_train_batch_size * read.gradient_accumulation_steps * layout.num_gpus
        assert batch == layout.global_batch_size
        assert bool(read.fsdp) == (layout.setting("sharding") == "fsdp" and layout.zero_stage > 0)


def test_torchtitan_takes_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan.config.job_config", reason="torchtitan 0.2 is not installed")
    from torchtitan.config import ConfigManager

    for layout, command in commands("torchtitan"):
        for name, text in command.files:
            (tmp_path / name).write_text(text.replace("{trial_dir}", str(tmp_path)))
        config = ConfigManager().parse_args(
            [arg.replace("{trial_dir}", str(tmp_path)) for arg in command.arguments[3:]]
        )
        parallel, training = config.parallelism, config.training
        ranks = parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree
        assert ranks == layout.data_parallel_size
        assert training.global_batch_size % (training.local_batch_size * ranks) == 0
        stages = parallel.pipeline_parallel_degree * layout.virtual_pipeline_stages
        assert parallel.pipeline_parallel_layers_per_stage * stages == LAYERS


def test_torchtitan_shards_where_ranks_are_more_than_replicas_unless_in_fp32() -> None:
    """Else it ends, or trains in fp32 what is called bf16: `parallelize_llama` and `maybe_enable_amp` of 0.2.2."""
    made = [layout for layout, _ in commands("torchtitan", space={**TITAN, "precision": ["bf16", "fp32"]})]
    assert {layout.zero_stage for layout in made if layout.tensor_parallel_size > 1} == {0, 3}
    for layout in made:
        if layout.zero_stage == 0 and layout.data_parallel_size < layout.num_gpus:
            assert (layout.data_parallel_size, layout.precision) == (1, "fp32")


EXPERTS = replace(PRESETS["mixtral-8x7b"], layers=LAYERS)
BIASED = replace(PRESETS["gpt3-175b"], layers=LAYERS)


@pytest.mark.parametrize("shape", [None, EXPERTS, BIASED], ids=["llama", "mixtral", "gpt3"])
def test_megatron_lms_own_parser_takes_the_command(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 0.16.1, with its checks of what goes together: `PYTHONPATH=CHECKOUT pytest -k megatron`, where triton is."""
    reason = "Megatron-LM's parser is in no package, only in its repository"
    pytest.importorskip("megatron.training.arguments", reason=reason, exc_type=ImportError)
    import torch
    from megatron.training.arguments import parse_args, validate_args

    if not torch.cuda.is_available():
        hopper = SimpleNamespace(major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    changes: dict[str, Any] = {} if shape is None else {"model": vars(shape)}
    experts = {"expert_parallel_size": [1, 2, 4]} if shape is EXPERTS else {}
    made = commands("megatron-lm", space=megatron_space() | experts, **changes)
    assert len(made) > 100
    for layout, command in made[::7]:
        for name, value in command.environment:
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *command.arguments[3:]])
        parsed = parse_args()
        parsed.rank, parsed.world_size = 0, layout.num_gpus
        validate_args(parsed)
        assert parsed.tensor_model_parallel_size == layout.tensor_parallel_size
        assert parsed.pipeline_model_parallel_size == layout.pipeline_parallel_size
        assert parsed.expert_model_parallel_size == layout.expert_parallel_size
        assert parsed.data_parallel_size == layout.data_parallel_size
        assert parsed.use_distributed_optimizer == (layout.zero_stage > 0)
        assert (parsed.num_layers, parsed.num_experts or 0) == (LAYERS, EXPERTS.num_experts if experts else 0)
        assert parsed.log_interval == 1
        if shape is None:
            assert parsed.rotary_base == SPEC["model"]["rope_theta"]
        for name, _ in command.environment:
            monkeypatch.delenv(name)


def megatron_space() -> dict[str, Any]:
    return {axis: values for axis, values in SPEC["space"].items() if axis in dict(load("megatron-lm").axes)}
