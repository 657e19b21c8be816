"""Formats: each by the parser or the classes of the framework that reads it, where that is installed.

Of what is not here, each test says why it is skipped.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.engines import ENGINES
from search_spaces.models import PRESETS
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload
from service.answers import exports
from service.answers.exports import megatron_bridge, megatron_lm, torchtitan
from service.answers.transformers_model import configuration_of
from service.errors import InputError
from trainables.launch import Launch
from trainables.training import Training

MODEL = replace(PRESETS["llama3-8b"], layers=16)
AXES: dict[str, list[Any]] = {
    "engine": ["megatron", "deepspeed"],
    "num_gpus": [16],
    "tensor_parallel_size": [1, 2],
    "context_parallel_size": [1, 2],
    "pipeline_parallel_size": [1, 2],
    "pipeline_schedule": ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"],
    "virtual_pipeline_stages": [1, 2],
    "stage_layers": [None, (7, 9)],
    "zero_stage": [0, 1, 2, 3],
    "data_parallel_replicate_size": [1, 2],
    "micro_batch_size": [2],
    "recompute": ["none", "selective", "full"],
    "offload_optimizer": [False, True],
}


def launches(engine: str, **changes: Any) -> list[Launch]:
    """Every legal layout of an engine over `AXES`, with `changes` to them."""
    axes = {name: values for name, values in AXES.items() if name not in changes} | {"engine": [engine]}
    axes |= {name: [value] for name, value in changes.items()}
    space = enumerate_space(axes, Workload(MODEL, 4096, 128))
    return [Launch(layout, Training(MODEL, "synthetic", 4096, 0), "h100", 8) for layout in space.layouts]


def expressible(name: str, of: list[Launch]) -> Iterator[Launch]:
    """Those that a format can express; that it cannot express all is no error."""
    for launch in of:
        with contextlib.suppress(InputError):
            exports.named(name).check(launch)
            yield launch


pytestmark = pytest.mark.xdist_group("frameworks")  # the frameworks are imported once

MEGATRON, DEEPSPEED = launches("megatron"), launches("deepspeed")
ONE = MEGATRON[0]


def test_the_formats_are_the_modules_and_each_has_the_name_that_it_is_asked_for_by() -> None:
    assert exports.names() == ["deepspeed", "huggingface", "megatron-bridge", "megatron-lm", "torchrun", "torchtitan"]
    assert [exports.named(name).name for name in exports.names()] == exports.names()
    with pytest.raises(InputError, match="format 'abacus' is unknown; must be one of deepspeed, huggingface"):
        exports.named("abacus")


@pytest.mark.parametrize("name", exports.names())
def test_what_a_text_does_not_say_it_lists(name: str) -> None:
    export = exports.named(name)
    listed = 0
    for launch in expressible(name, [*MEGATRON, *DEEPSPEED]):
        text, unsaid = export.text(launch), export.not_expressible(launch)
        if export.comment is None:
            assert json.loads(text).get("not_expressible", {}) == unsaid
        else:
            lines = text.splitlines()
            assert all(f"# {field}: {how}" in lines for field, how in unsaid.items())
        listed += len(unsaid)
    assert listed or name == "torchrun", "which says everything"


@pytest.mark.parametrize("name", exports.names())
def test_each_axis_changes_the_text_or_is_refused(name: str) -> None:
    """An axis whose value leaves a format's text as it is was dropped without a word."""
    changes: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "context_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "zero_stage": 3,
        "micro_batch_size": 4,
        "recompute": "full",
        "compile": True,
        "precision": "fp8",
        "reduce_precision": "bf16",
        "rank_order": tuple(reversed(range(16))),
        "expandable_segments": True,
        "power_limit_w": 400,
    }
    export = exports.named(name)
    plain = replace(ONE.layout, engine=export.engines[0], zero_stage=2)
    before = export.text(replace(ONE, layout=plain))
    for axis, value in changes.items():
        with contextlib.suppress(InputError):
            assert export.text(replace(ONE, layout=replace(plain, **{axis: value}))) != before, axis


def test_layouts_of_other_engines_are_refused() -> None:
    with pytest.raises(InputError, match="megatron-lm cannot express layouts of the engine deepspeed, only"):
        exports.named("megatron-lm").text(DEEPSPEED[0])
    assert set(exports.named("torchrun").engines) == set(ENGINES)


# Megatron-LM and Megatron-Bridge, by Megatron-Core.

OF_THE_SCRIPT = {
    # Arguments of `megatron/training/arguments.py` that are no field of a class in Megatron-Core's wheel.
    *("micro_batch_size", "global_batch_size", "seq_length", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "swiglu", "ckpt_format"),
    *("disable_bias_linear", "group_query_attention", "num_virtual_stages_per_pipeline_rank", "grad_reduce_in_bf16"),
    *("fp8_format", "num_experts"),
}


