from __future__ import annotations

from pathlib import Path

import pytest
import torch

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from trainables import engines
from trainables.engines.base import Job
from trainables.engines.build import build_engine


def job(engine: str) -> Job:
    return Job(Layout(engine, 1, 4), PRESETS["tiny-llama"], 32, seed=0, rank=0, device=torch.device("cpu"))


def test_an_engine_that_nobody_registered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown engine 'abacus'"):
        build_engine(job("abacus"))


def test_no_engine_is_known_outside_its_own_folder() -> None:
    room = Path(engines.__path__[0]).parent
    for file in room.rglob("*.py"):
        if room / "engines" not in file.parent.parents:
            assert "megatron" not in file.read_text(), file
