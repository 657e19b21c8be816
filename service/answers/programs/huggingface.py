"""Train a causal language model with Transformers' Trainer: torchrun ... train.py, as start.sh does.

`model.json` is the model's configuration, `training.yaml` the TrainingArguments, with accelerate's ParallelismConfig
under `parallelism_config` where it is needed, and under `sequence_length` the tokens of a sequence.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml
from accelerate.parallelism_config import ParallelismConfig
from tokens import Sequences
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


def main() -> None:
    settings = yaml.safe_load(Path("training.yaml").read_text())
    length, parallelism = settings.pop("sequence_length"), settings.pop("parallelism_config", None)
    steps = int(os.environ["TRAIN_STEPS"])
    arguments = TrainingArguments(
        output_dir=os.environ["OUTPUT"],
        learning_rate=float(os.environ["LEARNING_RATE"]),
        max_steps=steps,
        parallelism_config=ParallelismConfig(**parallelism) if parallelism else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **settings,
    )
    weights = os.environ.get("MODEL")
    if weights:
        split = {"tp_plan": "auto"} if parallelism and parallelism.get("tp_size", 1) > 1 else {}
        model = AutoModelForCausalLM.from_pretrained(weights, **split)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(Path("model.json").read_text())))
    replicas = arguments.world_size * arguments.per_device_train_batch_size
    count = steps * replicas * arguments.gradient_accumulation_steps
    data = Sequences(os.environ["DATA"], model.config.vocab_size, length, count)
    Trainer(model=model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
