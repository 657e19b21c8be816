"""What was measured on H200 and is committed under benchmarks/data, for the models to be held against."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from benchmarks import DATA, ROOT, SPECS
from search_spaces.engines.megatron import Megatron
from search_spaces.engines.others import EarlierMegatron
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from search_spaces.workload import Workload
from service.problem import Problem
from service.spec import load_spec

SEARCHED = ROOT / "examples" / "llama3_8b_4xh200.yaml"
RECORDS = (
    "microbatch_1xh200.jsonl",
    "layouts_4xh200.jsonl",
    "microbatch_4xh200.jsonl",
    "llama3_8b_best_4xh200.jsonl",
)
WHOLE = "proxy_4xh200.jsonl"
"""Whole models, beside what depth proxies foretold of them."""

FAULTS = "failures_1xh200.jsonl"
FAULT_LAYERS = {"oom in the optimizer": 40}
"""Layers of the models that `benchmarks.measure.failures` makes, where they are not two."""


def as_it_ran(layout: Layout) -> Layout:
    """A row's layout with the engine that trained it: all that were committed with context or tensor parallelism are of
    the one before `megatron` had attention in parts, and split blocks without DTensors."""
    earlier = layout.engine == Megatron.name and max(layout.context_parallel_size, layout.tensor_parallel_size) > 1
    return replace(layout, engine=EarlierMegatron.name) if earlier else layout


@dataclass(frozen=True)
class Measurement:
    """A layout that was run, in which file the figures are, and the trial's result, with `status` and `metrics` and, in
    records of their own, `ranks`."""

    file: str
    layout: Layout
    work: Workload
    result: Mapping[str, Any]


def measurements(records: Sequence[str] = RECORDS) -> Iterator[Measurement]:
    """Of `records`, of the search over Llama-3-8B, and of the whole models that depth proxies were held against."""
    for name in records:
        yield from _recorded(name)
    spec = load_spec(SEARCHED)
    for trial in json.loads((DATA / "llama3_8b_4xh200.json").read_text())["trials"]:
        yield Measurement("llama3_8b_4xh200.json", _layout(trial), workload(spec), trial)
    for record in map(json.loads, (DATA / WHOLE).read_text().splitlines()):
        spec = load_spec(ROOT / record["spec"])
        (layout,) = (layout for layout in spec.legal.layouts if layout.label == record["layout"])
        metrics = record["measured"]
        metrics |= {"mean_power_w": metrics["joules_per_token"] * metrics["tokens_per_s"]}
        yield Measurement(WHOLE, layout, workload(spec), {"status": "ok", "metrics": metrics})


def workload(spec: Problem, layers: int | None = None) -> Workload:
    """What was trained, on H200: the spec's model, or one of so many layers."""
    model = replace(spec.workload.shape, layers=layers or spec.workload.shape.layers)
    return Workload(model, spec.sequence_length, spec.global_batch_size, ACCELERATORS["h200"])


@cache
def _spec(name: str) -> Problem:
    """The one of this name that was run."""
    paths = [path for path in sorted(SPECS.glob("*.yaml")) if yaml.safe_load(path.read_text())["name"] == name]
    return load_spec(paths[-1])


def _recorded(name: str) -> Iterator[Measurement]:
    for record in map(json.loads, (DATA / name).read_text().splitlines()):
        spec = _spec(record.get("spec", "repeat-1gpu"))
        runs = [(proxy["layers"], proxy["result"]) for proxy in record["proxies"]]
        for layers, run in runs or [(FAULT_LAYERS.get(record.get("fault")), record)]:
            yield Measurement(name, _layout(run), workload(spec, layers), run)


def _layout(run: Mapping[str, Any]) -> Layout:
    """Of a record. One of DeepSpeed without `reduce_precision` is from before it was told to sum in fp32."""
    config = run["config"]
    return Layout.from_dict({"reduce_precision": "bf16"} | config if config["engine"] == "deepspeed" else config)
