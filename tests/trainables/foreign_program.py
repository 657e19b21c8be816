"""A program of a user's that takes its time for each step, tells of it by the hook or in its log, and may go wrong.

It knows nothing of Wattune but the hook, and needs no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--seconds", type=float, default=0.005)
parser.add_argument("--tell", choices=["hook", "log", "nothing"], default="hook")
parser.add_argument("--fault", default="")
parser.add_argument("--at", type=int, default=4, help="the step in which the last rank goes wrong")
parser.add_argument("--record", help="a file for the stamps at the ends of steps, in ns of the monotonic clock")
args = parser.parse_args()
LAST = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def go_wrong() -> None:
    if args.fault == "crash":
        raise ValueError("the reason\nand more of it")
    if args.fault == "device memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if args.fault == "host memory":
        bytearray(1 << 60)
    if args.fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.fault == "exit":
        sys.exit(3)
    if args.fault == "hang":
        print("about to hang", flush=True)
        time.sleep(1000)


if args.fault == "children":
    loader = "import subprocess, time; subprocess.Popen(['sleep', '4242'], start_new_session=True); time.sleep(4242)"
    subprocess.Popen([sys.executable, "-c", loader], start_new_session=True)
losses = {"nan": float("nan"), "flat": 1.0}
for step in range(1, args.steps + 1):
    time.sleep(args.seconds)
    if LAST and step == args.at:
        go_wrong()
    loss = losses.get(args.fault, 1 + 1 / step)
    if args.record:
        with open(args.record, "a") as record:
            record.write(f"{time.monotonic_ns()}\n")
    if args.tell == "hook":
        import wattune_steps

        wattune_steps.step(loss=loss, tokens=1000 + step)
    elif args.tell == "log" and LAST:
        print(f"\x1b[31mstep: {step}\x1b[0m  loss: {loss:.4f}  took {args.seconds} s")
print("trained")
