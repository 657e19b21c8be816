"""DeepSpeed's replicas have all states each, and reserve what such ranks did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import DATA
from benchmarks.measure.blind import read
from search_spaces.layout import Layout
from search_spaces.memory import estimate
from search_spaces.models import PRESETS, ModelShape
from search_spaces.replay import replayed
from search_spaces.replay.replicas import Replicas
from search_spaces.workload import Workload
from tests.search_spaces.test_replay import MIXTURE, work_of

LLAMA = PRESETS["llama3-8b"]
SHORT = replace(LLAMA, layers=4)
WORKSPACES = 2 * 2**25


def replicas(tensor: int = 1, **settings: Any) -> Layout:
    return replace(Layout("deepspeed", 2 * tensor, 4, tensor_parallel_size=tensor), **settings)


def reserved(layout: Layout, model: ModelShape = SHORT) -> float:
    found = replayed(layout, Workload(model, 2048, layout.global_batch_size))
    assert found is not None
    assert found.most <= found.reserved
    return found.reserved


def test_replicas_that_were_measured() -> None:
    """With full recomputation and without, in one microbatch a step and two, with products split and whole."""
    errors, kinds = [], set()
    for row in read(DATA / "blind_table_4xh200.measured.jsonl.xz"):
        layout = Layout.from_dict(row["config"])
        if layout.engine != "deepspeed" or layout.zero_stage or layout.shard_ranks == 1:
            continue
        work = work_of(row["spec"])
        assert replayed(layout, work) is not None
        gib = max(rank["peak_memory_gib"] for rank in row["full"]["ranks"])
        errors.append(abs(estimate(layout, work).peak_bytes / 2**30 / gib - 1))
        kinds.add((layout.recompute, layout.gradient_accumulation_steps, layout.tensor_parallel_size))
    assert (len(errors), len(kinds)) == (7, 6)
    assert max(errors) < 0.0001


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_between_steps_a_replica_has_its_states_alone(tensor: int, recompute: str) -> None:
    training = Replicas(SHORT, 2048, 2, replicas(tensor, recompute=recompute))
    kinds = ("weight", "first moment", "second moment", "rotary table")
    states = {name for name in training.live if name.startswith(kinds)}
    whole = sum(sum(parameters.values()) for parameters in training.groups.values())
    for _ in range(3):
        training.step()
        assert not any(training.of_blocks.values())
        assert set(training.live) == states | {"workspace", "workspace of backward passes"}
        assert training.allocator.used == pytest.approx(12 * whole + WORKSPACES, rel=0.001)


def test_more_recomputation_and_fewer_tokens_need_less() -> None:
    for tensor in (1, 2):
        full, none = (
            reserved(replicas(tensor, recompute=mode, micro_batch_size=2), LLAMA) for mode in ("full", "none")
        )
        assert full < none
        assert reserved(replicas(tensor), LLAMA) < none


class Noting(Replicas):
    def _send(self, gradients: Sequence[int]) -> None:
        self.sent = [*getattr(self, "sent", []), list(gradients)]
        before = self.allocator.most
        self.allocator.most = 0
        super()._send(gradients)
        self.copied = [*getattr(self, "copied", []), self.allocator.most > 0]
        self.allocator.most = max(before, self.allocator.most)


def test_buckets_are_filled_in_the_order_of_the_model() -> None:
    """Each is full once it has more than its size; what is one gradient is not copied."""
    training = Noting(SHORT, 2048, 1, replicas())
    training.step()
    every = [count for parameters in training.groups.values() for count in parameters.values()]
    assert [count for bucket in training.sent for count in bucket] == every
    assert all(sum(bucket) > 500_000_000 >= sum(bucket[:-1]) for bucket in training.sent[:-1])
    assert training.copied == [len(bucket) > 1 for bucket in training.sent]
    assert training.copied[0] is False, "the token table"


@pytest.mark.parametrize("change", [{"compile": True}, {"recompute": "selective"}, {"context_parallel_size": 2}])
def test_other_replicas_have_the_formula(change: dict[str, object]) -> None:
    layout = replicas(num_gpus=4)
    assert reserved(layout)
    assert replayed(replace(layout, **change), Workload(SHORT, 2048, 4)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [PRESETS["gpt3-1.3b"], MIXTURE, replace(SHORT, tie_embeddings=True)])
def test_replicas_of_other_models_have_the_formula(model: ModelShape) -> None:
    assert replayed(replicas(), Workload(model, 2048, 4)) is None
