"""What the doctor finds on this machine with a fake driver, whose GPUs have a made-up speed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.doctor.checks import judge
from service.doctor.checks.judged import Verdict
from service.doctor.facts import Facts, StoreFacts
from service.doctor.gather import gather
from telemetry.devices import nvidia
from tests.service.doctor.machines import gpu
from tests.telemetry.scenarios import serve, set_driver
from trainables.probes import Attained, Probed

LOADED_S = 1.2


def examine(scene: Mapping[str, Any]) -> list[str]:
    """What is wrong, and who is left alone. `scene`: the driver's settings `meanwhile`, one after the
    other while the GPUs work, and which of them, by UUID, is `slow`."""
    nvidia.REFRESH_NS = 0  # nobody waits for a counter that stands still

    def probe(platform: str, devices: int, environment: Mapping[str, str]) -> Probed:
        if platform == "cpu":
            return Probed((None,), (None,))
        start_ns = time.monotonic_ns()
        for settings in scene["meanwhile"]:
            set_driver(settings)
            time.sleep(LOADED_S / len(scene["meanwhile"]))
        uuids = environment["CUDA_VISIBLE_DEVICES"].split(",")
        return Probed(tuple(attained(uuid, start_ns, uuid == scene["slow"]) for uuid in uuids), (None,) * devices)

    with tempfile.TemporaryDirectory() as folder:
        node = gather(Path(folder), ["0", "1", "2"], probe)
    found = judge(Facts((node,), StoreFacts("sqlite:///mlflow.db")))
    return [f"{one.check}: {one.subject}: {one.seen}" for one in found if one.verdict is Verdict.WRONG] + [
        f"{one.subject}: {one.seen}" for one in found if one.check == "answers" and one.verdict is Verdict.UNKNOWN
    ]


def attained(uuid: str, start_ns: int, slow: bool) -> Attained:
    """What a GPU attained until now."""
    good = gpu("a", 0).attained
    assert good is not None
    flops = 600e12 if slow else good.flops
    return Attained(uuid, {}, flops, start_ns, time.monotonic_ns(), good.memory_bytes_per_s, good.launch_s)


if __name__ == "__main__":
    serve({examine.__name__: examine})
