"""Train a causal language model with Transformers' Trainer: torchrun ... huggingface_lm.py run.yaml.

The file holds fields of `TrainingArguments` and those of `Run`. All that is Wattune's here is the callback.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokens import Sequences
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
from wattune_huggingface import WattuneCallback

SEQUENCES = 1 << 20
"""In an epoch: more than a trial comes to."""


@dataclass
class Run:
    """What is trained.

    - `model`: the file or the folder with its configuration; its weights are drawn at random.
    - `tokens`: see `tokens.Sequences`. `sequence_length`: in tokens.
    - `attention`: one of Transformers' implementations.
    - `lora_rank`: of adapters of all linear layers, which alone are trained; 0 for none.
    """

    model: str
    tokens: str
    sequence_length: int
    attention: str = "sdpa"
    lora_rank: int = 0


def adapted(model: Any, rank: int) -> Any:
    """The model with adapters; what it had before is trained no more."""
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise SystemExit(f"lora_rank {rank} needs PEFT, which is not installed: pip install peft") from None
    model.enable_input_require_grads()  # else blocks that are computed again get no gradient
    return get_peft_model(
        model, LoraConfig(TaskType.CAUSAL_LM, r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    )


def main() -> None:
    fields = yaml.safe_load(Path(sys.argv[1]).read_text())
    processors = {"use_cpu": not torch.cuda.is_available()}  # else processes without GPUs do not train together
    run, arguments = HfArgumentParser((Run, TrainingArguments)).parse_dict(processors | fields)
    config = AutoConfig.from_pretrained(run.model)
    whole = not (arguments.fsdp or arguments.deepspeed)  # on each GPU
    with torch.device(arguments.device if whole else "cpu"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=run.attention)
    if run.lora_rank:
        model = adapted(model, run.lora_rank)
    data = Sequences(run.tokens, config.vocab_size, run.sequence_length, SEQUENCES)
    Trainer(model, arguments, train_dataset=data, callbacks=[WattuneCallback()]).train()


if __name__ == "__main__":
    main()
