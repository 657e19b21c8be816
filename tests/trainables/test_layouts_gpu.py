"""On GPUs as on CPUs: whole trials of both engines, through Ray, a gang and NCCL, train the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]

DENSE = "{family: llama, layers: 4, hidden: 1024, heads: 16, kv_heads: 8, ffn_hidden: 2816, vocab: 32000}"
MIXTURE = (
    "{family: llama, layers: 2, hidden: 1024, heads: 16, kv_heads: 8, ffn_hidden: 2816, vocab: 32000, num_experts: 4}"
)
SPACES = {
    "sizes": (DENSE, "{tensor_parallel_size: [1, 2], pipeline_parallel_size: [1, 2], context_parallel_size: [1, 2]}"),
    "zero": (DENSE, "{zero_stage: [0, 1, 2, 3], compile: true}"),
    "compiled": (DENSE, "{tensor_parallel_size: 2, compile: true, async_tensor_parallel: [true, false]}"),
    "fp8": (
        DENSE,
        "{engine: megatron, tensor_parallel_size: [1, 2], sequence_parallel: [true, false], compile: [true, false], "
        "zero_stage: 3, precision: fp8}",
    ),
    "schedules": (
        DENSE,
        "{engine: megatron, pipeline_parallel_size: 2, virtual_pipeline_stages: [1, 2], pipeline_schedule: "
        "[gpipe, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble]}",
    ),
    "recompute": (DENSE, "{engine: megatron, zero_stage: 1, recompute: [selective, full], compile: true}"),
    "overlap": (DENSE, "{engine: megatron, zero_stage: 3, overlap_grad_reduce: false, overlap_param_gather: false}"),
    "experts": (MIXTURE, "{expert_parallel_size: [1, 2], zero_stage: 2}"),
    "split experts": (MIXTURE, "{engine: megatron, tensor_parallel_size: 2}"),
}


def spec(name: str, model: str, space: str) -> str:
    return f"""
name: {name.replace(" ", "-")}
model: {model}
data: synthetic
sequence_length: 2048
global_batch_size: 8
cluster: {{nodes: 1, gpus_per_node: 2, accelerator: h200}}
space: {{engine: [megatron, deepspeed], {space[1:]}
measurement: {{steady_steps: 2, warmup_tolerance: 0.5, window_s: 0.1, window_min_steps: 2, deadline_s: 90}}
""".replace("engine: [megatron, deepspeed], engine:", "engine:")


def test_layouts_train_alike(tmp_path: Path) -> None:
    files = []
    for name, (model, space) in SPACES.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(spec(name, model, space))
    out = tmp_path / "results.jsonl"
    subprocess.run([sys.executable, "-m", "benchmarks.measure.layouts", *files, "--out", out], check=True)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(result["status"], result["cause"]) for result in results} == {("ok", None)}
    for mixture in (True, False):
        trained = [r for r in results if ("experts" in r["spec"]) == mixture]
        assert len(trained) >= 4
        expected = next(r["losses"][:4] for r in trained if r["spec"] != "fp8")
        for result in trained:
            assert result["losses"][:4] == pytest.approx(expected, rel=1e-2 if result["spec"] == "fp8" else 2e-3)
