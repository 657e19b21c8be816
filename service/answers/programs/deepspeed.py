"""Train a causal language model of Transformers with DeepSpeed: torchrun ... train.py, as start.sh does.

`model.json` is the model's configuration, `ds_config.json` DeepSpeed's, `run.json` what it has no word for: the tokens
of a sequence, and whether blocks are computed again in the backward pass (`recompute`) and compiled (`compile`).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from tokens import Sequences
from transformers import AutoConfig, AutoModelForCausalLM


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(name).read_text())
    return values


def make_moments(optimizer: torch.optim.AdamW) -> None:
    """Before logits are made: else in memory that these then lack."""
    torch.cuda.empty_cache()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}


def main() -> None:
    settings, run, model_settings = read("ds_config.json"), read("run.json"), read("model.json")
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=settings["zero_optimization"]["stage"] == 3):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_settings, use_cache=False))
    if run["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run["compile"]:
        for block in model.get_submodule(run["blocks"]):
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(os.environ["LEARNING_RATE"]), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    make_moments(optimizer)
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), int(os.environ["TRAIN_STEPS"])
    data = Sequences(
        os.environ["DATA"], model.config.vocab_size, run["sequence_length"], steps * accumulation * ranks * micro
    )
    began = time.monotonic()
    for number in range(steps * accumulation):
        first = (number * ranks + rank) * micro
        batch = torch.stack([data[first + i]["input_ids"] for i in range(micro)]).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if (number + 1) % accumulation == 0:
            shown, now = loss.item(), time.monotonic()
            if rank == 0:
                speed = accumulation * ranks * micro * run["sequence_length"] / (now - began)
                print(f"step {(number + 1) // accumulation}: loss {shown:.4f}, {speed:,.0f} tokens/s", flush=True)
            began = now
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
