"""A Lightning `Trainer` on a tiny model, two microbatches a step: one line of it knows of Wattune."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from wattune_lightning import WattuneCallback


class Numbers(torch.utils.data.Dataset[int]):
    """0 to 7, over and over."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index % 8


class Successor(lightning.LightningModule):
    """Learns each number's successor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch), (batch + 1) % 8)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=10**6,
    accumulate_grad_batches=2,
    callbacks=[WattuneCallback()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Successor(), torch.utils.data.DataLoader(Numbers(), batch_size=16))
