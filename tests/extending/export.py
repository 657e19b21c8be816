"""Run in a copy of the tree to which docs/extending.md added the export `nanotron`: it can be asked for."""

from __future__ import annotations

from dataclasses import replace

import yaml

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from service.answers import exports
from service.errors import InputError
from trainables.launch import Launch
from trainables.training import Training

LAYOUT = Layout("megatron", 16, 64, tensor_parallel_size=2, zero_stage=1, micro_batch_size=4, pipeline_parallel_size=2)
LAUNCH = Launch(LAYOUT, Training(PRESETS["llama3-8b"], "synthetic", 4096, 0), "h100", 8)


def refused(launch: Launch) -> str:
    try:
        exports.named("nanotron").text(launch)
    except InputError as error:
        return str(error)
    raise AssertionError(launch.layout.label)


def main() -> None:
    assert "nanotron" in exports.names()
    made = yaml.safe_load(exports.named("nanotron").text(LAUNCH))
    assert {axis: made["parallelism"][axis] for axis in ("dp", "pp", "tp")} == {"dp": 4, "pp": 2, "tp": 2}
    assert made["tokens"] == {"sequence_length": 4096, "micro_batch_size": 4, "batch_accumulation_per_replica": 4}
    bubbles = replace(LAUNCH, layout=replace(LAYOUT, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2))
    assert exports.named("nanotron").text(bubbles).startswith("# pipeline_schedule: nanotron is left at 1F1B, not zbv")
    sharded = replace(LAUNCH, layout=replace(LAYOUT, zero_stage=3, pipeline_parallel_size=1))
    assert refused(sharded).endswith("nanotron has ZeRO-0 and ZeRO-1")
    assert "layouts of the engine deepspeed" in refused(replace(LAUNCH, layout=Layout("deepspeed", 2, 8)))


if __name__ == "__main__":
    main()
