"""What the hook costs a training for each step: outside Wattune, and watched, whether or not anybody listens.

    python -m benchmarks.measure.hook [--steps 3000] [--step-s 1.0]

Each state in a process of its own, of which the calls are timed on the host, a millisecond apart, after some to warm
up; with CUDA on a stream that has work. Printed are the mean and percentiles of a call, what that is of a step of
`--step-s` seconds, and from which length of a step on it is less than 0.1% of it. What a call costs the host costs
training only where the GPU waits for the host. The watcher itself reads telemetry at 10 Hz: see `measure.pacing`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from service.watch.stamps import Listener
from trainables.foreign.steps import HOOK

SHARE = 0.001
"""Of a step: what watching may cost."""

PROGRAM = """
import json, sys, time
import torch, wattune_steps
on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
loss, taken = torch.ones(256, 256, device=on), []
for step in range(100 + int(sys.argv[1])):
    if on.type == "cuda":
        loss = (loss @ loss).clamp(max=1)
    time.sleep(0.001)
    began = time.perf_counter_ns()
    wattune_steps.step(loss=loss, tokens=4096)
    taken.append(time.perf_counter_ns() - began)
print(json.dumps({"on": torch.cuda.get_device_name() if on.type == "cuda" else "CPU", "ns": taken[100:]}))
"""


def calls(steps: int, address: str | None) -> tuple[str, np.ndarray]:
    """What it ran on, and the seconds of each call, with this address in `WATTUNE_RUN`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("WATTUNE_STEPS", "WATTUNE_RUN")}
    environment |= {"PYTHONPATH": str(HOOK)} | ({} if address is None else {"WATTUNE_RUN": address})
    command = [sys.executable, "-c", PROGRAM, str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    return told["on"], np.array(told["ns"]) / 1e9


@contextmanager
def listening() -> Iterator[tuple[str, list[int]]]:
    """An address at which a watcher listens, and the steps that it heard of, complete once this is left."""
    listener, heard, over = Listener("127.0.0.1:0"), list[int](), threading.Event()

    def listen() -> None:
        while not over.is_set():
            heard.extend(stamp.step for stamp in listener.until(time.monotonic() + 0.1))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield listener.address, heard
    finally:
        over.set()
        thread.join()
        listener.close()


def line(state: str, seconds: np.ndarray, step_s: float) -> str:
    mean = float(seconds.mean())
    p50, p99 = (float(np.percentile(seconds, q)) for q in (50, 99))
    return (
        f"{state:24} {1e6 * mean:8.2f} us a step (median {1e6 * p50:.2f}, 99% {1e6 * p99:.2f}): {mean / step_s:.5%} of "
        f"a step of {step_s:g} s, below {SHARE:.1%} from {1e3 * mean / SHARE:.2f} ms on"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-s", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    on, outside = calls(arguments.steps, None)
    print(f"on {on}, {arguments.steps} steps each")
    print(line("outside Wattune", outside, arguments.step_s))
    with listening() as (address, heard):
        _, watched = calls(arguments.steps, address)
    print(line("watched", watched, arguments.step_s))
    print(line("watched by nobody", calls(arguments.steps, address)[1], arguments.step_s))
    print(f"the watcher heard of {len(heard)} of {arguments.steps + 100} steps")


if __name__ == "__main__":
    main()
