"""What a layout is launched with: by the formats that can express it, each a module that is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.layout import Layout
from service.answers import export, exports, ranking
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


def test_a_layout_that_no_format_can_express_says_so() -> None:
    made = exported(replace(CONFIG, engine="abacus"))
    assert made["not_expressible"] == {"engine": "layouts of the engine abacus have no export"}
    assert Layout.from_dict(made["config"]).engine == "abacus"
    assert not {"deepspeed", "megatron_lm"} & set(made)


def test_a_format_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "abacus.py").write_text(
        "from service.answers.exports import Export\n"
        "EXPORT = Export(('megatron',), 'abacus', lambda layout: {'beads': layout.num_gpus}, lambda layout: "
        "{'compile': 'an abacus is compiled by hand', 'engine': 'wood'})\n"
    )
    monkeypatch.setattr(exports, "__path__", [*exports.__path__, str(tmp_path)])
    made = exported(Layout("megatron", 8, 16, compile=True))
    assert made["abacus"] == {"beads": 8}
    assert "--micro-batch-size" in made["megatron_lm"]
    assert made["not_expressible"] == {
        "compile": "Megatron-LM fuses kernels with Transformer Engine instead; an abacus is compiled by hand",
        "engine": "wood",
    }
