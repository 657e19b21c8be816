from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from telemetry.devices import DeviceInfo
from telemetry.devices.nvidia import _Total, _WrappingBytes, throttle_field_ids
from telemetry.samples import SCHEMA
from telemetry.windows.trial import WindowSummary, summarise
from tests.telemetry.scenarios import Interpreter, Step, compile_nvml, read_steps, sample_drift, sample_steps, step

TICK_NS = 100_000_000
TRIES = 5
"""Times that a busy machine may keep a device from seeing when its energy counter is refreshed."""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Has a libnvidia-ml.so.1 that the genuine binding loads."""
    folder = tmp_path_factory.mktemp("nvml")
    if not compile_nvml(folder):
        pytest.skip("no C compiler to build the fake driver with")
    with Interpreter(folder) as interpreter:
        yield interpreter


def watch(fake_driver: Interpreter, *steps: Step, **settings: object) -> tuple[dict[str, Any], str]:
    """What the devices read at each step, one full reading by default, and what they logged."""
    return fake_driver.run(read_steps, steps or (step(),), **settings)


def reads_of_one(fake_driver: Interpreter, *steps: Step, **settings: object) -> list[dict[str, Any]]:
    return [read[0] for read in watch(fake_driver, *steps, **settings)[0]["reads"]]


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
def test_a_sample_under_the_genuine_binding(fake_driver: Interpreter, driver: str, first: int) -> None:
    seen, log = watch(fake_driver, step(full=False), step(full=True, ecc=3, tensor=40, sleep=0.02), driver=driver)
    pcie_peak: Any = pytest.approx(63.0e9, rel=1e-3)
    info = DeviceInfo(
        uuid="GPU-0",
        index=0,
        name="Fake H200",
        kind="nvidia",
        energy_method="counter",
        driver_version=driver,
        power_limit_w=700.0,
        default_power_limit_w=700.0,
        max_sm_clock_mhz=1980,
        pcie_peak_bytes_per_s=pcie_peak,
    )
    assert seen["infos"] == [asdict(info)]
    tick, full = (read[0] for read in seen["reads"])
    assert tick == {
        "power_average_w": pytest.approx(690.123),
        "power_w": pytest.approx(700.456),
        "hbm_power_w": pytest.approx(88.012),
        "hbm_temp_c": 71.0,
        "throttle_power_cap_ns": 7_400_000_000,
        "throttle_sync_boost_ns": 76,
        "throttle_sw_thermal_ns": first * 10**9,
        "sm_clock_mhz": 1455,
        "memory_clock_mhz": 3201,
        "gpu_temp_c": 61,
        "gpu_utilisation": 0.97,
        "memory_used_gib": 12.0,
        "throttle_reasons": 0x24,
        "xid_errors": 0,
        "xid": None,
    }
    traffic = {name: full[name] for name in ("pcie_rx_bytes", "pcie_tx_bytes", "link_rx_bytes", "link_tx_bytes")}
    assert full == tick | traffic | {
        "energy_mj": 70_000,
        "throttle_thermal_policy_ns": 75,
        "throttle_hw_thermal_ns": (first + 1) * 10**9,
        "throttle_hw_brake_ns": (first + 2) * 10**9,
        "gpu_temp_margin_c": 29,
        "ecc_corrected": 3,
        "ecc_uncorrected": 1003,
        "tensor_activity": 0.4,
        "dram_activity": 0.2,
    }
    assert set(full) <= set(SCHEMA.names)
    assert log == ""


def test_costly_fields_are_asked_for_in_full_readings_alone_and_energy_first(
    fake_driver: Interpreter, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    watch(fake_driver, step(full=False, calls=calls), step(full=True), driver="580.82.07")
    tick, _, costly, tick_again, _ = (line.split() for line in calls.read_text().splitlines())
    assert tick == tick_again == ["186", "185", "185", "82", "74", "76", "269"]
    assert costly == ["83", "75", "270", "271"]


def away_ms(row: Mapping[str, Any], refresh_ms: int) -> float:
    """From when the counter was refreshed to when that is said to have been: it counts 700 W, from `refresh_ms` on."""
    return row["energy_ns"] / 1e6 - (row["energy_mj"] / 700 + refresh_ms)


@pytest.mark.parametrize("refresh", [0, 37, 95])
def test_a_reading_tells_when_its_energy_was_new(fake_driver: Interpreter, refresh: int) -> None:
    """A busy machine that misses a refresh is asked once more."""
    for _ in range(TRIES):
        reads = reads_of_one(fake_driver, *[step(sleep=0.023)] * 12, refresh=refresh)
        away = sorted(abs(away_ms(read, refresh)) for read in reads if "energy_ns" in read)
        if len(away) == 12 and away[6] < 6 and away[-1] < 20:
            return
    raise AssertionError(away)


def test_after_a_call_that_hung_nobody_knows_when_the_energy_was_new(fake_driver: Interpreter) -> None:
    """A busy machine that misses a refresh is asked once more."""
    known = []
    for _ in range(TRIES):
        reads = reads_of_one(fake_driver, step(), step(hang=0.12), step(), refresh=50)
        assert reads[1]["energy_mj"] is not None
        known.append([read.get("energy_ns") is not None for read in reads])
        if known[-1] == [True, False, True]:
            break
    assert not any(at for _, at, _ in known)
    assert known[-1] == [True, False, True]


def test_nothing_is_said_of_a_counter_with_another_period(fake_driver: Interpreter) -> None:
    reads = reads_of_one(fake_driver, *[step(sleep=0.03)] * 4, refresh=0, period=20)
    assert [read.get("energy_ns") for read in reads] == [None] * 4


def test_refreshes_that_drift_from_the_host_s_clock_are_followed(fake_driver: Interpreter) -> None:
    """By 2 ms each time between two looks. A busy machine misses some, is late to look at others, and in the end says
    nothing: then once more."""
    for _ in range(TRIES):
        rows, _ = fake_driver.run(sample_drift, 12, refresh=20, gpus=2)
        away = {
            uuid: sorted(
                abs(away_ms(row, row["refresh"])) for row in rows if row["device"] == uuid and "energy_ns" in row
            )
            for uuid in ("GPU-0", "GPU-1")
        }
        if all(len(each) > 6 and each[len(each) * 3 // 4] < 10 for each in away.values()):
            return
    pytest.fail(f"in {TRIES} tries not for both: {away}")


def test_what_is_not_supported_is_left_out_and_not_asked_again(fake_driver: Interpreter, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    settings = {"fields": "none", "calls": calls}
    seen, log = watch(fake_driver, step(full=False), step(full=False), step(full=False), **settings)
    assert seen["infos"][0]["power_limit_w"] is None
    assert seen["infos"][0]["pcie_peak_bytes_per_s"] is None
    assert seen["reads"] == [[{}]] * 3
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["90", "83", "186", "utilisation"]
    assert log == ""


def test_a_gpu_in_mig_mode_answers_what_it_can(fake_driver: Interpreter) -> None:
    before, after = reads_of_one(fake_driver, step(), step(), fields="mig")
    for column in ("energy_mj", "hbm_temp_c", "gpu_utilisation", "tensor_activity"):
        assert before.get(column) is after.get(column) is None
    for column in ("power_w", "throttle_power_cap_ns", "throttle_hw_thermal_ns", "sm_clock_mhz", "gpu_temp_c"):
        assert after[column] == before[column] is not None


def test_values_that_cannot_be_are_null(fake_driver: Interpreter) -> None:
    """Not a number, a negative counter, an unknown type, an error of one field, one that the driver does not fill in, a
    share over 1; a double where an integer is usual is read as one."""
    seen, _ = watch(fake_driver, step(fields="all"), step(fields="odd"), step(fields="all"), fields="odd")
    assert seen["infos"][0]["pcie_peak_bytes_per_s"] is None  # of a generation to come
    good, odd, good_again = (read[0] for read in seen["reads"])
    nulls = {"power_w", "energy_mj", "hbm_temp_c", "throttle_thermal_policy_ns", "throttle_sync_boost_ns"}
    for column in nulls | {"gpu_utilisation", "ecc_corrected"}:
        assert odd.get(column) is None, column
        assert good_again[column] == good[column] is not None
    assert odd["power_average_w"] == pytest.approx(690.123)
    assert odd["throttle_power_cap_ns"] == 7_400_000_000


@pytest.mark.parametrize("lost", [0, 100])  # by the call's answer, by each field's
def test_a_gpu_lost_on_the_way_reads_null_and_the_others_go_on(
    fake_driver: Interpreter, tmp_path: Path, lost: int
) -> None:
    steps = [step(), step(lost=lost, xid="79"), step(), step(lost=-1)]
    seen, log = watch(fake_driver, *steps, gpus=2, calls=tmp_path / "calls")
    assert [read[0].get("energy_mj") for read in seen["reads"]] == [70_000, None, None, 70_000]
    for read in seen["reads"][1:3]:
        assert {name for name, value in read[0].items() if value is not None} <= {"xid", "xid_errors"}
        assert read[0]["xid"] == 79
        assert read[0]["xid_errors"] == (1 if lost == 0 else None)  # with 100, no more XID errors are reported
    assert [read[1]["energy_mj"] for read in seen["reads"]] == [70_000] * 4
    assert log.count("GPU-0 does not answer: GPU is lost") == 1
    assert (tmp_path / "calls").read_text().count("utilisation") == 6  # not of the lost GPU


def test_a_gpu_that_never_answers_leaves_the_others(fake_driver: Interpreter) -> None:
    seen, log = watch(fake_driver, gpus=4, dead=1)
    assert [info["uuid"] for info in seen["infos"]] == ["GPU-0", "GPU-2", "GPU-3"]
    assert "GPU 1 does not answer" in log


def test_xid_errors_are_counted_and_the_latest_named(fake_driver: Interpreter) -> None:
    reads = reads_of_one(fake_driver, step(full=False), step(full=False, xid="31 43"), step(), step(xid="94"))
    assert [(read["xid_errors"], read["xid"]) for read in reads] == [(0, None), (2, 43), (2, 43), (3, 94)]


GPM_BYTES = 10 * 2**20


def test_gpm_gives_what_happened_between_full_readings(fake_driver: Interpreter) -> None:
    reads = reads_of_one(
        fake_driver,
        step(tensor=60, pcie=GPM_BYTES, sleep=0.05),
        step(full=False, tensor=70, pcie=2 * GPM_BYTES, sleep=0.05),
        step(tensor=90, pcie=4 * GPM_BYTES, sleep=0.05),
        step(tensor=200, pcie=4 * GPM_BYTES, sleep=0.05),  # more than can be
        links=4,
    )
    assert [read.get("tensor_activity") for read in reads] == [0.6, None, 0.3, None]
    assert [read.get("dram_activity") for read in reads] == [0.3, None, 0.15, 0.55]
    for column, scale in (("pcie_tx_bytes", 1), ("pcie_rx_bytes", 2), ("link_rx_bytes", 3), ("link_tx_bytes", 4)):
        assert column not in reads[1]
        first, second, third = (reads[number][column] for number in (0, 2, 3))
        assert second - first == pytest.approx(3 * scale * GPM_BYTES, rel=0.2)
        assert third - second == 0


def test_links_that_gpm_does_not_know_are_null(fake_driver: Interpreter) -> None:
    reads = reads_of_one(fake_driver, step(sleep=0.02), step(sleep=0.02, pcie=GPM_BYTES))
    assert reads[1]["link_rx_bytes"] is None
    assert reads[1]["pcie_tx_bytes"] > reads[0]["pcie_tx_bytes"]


@pytest.mark.parametrize(
    "fault",
    [
        {"pcie": 0},  # counters that start again, as when the GPU was reset
        {"pcie": 2**62},  # more than any fabric carries
    ],
)
def test_after_traffic_that_is_not_known_the_total_goes_on_lower(
    fake_driver: Interpreter, fault: dict[str, Any]
) -> None:
    before, at, after = reads_of_one(
        fake_driver,
        step(pcie=GPM_BYTES, sleep=0.02),
        step(**fault, sleep=0.02),
        step(pcie=fault["pcie"] + GPM_BYTES, sleep=0.02),
        links=4,
    )
    for column in ("pcie_tx_bytes", "pcie_rx_bytes", "link_rx_bytes", "link_tx_bytes"):
        assert at[column] is None
        assert after[column] < before[column]


@pytest.mark.parametrize("gpm", [3, 2])  # an error, a sample that took too long to have a moment
def test_gpm_that_does_not_answer_leaves_its_time_to_the_next_reading(fake_driver: Interpreter, gpm: int) -> None:
    before, at, after = reads_of_one(
        fake_driver,
        step(pcie=GPM_BYTES, tensor=10, sleep=0.02),
        step(pcie=2 * GPM_BYTES, tensor=20, gpm=gpm, sleep=0.02),
        step(pcie=3 * GPM_BYTES, tensor=30, gpm=1, sleep=0.02),
    )
    assert at.get("pcie_tx_bytes") is None
    assert at["energy_mj"] is not None
    assert after["pcie_tx_bytes"] - before["pcie_tx_bytes"] == pytest.approx(2 * GPM_BYTES, rel=0.2)
    assert after["tensor_activity"] == pytest.approx(0.2)


def test_without_gpm_traffic_is_of_byte_counters_that_wrap(fake_driver: Interpreter) -> None:
    ticks = [step(full=False, pcie=count) for count in (2**32 - 1000, 2**32 + 500, 2**32 + 500)]
    ticks += [step(full=True, pcie=2**32 + 2500, sleep=0.2), step(full=False)]
    seen, _ = watch(fake_driver, *ticks, gpm=0, generation=4)
    assert seen["infos"][0]["pcie_peak_bytes_per_s"] == pytest.approx(31.5e9, rel=1e-3)
    reads = [read[0] for read in seen["reads"]]
    first = reads[0]["pcie_tx_bytes"], reads[0]["pcie_rx_bytes"]
    grown = [(read["pcie_tx_bytes"] - first[0], read["pcie_rx_bytes"] - first[1]) for read in reads[1:3]]
    assert grown == [(1500, 3000), (1500, 3000)]
    assert reads[3]["pcie_tx_bytes"] is None  # in 0.2 s, a link of 31.5 GB/s may have moved 2^32 bytes more
    assert reads[4]["pcie_tx_bytes"] < first[0]
    assert reads[3]["link_tx_bytes"] == 138 * 1024 * (2**32 + 2500)
    assert reads[3]["link_rx_bytes"] == 139 * 1024 * (2**32 + 2500)
    assert "tensor_activity" not in reads[3]


@pytest.mark.parametrize(
    ("links", "common", "mb_per_s"),
    [(0, 26_562, None), (1, 0, 20_000), (2, 0, None), (18, 26_562, 20_000 + 17 * 26_562)],
)
def test_the_peak_of_the_links_is_that_of_the_active_ones(
    fake_driver: Interpreter, links: int, common: int, mb_per_s: float | None
) -> None:
    """One link has a speed of its own here, the others the common one."""
    info = watch(fake_driver, links=links, speed=common)[0]["infos"][0]
    assert info["link_peak_bytes_per_s"] == (mb_per_s and mb_per_s * 1e6)


SHARE = st.floats(0, 1)
PIECE = st.tuples(st.floats(0.001, 0.3), st.floats(0, 0.3), SHARE, SHARE, st.booleans())


@given(st.lists(PIECE, min_size=3, max_size=30))
@example([(0.01, 0.0, 0.0, 0.0, True), (0.01, 0.1, 0.0, 1.0, True), (0.01, 0.1, 1.0, 1.0, True)])
def test_no_difference_of_wrapping_bytes_is_wrong(pieces: list[tuple[float, float, float, float, bool]]) -> None:
    """Whatever readings are kept: a total that has not decreased since the one before has grown by just what moved.

    A piece is a wait, a call's length and the moment in it that the count is of, the share of its peak at which the
    link ran since the last count, and whether the reading is kept.
    """
    peak = 2**32 / 0.15
    counter = _WrappingBytes(peak)
    moved, clock, counted = 5_000, 0.0, 0.0
    readings: list[tuple[int, int]] = []
    for wait, length, moment, share, keep in pieces:
        asked, clock = clock + wait, clock + wait + length
        moved += int((asked + moment * length - counted) * share * peak)
        counted = asked + moment * length
        total = counter.advance(moved % 2**32, int(asked * 1e9), int(clock * 1e9) + 1)
        if keep and total is not None:
            readings.append((moved, total))
    for (moved_before, before), (moved_now, now) in pairwise(readings):
        assert now < before or now - before == moved_now - moved_before


def test_a_total_that_cannot_go_lower_is_null() -> None:
    total = _Total()
    for _ in range(2**18 + 2):
        total.add(None)  # one stretch that is not known, however often that is said
    seen = []
    for _ in range(2**18 + 2):
        seen.append(total.add(1))
        total.add(None)
    assert seen[0] is not None
    assert seen[-1] is None
    known = [value for value in seen if value is not None]
    assert all(0 <= now < before for before, now in pairwise(known))


@pytest.mark.parametrize(
    ("init", "gpus", "warning"), [(9, 1, ""), (18, 1, "NVML does not answer"), (0, 0, "")]
)  # driver not loaded, library and driver of different versions, no GPU
def test_without_a_gpu_that_answers_the_cpu_is_the_device(
    fake_driver: Interpreter, init: int, gpus: int, warning: str
) -> None:
    seen, log = watch(fake_driver, init=init, gpus=gpus)
    assert [info["kind"] for info in seen["infos"]] == ["cpu"]
    assert seen["infos"][0]["energy_method"] == "estimated"
    assert warning in log
    assert bool(log) == bool(warning)


def window(reads: Sequence[dict[str, Any]]) -> WindowSummary:
    """Three seconds of readings a tick apart."""
    rows = [
        {"time_ns": number * TICK_NS, "node": "n", "device": "GPU-0", "energy_method": "counter"} | read
        for number, read in enumerate(reads)
    ]
    return summarise(pa.Table.from_pylist(rows, schema=SCHEMA), 10 * TICK_NS, 40 * TICK_NS, ["GPU-0"])


def running(tick: int, **settings: Any) -> Step:
    """A step of steady work at 700 W, a quarter of the time at the power cap, sending 10 kB/s over PCIe."""
    return step(**{"energy": 10**6 + 70_046 * tick, "cap": 25_000_000 * tick, "pcie": 1000 * tick} | settings)


def test_a_window_of_a_sound_gpu(fake_driver: Interpreter) -> None:
    summary = window(reads_of_one(fake_driver, *map(running, range(60))))
    assert summary.problems == ()
    assert summary.energy_method == "counter"
    assert summary.energy_j == pytest.approx(2101.4, rel=1e-3)
    assert summary.power_cap_ratio == pytest.approx(0.25, rel=1e-3)
    assert summary.throttle_ratio == 0
    assert summary.devices[0].bytes_per_s["pcie_tx_bytes"] == pytest.approx(10_000, rel=0.5)


PCIE = {"pcie_rx_bytes", "pcie_tx_bytes"}
ALL = PCIE | {"energy_j", "power_cap"}


@pytest.mark.parametrize(
    ("faults", "unknown", "reason"),
    [
        ({25: {"lost": 0}}, ALL, "no reading after the window"),
        ({25: {"lost": 100}}, ALL, "no reading after the window"),
        ({25: {"lost": 0}, 37: {"lost": -1}}, ALL, "was not read for 1.3 s"),
        ({tick: {"energy": 70_046 * tick, "cap": 0} for tick in range(25, 60)}, ALL, "energy_mj went backwards"),
        ({25: {"pcie": 0}}, PCIE, "pcie_rx_bytes, pcie_tx_bytes went backwards"),
        ({25: {"gpm": 3}}, PCIE, "no reading after the window"),
        ({25: {"fields": "odd"}, 39: {"fields": "all"}}, set(), "hbm_temp_c was not read for 1.5 s"),
        ({25: {"ecc": 2}}, set(), "ecc_uncorrected grew by 2"),
        ({25: {"xid": "48 79"}}, set(), "xid_errors grew by 2, the last XID 79"),
    ],
)
def test_a_fault_ends_in_no_figure_and_a_reason(
    fake_driver: Interpreter, faults: dict[int, dict[str, Any]], unknown: set[str], reason: str
) -> None:
    summary = window(reads_of_one(fake_driver, *(running(tick, **faults.get(tick, {})) for tick in range(60))))
    device = summary.devices[0]
    figures = {"energy_j": device.energy_j, "power_cap": device.throttle_s["power_cap"]} | {
        column: device.bytes_per_s[column] for column in PCIE
    }
    assert {name for name, figure in figures.items() if figure is None} == unknown
    assert any(reason in problem for problem in summary.problems), summary.problems


def test_mig_has_its_energy_by_integrated_power_and_says_so(fake_driver: Interpreter) -> None:
    summary = window(reads_of_one(fake_driver, *map(running, range(60)), fields="mig"))
    assert summary.energy_method == "integrated"
    assert summary.energy_j == pytest.approx(3 * 690.123, rel=1e-3)
    assert summary.power_cap_ratio == pytest.approx(0.25, rel=1e-3)


def test_no_support_ends_in_no_figure(fake_driver: Interpreter) -> None:
    summary = window(reads_of_one(fake_driver, *map(running, range(60)), fields="none"))
    assert summary.energy_j is None
    assert summary.throttle_ratio is None
    assert summary.metrics()["peak_power_w"] is None


def test_a_call_that_hangs_is_no_reading(fake_driver: Interpreter) -> None:
    steps = [*[step(sleep=0.1)] * 5, step(hang=1.3, sleep=0.1), step(sleep=2)]
    rows, log = fake_driver.run(sample_steps, steps, gpus=2)
    assert "the driver took 1." in log
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    of_each = [[row for row in rows if row["device"] == f"GPU-{index}"] for index in (0, 1)]
    assert [sum("power_w" not in row for row in each) for each in of_each] == [1, 0]
    hung_row = next(row for row in of_each[0] if "power_w" not in row)
    assert "energy_mj" not in hung_row
    after = [row for row in of_each[0] if row["time_ns"] > hung_row["time_ns"]]
    assert after[0]["time_ns"] - hung_row["time_ns"] > 1.2e9
    assert len(after) >= 2
    summary = summarise(table, hung_row["time_ns"] - 200_000_000, after[0]["time_ns"] + 200_000_000, ["GPU-0"])
    assert summary.energy_j is None
    assert any("GPU-0: " in problem for problem in summary.problems)
