from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from telemetry import live
from telemetry.samples import SCHEMA

SECOND = 10**9


def table(*rows: dict[str, Any], kind: str = "nvidia") -> pa.Table:
    known = {"node": "n", "device": "GPU-0", "kind": kind}
    return pa.Table.from_pylist([known | row for row in rows], schema=SCHEMA)


def test_the_latest_sample_has_what_is_read_now_and_then_but_no_state_of_the_past() -> None:
    rows = table(
        {"time_ns": 1, "power_w": 500.0, "energy_mj": 7, "tensor_activity": 0.5},
        {"time_ns": 2, "power_w": 600.0, "gpu_temp_c": 60.0},
        {"time_ns": 3, "gpu_temp_c": 61.0},
    )
    latest = live.latest(rows)["GPU-0"]
    assert (latest["energy_mj"], latest["tensor_activity"], latest["gpu_temp_c"]) == (7, 0.5, 61.0)
    assert latest["power_w"] is None
    assert latest["throttle_hw_thermal_ns"] is None


def test_a_cause_is_told_while_its_counter_grows() -> None:
    power = [(0, 0), (5, 4 * SECOND), (9, 4 * SECOND), (11, 4 * SECOND)]  # held the clock down until 7 s ago
    heat = [(0, 0), (10, 3 * SECOND)]  # read every 10 s
    rows = [{"time_ns": at * SECOND, "throttle_power_cap_ns": value, "throttle_reasons": 4} for at, value in power]
    rows += [{"time_ns": at * SECOND, "throttle_hw_thermal_ns": value} for at, value in heat]
    rows.sort(key=lambda row: row["time_ns"])
    assert live.throttled_by(table(*rows)) == {"GPU-0": ("hw_thermal",)}


@pytest.mark.parametrize(
    ("kind", "bits", "causes"),
    [
        ("nvidia", 0x4, ("power_cap",)),
        ("nvidia", 0x20 | 0x40, ("sw_thermal", "hw_thermal")),
        ("nvidia", 0x1 | 0x8, ()),
        ("amd", 1 << 15, ("power_cap",)),
        ("amd", 1 << 20, ()),
        ("amd", 1 << 33, ("sw_thermal",)),
        ("nvidia", None, ()),
    ],
)
def test_without_counters_the_drivers_bits_tell(kind: str, bits: int | None, causes: tuple[str, ...]) -> None:
    rows = table({"time_ns": 1, "throttle_reasons": 0x40}, {"time_ns": 2, "throttle_reasons": bits}, kind=kind)
    assert live.throttled_by(rows) == {"GPU-0": causes}