def classes_of(file: Path) -> dict[str, set[str]]:
    """The fields of each class in a file. It is read as text: importing Megatron-Core takes long, and Megatron-Bridge
    takes Transformer Engine, which takes CUDA."""
    return {
        node.name: {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def folder_of(package: str) -> Path:
    """Where a package is installed; skips the test that asks if it is not."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


def core_fields() -> set[str]:
    core = folder_of("megatron.core")
    held = {
        "model_parallel_config": "ModelParallelConfig",
        "transformer/transformer_config": "TransformerConfig",
        "distributed/distributed_data_parallel_config": "DistributedDataParallelConfig",
        "optimizer/optimizer_config": "OptimizerConfig",
    }
    return set().union(*(classes_of(core / f"{file}.py")[name] for file, name in held.items()))


def test_megatron_core_has_the_names_of_megatron_lms_arguments() -> None:
    known = core_fields()
    mixtral = replace(ONE, training=replace(ONE.training, model=PRESETS["mixtral-8x7b"]))
    parted = replace(mixtral, layout=replace(ONE.layout, expert_parallel_size=2, precision="fp8"))
    wide = replace(ONE, training=replace(ONE.training, model=replace(MODEL, head_dim=192)))
    assert "--kv-channels 192\n" in exports.named("megatron-lm").text(wide)
    named = {
        word.removeprefix("--").replace("-", "_")
        for launch in [*MEGATRON, mixtral, parted, wide]
        for word in megatron_lm.settings(launch)
        if word.startswith("--")
    }
    assert len(named) > 30
    assert named - known <= OF_THE_SCRIPT


@pytest.mark.slow
def test_megatron_core_takes_the_stages() -> None:
    folder_of("megatron.core")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    (launch, *_) = launches("megatron", pipeline_parallel_size=2, stage_layers=(7, 9), pipeline_schedule="1f1b")
    assert launch.layout.stage_layers is not None
    parsed = PipelineParallelLayerLayout.from_str(megatron_lm.stages(launch.layout.stage_layers), 2)
    held = [[kind.name for kind in stage[0]] for stage in parsed.layout]
    assert held == [["embedding", *["decoder"] * 7], [*["decoder"] * 9, "loss"]]


def test_megatron_lms_own_parser_takes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "Megatron-LM's parser is in no package, only in its repository"
    pytest.importorskip("megatron.training.arguments", reason=reason, exc_type=ImportError)
    from megatron.training.arguments import parse_args

    for launch in MEGATRON[::7]:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *megatron_lm.settings(launch)])
        parsed, layout = parse_args(), launch.layout
        assert parsed.tensor_model_parallel_size == layout.tensor_parallel_size
        assert parsed.pipeline_model_parallel_size == layout.pipeline_parallel_size
        assert parsed.use_distributed_optimizer == (layout.zero_stage > 0)
        assert parsed.num_layers == MODEL.layers


def test_megatron_bridge_has_the_fields_that_are_overridden() -> None:
    core, training = core_fields(), folder_of("megatron.bridge") / "training"
    classes = classes_of(training / "config.py")
    known = {
        "model": core | {"seq_length"},
        "dataset": {"sequence_length"},
        "train": classes["TrainingConfig"],
        "dist": classes["DistributedInitConfig"],
        "checkpoint": classes["CheckpointConfig"],
        "ddp": core,
        "optimizer": core,
    }
    recipes = (training / "mixed_precision.py").read_text()
    for launch in MEGATRON:
        for section, values in megatron_bridge.settings(launch).items():
            assert section in classes["ConfigContainer"]
            if isinstance(values, str):
                assert f"def {values}()" in recipes
            else:
                assert set(values) <= known[section], section


def test_overrides_are_what_hydra_reads() -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser", reason="hydra is not installed")
    launch = next(one for one in MEGATRON if one.layout.stage_layers and one.layout.recompute == "selective")
    read = parser.OverridesParser.create().parse_overrides(
        exports.named("megatron-bridge").render(megatron_bridge.settings(launch)).splitlines()
    )
    values = {one.key_or_group: one.value() for one in read}
    assert values["model.pipeline_model_parallel_size"] == 2
    assert values["model.recompute_modules"] == ["layernorm"]
    assert str(values["model.pipeline_model_parallel_layout"]).strip("'") == "Et*7|t*9L"


# torchtitan.


@pytest.fixture
def titan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchtitan's own reader of the file that is made of a launch."""
    pytest.importorskip("triton", reason="torchtitan needs triton")
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan is not installed")
    monkeypatch.syspath_prepend(str(tmp_path))

    def read(launch: Launch) -> Any:
        (tmp_path / f"{torchtitan.MODULE}.py").write_text(exports.named("torchtitan").text(launch))
        importlib.invalidate_caches()
        sys.modules.pop(torchtitan.MODULE, None)
        return manager.ConfigManager().parse_args(["--module", torchtitan.MODULE, "--config", "run"])

    return read


def test_torchtitan_reads_its_configuration(titan: Any) -> None:
    import torch
    from torchtitan.distributed.parallel_dims import ParallelDims

    taken = [one for one in expressible("torchtitan", MEGATRON) if one.layout.recompute == "full"]
    assert len(taken) > 20
    sys.dont_write_bytecode = True  # one file after the other, of the same second
    for launch in taken:
        config, layout = titan(launch), launch.layout
        dims = ParallelDims.from_config(config.parallelism, layout.num_gpus)
        assert (dims.tp, dims.pp, dims.cp) == (
            layout.tensor_parallel_size,
            layout.pipeline_parallel_size,
            layout.context_parallel_size,
        )
        assert dims.dp_shard * dims.cp == max(layout.shard_group_size, 1)
        if layout.pipeline_parallel_size > 1:
            assert config.training.local_batch_size * layout.data_parallel_size == layout.global_batch_size
            assert len(config.parallelism.module_fqns_per_model_part) == layout.pipeline_stages
    with torch.device("meta"):
        model = config.model_spec.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == MODEL.parameters


# DeepSpeed and Transformers.


def test_deepspeed_takes_its_configuration() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    for launch in DEEPSPEED:
        made = json.loads(exports.named("deepspeed").text(launch))
        read = DeepSpeedConfig(made)
        assert read.zero_config.stage == made["zero_optimization"]["stage"]
        assert read.train_micro_batch_size_per_gpu == launch.layout.micro_batch_size
        assert read.gradient_accumulation_steps == launch.layout.gradient_accumulation_steps


WIDE = {f"{name}-wide": replace(PRESETS[name], head_dim=40) for name in ("tiny-llama", "tiny-moe")}


@pytest.mark.parametrize("name", sorted(PRESETS | WIDE))
def test_a_model_of_transformers_has_the_parameters_of_its_shape(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    shape = (PRESETS | WIDE)[name]
    config = transformers.AutoConfig.for_model(**configuration_of(shape))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "gpt", "kv_heads": 4, "head_dim": 40}, "as wide as hidden / heads, not head_dim 40"),
        ({"hidden": 66, "head_dim": 16}, "no hidden 66 that is no multiple of 4 heads"),
    ],
)
def test_heads_that_transformers_has_not_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        configuration_of(replace(PRESETS["tiny-llama"], **changes))


