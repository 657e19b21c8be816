"""Run in a copy of the tree to which docs/extending.md added the engine `ddp`: it is planned and trained with."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import yaml
from torch.distributed import TCPStore

from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from service.answers import exports
from service.plan import make_plan, text
from service.spec import parse_spec
from trainables.child import Nursery
from trainables.data import SYNTHETIC
from trainables.measure import Procedure
from trainables.platforms.base import platform_of
from trainables.program import Place, TrialRequest
from trainables.training import Training

SPEC = """
name: extended
model: tiny-llama
data: synthetic
sequence_length: 32
global_batch_size: 8
cluster: {gpus_per_node: 2, accelerator: h200}
space:
  engine: [megatron, ddp]
  tensor_parallel_size: [1, 2]
  zero_stage: [0, 3]
  precision: [fp32, bf16]
  compile: [false, true]
"""
STEPS = Procedure(steady_steps=2, warmup_tolerance=0.9, warmup_max_s=0.1, window_s=1e-3, window_min_steps=3)


def planned() -> list[Layout]:
    problem = parse_spec(SPEC)
    from search_spaces.cost import data_sheet

    plan = make_plan(problem, data_sheet("h200"))
    assert "ddp 2gpu dp2" in text(plan, every=True)
    assert {"ddp_replicates", "ddp_is_in_fp32"} <= set(problem.legal.refused)
    assert yaml.safe_load(yaml.safe_dump(problem.legal.reasons))
    return [layout for layout in problem.legal.layouts if layout.engine == "ddp"]


def losses(layout: Layout, nursery: Nursery, store: TCPStore) -> list[float]:
    """Of the first optimizer steps, trained as a gang trains: a forked process for each rank."""
    platform = platform_of(ACCELERATORS["cpu"])
    request = TrialRequest(layout.label, layout, Training(PRESETS["tiny-llama"], SYNTHETIC, 32, 0), STEPS, 120.0)
    failed, began = threading.Event(), time.monotonic()

    def rank_losses(rank: int) -> list[float]:
        place = Place(rank, rank, "127.0.0.1", store.port, platform)
        with nursery.trial(request, place, lambda: time.monotonic() - began, failed.is_set) as outcome:
            if outcome.status != "ok":
                failed.set()
            assert outcome.report is not None, outcome.cause or outcome.traceback
            return list(outcome.report.losses[:5])

    with ThreadPoolExecutor(layout.num_gpus) as pool:
        (first, second) = pool.map(rank_losses, range(layout.num_gpus))
    assert first == second
    return first


def main() -> None:
    (ddp,) = planned()
    assert ddp == Layout("ddp", 2, 8, precision="fp32", sequence_parallel=False)
    assert [name for name in exports.names() if "ddp" in exports.named(name).engines] == ["torchrun"]
    nursery = Nursery(platform_of(ACCELERATORS["cpu"]), Training.preload([ddp, replace(ddp, engine="megatron")]))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    added, known = (losses(replace(ddp, engine=engine), nursery, store) for engine in ("ddp", "megatron"))
    assert added[-1] < added[0]
    assert all(abs(one - other) < 1e-5 for one, other in zip(added, known, strict=True)), (added, known)


if __name__ == "__main__":
    main()
