"""Each fault that is injected is named in one line by the whole doctor, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.doctor.faults import (
    CLUSTER,
    DRIVER,
    FAULTS,
    MACHINE,
    MACHINES_OWN,
    OfDriver,
    OfMachine,
    fake_machine,
    names,
    of_cluster,
    of_driver,
    of_machine,
    wrong,
)
from tests.telemetry.scenarios import Interpreter


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    with fake_machine(tmp_path_factory.mktemp("nvml")) as interpreter:
        if interpreter is None:
            pytest.skip("no C compiler to build the fake driver with")
        yield interpreter


def of_fault(lines: list[str], *checks: str) -> list[tuple[str, str]]:
    """What is wrong, without what this machine itself may lack, unless the fault is of one of these checks."""
    return [line for line in wrong(lines) if line[0] not in MACHINES_OWN or line[0] in checks]


def test_each_fault_is_another_one() -> None:
    assert len({fault.name for fault in FAULTS}) == len({fault.told for fault in FAULTS}) == len(FAULTS) >= 12


def test_gpus_in_order_have_no_fault_and_those_of_others_are_left_alone(machine: Interpreter) -> None:
    lines = of_driver(machine, None)
    assert of_fault(lines) == []
    (held,) = (line for line in lines if line.startswith("--  answers"))
    assert "GPU 3 (GPU-3): left alone: in use, 120 GiB and 99% of the time" in held


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.slow] * (index % 2)) for index, fault in enumerate(DRIVER)],
)
def test_a_fault_of_a_driver_is_named_in_one_line(machine: Interpreter, fault: OfDriver) -> None:
    (line,) = of_fault(of_driver(machine, fault))
    assert names(line, fault)


@pytest.mark.parametrize("fault", MACHINE, ids=lambda fault: fault.name)
def test_a_fault_of_this_machine_is_named_in_one_line(tmp_path: Path, fault: OfMachine) -> None:
    lines = of_machine(tmp_path, fault)
    if isinstance(lines, str):
        pytest.skip(lines)
    found = of_fault(lines, fault.check)
    assert sum(names(line, fault) for line in found) == 1
    assert {check for check, _ in found} == {fault.check}


@pytest.mark.slow
def test_each_fault_of_a_cluster_is_named_in_one_line(tmp_path: Path) -> None:
    examined = of_cluster(tmp_path)
    if isinstance(examined, str):
        pytest.skip(examined)
    lines, nodes = examined
    found = of_fault(lines)
    for fault in CLUSTER:
        assert sum(names(line, fault, nodes[fault.name]) for line in found) == 1, fault.name
    assert len(found) == len(CLUSTER), found
