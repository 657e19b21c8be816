"""All that is to be measured of one node of four or eight GPUs, in one go, what is worth most first.

    python -m benchmarks.measure.node --out FOLDER [--gpus N] [--accelerator h200] [--seconds S] [--parts PART...]
        [--archive FILE.tar.gz]

Each part starts programs that are there for themselves, and has a limit of its own (`benchmarks.measure.parts`):

    tokens     the text that is trained on
    doctor     whether the GPUs are well, and how fast each is, by which slices are corrected
    models     what cost and memory model foretell of every layout of the specs below
    search     the search over Llama-3-8B of examples/, with finalists, report and archive
    best       the layout of the same model that is foretold to be the fastest, in bf16 and in fp8
    slices     18 layouts of each number of GPUs from four on, or of two, foretold by slices on one GPU each: six of a
               Llama, a GPT-3 and a mixture of experts each
    full       the same layouts by all their ranks
    lacking    the layouts that benchmarks/data/llama3_12l_4xh200.csv lacks, foretold by slices; from four GPUs on
    missing    the same layouts by all their ranks
    telemetry  what it costs a training on all GPUs
    mixed      layouts of all sizes side by side, with ranks that are killed, hang and run out of memory
    shared     the same of two searches that share the machine

All is foretold before it is measured. What is printed and measured lies in FOLDER as it comes, with one line for each
program that ended in `programs.jsonl`. After S seconds, or SIGTERM, all ends; the same command goes on with what is
left. FILE has the folder as it is after each part. With `--accelerator cpu` all parts run on two workers, of a small
model, in minutes. With `--gpus 8 --parts tokens models slices`, one GPU foretells what a node of eight is to measure.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import DATA, ROOT, SPECS
from benchmarks.measure.parts import Part, Program, environment_of, run_parts
from benchmarks.measure.sized import Fields, of_size, on_cpu, read, write
from telemetry.devices import count_gpus

CPU_WORKERS = 2
TABLE = DATA / "llama3_12l_4xh200.csv"
SEARCH_ID = "node-search"
SEED = "22"
TOKENS = "data/demo"

SEARCH_S, OTHERS_S = 540.0, 80.0
"""The limit of the search, and what of it is not of its budget: Ray's start, the last trial, and answers."""

SEARCHED: Fields = {
    "budget": {"trials": 60, "wall_time_s": SEARCH_S - OTHERS_S},
    "finalists": {"count": 3, "repeats": 3, "window_s": 12},
}
SEARCHED_ON_CPU: Fields = {"budget": {"trials": 2}, "finalists": {"count": 1, "repeats": 2, "window_s": 0.3}}
FAMILIES = "llama", "gpt", "moe"
"""Of what is foretold by slices."""

FITTING: dict[str, Fields] = {
    "search": {"recompute": ["none", "selective"]},
    "best": {"zero_stage": 2, "micro_batch_size": 1, "recompute": "selective"},
    "telemetry": {"recompute": "selective"},
}
"""What specs of four H200 or more try where there is less memory: on H100, and on fewer."""

MIXED_ON_CPU: Fields = {
    "measurement": {"window_s": 3, "window_min_steps": 3, "steady_steps": 2, "warmup_max_s": 1, "deadline_s": 15}
}
"""Trials that last as long as faults take to befall them."""


class Specs:
    """The specs of all parts, for one machine, in the folder `specs` of that of all parts."""

    def __init__(self, folder: Path, gpus: int, accelerator: str) -> None:
        self.folder, self.gpus, self.accelerator = folder, gpus, accelerator
        self.paths: list[str] = []

    def add(self, name: str, source: Path, layouts_of: int | None = None, **changes: Any) -> str:
        """Write one like `source` but for `changes`, of layouts of so many GPUs alone, and return its path."""
        fields = of_size(read(source), layouts_of or self.gpus)
        fields["cluster"] |= {"gpus_per_node": self.gpus, "accelerator": self.accelerator}
        if self.accelerator == "h100" or (self.gpus < 4 and self.accelerator != "cpu"):
            fields["space"] |= FITTING.get(name, {})
        if layouts_of is not None:
            fields["space"]["num_gpus"] = layouts_of
        if fields["data"] != "synthetic":
            fields["data"] = str(self.folder / TOKENS)
        path = f"specs/{name}.yaml"
        write((on_cpu(fields) if self.accelerator == "cpu" else fields) | changes, self.folder / path)
        self.paths.append(path)
        return path


def wattune(*arguments: str) -> tuple[str, ...]:
    return "-m", "service.cli", *arguments


