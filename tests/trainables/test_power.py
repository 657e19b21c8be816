"""The power limit of a worker's GPU: set for a trial by the node's telemetry, held to its end, and put back."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from telemetry.actor import Telemetry
from telemetry.devices import DeviceInfo
from trainables.child import Outcome
from trainables.power import PowerLimit
from trainables.program import RankReport
from trainables.status import Status

UUID = "GPU-1"


class Adjustable:
    """A device without a driver, whose limit is its own."""

    def __init__(self) -> None:
        self.info = DeviceInfo(UUID, 1, "a GPU", "nvidia", "counter")
        self.watts = 700.0

    def read(self, full: bool) -> dict[str, Any]:
        return {"power_average_w": self.watts}

    def power_limit_range_w(self) -> tuple[float, float]:
        return 200.0, 700.0

    def power_limit_w(self) -> float:
        return self.watts

    def set_power_limit(self, watts: float) -> None:
        self.watts = watts


class Watching(Telemetry):
    """That of a node with one such device, whose limit somebody else may set too."""

    def __init__(self) -> None:
        self.device = Adjustable()
        super().__init__("node", "test", devices=[self.device], power_limits=True)

    def limit(self, watts: float | None = None) -> float:
        self.device.watts = watts or self.device.watts
        return self.device.watts


def ended(device: str | None = UUID, status: Status = Status.OK) -> Outcome:
    report = RankReport(0, {}, device, {}, (), (), None, {}) if status == Status.OK else None
    return Outcome(status, None, report=report)


def test_a_trial_has_the_limit_that_it_asks_for_and_the_next_one_what_there_was(telemetry: Any) -> None:
    power = PowerLimit(telemetry, "1", UUID, allowed=True)
    assert power.set(400) is None
    assert ray.get(telemetry.limit.remote()) == 400
    assert power.checked(ended()) == ended()
    power.restore()
    assert ray.get(telemetry.limit.remote()) == 700
    assert power.set(None) is None
    assert power.checked(ended()) == ended()
    assert power.set(900) == f"power limit: {UUID} takes a power limit of 200 to 700 W, not 900 W"


def test_a_trial_whose_limit_did_not_last_is_no_result(telemetry: Any) -> None:
    power = PowerLimit(telemetry, "1", UUID, allowed=True)
    assert power.set(400) is None
    assert power.checked(ended("GPU-2")).cause == f"power limit: set for {UUID}, but GPU-2 trained"
    assert power.checked(ended(status=Status.OOM)) == ended(status=Status.OOM)
    ray.get(telemetry.limit.remote(500))
    lost = power.checked(ended())
    assert (lost.status, lost.cause) == (Status.CRASH, "power limit: 400 W were not held to the end")
    assert lost.infrastructure
    power.restore()
    assert ray.get(telemetry.limit.remote()) == 700


def test_a_worker_puts_back_what_the_one_before_it_left(telemetry: Any) -> None:
    assert PowerLimit(telemetry, "1", UUID, allowed=True).set(300) is None
    PowerLimit(telemetry, "1", UUID, allowed=True)
    assert ray.get(telemetry.limit.remote()) == 700


@pytest.mark.parametrize(("device", "allowed"), [("1", False), (None, True), ("GPU-1", True)])
def test_without_leave_or_a_gpu_no_limit_is_set(telemetry: Any, device: str | None, allowed: bool) -> None:
    power = PowerLimit(telemetry, device, UUID, allowed)
    assert "with --allow-power-limits" in (power.set(400) or "")
    assert power.set(None) is None
    power.restore()
    assert ray.get(telemetry.limit.remote()) == 700
