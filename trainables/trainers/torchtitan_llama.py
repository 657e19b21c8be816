"""A Llama of any sizes for torchtitan 0.2, on tokens that need no tokenizer.

`--experimental.custom_import torchtitan_llama` makes it the model `llama`, flavor `run`. The environment's MODEL is
the path of a JSON file with fields of `TransformerModelArgs`; `training.dataset` is what `tokens.Sequences` reads.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokens import Sequences
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

MODEL = TransformerModelArgs(**json.loads(Path(os.environ["MODEL"]).read_text()))

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class Successors(IterableDataset[Sample]):
    """Every `ranks`-th sequence, each with the tokens that come next."""

    def __init__(self, sequences: Sequences, rank: int, ranks: int) -> None:
        self.sequences, self.rank, self.ranks = sequences, rank, ranks

    def __iter__(self) -> Iterator[Sample]:
        for index in itertools.count(self.rank, self.ranks):
            tokens = self.sequences[index]["input_ids"]
            yield {"input": tokens[:-1]}, tokens[1:]


def dataloader(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig, **kwargs: Any) -> Any:
    training = job_config.training
    sequences = Sequences(training.dataset, MODEL.vocab_size, training.seq_len + 1, 1)
    dataset = Successors(sequences, dp_rank, dp_world_size)
    return ParallelAwareDataloader(dataset, dp_rank, dp_world_size, batch_size=training.local_batch_size)


register_train_spec(
    "llama",
    replace(
        get_train_spec(),
        model_args={"run": MODEL},
        build_dataloader_fn=dataloader,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    ),
)