def benchmark(name: str, *arguments: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.{name}", *arguments


def predicting(file: str, specs: Sequence[str], *drawn: str) -> Program:
    """Foretells layouts of specs, and goes on with those that are left."""
    command = benchmark("measure.blind", "predict", *specs, *drawn, "--seed", SEED, "--out", file)
    return Program("predict", command, soft_s=40.0, again=True)


def measuring(foretold: str, file: str) -> Program:
    """Measures what was foretold, and goes on with what is left."""
    return Program("measure", benchmark("measure.blind", "measure", foretold, "--out", file), soft_s=45.0, again=True)


def search_program(folder: Path, spec: str) -> Program:
    """The search, or what goes on with it where it has been begun."""
    output = folder / "search" / "search.txt"
    begun = output.exists() and f"search {SEARCH_ID}:" in output.read_text(errors="replace")
    command = ("resume", SEARCH_ID) if begun else ("run", spec, "--search-id", SEARCH_ID)
    return Program("search", wattune(*command))


def parts_of(folder: Path, gpus: int, accelerator: str) -> list[Part]:
    """The parts for a machine, in the order of their worth. Writes their specs into the folder of all parts."""
    specs, cpu = Specs(folder, gpus, accelerator), accelerator == "cpu"
    example = ROOT / "examples" / f"llama3_8b_{8 if gpus > 4 else 4}xh200.yaml"
    pacing = SPECS / f"pacing_{4 if gpus >= 4 else 2}gpu.yaml"
    search = specs.add("search", example, **(SEARCHED_ON_CPU if cpu else SEARCHED))
    best = specs.add("best", SPECS / "llama3_8b_fp8.yaml", global_batch_size=16 * gpus)
    sizes = [size for size in (8, 4) if size <= gpus] or [gpus]
    drawn = [
        specs.add(f"blind_{family}_{size}", SPECS / f"blind_{family}_node.yaml", size)
        for size in sizes
        for family in FAMILIES
    ]
    trained = specs.add("telemetry", pacing, global_batch_size=gpus)
    mixed = specs.add("mixed", SPECS / "mixed.yaml", **(MIXED_ON_CPU if cpu else {}))
    text = map(str, sorted(Path(os.__file__).parent.glob("*.py")))
    each = "1" if cpu else "6"
    trained_s, mixed_s = (106.0, 115.0) if cpu else (220.0, 260.0)
    swept = []
    if gpus >= 4 or cpu:
        table, count = specs.add("table", TABLE.with_suffix(".yaml")), "1" if cpu else "1000"
        program = predicting("lacking/foretold.jsonl", [table], "--layouts", count, "--not-in", str(TABLE))
        swept = [
            Part("lacking", 240, (program,)),
            Part("missing", 400, (measuring("lacking/foretold.jsonl", "missing/measured.jsonl"),)),
        ]
    return [
        Part("tokens", 60, (Program("data", wattune("data", "--out", TOKENS, *text)),)),
        Part("doctor", 120, (Program("doctor", wattune("doctor", "--json")),)),
        Part("models", 120, tuple(Program(Path(one).stem, wattune("plan", one, "--json")) for one in specs.paths)),
        Part(
            "search",
            SEARCH_S,
            (
                search_program(folder, search),
                Program("report", wattune("report", SEARCH_ID), tells=True),
                Program(
                    "pack",
                    benchmark("convert.archive", "pack", SEARCH_ID, "--out", "search/search.tar.xz"),
                    tells=True,
                ),
            ),
        ),
        Part("best", 280, (Program("layouts", benchmark("measure.layouts", best, "--out", "best/layouts.jsonl")),)),
        Part("slices", 240, (predicting("slices/foretold.jsonl", drawn, "--layouts", each),)),
        Part("full", 540, (measuring("slices/foretold.jsonl", "full/measured.jsonl"),)),
        *swept,
        Part(
            "telemetry",
            trained_s,
            (Program("pacing", benchmark("measure.pacing", trained, "--out", "telemetry/pacing.json"), soft_s=60.0),),
        ),
        *(
            Part(
                name,
                mixed_s,
                (
                    Program(
                        "mixed", benchmark("measure.mixed", mixed, "--searches", searches, "--out", name), soft_s=85.0
                    ),
                ),
            )
            for name, searches in (("mixed", "1"), ("shared", "2"))
        ),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder of all parts; one that is there is gone on with."
    )
    parser.add_argument("--accelerator", default="h200", help="As specs name it; cpu tries all on processors.")
    parser.add_argument("--gpus", type=int, help="By default all there are.")
    parser.add_argument("--seconds", type=float, default=1e6, help="After which all ends.")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="These alone, in the order above.")
    parser.add_argument("--archive", type=Path, help="File for all of the folder, written anew after each part.")
    given = parser.parse_args(argv)
    gpus = given.gpus or (CPU_WORKERS if given.accelerator == "cpu" else count_gpus())
    if gpus < 2:
        parser.error(f"there are {gpus} GPUs here: it takes two or more, or --accelerator cpu")
    folder = given.out.absolute()
    parts = parts_of(folder, gpus, given.accelerator)
    if unknown := sorted(set(given.parts or ()) - {part.name for part in parts}):
        parser.error(f"no part {', '.join(unknown)} here; there are {', '.join(part.name for part in parts)}")
    chosen = [part for part in parts if given.parts is None or part.name in given.parts]
    done = run_parts(chosen, folder, given.seconds, environment_of(folder), given.archive)
    print("\n".join(map(str, done)))


if __name__ == "__main__":
    main()
