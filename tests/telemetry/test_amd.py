from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.devices import DeviceInfo
from telemetry.devices.amd import _ThrottledTime, torch_uuid
from telemetry.samples import SCHEMA
from telemetry.windows.trial import summarise
from tests.telemetry.scenarios import Interpreter, compile_amdsmi, install_amdsmi, read_steps, sample_steps, step


@pytest.fixture(scope="module")
def amdsmi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the genuine binding."""
    folder = tmp_path_factory.mktemp("amdsmi")
    if lack := install_amdsmi(folder):
        pytest.skip(lack)
    return folder


@pytest.fixture(scope="module")
def fake_rocm(amdsmi: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Has a libamd_smi.so that it loads."""
    library = tmp_path_factory.mktemp("rocm")
    if lack := compile_amdsmi(library, amdsmi):
        pytest.skip(lack)
    with Interpreter(library, amdsmi) as interpreter:
        yield interpreter


def watch(
    fake_rocm: Interpreter, reads: int = 1, period_s: float = 0.0, **settings: object
) -> tuple[dict[str, Any], str]:
    """What is seen of the devices, every other reading a full one, and the log."""
    steps = [step(full=number % 2 == 0, sleep=period_s) for number in range(reads)]
    return fake_rocm.run(read_steps, steps, **settings)


def rows(seen: dict[str, Any], device: int) -> pa.Table:
    """What was seen of a device as the sampler stores it."""
    info = seen["infos"][device]
    common = {"node": "n", "device": info["uuid"], "kind": info["kind"], "energy_method": info["energy_method"]}
    return pa.Table.from_pylist(
        [
            {"time_ns": time_ns} | common | reading[device]
            for time_ns, reading in zip(seen["times"], seen["reads"], strict=True)
        ],
        schema=SCHEMA,
    )


def test_hips_uuid_in_torchs_words() -> None:
    assert torch_uuid("GPU-61b786e239c9c398") == "GPU-36316237-3836-6532-3339-633963333938"
    assert torch_uuid("GPU-XX") is None
    assert torch_uuid("") is None


def test_a_sample_of_an_mi300_under_the_genuine_binding(fake_rocm: Interpreter) -> None:
    seen, log = watch(fake_rocm, model="mi300")
    assert log == ""
    assert seen["infos"][0] == {
        "uuid": "GPU-36316237-3836-6532-3339-633963333930",
        "index": 0,
        "name": "Fake MI300X",
        "kind": "amd",
        "energy_method": "counter",
        "card": None,
        "driver_version": "6.14.14",
        "power_limit_w": 750.0,
        "default_power_limit_w": None,
        "max_sm_clock_mhz": None,
        "pcie_peak_bytes_per_s": None,
        "link_peak_bytes_per_s": 6 * 16 * 32e9 / 8,  # of seven links one is down
    }
    assert seen["reads"][0][0] == {
        "energy_mj": (2**40 + 2 * 10**6) * 15_259 // 10**6,  # one table was read for the links' speed
        "power_w": 700.0,
        "power_average_w": None,
        "throttle_power_cap_ns": 0,
        "throttle_sw_thermal_ns": 0,
        "throttle_hw_thermal_ns": 0,
        "sm_clock_mhz": 2050.0,
        "memory_clock_mhz": 1300,
        "link_rx_bytes": 7 * 2 * 1000 * 1024,
        "link_tx_bytes": 7 * 2 * 500 * 1024,
        "ecc_corrected": 7,
        "ecc_uncorrected": 3,
        "gpu_temp_c": 61,
        "gpu_temp_margin_c": 39,
        "hbm_temp_c": 66,
        "gpu_utilisation": 0.97,
        "memory_used_gib": 12.0,
        "throttle_reasons": None,
    }
    assert rows(seen, 0).num_rows == 1


def test_residency_counters_become_time(fake_rocm: Interpreter) -> None:
    """Half of the ticks at the power limit, a quarter hot at the socket and a tenth at the memory in the same time."""
    seen, _ = watch(fake_rocm, reads=40, period_s=0.01, model="mi300", busy=50)
    first, last = seen["reads"][0][0], seen["reads"][-1][0]
    elapsed_ns = seen["times"][-1] - seen["times"][0]
    assert last["throttle_power_cap_ns"] - first["throttle_power_cap_ns"] == pytest.approx(0.5 * elapsed_ns, rel=0.1)
    assert last["throttle_sw_thermal_ns"] - first["throttle_sw_thermal_ns"] == pytest.approx(0.25 * elapsed_ns, rel=0.1)
    assert last["throttle_hw_thermal_ns"] == 0
    window = summarise(rows(seen, 0), seen["times"][2], seen["times"][-4], [seen["infos"][0]["uuid"]])
    assert window.throttle_ratio == pytest.approx(0.25, rel=0.2)
    assert window.power_cap_ratio == pytest.approx(0.5, rel=0.2)


