"""The power limit of a worker's GPU while a trial runs: the node's telemetry sets it and puts it back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from trainables.child import Outcome
from trainables.status import Status


class PowerLimit:
    """That of one worker's GPU. Of a search that is not to set power limits, nothing is asked of telemetry."""

    def __init__(self, telemetry: Any, device: str | None, uuid: str, allowed: bool) -> None:
        """`telemetry`: the handle of the node's actor; `device`: the GPU as the node calls it, None on CPU; `uuid`: as
        telemetry calls it."""
        self._telemetry, self._uuid = telemetry, uuid
        self._watts: int | None = None
        self._index: int | None = None
        if allowed and device is not None and device.isdecimal():
            self._index = int(device)
            self.restore()  # what a worker left that was killed

    def set(self, watts: int | None) -> str | None:
        """Set the limit that a trial asks for, if it asks for one; why that cannot be, in a line, else None."""
        self._watts = watts
        if watts is None:
            return None
        if self._index is None:
            return "power limit: it is of GPUs alone that Ray knows by number, with --allow-power-limits"
        refused: str | None = ray.get(self._telemetry.limit_power.remote(self._index, watts))
        return None if refused is None else f"power limit: {refused}"

    def checked(self, outcome: Outcome) -> Outcome:
        """What came of the trial, a failure of the machines' if its GPU did not have the limit to its end."""
        if self._watts is None or outcome.status != Status.OK:
            return outcome
        ran = outcome.report and outcome.report.device
        if ran is not None and ran != self._uuid:
            return replace(outcome, status=Status.CRASH, cause=f"power limit: set for {self._uuid}, but {ran} trained")
        if ray.get(self._telemetry.holds_power.remote(self._index, self._watts)):
            return outcome
        cause = f"power limit: {self._watts} W were not held to the end"
        return replace(outcome, status=Status.CRASH, cause=cause, infrastructure=True)

    def restore(self) -> None:
        """Put back what the GPU had."""
        if self._index is not None:
            ray.get(self._telemetry.restore_power.remote(self._index))