def test_transformers_takes_its_training_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    parallelism = pytest.importorskip("accelerate.parallelism_config", reason="accelerate is not installed")
    taken = [*expressible("huggingface", MEGATRON), *expressible("huggingface", DEEPSPEED)]
    assert {launch.layout.engine for launch in taken} == {"megatron", "deepspeed"}
    for launch in taken:
        made, layout = yaml.safe_load(exports.named("huggingface").text(launch)), launch.layout
        sizes = made.pop("parallelism_config", None)
        chosen = parallelism.ParallelismConfig(**sizes) if sizes else None
        read = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, parallelism_config=chosen, report_to="none", **made
        )
        model_parallel = layout.tensor_parallel_size * layout.context_parallel_size
        assert (
            read.per_device_train_batch_size * read.gradient_accumulation_steps * (layout.num_gpus // model_parallel)
            == layout.global_batch_size
        )
        if layout.engine == "megatron" and chosen is not None:
            sharded = layout.zero_stage > 0
            assert chosen.total_size == layout.num_gpus if sharded else chosen.tp_size == layout.tensor_parallel_size
            assert bool(read.fsdp) == sharded
        if layout.engine == "deepspeed":
            assert (
                read.hf_deepspeed_config.config["zero_optimization"]["stage"]
                == read.deepspeed["zero_optimization"]["stage"]
            )


# Wattune's own trainer.


def test_the_command_of_torchrun_writes_the_file_that_the_trainer_reads(tmp_path: Path) -> None:
    text = exports.named("torchrun").text(ONE)
    *writing, command = text.partition("\ntorchrun ")
    subprocess.run(["bash", "-c", "".join(writing[:1])], cwd=tmp_path, check=True)
    assert Launch.from_dict(yaml.safe_load((tmp_path / "run.yaml").read_text())) == ONE
    assert "--nnodes=2" in command
    assert "--nproc-per-node=8" in command
