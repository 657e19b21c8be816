"""Specs for other machines than they were written for: other numbers of GPUs, or none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from service.reading import read_yaml
from trainables.data import located

Fields = dict[str, Any]
"""A spec as its YAML has it."""

SMALL: Fields = {
    "model": {"family": "llama", "layers": 8, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn_hidden": 176, "vocab": 512},
    "data": "synthetic",
    "sequence_length": 32,
    "global_batch_size": 8,
    "measurement": {"window_s": 0.3, "window_min_steps": 3, "steady_steps": 2, "warmup_max_s": 1, "deadline_s": 90},
}
"""What stands in for model, data and measurement where processors train."""

OF_GPUS = ("compile", "reduce_precision")
"""Axes without worth on a processor."""


def read(path: Path) -> Fields:
    """Of a file; the path of its data no longer depends on where that lies."""
    fields = read_yaml(path.read_text())
    assert isinstance(fields, dict)
    if isinstance(fields.get("data"), str):
        fields["data"] = located(fields["data"], path.parent)
    return fields


def of_size(fields: Fields, gpus: int) -> Fields:
    """The same for a machine with so many GPUs, without the sizes that need more."""

    def fit(axis: str, values: Any) -> Any:
        sized = axis == "num_gpus" or axis.endswith("_parallel_size")
        return [value for value in values if value <= gpus] if sized and isinstance(values, list) else values

    space = {axis: fit(axis, values) for axis, values in fields["space"].items()}
    return fields | {"cluster": {**fields["cluster"], "nodes": 1, "gpus_per_node": gpus}, "space": space}


def on_cpu(fields: Fields) -> Fields:
    """The same axes on processors: a small model, in fp32, with experts if there are any."""
    cluster = {"gpus_per_node": fields["cluster"]["gpus_per_node"], "accelerator": "cpu", "cpus_per_worker": 0.5}
    space = {axis: values for axis, values in fields["space"].items() if axis not in OF_GPUS} | {"precision": "fp32"}
    measurement = {**SMALL["measurement"], "breakdown": fields["measurement"].get("breakdown", True)}
    experts = {"num_experts": 4} if isinstance(fields["model"], dict) and "num_experts" in fields["model"] else {}
    model = SMALL["model"] | experts
    return fields | SMALL | {"model": model, "cluster": cluster, "space": space, "measurement": measurement}


def write(fields: Fields, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
