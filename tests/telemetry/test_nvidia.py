from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from telemetry.devices.nvidia import throttle_field_ids

ROOT = Path(__file__).parents[2]

# The binding keeps the library it has loaded, so each scenario has a process of its own.
WATCH = """
import json, sys
from dataclasses import asdict
from telemetry.devices import discover
devices = discover()
reads = [[device.read() for device in devices] for _ in range(int(sys.argv[1]))]
print(json.dumps({"infos": [asdict(device.info) for device in devices], "reads": reads}))
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 that the genuine binding loads."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-lm"], check=True)
    return folder


def watch(fake_driver: Path, reads: int = 1, **script: object) -> tuple[dict[str, Any], str]:
    environment = os.environ | {f"FAKE_{name.upper()}": str(value) for name, value in script.items()}
    environment |= {"LD_LIBRARY_PATH": str(fake_driver), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(reads)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("535.183.01", 251),
        ("580.65.06", 251),
        ("580.81", 251),
        ("580.82.07", 269),
        ("580.159.04", 269),
        ("610.10", 269),
    ],
)
def test_throttle_fields_follow_the_driver_version(version: str, first: int) -> None:
    assert throttle_field_ids(version) == {
        "throttle_sw_thermal_ns": first,
        "throttle_hw_thermal_ns": first + 1,
        "throttle_hw_brake_ns": first + 2,
    }


def test_an_unreadable_driver_version_asks_for_no_renumbered_field() -> None:
    assert throttle_field_ids("Not Available") == {}


@pytest.mark.parametrize(("driver", "first"), [("580.65.06", 251), ("580.82.07", 269)])
def test_a_sample_under_the_genuine_binding(fake_driver: Path, driver: str, first: int) -> None:
    seen, _ = watch(fake_driver, reads=2, driver=driver)
    assert seen["infos"] == [
        {
            "uuid": "GPU-0",
            "index": 0,
            "name": "Fake H200",
            "kind": "nvidia",
            "energy_method": "counter",
            "driver_version": driver,
            "power_limit_w": 700.0,
        }
    ]
    sample = seen["reads"][0][0]
    assert sample == {
        "energy_mj": 2**40 + 70_000,
        "power_average_w": pytest.approx(690.123),
        "power_w": pytest.approx(700.456),
        "hbm_temp_c": 71.0,
        "throttle_power_cap_ns": 7_400_000_000,
        "throttle_thermal_policy_ns": 75,
        "throttle_sync_boost_ns": 76,
        "throttle_sw_thermal_ns": first * 10**9,
        "throttle_hw_thermal_ns": (first + 1) * 10**9,
        "throttle_hw_brake_ns": (first + 2) * 10**9,
        "sm_clock_mhz": 1455,
        "memory_clock_mhz": 3201,
        "gpu_temp_c": 61,
        "gpu_utilisation": 0.97,
        "memory_used_gib": 12.0,
        "throttle_reasons": 0x24,
    }
    assert seen["reads"][1][0]["energy_mj"] == 2**40 + 140_000


def test_what_is_not_supported_is_null(fake_driver: Path) -> None:
    seen, _ = watch(fake_driver, fields="none")
    assert seen["infos"][0]["power_limit_w"] is None
    assert len(seen["reads"][0][0]) == 16
    assert set(seen["reads"][0][0].values()) == {None}


def test_values_that_cannot_be_are_null(fake_driver: Path) -> None:
    """Not a number, a negative counter and an unknown type; a double where an integer is usual is read as one."""
    sample = watch(fake_driver, fields="odd")[0]["reads"][0][0]
    assert sample["power_w"] is None
    assert sample["energy_mj"] is None
    assert sample["hbm_temp_c"] is None
    assert sample["power_average_w"] == pytest.approx(690.123)
    assert sample["throttle_power_cap_ns"] == 7_400_000_000


def test_a_gpu_lost_on_the_way_reads_null(fake_driver: Path) -> None:
    reads = watch(fake_driver, reads=3, lost=2)[0]["reads"]
    assert [read[0].get("energy_mj") for read in reads] == [2**40 + 70_000, 2**40 + 140_000, None]
    assert set(reads[2][0].values()) == {None}


def test_a_gpu_that_never_answers_leaves_the_others(fake_driver: Path) -> None:
    seen, log = watch(fake_driver, gpus=4, dead=1)
    assert [info["uuid"] for info in seen["infos"]] == ["GPU-0", "GPU-2", "GPU-3"]
    assert "GPU 1 does not answer" in log


@pytest.mark.parametrize(
    ("init", "gpus", "warning"), [(9, 1, ""), (18, 1, "NVML does not answer"), (0, 0, "")]
)  # driver not loaded, library and driver of different versions, no GPU
def test_without_a_gpu_that_answers_the_cpu_is_the_device(
    fake_driver: Path, init: int, gpus: int, warning: str
) -> None:
    seen, log = watch(fake_driver, init=init, gpus=gpus)
    assert [info["kind"] for info in seen["infos"]] == ["cpu"]
    assert seen["infos"][0]["energy_method"] == "estimated"
    assert warning in log
    assert bool(log) == bool(warning)
