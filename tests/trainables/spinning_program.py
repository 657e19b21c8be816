"""A program of which a process has a GPU spin and is halted, while another waits for the GPU to work for nobody else.
It prints for how many seconds the GPU was told to spin, at 1.5 GHz, and how many the other waited."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from search_spaces.hardware import ACCELERATORS
from trainables import gauge
from trainables.forks import Fork, halted
from trainables.gauge import Gauge
from trainables.platforms.base import platform_of

SPINNING_S = 0.5

platform = platform_of(ACCELERATORS["gpu"])


def spin(messages: Connection) -> None:
    platform.take(0)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    messages.send(None)
    messages.recv()
    torch.cuda._sleep(round(1.5e9 * SPINNING_S))
    messages.send(None)
    messages.recv()


def wait(messages: Connection) -> None:
    gauge.WIDTH = 4096
    alone = Gauge(platform, platform.take(0))
    messages.send(None)
    messages.recv()
    began = time.monotonic()
    alone.wait()
    messages.send(time.monotonic() - began)


def main() -> None:
    spinning, waiting = Fork(spin), Fork(wait)
    try:
        assert (spinning.hear(60), waiting.hear(60)) == (None, None)
        spinning.tell(None)
        assert spinning.hear(10) is None
        with halted([spinning]):
            waiting.tell(None)
            print(SPINNING_S, waiting.hear(10))
    finally:
        spinning.end()
        waiting.end()


if __name__ == "__main__":
    main()
