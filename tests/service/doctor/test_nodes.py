"""Ray clusters of this machine, each of whose nodes has a fake driver of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.service.doctor.clusters import Node, examined, nvidia
from tests.telemetry.scenarios import ROOT, compile_amdsmi, compile_nvml, install_amdsmi


@pytest.mark.slow
def test_every_node_of_a_cluster_is_examined_and_what_differs_is_told(tmp_path: Path) -> None:
    """One GPU is lent to somebody, the other has a driver and no CUDA behind it, so that its probe fails."""
    if not compile_nvml(tmp_path):
        pytest.skip("no C compiler to build the fake driver with")
    answer = examined(tmp_path, [Node(nvidia(tmp_path, version)) for version in ("580.159.04", "570.86.10")])
    assert answer["facts"]["lost"] == {}
    found = {(one["check"], one["verdict"]): one for one in answer["findings"]}
    assert len(answer["facts"]["nodes"]) == 2
    assert "driver 5" in found["driver", "wrong"]["seen"]
    assert "Ray has lent it to others" in found["answers", "unknown"]["seen"]
    assert "matrix products failed" in found["products", "wrong"]["seen"]
    assert found["host clocks", "ok"]["seen"].endswith("s apart")
    stores = [one["seen"] for (check, _), one in found.items() if check == "object store"]  # slow where others work
    assert len(stores) == 1
    assert "objects come at" in stores[0]
    names = [node["name"] for node in answer["facts"]["nodes"]]
    assert len(set(names)) == 2, "two nodes of one host have names of their own"


@pytest.mark.slow
def test_a_cluster_of_both_vendors_is_examined_and_its_drivers_need_not_be_alike(tmp_path: Path) -> None:
    binding, rocm = tmp_path / "amdsmi", tmp_path / "rocm"
    rocm.mkdir()
    if not compile_nvml(tmp_path):
        pytest.skip("no C compiler to build the fake driver with")
    if lack := install_amdsmi(binding) or compile_amdsmi(rocm, binding):
        pytest.skip(lack)
    amd = {"LD_LIBRARY_PATH": str(rocm), "PYTHONPATH": os.pathsep.join([str(ROOT), str(binding)])}
    answer = examined(tmp_path, [Node(nvidia(tmp_path, "580.159.04")), Node(amd | {"FAKE_MODEL": "mi300"})])
    assert answer["facts"]["lost"] == {}
    kinds = [{device["info"]["kind"] for device in node["devices"]} for node in answer["facts"]["nodes"]]
    assert sorted(map(sorted, kinds)) == [["amd"], ["nvidia"]]
    (driver,) = (one for one in answer["findings"] if one["check"] == "driver")
    assert driver["verdict"] == "ok"
    assert "nvidia 580.159.04" in driver["seen"]
