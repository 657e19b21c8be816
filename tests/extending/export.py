"""Run in a copy of the tree to which docs/extending.md added the export `torchtitan`: best answers have it."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from search_spaces.layout import Layout
from service.answers.export import export
from service.answers.ranking import best
from service.metrics import Direction
from service.record.results import SearchRecord, TrialRecord

LAYOUT = Layout(
    "megatron",
    16,
    64,
    tensor_parallel_size=2,
    context_parallel_size=2,
    zero_stage=3,
    data_parallel_replicate_size=2,
    micro_batch_size=4,
)


def exported(layout: Layout) -> dict[str, object]:
    trial = TrialRecord("t", layout.label, layout, "ok", None, {"tokens_per_s": 1.0}, {}, "r")
    goals, start = {"tokens_per_s": Direction.MAXIMIZE}, datetime(2026, 1, 1, tzinfo=UTC)
    record = SearchRecord("s", "extended", "finished", start, goals, (), {}, {}, (), "r", (trial,))
    values: dict[str, object] = json.loads(json.dumps(export(record, best(record))))
    return values


def main() -> None:
    titan = exported(LAYOUT)["torchtitan"]
    assert isinstance(titan, dict)
    degrees = {name: size for name, size in titan["parallelism"].items() if name.endswith("degree")}
    assert degrees == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 2,
        "pipeline_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    assert "megatron_lm" in exported(LAYOUT), "beside what there was"
    assert "torchtitan" not in exported(Layout("deepspeed", 2, 8))


if __name__ == "__main__":
    main()
