from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from search_spaces.engines import ENGINES
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from trainables import engines
from trainables.engines.base import Job
from trainables.engines.build import build_engine, engine_module
from trainables.training import Training

JOB = Job(Layout("megatron", 1, 4), PRESETS["tiny-llama"], 32, seed=0, rank=0, device=torch.device("cpu"))


def test_an_engine_that_is_not_registered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown engine 'abacus'; must be one of megatron, deepspeed"):
        build_engine(replace(JOB, layout=replace(JOB.layout, engine="abacus")))


def test_an_engine_is_its_facts_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "abacus").mkdir()
    (tmp_path / "abacus" / "engine.py").write_text("def build(job):\n    return 'made for', job\n")
    facts = type("Abacus", (type(ENGINES["megatron"]),), {"name": "abacus"})
    monkeypatch.setitem(ENGINES, "abacus", facts())
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    job = replace(JOB, layout=replace(JOB.layout, engine="abacus"))
    assert build_engine(job) == ("made for", job)
    assert engine_module("abacus") in Training.preload([job.layout])


def test_only_what_the_layouts_need_is_imported_ahead() -> None:
    plain, compiled = Layout("megatron", 1, 1), Layout("deepspeed", 1, 1, compile=True)
    ranks = ["trainables.rank", engine_module("megatron")]
    compiler = ["torch._inductor.compile_fx", "trainables.hashed"]
    assert Training.preload([plain, plain]) == ranks
    assert Training.preload([plain, compiled]) == [*ranks, engine_module("deepspeed"), *compiler]
    assert Training.preload([replace(plain, precision="fp8")]) == [*ranks, *compiler]


def test_a_trial_is_asked_for_without_torch() -> None:
    modules = ["mailbox", "worker", "training", "engines.deepspeed.configuration"]
    modules += [f"platforms.{name}" for name in ("base", "cpu", "cuda", "rocm")]
    imports = ", ".join(["service.driver", *(f"trainables.{name}" for name in modules)])
    program = f"import sys, {imports}; sys.exit(bool({{'torch', 'deepspeed'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], cwd=Path(engines.__path__[0]).parents[1], check=True)


def test_engines_are_compared_nowhere_but_in_their_own_folders() -> None:
    folder = Path(engines.__path__[0])
    for file in folder.parent.rglob("*.py"):
        if folder not in file.parent.parents:
            assert not re.search(r"engine\s*[!=]=", file.read_text()), file
