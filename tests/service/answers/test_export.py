"""What an answer holds beside a layout's axes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from search_spaces.layout import Layout
from service.answers import export, ranking
from tests.service.records import CONFIG, search, trial

FAST = trial("fast", tokens_per_s=100, joules_per_token=3, throttle_ratio=0)


def exported(layout: Layout) -> dict[str, Any]:
    """The export of a search that tried nothing else, after a round trip through JSON."""
    record = search(replace(FAST, layout=layout))
    made: dict[str, Any] = json.loads(json.dumps(export.export(record, ranking.best(record))))
    return made


def test_export_holds_what_launching_needs() -> None:
    exported = json.loads(json.dumps(export.export(search(FAST), ranking.best(search(FAST)))))
    assert Layout.from_dict(exported["config"]) == CONFIG
    assert (exported["search_id"], exported["trial_id"]) == ("s1", "fast")
    assert exported["workload"]["model"] == "tiny-llama"
    assert exported["metrics"]["tokens_per_s"] == 100
    assert exported["methods"] == {"joules_per_token": "counter"}
    assert exported["deepspeed"]["zero_optimization"]["stage"] == 2
    assert exported["deepspeed"]["train_micro_batch_size_per_gpu"] == 4
    assert set(exported["not_expressible"]) == {"recompute"}
    assert "megatron_lm" not in exported


def test_export_of_a_megatron_layout_has_its_arguments() -> None:
    layout = Layout("megatron", 8, 16, tensor_parallel_size=2, pipeline_parallel_size=4, compile=True)
    record = search(replace(FAST, layout=layout))
    exported = export.export(record, ranking.best(record))
    arguments = " ".join(exported["megatron_lm"])
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4" in arguments
    assert set(exported["not_expressible"]) == {"compile"}
    assert "deepspeed" not in exported


def test_a_layout_of_a_trainer_says_what_starts_it() -> None:
    made = exported(replace(CONFIG, engine="abacus"))
    assert made["not_expressible"] == {"engine": "abacus is a program of its own: see --format torchrun"}
    assert Layout.from_dict(made["config"]).engine == "abacus"
    assert not {"deepspeed", "megatron_lm"} & set(made)


def test_an_answer_holds_the_configuration_that_its_engine_is_known_by_and_no_other() -> None:
    plain = {"search_id", "search", "trial_id", "purpose", "trials", "workload", "config", "not_expressible", "metrics"}
    plain |= {"intervals", "methods"}
    assert set(exported(Layout("megatron", 8, 16))) == plain | {"megatron_lm"}
    assert set(exported(Layout("deepspeed", 8, 16))) == plain | {"deepspeed"}
