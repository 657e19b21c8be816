"""A Hugging Face `Trainer` on a tiny Llama with weights drawn at random: one line of it knows of Wattune."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from wattune_huggingface import WattuneCallback

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
text = torch.arange(32) % 8
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=10**6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)
rows = [{"input_ids": text, "labels": text}] * 64
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[WattuneCallback()]).train()
