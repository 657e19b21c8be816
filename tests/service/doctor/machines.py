"""Machines in perfect order, made up, in whose facts tests change one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from service.doctor.facts import DeviceFacts, DiskFacts, Facts, Load, NodeFacts, StoreFacts
from telemetry.devices import DeviceInfo
from trainables.probes import Attained

GPUS = 4


def gpu(host: str, index: int) -> DeviceFacts:
    """A good H200 that multiplied matrices for 8 s at its power limit."""
    uuid = f"GPU-{host}-{index}"
    peers = {f"GPU-{host}-{other}": 380e9 for other in range(GPUS) if other != index}
    info = DeviceInfo(
        uuid,
        index,
        "NVIDIA H200",
        "nvidia",
        "counter",
        driver_version="580.159.04",
        power_limit_w=700.0,
        default_power_limit_w=700.0,
        max_sm_clock_mhz=1980.0,
        pcie_peak_bytes_per_s=63e9,
        link_peak_bytes_per_s=478e9,
    )
    reading = {
        "energy_mj": 10**9,
        "power_w": 90.0,
        "sm_clock_mhz": 1980.0,
        "gpu_temp_c": 32.0,
        "hbm_temp_c": 35.0,
        "memory_used_gib": 0.6,
        "gpu_utilisation": 0.0,
        "throttle_power_cap_ns": 9 * 10**12,
        "throttle_sw_thermal_ns": 5 * 10**9,
        "throttle_hw_thermal_ns": 0,
        "throttle_hw_brake_ns": 0,
        "ecc_corrected": 2,
        "ecc_uncorrected": 0,
        "xid_errors": 0,
    }
    attained = Attained(uuid, {"nccl": "2.30.4"}, 655e12 + index * 1e12, 0, 8 * 10**9, 4.3e12, 3.5e-6, 360e9, peers)
    return DeviceFacts(info, reading, None, attained, load(sw_thermal=0.0))


def load(clock: float = 1450.0, power: float = 698.0, **throttle_s: float) -> Load:
    """What telemetry saw of 8 s under load."""
    return Load(8.0, power, clock, 62.0, {"power_cap": 8.0, "sw_thermal": 0.0, "hw_thermal": 0.0} | throttle_s)


def node(name: str) -> NodeFacts:
    """A good node of four."""
    return NodeFacts(
        name=name,
        hostname=name,
        versions={"python": "3.12.3", "torch": "2.13.0", "ray": "2.60.0", "nccl": "2.30.4", "kernel": "6.8"},
        devices=tuple(gpu(name, index) for index in range(GPUS)),
        disks=(DiskFacts("/scratch/.wattune", int(2e12), 1.5e9),),
        cores=64,
        load_average=2.0,
        host=Attained(None, {}, 2e12, 0, 10**9, 80e9, 1.2e-6),
        xids=(),
        clock_s=0.001,
        clock_error_s=0.0005,
        object_store_bytes_per_s=2e9,
    )


def amd_node(name: str) -> NodeFacts:
    """A good node of four MI250, whose torch is a build of its own."""
    good = node(name)
    devices = tuple(
        replace(
            one,
            info=replace(one.info, name="AMD Instinct MI250", kind="amd", driver_version="6.10.5"),
            attained=None,
            load=None,
        )
        for one in good.devices
    )
    return replace(good, versions={**good.versions, "torch": "2.13.0+rocm7.2", "nccl": "2.26.6"}, devices=devices)


def facts(**changes: Any) -> Facts:
    """Three good nodes and their store."""
    return replace(Facts(tuple(map(node, ("a", "b", "c"))), StoreFacts("http://mlflow:5000")), **changes)


def with_node(at: int = 1, **changes: Any) -> Facts:
    """With one of the nodes changed."""
    good = facts()
    nodes = list(good.nodes)
    nodes[at] = replace(nodes[at], **changes)
    return replace(good, nodes=tuple(nodes))


def with_gpu(index: int = 2, **changes: Any) -> Facts:
    """With one of node b's GPUs changed."""
    devices = list(facts().nodes[1].devices)
    devices[index] = replace(devices[index], **changes)
    return with_node(devices=tuple(devices))


def with_info(**changes: Any) -> Facts:
    """With one of node b's GPUs called something else."""
    return with_gpu(info=replace(gpu("b", 2).info, **changes))


def with_reading(**changes: Any) -> Facts:
    """With one of node b's GPUs answering something else."""
    return with_gpu(reading={**gpu("b", 2).reading, **changes})


def with_attained(**changes: Any) -> Facts:
    """With one of node b's GPUs attaining something else."""
    attained = gpu("b", 2).attained
    assert attained is not None
    return with_gpu(attained=replace(attained, **changes))
