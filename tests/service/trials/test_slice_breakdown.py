"""Where a step's time goes, by hand."""

from __future__ import annotations

from dataclasses import fields

import pytest

from search_spaces.composition import RankTimes, compose
from search_spaces.kinds import kinds
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.network import Network
from search_spaces.schedules import orders
from search_spaces.workload import Workload
from service.trials.figures import breakdown_metrics
from service.trials.slice_breakdown import USUAL_PRODUCTS, by_pipeline_rank, exposed_s, products, unprofiled
from trainables.breakdown import Breakdown

NETWORK = Network("by hand", 8, 1e11, 1e10, 1e-6, 1e-5)
PROFILED = Breakdown(
    **dict.fromkeys((field.name for field in fields(Breakdown)), 0.0)
    | {"span_s": 10.0, "compute_s": 6.0, "matmul_s": 6.0, "idle_s": 1.0}
    | {"communication_s": 4.0, "overlapped_communication_s": 1.0, "exposed_communication_s": 3.0}
    | {"all_reduce_s": 4.0, "exposed_all_reduce_s": 3.0}
)
"""Of a step that took twice as long as without the profiler."""


def test_what_the_profiler_adds_to_a_step_is_idle() -> None:
    own = unprofiled(PROFILED, 9.25)
    assert (own.span_s, own.idle_s, own.matmul_s, own.exposed_all_reduce_s) == (9.25, 0.25, 6.0, 3.0)
    assert unprofiled(PROFILED, 5.0).span_s == 9.0  # kernels took that long, as they also do without it
    assert unprofiled(PROFILED, 11.0) == PROFILED


def test_exposed_communication_keeps_its_share_of_the_step() -> None:
    assert exposed_s(None, 5.0) == {}
    assert {name: seconds for name, seconds in exposed_s(PROFILED, 5.0).items() if seconds} == {"all_reduce": 1.5}


def test_a_rank_that_was_not_profiled_has_the_usual_share_of_products() -> None:
    assert products(PROFILED) == pytest.approx(0.6)
    assert products(None) == USUAL_PRODUCTS > 0


def test_ranks_of_a_pipeline_wait_for_each_other_as_in_send_recv() -> None:
    layout, work = Layout("megatron", 4, 4, pipeline_parallel_size=2), Workload(PRESETS["tiny-llama"], 128, 4)
    times = {
        kind: RankTimes(dict.fromkeys(orders(layout)[kind.pipeline_rank], 1.0 + kind.pipeline_rank), 1.0, 400, 100, 1)
        for kind in kinds(layout, work)
    }
    step = compose(layout, work, times, NETWORK)
    ranks = by_pipeline_rank(step, times, dict.fromkeys(times, PROFILED))
    for rank, waiting, of_kind in zip(ranks, step.waiting_s, times.values(), strict=True):
        assert rank.span_s == pytest.approx(step.step_time_s)
        assert rank.exposed_send_recv_s == rank.send_recv_s == waiting
        assert rank.matmul_s == pytest.approx(0.6 * of_kind.busy_s)
        assert rank.exposed_communication_s == pytest.approx(0.3 * of_kind.busy_s + waiting)
    metrics = breakdown_metrics(ranks)
    assert metrics["breakdown_span_s"] == pytest.approx(step.step_time_s)
    assert metrics["breakdown_max_idle_s"] == pytest.approx(max(0.1 * of_kind.busy_s for of_kind in times.values()))
    assert by_pipeline_rank(step, times, dict.fromkeys(times)) == []