def residencies(ticks: int, **counts: int) -> SimpleNamespace:
    names = ("ppt", "socket_thm", "vr_thm", "hbm_thm", "prochot")
    return SimpleNamespace(
        accumulation_counter=ticks, **{f"{name}_residency_acc": counts.get(name, 0) for name in names}
    )


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3_000_000_000),  # ns from the reading before
            st.integers(0, 5_000),  # ticks in it: none if the firmware's table was not renewed
            st.floats(0, 1),  # share of them at the power limit
            st.sampled_from(["read", "read", "read", "gap", "reset"]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_throttled_time_never_outruns_time(steps: list[tuple[int, int, float, str]]) -> None:
    """Whatever comes between readings: a gap (readings that failed), a reset, a table that is the one before."""
    throttled = _ThrottledTime()
    now_ns, ticks, power_cap, was_reset = 0, 1, 0, False
    before = throttled.advance(residencies(ticks), now_ns)
    for elapsed_ns, more, share, event in steps:
        now_ns += elapsed_ns
        if event == "reset":
            ticks, power_cap, was_reset = 0, 0, True
        ticks, power_cap = ticks + more, power_cap + int(share * more)
        if event == "gap":
            continue
        seen = throttled.advance(residencies(ticks, ppt=power_cap, hbm_thm=power_cap // 2), now_ns)
        if not ticks:
            assert seen == {}
            continue
        assert seen["throttle_hw_thermal_ns"] == 0
        assert seen["throttle_sw_thermal_ns"] <= seen["throttle_power_cap_ns"] <= now_ns
        assert was_reset or all(seen[column] >= before[column] for column in before)
        before, was_reset = seen, False


def test_a_reset_of_residency_counters_starts_again_at_0() -> None:
    throttled = _ThrottledTime()
    throttled.advance(residencies(1000), 0)
    assert throttled.advance(residencies(2000, ppt=250), 10**9)["throttle_power_cap_ns"] == 250_000_000
    assert throttled.advance(residencies(2000, ppt=250), 2 * 10**9)["throttle_power_cap_ns"] == 250_000_000
    assert throttled.advance(residencies(3000, ppt=750), 3 * 10**9)["throttle_power_cap_ns"] == 1_250_000_000
    assert throttled.advance(residencies(500, ppt=100), 4 * 10**9)["throttle_power_cap_ns"] == 0
    assert throttled.advance(residencies(1500, ppt=600), 5 * 10**9)["throttle_power_cap_ns"] == 500_000_000
    # All counters have overtaken those before a reset, but more ticks were throttled since than there were ticks.
    assert throttled.advance(residencies(1600, ppt=1600), 6 * 10**9)["throttle_power_cap_ns"] == 0


def test_the_dies_of_an_mi250_share_what_one_reports(fake_rocm: Interpreter) -> None:
    seen, log = watch(fake_rocm, reads=2, model="mi250")
    assert log == ""
    assert [info["uuid"][-1] for info in seen["infos"]] == ["0", "1", "2", "3"]  # by place on the bus
    assert [info["index"] for info in seen["infos"]] == [2, 3, 0, 1]  # AMD SMI's own order
    assert {info["energy_method"] for info in seen["infos"]} == {"shared"}
    assert [info["card"] for info in seen["infos"]] == ["amd:0000:c1:00.0"] * 2 + ["amd:0000:c9:00.0"] * 2
    assert {info["power_limit_w"] for info in seen["infos"]} == {280.0}
    for reading, grown in zip(seen["reads"], (3, 4), strict=True):  # two more told of die and links
        card_mj = (2**40 + grown * 10**6) * 15_259 // 10**6
        for card in (reading[:2], reading[2:]):
            assert sum(die["energy_mj"] for die in card) == pytest.approx(card_mj, abs=1)
            assert sum(die["power_w"] for die in card) == 500
            assert [die["power_average_w"] for die in card] == [250, 250]
    die = seen["reads"][0][1]
    assert die["throttle_reasons"] == 1 << 34 | 1
    assert not [column for column in die if column.startswith("throttle_") and column.endswith("_ns")]
    assert (die["link_rx_bytes"], die["link_tx_bytes"], seen["infos"][1]["link_peak_bytes_per_s"]) == (None,) * 3
    assert (die["sm_clock_mhz"], die["gpu_temp_c"], die["hbm_temp_c"]) == (1650, 62, 59)


def test_the_energy_of_whole_cards_is_counted(fake_rocm: Interpreter) -> None:
    """That of a card of which the trial has one die is a guess."""
    seen, _ = watch(fake_rocm, reads=40, period_s=0.01, model="mi250")
    infos = {info["uuid"]: DeviceInfo(**info) for info in seen["infos"]}
    table = pa.concat_tables([rows(seen, die) for die in range(4)])
    dies = list(infos)
    methods = {}
    for chosen in [(0, 1), (2, 3), (0, 1, 2, 3), (1, 2), (0,)]:
        devices = [dies[die] for die in chosen]
        methods[chosen] = summarise(table, seen["times"][4], seen["times"][-6], devices, infos).energy_method
    assert methods == {
        (0, 1): "counter",
        (2, 3): "counter",
        (0, 1, 2, 3): "counter",
        (1, 2): "estimated",
        (0,): "estimated",
    }


@pytest.mark.parametrize(("hidden", "unknown"), [(0, [0]), (2, [2])])
def test_a_die_whose_partner_is_not_seen_has_no_power(fake_rocm: Interpreter, hidden: int, unknown: list[int]) -> None:
    """It says 0 of its own accord. The other card is not disturbed."""
    seen, log = watch(fake_rocm, model="mi250", hidden=hidden)
    assert [(info["energy_method"], info["card"] is None) for info in seen["infos"]] == [
        ("estimated", True) if place in unknown else ("shared", False) for place in range(3)
    ]
    assert [place for place, die in enumerate(seen["reads"][0]) if die.get("power_w") is None] == unknown
    assert [place for place, die in enumerate(seen["reads"][0]) if die.get("energy_mj") is None] == unknown
    assert seen["infos"][unknown[0]]["power_limit_w"] is None
    assert log.count("the die that reports its card's power and energy is not to be seen") == 1


def test_a_reporting_die_alone_is_half_of_its_card(fake_rocm: Interpreter) -> None:
    seen, log = watch(fake_rocm, model="mi250", hidden=1)
    assert [info["energy_method"] for info in seen["infos"]] == ["estimated", "shared", "shared"]
    assert [die["power_w"] for die in seen["reads"][0]] == [250, 250, 250]
    assert log == ""


def test_one_die_lost_leaves_the_other_card(fake_rocm: Interpreter) -> None:
    seen, log = watch(fake_rocm, model="mi250", dead=0)
    assert "AMD GPU 2 does not answer and is not watched" in log
    assert [info["uuid"][-1] for info in seen["infos"]] == ["1", "2", "3"]
    assert [die.get("power_w") for die in seen["reads"][0]] == [None, 250, 250]


def test_what_is_not_supported_is_null(fake_rocm: Interpreter) -> None:
    seen, _ = watch(fake_rocm, reads=2, model="mi300", fields="none")
    assert (seen["infos"][0]["power_limit_w"], seen["infos"][0]["driver_version"]) == (None, None)
    for reading in seen["reads"]:
        assert set(reading[0].values()) == {None}


def test_what_an_older_library_does_not_fill_in_is_not_read_as_0(fake_rocm: Interpreter) -> None:
    seen, _ = watch(fake_rocm, reads=2, model="mi250", fields="short")
    die = seen["reads"][1][0]
    assert (die["power_w"], die["sm_clock_mhz"], die["throttle_reasons"]) == (250, 1650, 1 << 34 | 1)


def test_values_in_units_that_cannot_be_are_null(fake_rocm: Interpreter) -> None:
    """Activity and temperature in hundredths, a power that no GPU draws; a cap in W where uW are usual is read."""
    seen, _ = watch(fake_rocm, reads=2, model="mi300", fields="odd")
    assert [info["uuid"] for info in seen["infos"]] == ["amd:0000:c1:00.0", "amd:0000:c6:00.0"]
    assert seen["infos"][0]["power_limit_w"] == 750
    sample = seen["reads"][1][0]
    assert sample["gpu_temp_c"] == 55  # the edge's, not the hot spot's
    assert sample["gpu_temp_margin_c"] == 45  # to a limit in thousandths
    for column in ("power_w", "hbm_temp_c", "gpu_utilisation", "memory_clock_mhz"):
        assert sample[column] is None
    assert sample["energy_mj"] is not None
    assert "throttle_sw_thermal_ns" not in sample  # one of its three counters is not supported
    assert sample["throttle_power_cap_ns"] > 0


def test_a_partition_does_not_claim_the_power_of_the_whole(fake_rocm: Interpreter) -> None:
    seen, log = watch(fake_rocm, reads=3, model="mi300", fields="partition")
    assert not any("energy_mj" in gpu or "power_w" in gpu for reading in seen["reads"] for gpu in reading)
    assert {gpu[f"link_{way}_bytes"] for reading in seen["reads"] for gpu in reading for way in ("rx", "tx")} == {None}
    assert log.count("is a partition") == 2


def test_a_gpu_that_falls_off_the_bus_reads_nothing(fake_rocm: Interpreter) -> None:
    seen, _ = watch(fake_rocm, reads=4, model="mi300", lost=3)
    assert [bool(reading[0]) for reading in seen["reads"]] == [True, True, False, False]
    assert rows(seen, 0)["energy_mj"].null_count == 2


def test_a_reading_that_hangs_is_dropped(fake_rocm: Interpreter) -> None:
    """Of either GPU one takes 0.4 s, after which ticks go on."""
    sampled, log = fake_rocm.run(sample_steps, [step(full=False, sleep=2)], model="mi300", hang=6)
    for device in {row["device"] for row in sampled}:
        power_w = [row.get("power_w") for row in sampled if row["device"] == device]
        assert power_w[:5] == [700, 700, 700, 700, None]  # one table was read before
        assert set(power_w[5:]) == {700}
        assert log.count(f"reading {device} failed") == 1
    assert "TimeoutError: the driver took 0.4" in log


def test_memory_errors_are_read_now_and_then(fake_rocm: Interpreter) -> None:
    seen, _ = watch(fake_rocm, reads=3, model="mi300")
    assert [reading[0].get("ecc_corrected") for reading in seen["reads"]] == [7, None, 7]


@pytest.mark.parametrize(
    "script", [{"energy": 2**64 - 20_500_000}, {"reset": 20}], ids=["the accumulator wraps", "the GPU is reset"]
)
def test_counters_that_lose_their_past_give_no_figure(fake_rocm: Interpreter, script: dict[str, int]) -> None:
    seen, _ = watch(fake_rocm, reads=40, period_s=0.01, model="mi300", **script)
    window = summarise(rows(seen, 0), seen["times"][4], seen["times"][-6], [seen["infos"][0]["uuid"]])
    assert window.energy_j is None
    assert any("energy_mj went backwards" in problem for problem in window.problems)
    assert window.throttle_time_s is None


@pytest.mark.parametrize(("init", "warning"), [(34, ""), (18, "AMD SMI does not answer, no AMD GPU is watched")])
def test_without_a_gpu_that_answers_the_cpu_is_the_device(fake_rocm: Interpreter, init: int, warning: str) -> None:
    seen, log = watch(fake_rocm, init=init)
    assert [info["kind"] for info in seen["infos"]] == ["cpu"]
    assert warning in log
    assert bool(log) == bool(warning)


def test_amdsmi_without_rocm_is_one_clear_line(amdsmi: Path) -> None:
    if any(Path(folder, "libamd_smi.so").exists() for folder in ("/opt/rocm/lib", "/usr/lib64")):
        pytest.skip("ROCm is installed here")
    with Interpreter(None, amdsmi) as interpreter:
        seen, log = watch(interpreter)
    assert [info["kind"] for info in seen["infos"]] == ["cpu"]
    assert "amdsmi is installed but ROCm's libamd_smi.so is not found" in log
    assert log.count("\n") == 1


def test_a_library_of_another_age_is_one_clear_line(amdsmi: Path, tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake library with")
    source, library = tmp_path / "empty.c", tmp_path / "libamd_smi.so"
    source.write_text("int nothing;\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    with Interpreter(tmp_path, amdsmi) as interpreter:
        seen, log = watch(interpreter)
    assert [info["kind"] for info in seen["infos"]] == ["cpu"]
    assert "amdsmi does not go with this libamd_smi.so" in log
    assert log.count("\n") == 1
