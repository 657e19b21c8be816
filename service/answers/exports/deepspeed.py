"""DeepSpeed's JSON configuration of a layout of the `deepspeed` engine: the one that its trials run with."""

from __future__ import annotations

import json
from typing import Any

from service.answers.exports import LEARNING_RATE, TRAIN_STEPS, Export, Program, memory_environment
from service.answers.programs import source
from service.answers.transformers_model import BLOCKS, configuration_of, tokens_of
from service.errors import InputError
from trainables.engines.deepspeed import configuration as engine
from trainables.launch import Launch


def settings(launch: Launch) -> dict[str, Any]:
    """With what it does not say under `not_expressible`, of which DeepSpeed takes no notice."""
    unsaid = engine.not_expressible(launch.layout)
    made = engine.configuration(launch.layout)
    return made | {"not_expressible": unsaid} if unsaid else made


def render(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def program(launch: Launch) -> Program:
    """A model of Transformers, trained by DeepSpeed. Raises `InputError` for layouts that it is not made for."""
    layout = launch.layout
    for axis in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"):
        if getattr(layout, axis) > 1:
            raise InputError(
                f"deepspeed: {axis} {getattr(layout, axis)} is for your own model to say, not for a script; `wattune "
                "best --format deepspeed` prints the configuration, `--for torchrun` starts Wattune's trainer"
            )
    model = configuration_of(launch.training.model)
    run = {
        "sequence_length": launch.training.sequence_length,
        "recompute": layout.recompute == "full",
        "compile": layout.compile,
        "blocks": BLOCKS[model["model_type"]],
    }
    return Program(
        ("train.py",),
        {
            "ds_config.json": render(engine.configuration(layout)),
            "model.json": render(model),
            "run.json": render(run),
            "train.py": source("deepspeed"),
            "tokens.py": source("tokens"),
        },
        (LEARNING_RATE, TRAIN_STEPS, tokens_of(launch)),
        expresses=("compile", *(["recompute"] if layout.recompute == "full" else [])),
    )


EXPORT = Export(
    "deepspeed",
    ("deepspeed",),
    settings,
    render,
    lambda launch: engine.not_expressible(launch.layout),
    environment=memory_environment,
    program=program,
    comment=None,
)
