from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import ray
from click.testing import CliRunner

from service import top
from service.cli import main
from telemetry.actor import NodeState, Work, start_telemetry, stop_telemetry
from telemetry.devices import DeviceInfo
from telemetry.devices.cpu import cpu_uuid


def gpu(index: int, method: str = "counter") -> DeviceInfo:
    return DeviceInfo(uuid=f"GPU-{index}", index=index, name="H200", kind="nvidia", energy_method=method)


def state(*devices: DeviceInfo, works: tuple[Work, ...] = (), **values: Any) -> NodeState:
    sample = {"power_w": 650.4, "gpu_temp_c": 61.0, "sm_clock_mhz": 1455.0, "memory_used_gib": 120.25} | values
    return NodeState(
        node_id="n0",
        hostname="host0",
        devices=devices,
        latest={device.uuid: sample for device in devices},
        throttled_by={devices[0].uuid: ("power_cap", "sw_thermal")},
        works=works,
    )


def test_each_gpu_and_each_of_its_trials_has_a_row() -> None:
    works = tuple(
        Work("GPU-1", trial, f"layout {trial}", "window", speed) for trial, speed in (("a", 12345.6), ("b", None))
    )
    other_search = state(gpu(1), gpu(0), works=(Work("GPU-0", "c", "layout c", "warmup", None),))
    lines = top.page([other_search, state(gpu(1, "estimated"), gpu(0), works=works)]).splitlines()
    assert "nodes: 1  devices: 2  power: 1,301 W  trials: 3" in lines[0]
    assert [line.split() for line in lines[4:]] == [
        ["host0", "0", "650", "61", "1,455", "120.2", "-", "-", "c", "warmup", "-", "layout", "c"],
        [
            "host0",
            "1",
            "650*",
            "61",
            "1,455",
            "120.2",
            "-",
            "power_cap,",
            "sw_thermal",
            "a",
            "window",
            "12,346",
            "layout",
            "a",
        ],
        ["b", "window", "-", "layout", "b"],
    ]


def test_what_is_not_known_is_a_dash() -> None:
    lines = top.page([state(gpu(0), power_w=None, gpu_temp_c=None)]).splitlines()
    assert "power: -" in lines[0]
    assert lines[4].split()[:5] == ["host0", "0", "-", "-", "1,455"]


def test_a_cluster_without_telemetry_is_refused_and_one_with_is_shown_once(ray_session: Any) -> None:
    refused = CliRunner().invoke(main, ["top"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("wattune: no telemetry at ")
    actors = start_telemetry()
    try:
        ray.get([actor.describe.remote() for actor in actors.values()])
        (actor,) = actors.values()

        def shown(*options: str) -> str:
            """Once the work is among it: on a busy machine actors that take long to answer are not shown, and work of
            which nobody has told for some seconds is forgotten."""
            give_up = time.monotonic() + 60
            while True:
                ray.get(actor.working.remote(Work(cpu_uuid(), "trial-7", "tp2", "window", 1000.0)))
                result = CliRunner().invoke(main, ["top", *options])  # no terminal
                if "trial-7" in result.stdout:
                    assert result.exit_code == 0, result.stderr
                    return result.stdout
                assert time.monotonic() < give_up, result.output
                time.sleep(0.5)

        assert "1,000" in shown()
        assert json.loads(shown("--json"))[0]["works"][0]["trial_id"] == "trial-7"
    finally:
        stop_telemetry(actors)


def test_an_address_where_nobody_listens_is_one_line() -> None:
    command = [sys.executable, "-m", "service.cli", "top", "--address", "127.0.0.1:9"]  # its own process: no Ray yet
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line.startswith("wattune: address 127.0.0.1:9: no Ray cluster answers")
