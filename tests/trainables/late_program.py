"""Steps of a second and more on a GPU, of which the host hears when it waits for the next one, as many trainers do.

There is no GPU: events are over when the work before them would be. The hook knows no difference.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

STEP_S = 1.3
done_at = 0.0


class Event:
    """Of torch.cuda.Event, what the hook calls."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = done_at

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


torch: Any = ModuleType("torch")
torch.__version__ = "fake"
torch.version = SimpleNamespace(cuda="13.0")
torch.device = lambda kind, index: f"{kind}:{index}"
torch.cuda = SimpleNamespace(
    Event=Event,
    is_initialized=lambda: True,
    current_device=lambda: 0,
    current_stream=lambda device: None,
    get_device_name=lambda device: "a GPU",
    get_device_properties=lambda device: SimpleNamespace(uuid="0"),
    max_memory_reserved=lambda device: 2**30,
    nccl=SimpleNamespace(version=lambda: (2, 28)),
)
sys.modules["torch"] = torch

import wattune_steps  # noqa: E402

for number in range(1, 1000):
    # The optimizer of the step before ends some ms later than the host waits for.
    time.sleep(max(0.0, done_at + STEP_S - 0.05 - time.monotonic()))
    done_at = max(done_at, time.monotonic() - STEP_S + 0.05) + STEP_S
    wattune_steps.step(loss=5 / number)
