"""Hugging Face's `Trainer` tells Wattune of its steps: `Trainer(..., callbacks=[WattuneCallback()])`.

Outside Wattune the callback does nothing. Losses are those that the Trainer logs, which it does behind the step: each
is told with the next one. `logging_steps=1` has it log every step's.
"""

from __future__ import annotations

from typing import Any

import wattune_steps

try:
    from transformers import TrainerCallback
except ImportError:  # imported where it is not used
    TrainerCallback = object


class WattuneCallback(TrainerCallback):  # type: ignore[misc]
    """Calls `wattune_steps.step` after each optimizer step."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wattune_steps.step(loss=self.logged.pop("loss", None), grad_norm=self.logged.pop("grad_norm", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.logged = {name: value for name, value in (logs or {}).items() if name in ("loss", "grad_norm")}
