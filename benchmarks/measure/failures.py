"""Thirty trials in a row of which a third fail, on one GPU: what do the failures leave behind, and what do they change?

    python -m benchmarks.measure.failures SPEC [--trials 30] --out FILE.jsonl

Runs the first legal layout of the spec in one gang, and in every third place one that must fail: memory runs out in the
forward pass, in the backward pass or in the optimizer, or the rank's process is killed. Prints, for each trial, how
soon after its result the GPU's memory is free again, what is in use then, and the number of the gang's processes; then
how far tokens/s and J/token of the good trials differ within neighbouring pairs, and between the first and the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pynvml

from benchmarks.measure.gang import one_gang
from benchmarks.measure.layouts import REPEATED, differences
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from service.problem import INLINE, Problem
from service.result import TrialResult
from service.spec import load_spec

# One H200 has 140 GiB. Logits of 8192 positions over 128 256 words take 2 GiB a sequence in bf16, and their gradient as
# much again; 40 layers with their gradients 100 GB, and Adam's states 78 GB more.
FAULTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "oom in forward": (2, {"micro_batch_size": 64, "recompute": "none", "compile": False}, "stage(inputs)"),
    "oom in backward": (2, {"micro_batch_size": 40, "recompute": "full", "compile": True}, "backward()"),
    "oom in the optimizer": (40, {"micro_batch_size": 1, "recompute": "full"}, "self.optimizer.step()"),
    "killed": (0, {}, ""),
}
# By name: the layers of the model, 0 for the spec's own, what of the layout is changed, and the line that fails.

KILL_AFTER_S = 6.0
FREE_GIB = 1.0
FREE_TIMEOUT_S = 20.0


def faulty(spec: Problem, layers: int, changes: dict[str, Any]) -> tuple[Problem, Layout]:
    """A model of so many layers, and a layout of one or two microbatches, of which the spec's rules know nothing."""
    shape = ModelShape("llama", layers, 4096, 32, 8, 14336, 128256, max_sequence_length=8192)
    sequences = max(2, changes["micro_batch_size"])
    cluster = replace(spec.cluster, accelerator="gpu")  # of which nothing is known that would refuse these layouts
    changed = replace(spec, model=INLINE, shape=shape, global_batch_size=sequences, cluster=cluster)
    return changed, replace(spec.legal.layouts[0], global_batch_size=sequences, **changes)


def gang_processes() -> list[psutil.Process]:
    """The children of this machine's fork servers: what runs trials."""
    children: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.forkserver" in " ".join(process.info["cmdline"] or ()):
                children += process.children(recursive=True)
    return children


def kill_children() -> None:
    for process in gang_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def left_behind() -> dict[str, float]:
    """GPU memory in use in GiB and processes that run trials, once memory is free again, and the seconds until then."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    began = time.monotonic()
    while (used_gib := pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30) > FREE_GIB:
        if time.monotonic() - began > FREE_TIMEOUT_S:
            break
        time.sleep(0.05)
    return {"seconds": time.monotonic() - began, "gpu_gib": used_gib, "processes": len(gang_processes())}


def faults_in_turn(trials: int) -> Iterator[str | None]:
    """Two good trials, then one fault, each kind in turn."""
    kinds = list(FAULTS)
    for number in range(trials):
        yield kinds[number // 3 % len(kinds)] if number % 3 == 2 else None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--out", type=argparse.FileType("w"), required=True)
    arguments = parser.parse_args(argv)
    spec = load_spec(arguments.spec).located()
    good: list[TrialResult] = []
    with one_gang(spec, 1) as run:
        for number, fault in enumerate([*faults_in_turn(arguments.trials), None]):
            layers, changes, where = FAULTS[fault] if fault else (0, {}, "")
            of, layout = faulty(spec, layers, changes) if layers else (spec, spec.legal.layouts[0])
            if fault == "killed":
                threading.Timer(KILL_AFTER_S, kill_children).start()
            began = time.monotonic()
            result = run(f"trial-{number}", layout, of)
            seconds = time.monotonic() - began
            left = left_behind()
            as_meant = result.status == ("ok" if fault is None else "crash" if fault == "killed" else "oom")
            as_meant = as_meant and where in (result.traceback or "")
            arguments.out.write(json.dumps({"fault": fault, "left_behind": left} | result.to_dict()) + "\n")
            arguments.out.flush()
            kind = (fault or "good") + ("" if as_meant else " (not as meant)")
            speed = result.metrics.get("tokens_per_s_per_gpu")
            reached = "" if speed is None else f"{speed:9.1f} tok/s/GPU"
            remains = f"{left['gpu_gib']:.2f} GiB after {left['seconds']:.2f} s, {left['processes']:.0f} processes"
            cause = (result.cause or "")[:100]
            print(
                f"{number:3} {kind:22} {result.status:5} {seconds:5.1f} s {reached:20} {remains}  {cause}", flush=True
            )
            if fault is None:
                good.append(result)
    print("\n".join(differences(good)))
    for metric in REPEATED:
        first, last = good[0].metrics[metric] or 0.0, good[-1].metrics[metric] or 0.0
        print(f"{metric}: {first:.5g} at the start, {last:.5g} at the end, {100 * (last / first - 1):+.2f} %")


if __name__ == "__main__":
    main()
