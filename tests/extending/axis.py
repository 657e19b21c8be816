"""Run in a copy of the tree to which docs/extending.md added the axis `fused_optimizer`: specs, labels, the sampler,
records, the documentation and the engines have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from search_spaces.layout import AXES, Layout
from search_spaces.models import PRESETS
from service.sampling.study import SearchStudy
from service.spec import dump_spec, parse_spec
from trainables.engines.base import Job
from trainables.engines.build import build_engine

SPEC = """
name: extended
model: tiny-llama
data: synthetic
sequence_length: 32
global_batch_size: 8
cluster: {gpus_per_node: 2, accelerator: cpu}
space: {engine: [megatron, deepspeed], precision: fp32, AXIS}
"""


def main() -> None:
    problem = parse_spec(SPEC.replace("AXIS", "fused_optimizer: [true, false]"))
    assert parse_spec(dump_spec(problem)) == problem
    labels = sorted(layout.label for layout in problem.legal.layouts)
    assert labels == [
        "deepspeed 2gpu dp2 zero0 mbs1 fp32",
        "megatron 2gpu dp2 zero0 mbs1 fp32",
        "megatron 2gpu dp2 zero0 mbs1 fp32 no-fused",
    ]
    assert parse_spec(SPEC.replace(", AXIS", "")).axes["fused_optimizer"] == [True]

    study = SearchStudy("extended", problem.legal.layouts, problem.goals, "random", 0)
    assert "fused_optimizer" in study.distributions
    asked = [study.ask() for _ in problem.legal.layouts]
    assert {layout.fused_optimizer for layout in asked if layout is not None} == {True, False}  # type: ignore[attr-defined]

    unfused = replace(problem.legal.layouts[0], engine="megatron", num_gpus=1, fused_optimizer=False)  # type: ignore[call-arg]
    assert Layout.from_dict(unfused.to_dict()) == unfused
    old = {name: value for name, value in unfused.to_dict().items() if name != "fused_optimizer"}
    assert Layout.from_dict(old) == replace(unfused, fused_optimizer=True), "what layouts were run with before"  # type: ignore[call-arg]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for layout in (unfused, Layout.from_dict(old)):
        job = Job(layout, PRESETS["tiny-llama"], 32, seed=0, rank=0, device=torch.device("cpu"))
        engine = build_engine(job)
        assert engine.optimizer.defaults["fused"] is layout.fused_optimizer  # type: ignore[attr-defined]
    dist.destroy_process_group()

    assert AXES["fused_optimizer"].documentation in Path("docs/spec.md").read_text()


if __name__ == "__main__":
    main()
