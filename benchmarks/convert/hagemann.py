"""Somebody else's clusters for `benchmarks.judge.search`: the sheets of Hagemann et al. 2023 as tables of layouts.

    python -m benchmarks.convert.hagemann SHEET.xlsx... --out DIR [--kernel flash_attention2]

"Efficient Parallelization Layouts for Large-Scale Distributed Model Training" (arXiv 2311.05610) tried LLaMA 13B, 30B
and 65B on 32 to 256 A100, with ZeRO-1. Its sheets, in `data` of the GitHub repository
Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts, are CC BY-NC-SA 4.0 and no part of this one. Each
becomes DIR/SHEET.csv and, beside it, a spec of its search, DIR/SHEET.yaml. To read them pandas needs openpyxl.

The kernel of attention is no axis here, so a table has the rows of one kernel, and of a layout that was tried twice the
later trial. What trials cost is in no sheet: `gpu_seconds` are those of ten steps, and of failures unknown. Shapes and
batches are those by which the sheets' MFU comes out, if both tables count as parameters. Their trainer, as published in
Aleph-Alpha/scaling in 2024, keeps gradients in bf16 and gives the first stages the layers that are left over.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

SHAPES = {
    "13B": {"layers": 40, "hidden": 5120, "heads": 40, "ffn_hidden": 13_824},
    "30B": {"layers": 60, "hidden": 6656, "heads": 52, "ffn_hidden": 17_888},
    "65B": {"layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 22_016},
}
VOCAB = 128_000
BATCHES = {2048: 2048, 8192: 512}
"""Sequences of a step, by their length."""

STEPS = 10
"""Steps of which `gpu_seconds` are."""

AXES = {
    "World Size": "num_gpus",
    "model_parallel_size": "tensor_parallel_size",
    "pipe_parallel_size": "pipeline_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "activation_checkpointing_type": "recompute",
    "sequence_parallel": "sequence_parallel",
}
RECOMPUTE = {"disabled": "none", "every_layer": "full"}


def convert(sheet: Path, kernel: str, out: Path) -> Path:
    """Write the table of a sheet, with its spec, and return where. Raises ValueError if the sheet is another."""
    named = re.match(r"llama_(\w+?)_", sheet.name)
    if named is None or named[1] not in SHAPES:
        raise ValueError(f"{sheet}: its name does not begin like that of a sheet on LLaMA {', '.join(SHAPES)}")
    shape, length = SHAPES[named[1]], 8192 if "_8k_" in sheet.name else 2048
    trials = pd.read_excel(sheet, header=1).sort_values("Trial ID").to_dict("records")
    trials = [{"sequence_parallel": False} | trial for trial in trials]  # which most sheets do not have
    kernels = sorted({trial["kernel"] for trial in trials})
    if kernel not in kernels:
        raise ValueError(f"{sheet}: no kernel {kernel}, but {', '.join(kernels)}")
    layouts = [(_layout(trial, shape["layers"]), trial) for trial in trials if trial["kernel"] == kernel]
    axes = list(layouts[0][0])
    tokens = BATCHES[length] * length
    rows = {tuple(layout.values()): layout | _result_columns(trial, tokens) for layout, trial in layouts}

    out.mkdir(parents=True, exist_ok=True)
    table = out / f"{sheet.stem}.csv"
    with table.open("w", newline="") as file:
        file.write(f"# {sheet.name}, kernel {kernel}: Hagemann et al. 2023, arXiv 2311.05610, CC BY-NC-SA 4.0\n")
        writer = csv.DictWriter(file, [*axes, "status", "gpu_seconds", "tokens_per_s", "mfu", "step_time_s"])
        writer.writeheader()
        writer.writerows(rows.values())
    space = {axis: [yaml.safe_load(str(row[axis])) for row in rows.values()] for axis in axes}
    spec = {
        "name": sheet.stem.replace("_", "-")[:63],
        "model": {"family": "llama", "vocab": VOCAB, "max_sequence_length": length, **shape},
        "data": "synthetic",
        "sequence_length": length,
        "global_batch_size": BATCHES[length],
        "cluster": {"nodes": max(space["num_gpus"]) // 8, "gpus_per_node": 8, "accelerator": "a100"},
        "space": {axis: [v for i, v in enumerate(values) if v not in values[:i]] for axis, values in space.items()},
    }
    table.with_suffix(".yaml").write_text(yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=120))
    return table


def _layout(trial: Mapping[Hashable, Any], layers: int) -> dict[str, Any]:
    """Our axes of a trial, as text that YAML reads."""
    layout = {ours: trial[theirs] for theirs, ours in AXES.items()}
    each, odd = divmod(layers, layout["pipeline_parallel_size"])
    stages = [each + 1] * odd + [each] * (layout["pipeline_parallel_size"] - odd)
    layout |= {"recompute": RECOMPUTE[layout["recompute"]], "zero_stage": 1, "reduce_precision": "bf16"}
    layout["stage_layers"] = stages if odd else "null"
    return {axis: str(value).lower() for axis, value in layout.items()}


def _result_columns(trial: Mapping[Hashable, Any], tokens: int) -> dict[str, Any]:
    """What became of a trial with so many tokens a step; its times are figures, or say what failed."""
    time = trial["Average Step Time"]
    try:
        seconds = float(time)
    except ValueError:
        return {"status": "oom" if time == "OOM Error" else "crash"}
    return {
        "status": "ok",
        "gpu_seconds": round(STEPS * seconds * trial["World Size"]),
        "tokens_per_s": tokens / seconds,
        "mfu": float(trial["Average MFU"]),
        "step_time_s": seconds,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sheets", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", default="flash_attention2")
    arguments = parser.parse_args(argv)
    for sheet in arguments.sheets:
        try:
            print(convert(sheet, arguments.kernel, arguments.out))
        except (ImportError, OSError, ValueError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
