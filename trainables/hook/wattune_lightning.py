"""Lightning's `Trainer` tells Wattune of its steps: `Trainer(..., callbacks=[WattuneCallback()])`.

Outside Wattune the callback does nothing. The loss of a step is that of its last microbatch.
"""

from __future__ import annotations

from typing import Any

import wattune_steps

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:  # imported where it is not used
        Callback = object


class WattuneCallback(Callback):  # type: ignore[misc]
    """Calls `wattune_steps.step` after each optimizer step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self.steps:  # not after each microbatch
            self.steps = trainer.global_step
            wattune_steps.step(loss=outputs.get("loss") if isinstance(outputs, dict) else outputs)
