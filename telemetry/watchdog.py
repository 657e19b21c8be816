"""Puts power limits back when the process that set them is gone: `python -m telemetry.watchdog`, by `telemetry.power`.

Standard input has a line for each device to be looked after: `{"device": UUID, "power_limit_w": watts}`, null for one
that needs it no more. At its end, which the kernel brings about if the other process is killed, what is left is set.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable

from telemetry.devices import Limitable, discover
from telemetry.power import READY

logger = logging.getLogger("telemetry.watchdog")

TRIES = 5
PAUSE_S = 2.0


def watch(lines: Iterable[str]) -> dict[str, float]:
    """What is to be restored once the lines end, by UUID."""
    limits: dict[str, float] = {}
    for line in lines:
        told = json.loads(line)
        if told["power_limit_w"] is None:
            limits.pop(told["device"], None)
        else:
            limits[told["device"]] = told["power_limit_w"]
    return limits


def restore(limits: dict[str, float]) -> dict[str, float]:
    """Set these limits. Returns those that could not be set."""
    left = dict(limits)
    for device in discover():
        watts = left.get(device.info.uuid)
        if watts is None or not isinstance(device, Limitable):
            continue
        try:
            device.set_power_limit(watts)
        except OSError as error:
            logger.error("%s: the power limit of %g W is not restored: %s", device.info.uuid, watts, error)
        else:
            del left[device.info.uuid]
    return left


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # so that the other is nobody's child
    os.setsid()
    print(READY, flush=True)
    left = watch(sys.stdin)
    for _ in range(TRIES):
        left = restore(left) if left else {}
        if not left:
            return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
