"""Runs a program as it is, and writes down what collectives its steps call for, among real ranks or with stand-ins.

python -m tests.trainables.recorded_program FILE PROGRAM ARGUMENTS...
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import astuple
from typing import Any

import torch.distributed as dist
import wattune_steps
from torch.distributed import distributed_c10d as c10d

from tests.trainables.ledgers import STEPS, Recorded
from trainables.standin import program
from trainables.standin.ledger import Ledger

BACKEND = "recorded"


def main(file: str, path: str) -> None:
    ledger, calls = Ledger(), list[list[Any]]()
    if program.SETTING in os.environ:
        program.__dict__["Kinds"] = lambda path: ledger
    else:
        dist.Backend.register_backend(
            BACKEND, lambda options, _: Recorded(options, ledger), extended_api=True, devices=["cpu"]
        )
        c10d._new_process_group_helper = program.redirected(c10d._new_process_group_helper, BACKEND)
    tell = wattune_steps.step

    def step(**told: Any) -> None:
        calls.append([astuple(call) for call in ledger])
        ledger.clear()
        if len(calls) == STEPS and os.environ["RANK"] == "0":
            with open(file, "w") as out:
                json.dump(calls, out)
        tell(**told)

    wattune_steps.step = step
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    file, *sys.argv = sys.argv[1:]
    main(file, sys.argv[0])
