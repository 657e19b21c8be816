"""What heat, power and speed cost each other: on a record whose answers are worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from benchmarks.convert.archive import pack
from benchmarks.heat import main
from search_spaces.layout import Layout
from service.cli import main as wattune
from service.home import Home
from service.metrics import Method
from service.record.tracking import Tracker
from service.result import DeviceRecord, NodeWindow, Purpose, TrialResult
from telemetry.samples import SCHEMA, THROTTLE_CAUSES
from tests.service.conftest import empty_database, home
from tests.service.records import problem
from trainables.status import Status

__all__ = ["empty_database", "home"]

UUIDS = [f"GPU-{digit * 8}-0a1b-2c3d-4e5f-0123456789ab" for digit in ("a", "b")]
A, B = (uuid[:12] for uuid in UUIDS)
FAST = Layout("megatron", 2, 16, sequence_parallel=False, precision="fp32")
COOL = replace(FAST, micro_batch_size=2)
OLD = replace(FAST, micro_batch_size=4)
ENVIRONMENT = {"devices": "NVIDIA H200", "driver": "580.65.06", "torch": "2.13.0", "git_commit": "0123abc"}


def gpu(place: int, seconds: float, watts: float, clock: float, warm: float, **throttled: float) -> DeviceRecord:
    """Its peak is 2 degC above its mean; causes of throttling that are not named are 0 s, but the thermal policy's,
    which this driver does not count."""
    none: dict[str, float | None] = {cause: None if cause == "thermal_policy" else 0.0 for cause in THROTTLE_CAUSES}
    return DeviceRecord(
        UUIDS[place],
        "node",
        seconds,
        watts * seconds,
        clock,
        clock - 100,
        warm,
        warm + 2,
        warm - 10,
        {**none, **throttled},
    )


def ran(name: str, layout: Layout, speed: float, watts: float, *devices: DeviceRecord, **more: float) -> TrialResult:
    metrics: dict[str, float | None] = {"tokens_per_s": speed, "tokens_per_s_per_gpu": speed / 2}
    metrics |= {"mean_power_w": watts, "joules_per_token": watts / speed, **more}
    window = NodeWindow("node", 10**12, 10**12 + 2 * 10**9, tuple(UUIDS))
    methods = {"joules_per_token": Method.COUNTER}
    return TrialResult(name, layout, Status.OK, None, metrics, methods, windows=(window,), devices=devices)


def samples() -> pa.Table:
    """Of a record made before devices were kept, of 2 s. GPU a is at 60 degC for 0.4 s, then warms evenly to 70 within
    0.8 s and stays so for 0.8 s: 24 + 52 + 56 = 132 degC s, 66 on average. GPU b is at 50 degC. Each second, a is held
    down for 0.25 s by the power cap; what heat held it down for was read but once."""
    rows = [
        {"time_ns": 10**12 + round(second * 1e9), "node": "node", "device": UUIDS[index], "index": index}
        | {"kind": "nvidia", "power_w": 300.0, "gpu_temp_c": [warm, 50.0][index], "sm_clock_mhz": 1500.0}
        | {"throttle_power_cap_ns": [round(second * 0.25e9), 7][index]}
        | {"throttle_hw_thermal_ns": 5 if second == 0.4 else None}
        for second, warm in ((0.0, 60.0), (0.4, 60.0), (1.2, 70.0), (2.0, 70.0))
        for index in (0, 1)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@pytest.fixture
def search(home: Home) -> str:
    tracker = Tracker(home.tracking_uri, home)
    cluster = {"gpus_per_node": 2, "accelerator": "h200"}
    objectives = {"tokens_per_s": "maximize", "joules_per_token": "minimize"}
    tracker.start_search("s1", problem(name="hot", cluster=cluster, objectives=objectives), ENVIRONMENT)
    trials: list[tuple[TrialResult, pa.Table | None]] = [
        # Explored, then measured twice: 1,000 tokens/s at 1,200 W. GPU a over 2 s and 6 s: 80 and 84 degC, 83 on
        # average, at 1,400 MHz; GPU b 70 degC at 1,470 MHz. Heat holds a down for 0.5 + 1.5 s.
        (ran("explored", FAST, 990.0, 1190.0, gpu(0, 2, 600, 1400, 99), gpu(1, 2, 590, 1500, 70)), None),
        *(
            (
                replace(
                    ran(
                        name,
                        FAST,
                        speed,
                        1200.0,
                        gpu(0, seconds, 610, 1400, warm, sw_thermal=seconds / 4),
                        gpu(1, seconds, 590, 1470, 70, power_cap=seconds),
                        gpu_temp_rise_c=1.0,
                    ),
                    purpose=Purpose.FINALIST,
                ),
                None,
            )
            for name, speed, seconds, warm in (("first", 1010.0, 2.0, 80.0), ("second", 990.0, 6.0, 84.0))
        ),
        # 960 tokens/s, 4% slower, at 960 W: the hottest GPU, b, is also the faster one and costs nothing.
        (ran("cool", COOL, 960.0, 960.0, gpu(0, 2, 480, 1500, 60), gpu(1, 2, 480, 1530, 65)), None),
        # Slower and warmer than the one before, and draws more: beaten.
        (ran("old", OLD, 900.0, 1100.0), samples()),
    ]
    for result, table in trials:
        tracker.start_trial(result.trial_id, result.layout, result.purpose)
        tracker.finish_trial(result, table)
    tracker.finish_search("finished", {})
    return "s1"


def written(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json", str(tmp_path / "heat.json")])
    read: dict[str, Any] = json.loads((tmp_path / "heat.json").read_text())
    return read


def test_figures_are_those_worked_out_by_hand(search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = written(tmp_path, search)
    fast, cool, old = found["layouts"]
    assert [one["config"] for one in (fast, cool, old)] == [layout.to_dict() for layout in (FAST, COOL, OLD)]
    assert [one["front"] for one in (fast, cool, old)] == [True, True, False]
    assert fast["trials"] == ["first", "second"]
    assert (fast["tokens_per_s"], fast["mean_power_w"]) == (1000.0, 1200.0)
    assert fast["gpu_temp_c"] == {"mean": 76.5, "hottest_gpu_mean": 83.0, "peak": 86.0, "spread": 13.0}
    assert fast["sm_clock_mhz"] == {"mean": 1435.0, "spread": 70.0}
    assert fast["hottest"] == {"device": A, "warmer_c": 13.0, "slower_mhz": 70.0, "cost": pytest.approx(0.05)}
    assert fast["slowest_gpu_cost"] == pytest.approx(0.025)
    assert fast["throttle_s"] == dict.fromkeys(THROTTLE_CAUSES, 0.0) | {
        "sw_thermal": 2.0,
        "power_cap": 8.0,
        "thermal_policy": None,
    }
    a, b = fast["gpus"]
    assert (a["device"], a["duration_s"], a["mean_power_w"], b["throttle_s"]["power_cap"]) == (A, 8.0, 610.0, 8.0)
    assert cool["hottest"] == {"device": B, "warmer_c": 5.0, "slower_mhz": -30.0, "cost": 0.0}
    assert old["gpu_temp_c"] == pytest.approx({"mean": 58.0, "hottest_gpu_mean": 66.0, "peak": 70.0, "spread": 16.0})
    assert old["throttle_s"]["power_cap"] == pytest.approx(0.5)
    assert old["throttle_s"]["hw_thermal"] is None, "read but once"
    assert found["machine"] | {"unknown": None} == {
        "gpus": "NVIDIA H200",
        "accelerator": "h200",
        "nodes": 1,
        "gpus_per_node": 2,
        "driver": "580.65.06",
        "power_limit_w": None,
        "ambient_c": None,
        "unknown": None,
    }
    assert [one.split(":")[0] for one in found["unknown"]] == [
        "ambient temperature",
        "cooling, case and airflow",
        "power limit",
        "seconds of throttling for thermal_policy",
        "thermal steady state",
    ]
    printed = capsys.readouterr().out
    assert "NVIDIA H200, driver 580.65.06, search s1 (hot)\nambient: not known" in printed
    assert "power_cap 8 s, sw_thermal 2 s" in printed
    assert UUIDS[0] not in (tmp_path / "heat.json").read_text()


def test_the_trade_is_what_less_speed_buys(search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["slower"]: row for row in written(tmp_path, search)["trade"]}
    assert rows[0.0]["hottest_gpu_c"] == {"layout": FAST.label, "value": 83.0, "off_fastest": 0.0}
    assert rows[0.02] == rows[0.0] | {"slower": 0.02}
    assert rows[0.05]["hottest_gpu_c"] == {"layout": COOL.label, "value": 65.0, "off_fastest": -18.0}
    assert rows[0.05]["mean_power_w"] == {"layout": COOL.label, "value": 960.0, "off_fastest": -240.0}
    energy = (1200 / 1010 + 1200 / 990) / 2
    assert rows[0.05]["joules_per_token"]["off_fastest"] == pytest.approx(1.0 - energy)
    assert rows[0.2]["hottest_gpu_c"]["layout"] == COOL.label, "the slowest is not the coolest"
    assert "65.0 degC (-18.0)" in capsys.readouterr().out


def test_compare_reads_it_as_a_search(search: str, tmp_path: Path, home: Home) -> None:
    document = written(tmp_path, search, "--ambient-c", "21.5")
    assert document["machine"]["ambient_c"] == 21.5
    document["search"] |= {"id": "elsewhere", "name": "cooler"}
    document["search"]["environment"]["driver"] = "610.10"
    for trial in document["trials"]:
        trial["metrics"]["tokens_per_s_per_gpu"] *= 1.1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document))
    asked = CliRunner().invoke(wattune, ["compare", search, str(other), "--json"])
    assert asked.exit_code == 0, asked.stderr
    answer = json.loads(asked.stdout)
    assert [one["name"] for one in answer["searches"]] == ["hot", "cooler"]
    assert answer["differences"] == {"driver": ["580.65.06", "610.10"]}
    assert answer["best"]["tokens_per_s_per_gpu"]["changes"][0]["share"] == pytest.approx(0.1)
    assert {FAST.label, COOL.label, OLD.label} == {pair["layout"] for pair in answer["matched"]}


def test_a_packed_search_is_read_without_a_store_of_its_own(search: str, home: Home, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    pack(search, home.tracking_uri, tmp_path / "s1.tar.xz", tmp_path / "packed")
    here, there = written(tmp_path, search), written(tmp_path, str(tmp_path / "s1.tar.xz"))
    for one in (here, there):
        for trial in one["trials"]:
            trial |= {"run_id": None, "ended": None, "started": None}
    assert there == here


def test_what_cannot_be_read_is_told_in_a_line(
    search: str, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Tracker(home.tracking_uri, home).start_search("s2", problem(), {})
    nothing = tmp_path / "nothing.tar.xz"
    nothing.write_text("no archive")
    for arguments, words in (
        (["none"], "search 'none' is unknown"),
        (["s2"], "no trial of it was measured in full"),
        ([str(nothing)], "is no file of benchmarks.convert.archive"),
        ([search, "--json", str(tmp_path / "no" / "heat.json")], "cannot be written"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), arguments
        assert words in said.err
