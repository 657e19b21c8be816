"""Thirty trials in a row of which a third fail, on one GPU: what do the failures leave behind, and what do they change?

    python -m benchmarks.failures SPEC [--trials 30] --out FILE.jsonl

Runs the first legal layout of the spec in one gang, and in every third place one that must fail: memory runs out in the
forward pass, in the backward pass or in the optimizer, or the rank's process is killed. Prints, after each trial, the
memory in use on the GPU and the number of the gang's processes; then how far tokens/s and J/token of the good trials
differ within neighbouring pairs, and between the first and the last.
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

from benchmarks.gang import one_gang
from benchmarks.layouts import REPEATED, differences
from search_spaces.config import TrialConfig
from service.spec import SearchSpec, load_spec, parse_spec
from trainables.result import TrialResult

# One H200 has 140 GiB. Logits of 8192 positions over 128 256 words take 2 GiB a sequence in bf16, and their gradient as
# much again; an 8B model with its gradients 80 GB, and Adam's states 64 GB more.
FAULTS: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "oom in forward": ("two", {"micro_batch_size": 64, "recompute": "none", "compile": False}, "stage(inputs)"),
    "oom in backward": ("two", {"micro_batch_size": 40, "recompute": "full", "compile": True}, "backward()"),
    "oom in the optimizer": ("whole", {"micro_batch_size": 1, "recompute": "full"}, "self.optimizer.step()"),
    "killed": (None, {}, ""),
}
KILL_AFTER_S = 6.0


def variants(spec: SearchSpec) -> dict[str | None, SearchSpec]:
    """The spec itself, and with models that do not fit."""
    shape = "{family: llama, layers: %d, hidden: 4096, heads: 32, kv_heads: 8, ffn_hidden: 14336, vocab: 128256}"

    def with_model(layers: int) -> SearchSpec:
        values = spec.model_dump(mode="json") | {"model": "MODEL", "global_batch_size": 64 * 40}
        values["cluster"]["accelerator"] = "gpu"  # of which nothing is known that would refuse these layouts
        return parse_spec(json.dumps(values).replace('"MODEL"', shape % layers))

    return {None: spec, "two": with_model(2), "whole": with_model(32)}


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
    """GPU memory in use, in GiB, and the number of processes that run trials."""
    pynvml.nvmlInit()
    used = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    return {"gpu_gib": used / 2**30, "processes": len(gang_processes())}


def plan(trials: int) -> Iterator[str | None]:
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
    specs = variants(load_spec(arguments.spec).located())
    good: list[TrialResult] = []
    with one_gang(specs[None], 1) as run:
        point = specs[None].legal.points[0]
        for number, fault in enumerate([*plan(arguments.trials), None]):
            model, changes, where = FAULTS[fault] if fault else (None, {}, "")
            spec = specs[model]
            layout: TrialConfig = replace(point, global_batch_size=spec.global_batch_size, **changes)
            if fault == "killed":
                threading.Timer(KILL_AFTER_S, kill_children).start()
            began = time.monotonic()
            result = run(f"trial-{number}", layout, spec)
            seconds = time.monotonic() - began
            left = left_behind()
            as_meant = result.status == ("ok" if fault is None else "crash" if fault == "killed" else "oom")
            as_meant = as_meant and where in (result.traceback or "")
            arguments.out.write(json.dumps({"fault": fault, "left_behind": left} | result.to_dict()) + "\n")
            arguments.out.flush()
            kind = (fault or "good") + ("" if as_meant else " (not as meant)")
            speed = result.metrics.get("tokens_per_s_per_gpu")
            reached = "" if speed is None else f"{speed:9.1f} tok/s/GPU"
            remains = f"{left['gpu_gib']:.2f} GiB  {left['processes']:.0f} processes"
            cause = (result.cause or "")[:100]
            print(
                f"{number:3} {kind:24} {result.status:7} {seconds:5.1f} s  {reached:20}  {remains}  {cause}", flush=True
            )
            if fault is None:
                good.append(result)
    print("\n".join(differences(good)))
    for metric in REPEATED:
        first, last = good[0].metrics[metric] or 0.0, good[-1].metrics[metric] or 0.0
        print(f"{metric}: {first:.5g} at the start, {last:.5g} at the end, {100 * (last / first - 1):+.2f} %")


if __name__ == "__main__":
    main()
