"""Sequences of tokens for causal language models, packed: cut from one stream, one after the other."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

HEADER = struct.Struct("<9sQB")  # of a Megatron-LM indexed dataset: magic, version, code of the tokens' type
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SYNTHETIC = "synthetic"


def open_tokens(source: str) -> Any:
    """The tokens of a Megatron-LM indexed dataset, of a numpy array `.npy`, or of a `.bin` of uint16; unread so far."""
    if source.endswith(".npy"):
        return np.load(source, mmap_mode="r")
    prefix = source[:-4] if source.endswith((".bin", ".idx")) else source
    index = Path(f"{prefix}.idx")
    kind = TYPES[HEADER.unpack(index.read_bytes()[: HEADER.size])[2]] if index.exists() else "<u2"
    return np.memmap(f"{prefix}.bin", dtype=kind, mode="r")


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of `length` tokens as a Transformers model takes them.

    `synthetic` ones are drawn at random, low numbers more often, as in text: a model that trains brings the loss down.
    """

    def __init__(self, source: str, vocab: int, length: int, count: int) -> None:
        self.vocab, self.length, self.count = vocab, length, count
        self.tokens = None if source == SYNTHETIC else open_tokens(source)
        if self.tokens is not None and len(self.tokens) < length:
            raise SystemExit(f"DATA: {source} holds {len(self.tokens)} tokens, fewer than a sequence of {length}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.tokens is None:
            drawn = torch.Generator().manual_seed(index)
            tokens = (self.vocab * torch.rand(self.length, generator=drawn, dtype=torch.float64) ** 3).long()
        else:
            start = index % (len(self.tokens) // self.length) * self.length
            tokens = torch.from_numpy(np.array(self.tokens[start : start + self.length], dtype=np.int64))
        return {"input_ids": tokens, "labels": tokens}
