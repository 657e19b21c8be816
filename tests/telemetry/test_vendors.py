from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from telemetry import devices, live
from telemetry.devices import Precedence, discover, is_host, replay, throttle_bits, vendors
from telemetry.sampler import Sampler
from telemetry.samples import THROTTLE_CAUSES, SampleBuffer
from telemetry.windows.trial import summarise
from tests.worked_examples import example

(CHANGE,) = example("A vendor's device")
INTEL = CHANGE.code
"""All that is to be written for a vendor: the example of docs/extending.md."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules are of `telemetry.devices` too."""
    monkeypatch.delenv(replay.TRACE, raising=False)
    folder = tmp_path / "devices"
    folder.mkdir()
    monkeypatch.setattr(devices, "__path__", [*devices.__path__, str(folder)])
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith(f"{devices.__name__}."):
            del sys.modules[name]
            delattr(devices, name.rpartition(".")[2])


class Card:
    """The files of one GPU that draws 100 W and is too hot."""

    def __init__(self, drm: Path) -> None:
        hwmon, gt = drm / "card0/device/hwmon/hwmon3", drm / "card0/gt/gt0"
        for folder in (hwmon, gt):
            folder.mkdir(parents=True)
        for reason, is_set in {"pl1": 0, "thermal": 1, "prochot": 0}.items():
            (gt / f"throttle_reason_{reason}").write_text(f"{is_set}\n")
        self._energy_uj = hwmon / "energy1_input"
        self.work(0.0)

    def work(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            new = self._energy_uj.with_name("new")
            new.write_text(f"{int(1e8 * time.monotonic())}\n")
            os.replace(new, self._energy_uj)
            if time.monotonic() >= until:
                return
            time.sleep(0.02)


def test_a_vendor_is_one_file(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found, its device is sampled, and window and live view know what its bits mean."""
    assert throttle_bits("intel") == {}
    (package / "intel.py").write_text(INTEL)
    assert "intel" in [vendor.kind for vendor in vendors()]
    drm = tmp_path / "drm"
    monkeypatch.setattr("telemetry.devices.intel.DRM", drm)
    assert "intel" not in [device.info.kind for device in discover()]
    card = Card(drm)
    there = discover()
    assert "cpu" not in [device.info.kind for device in there]
    (device,) = [device for device in there if device.info.kind == "intel"]

    buffer = SampleBuffer(10_000)
    sampler = Sampler([device], buffer, "n")
    sampler.start()
    card.work(0.5)
    start_ns = time.monotonic_ns()
    card.work(1.0)
    end_ns = time.monotonic_ns()
    card.work(0.5)
    sampler.stop()
    samples = buffer.between(0, time.monotonic_ns())

    summary = summarise(samples, start_ns, end_ns, ["intel:card0"])
    assert summary.problems == ()
    assert summary.energy_method == "counter"
    assert summary.energy_j == pytest.approx(100 * (end_ns - start_ns) / 1e9, rel=0.5)
    assert (summary.throttle_ratio, summary.power_cap_ratio) == (1.0, 0.0)
    assert summary.methods()["throttle_ratio"] == "sampled"
    assert live.throttled_by(samples) == {"intel:card0": ("sw_thermal",)}


def test_a_module_that_is_no_vendor_is_refused(package: Path) -> None:
    (package / "helpers.py").write_text("")
    with pytest.raises(AttributeError, match="VENDOR"):
        vendors()


def test_every_vendor_speaks_of_known_causes_and_of_kinds_of_its_own() -> None:
    kinds = [vendor.kind for vendor in vendors()]
    assert len(set(kinds)) == len(kinds)
    assert {cause for vendor in vendors() for cause in vendor.throttle_bits} <= set(THROTTLE_CAUSES)
    by_precedence = {vendor.kind: vendor.precedence for vendor in vendors() if vendor.precedence is not Precedence.GPU}
    assert by_precedence == {"replay": Precedence.RECORDED, "cpu": Precedence.HOST}
    assert [kind for kind in (*kinds, None) if is_host(kind)] == ["cpu"]
