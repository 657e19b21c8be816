"""What a worker settles before its first trial, and what it tells of each."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from telemetry.actor import Telemetry, Work
from telemetry.devices import DeviceInfo
from telemetry.devices.cpu import cpu_uuid
from trainables.measure import Procedure
from trainables.platforms.base import platform_of
from trainables.program import Progress, TrialRequest
from trainables.training import Training
from trainables.worker import Follower, compile_threads, memory_gib, own_uuid

REQUEST = TrialRequest(
    "t0",
    Layout("megatron", 1, 4, precision="fp32"),
    Training(PRESETS["tiny-llama"], "synthetic", 32, seed=0),
    Procedure(3, 0.02, 1.0, 1.0, 5),
    deadline_s=60,
)


@pytest.mark.parametrize(("gpus", "cores", "threads"), [(2, 32, 15), (8, 128, 15), (8, 4, 1), (1, 1, 1)])
def test_ranks_compile_on_their_share_of_the_nodes_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, threads: int
) -> None:
    nodes = [{"NodeID": "other", "Resources": {"GPU": 64.0}}, {"NodeID": "mine", "Resources": {"GPU": float(gpus)}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert compile_threads(platform_of(ACCELERATORS["h200"]), "mine") == threads


class Gpu:
    """A device without a driver, of which so many GiB are in use as its number says."""

    def __init__(self, uuid: str, index: int) -> None:
        self.info = DeviceInfo(uuid, index, "a GPU", "nvidia", "counter")

    def read(self, full: bool) -> dict[str, Any]:
        return {"memory_used_gib": float(self.info.index)}


class Watching(Telemetry):
    """That of a node with GPUs 1 and 11, of which Ray has more."""

    def __init__(self) -> None:
        super().__init__("node", "test", devices=[Gpu("GPU-b", 11), Gpu("GPU-a", 1)])


def test_a_worker_knows_its_device_as_telemetry_does(telemetry: Any) -> None:
    names = {"1": "GPU-a", "11": "GPU-b", "GPU-b": "GPU-b", "3": "3", "MIG-c": "MIG-c", None: cpu_uuid()}
    assert {name: own_uuid(telemetry, name) for name in names} == names
    until = time.monotonic() + 30
    while memory_gib(telemetry, "GPU-b") is None and time.monotonic() < until:
        time.sleep(0.05)
    assert [memory_gib(telemetry, gpu) for gpu in ("GPU-a", "GPU-b", "3", None)] == [1.0, 11.0, None, None]


def test_a_trial_is_on_its_worker_s_gpu_before_its_rank_names_one() -> None:
    works: list[Work] = []
    watching = SimpleNamespace(working=SimpleNamespace(remote=works.append))
    follower = Follower(REQUEST, watching, "GPU-a", False, lambda progress: None)
    for progress in (Progress(), Progress("build"), Progress("warmup", device="GPU-a")):
        follower.follow(progress)
    assert [(work.trial_id, work.device, work.phase) for work in works] == [
        ("t0", "GPU-a", phase) for phase in ("start", "build", "warmup")
    ]
