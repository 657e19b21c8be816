"""Each fault is named in one line, and nothing else is; machines in order have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.doctor.checks import CHECKS, judge
from service.doctor.checks.judged import Verdict
from service.doctor.examination import lines
from service.doctor.facts import DiskFacts, Facts, NodeFacts, StoreFacts
from service.history import Figures
from tests.service.doctor.machines import (
    amd_node,
    facts,
    gpu,
    load,
    node,
    with_attained,
    with_gpu,
    with_info,
    with_node,
    with_reading,
)

OTHER = "580.65.06"


def wrong(of: Facts) -> list[str]:
    """The lines of what is wrong."""
    return [line for line in lines(judge(of)) if line.startswith("!!")]


def test_machines_in_order_have_a_line_for_each_check_and_nothing_wrong() -> None:
    found = judge(facts())
    assert [one.check for one in found] == list(CHECKS)
    assert {one.verdict for one in found} == {Verdict.OK}
    assert lines(found)[-1] == "all is well"


def mixed(*amd: NodeFacts) -> Facts:
    """A cluster of both vendors."""
    return facts(nodes=(node("a"), node("b"), *amd))


def with_driver(of: NodeFacts, version: str) -> NodeFacts:
    return replace(of, devices=tuple(replace(d, info=replace(d.info, driver_version=version)) for d in of.devices))


def test_nodes_of_two_vendors_are_held_each_against_its_like() -> None:
    well = mixed(amd_node("c"), amd_node("d"), amd_node("e"))
    told = {one.check: one.seen for one in judge(well) if one.check in ("driver", "versions")}
    assert told["driver"] == "nvidia 580.159.04, amd 6.10.5"
    assert not [line for line in wrong(well) if "driver" in line or "versions" in line]
    other = with_driver(amd_node("e"), "6.8.5")
    (line,) = (line for line in wrong(mixed(amd_node("c"), amd_node("d"), other)) if "driver" in line)
    assert "e: driver 6.8.5; expected: 6.10.5, as 2 of 3 nodes" in line
    other = replace(amd_node("e"), versions={**amd_node("e").versions, "torch": "2.13.0+rocm6.4", "ray": "2.61.0"})
    found = [line.split("  ", 2)[2].strip() for line in wrong(mixed(amd_node("c"), amd_node("d"), other))]
    assert [line.split(";")[0] for line in found if line.startswith("e: ")] == [
        "e: torch 2.13.0+rocm6.4",
        "e: ray 2.61.0",
    ]
    assert any("expected: 2.60.0, as 4 of 5 nodes" in line for line in found)


def before(**changes: Any) -> dict[str, tuple[Figures, ...]]:
    """What GPU 2 of node b came to three times last week."""
    usual = Figures(1.0, 656e12, 4.3e12, 3.5e-6, 360e9, 1450.0)
    return {"GPU-b-2": (replace(usual, **changes),) * 3}


FAULTS: dict[str, tuple[Facts, str, str]] = {
    "a node that does not answer": (
        facts(lost={"d": "no answer within 120 s"}),
        "answers",
        "d: no answer within 120 s",
    ),
    "a GPU that fell off the bus": (
        with_node(silent=("GPU 3 does not answer",)),
        "answers",
        "b: GPU 3 does not answer",
    ),
    "another driver": (
        facts(nodes=(node("a"), with_driver(node("b"), OTHER), node("c"))),
        "driver",
        f"b: driver {OTHER}; expected: 580.159.04, as 2 of 3 nodes",
    ),
    "another torch": (
        with_node(versions={**node("b").versions, "torch": "2.11.0"}),
        "versions",
        "b: torch 2.11.0; expected: 2.13.0, as 2 of 3 nodes",
    ),
    "no energy counter": (with_reading(energy_mj=None), "telemetry", "b GPU 2 (GPU-b-2): energy_mj is not answered"),
    "a field that its like answer": (with_reading(hbm_temp_c=None), "telemetry", "hbm_temp_c: no answer"),
    "a low power limit": (with_info(power_limit_w=500.0), "power limit", "power limit 500 W; expected: 700 W"),
    "a clock that is locked": (
        with_gpu(load=load(1200.0, 480.0, power_cap=0.0)),
        "clocks",
        "1,200 MHz in matrix products; expected: up to 1,980 MHz, as neither power nor heat holds it",
    ),
    "a clock below its like": (
        with_gpu(load=load(1200.0)),
        "clocks",
        "1,200 MHz in matrix products; expected: 1,450 MHz",
    ),
    "heat under load": (
        with_gpu(load=load(sw_thermal=2.0)),
        "heat",
        "heat held its clock down for 25% of the time at 62 degC",
    ),
    "heat in the past": (
        with_reading(throttle_hw_thermal_ns=900 * 10**9),
        "heat",
        "heat held its clock down for 900 s since the driver was loaded",
    ),
    "the power brake": (
        with_reading(throttle_hw_brake_ns=4 * 10**9),
        "heat",
        "the power brake held its clock down for 4 s",
    ),
    "memory errors": (with_reading(ecc_uncorrected=3), "ecc", "3 memory errors that were not corrected"),
    "an XID error now": (with_reading(xid_errors=1, xid=79), "xid", "1 XID errors while it was watched, the last 79"),
    "an XID error in the log": (
        with_node(xids=("79 at 0000:1b:00", "31 at 0000:1b:00")),
        "xid",
        "log: 79 at 0000:1b:00;",
    ),
    "a GPU slower than its like": (
        with_attained(flops=600e12),
        "products",
        "600 TFLOP/s; expected: 623 TFLOP/s or more",
    ),
    "a GPU that got slower": (
        facts(history=before(flops=680e12)),
        "products",
        "b GPU 2 (GPU-b-2): 657 TFLOP/s; expected: 660 TFLOP/s or more, as it was before: it got 3.4% slower",
    ),
    "a GPU that does not compute": (
        with_gpu(attained=None, load=None, error="CUDA error: an illegal memory access"),
        "products",
        "matrix products failed: CUDA error: an illegal memory access",
    ),
    "slow memory": (with_attained(memory_bytes_per_s=3.9e12), "memory", "3.90 TB/s; expected: 4.08 TB/s or more"),
    "memory that got slower": (facts(history=before(memory_bytes_per_s=4.5e12)), "memory", "it got 4.4% slower"),
    "a slow host": (with_attained(launch_s=9e-6), "launches", "9.0 us to launch one kernel; expected: 5.2 us at most"),
    "a dead link": (with_info(link_peak_bytes_per_s=451e9), "links", "links of 451 GB/s are up; expected: 478 GB/s"),
    "links that hang": (
        with_gpu(error="its links were not measured in time"),
        "collectives",
        "b GPU 2 (GPU-b-2): its links were not measured in time",
    ),
    "processors slower than their like": (
        with_node(host=replace(node("b").host, memory_bytes_per_s=40e9)),  # type: ignore[type-var]
        "host",
        "b, processors: memory: 4e+10 B/s; expected: 5.6e+10 B/s or more, as 2 others: it is 50.0% slower",
    ),
    "a busy host": (with_node(load_average=90.0), "host", "b: load 90.0 on 64 cores"),
    "a full disk": (
        with_node(disks=(DiskFacts("/scratch", None, None, "No space left on device"),)),
        "disk",
        "b, /scratch: cannot be written: No space left on device",
    ),
    "a disk that is nearly full": (with_node(disks=(DiskFacts("/scratch", 3 * 10**9, 1e9),)), "disk", "3.0 GB free"),
    "a slow disk": (with_node(disks=(DiskFacts("/scratch", 10**12, 8e6),)), "disk", "writes 8 MB/s"),
    "MLflow away": (
        facts(store=StoreFacts("http://mlflow:5000", "no server answers there")),
        "mlflow",
        "no server answers",
    ),
    "an object store out of reach": (
        with_node(object_store_bytes_per_s=None, object_store_error="the object was lost"),
        "object store",
        "b: no object comes: the object was lost",
    ),
    "a slow network": (with_node(object_store_bytes_per_s=2e6), "object store", "objects come at 2 MB/s"),
    "clocks apart": (with_node(clock_s=-42.0), "host clocks", "b: its clock is 42.0 s behind; expected: within 1 s"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_one_line(name: str) -> None:
    faulty, check, told = FAULTS[name]
    (line,) = wrong(faulty)
    assert line.split("  ")[1] == check
    assert told in line
    assert "\n" not in line
    (found,) = (one for one in judge(faulty) if one.verdict is Verdict.WRONG)
    assert found.subject
    assert found.expected
    assert found.advice
    assert lines(judge(faulty))[-1] == "1 finding"


def test_a_slow_pair_and_a_slow_all_reduce_are_named() -> None:
    """A pair is seen from both of its ends and told once."""
    devices = []
    for one in node("b").devices:
        assert one.attained is not None
        assert one.attained.pairs is not None
        mine, other = one.info.uuid, {"GPU-b-0": "GPU-b-3", "GPU-b-3": "GPU-b-0"}
        pairs = {**one.attained.pairs} | ({other[mine]: 30e9} if mine in other else {})
        devices.append(replace(one, attained=replace(one.attained, pairs=pairs, all_reduce_bytes_per_s=50e9)))
    first, second = wrong(with_node(devices=tuple(devices)))
    assert "b, 4 GPUs: all-reduce at 50 GB/s; expected: 239 GB/s or more, of links of 478" in first
    assert "b GPU 0 and GPU 3: 30 GB/s between them; expected: 323 GB/s or more" in second


def test_a_gpu_that_is_held_is_said_and_not_judged() -> None:
    held = with_gpu(held="in use, 120 GiB and 99% of the time", attained=None, load=None)
    assert wrong(held) == []
    assert any(line.startswith("--  answers") and "in use, 120 GiB" in line for line in lines(judge(held)))


def test_what_differs_as_gpus_do_at_the_power_limit_is_no_fault() -> None:
    assert wrong(with_attained(flops=632e12)) == []
    assert wrong(facts(history=before(flops=670e12))) == []


def test_a_gpu_alone_is_held_against_its_data_sheet() -> None:
    slow = gpu("a", 0)
    assert slow.attained is not None
    slow = replace(slow, attained=replace(slow.attained, flops=400e12, all_reduce_bytes_per_s=None, pairs=None))
    alone = facts(nodes=(replace(node("a"), devices=(slow,)),))
    (line,) = wrong(alone)
    assert "400 TFLOP/s; expected: 495 TFLOP/s or more, by its data sheet" in line
