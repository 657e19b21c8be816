"""What the doctor says of this machine with a fake driver, whose GPUs attain made-up figures."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from service.doctor import examination
from service.doctor.gather import gather
from telemetry.devices import nvidia
from tests.service.doctor.machines import gpu
from tests.telemetry.scenarios import serve, set_driver
from trainables.probes import Attained, Probed

LOADED_S = 1.2
LENT = ["0", "1", "2"]
"""GPUs that Ray lent to the doctor."""


def examine(scene: Mapping[str, Any]) -> list[str]:
    """The lines of the doctor. `scene`: the driver's settings `meanwhile`, one after the other while the GPUs work, and
    how what they attain, by UUID, `differs` from a good GPU's, in one examination after the other: the last one's lines
    are returned. One that differs by an `error` attains nothing."""
    nvidia.REFRESH_NS = 0  # nobody waits for a counter that stands still
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir()
        os.environ["WATTUNE_HOME"] = str(home)
        for differs in scene["differs"]:
            probe = partial(probed, scene["meanwhile"], differs)
            with mock.patch.object(examination, "gather", partial(gather, granted=LENT, probe=probe)):
                said = examination.examine(None, f"sqlite:///{home / 'mlflow.db'}")
        return examination.text(said).splitlines()


def probed(
    meanwhile: list[dict[str, object]],
    differs: Mapping[str, Mapping[str, Any]],
    platform: str,
    devices: int,
    environment: Mapping[str, str],
) -> Probed:
    """In place of `trainables.probes.probe`, as the driver has no GPU behind it."""
    if platform == "cpu":
        return Probed((None,), (None,))
    start_ns = time.monotonic_ns()
    for settings in meanwhile:
        set_driver(settings)
        time.sleep(LOADED_S / len(meanwhile))
    uuids = environment["CUDA_VISIBLE_DEVICES"].split(",")
    of_each = [differs.get(uuid, {}) for uuid in uuids]
    errors = tuple(one.get("error") for one in of_each)
    return Probed(tuple(attained(uuid, start_ns, one) for uuid, one in zip(uuids, of_each, strict=True)), errors)


def attained(uuid: str, start_ns: int, differs: Mapping[str, Any]) -> Attained | None:
    """What a GPU attained until now."""
    good = gpu("a", 0).attained
    assert good is not None
    if "error" in differs:
        return None
    good = replace(good, device=uuid, versions={}, start_ns=start_ns, end_ns=time.monotonic_ns())
    return replace(good, all_reduce_bytes_per_s=None, pairs=None, **differs)


if __name__ == "__main__":
    serve({examine.__name__: examine})
