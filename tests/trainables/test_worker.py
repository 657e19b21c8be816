"""What a worker settles before its first trial."""

from __future__ import annotations

import os

import pytest
import ray

from search_spaces.hardware import ACCELERATORS
from trainables.platforms.base import platform_of
from trainables.worker import compile_threads


@pytest.mark.parametrize(("gpus", "cores", "threads"), [(2, 32, 15), (8, 128, 15), (8, 4, 1), (1, 1, 1)])
def test_ranks_compile_on_their_share_of_the_nodes_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, threads: int
) -> None:
    nodes = [{"NodeID": "other", "Resources": {"GPU": 64.0}}, {"NodeID": "mine", "Resources": {"GPU": float(gpus)}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert compile_threads(platform_of(ACCELERATORS["h200"]), "mine") == threads
