"""The value of a search's problem, as it travels through the rooms and to Ray's workers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.models import PRESETS
from service.problem import INLINE
from service.spec import dump_spec, parse_spec
from tests.service.records import problem


def test_a_problem_knows_nothing_of_pydantic_and_travels_light() -> None:
    many = problem(space={"micro_batch_size": [1, 2, 4, 8], "zero_stage": [0, 1, 2, 3]})
    before = len(pickle.dumps(many))
    assert len(many.legal.layouts) > 8
    sent = pickle.dumps(many)
    assert len(sent) == before, "the legal layouts are enumerated where they are wanted"
    assert b"pydantic" not in sent
    assert pickle.loads(sent) == many


def test_where_the_data_lie_does_not_bear_on_what_is_legal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    here = problem(data="tokens")
    assert here.located().data == str(tmp_path / "tokens")
    assert here.located().legal is here.legal
    assert problem().located() == problem()


def test_a_baseline_is_one_legal_layout() -> None:
    named = problem(space={"zero_stage": [0, 3]}, baseline={"zero_stage": 3})
    assert named.baseline_layout is not None
    assert named.baseline_layout.zero_stage == 3
    assert problem().baseline_layout is None


def test_a_problem_says_what_its_model_is_called() -> None:
    preset, shape = problem(), PRESETS["tiny-llama"]
    shallow = preset.at_depth(2)
    assert (preset.model, preset.facts()["model"]) == ("tiny-llama", "tiny-llama")
    assert (shallow.model, shallow.shape) == (INLINE, replace(shape, layers=2))
    assert parse_spec(dump_spec(shallow)) == shallow


def test_machines_decide_how_a_problem_is_explored_and_whether_it_has_finalists() -> None:
    cluster = {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100"}
    explored = {}
    for explore in ("gang", "slices", "auto"):
        asked = problem(cluster=cluster, measurement={"explore": explore}, space={"num_gpus": [4, 16]})
        assert asked.least.size == (16 if explore == "gang" else 1)
        for workers in (1, 16):
            found = asked.on(workers)
            explored[explore, workers] = found.measurement.explore, found.finalists.count
            assert parse_spec(dump_spec(found)) == found
    assert explored == {
        ("gang", 1): ("gang", 0),
        ("gang", 16): ("gang", 4),
        ("slices", 1): ("slices", 0),
        ("slices", 16): ("slices", 4),
        ("auto", 1): ("slices", 0),
        ("auto", 16): ("gang", 4),
    }
