"""Collectives are measured by a gang's ranks: in which groups, what comes of it, and when it ends."""

from __future__ import annotations

import pytest

from search_spaces.layout import Layout
from search_spaces.network import Collective, Curve
from tests.trainables.conftest import RunRanks
from trainables.collectives import KINDS, Collectives, groupings
from trainables.measure import Procedure
from trainables.program import TrialRequest

SIZES = (2**10, 2**14, 2**20)


def measured(run_ranks: RunRanks, name: str, ranks: int, program: Collectives) -> list[tuple[Curve, ...]]:
    """The curves that each rank reports."""
    layout = Layout("megatron", ranks, 8)
    outcomes = run_ranks(TrialRequest(name, layout, program, Procedure(2, 0.5, 1, 1, 1), deadline_s=120))
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * ranks
    return [outcome.report.curves for outcome in outcomes if outcome.report is not None]


def test_all_kinds_are_measured_in_groups_of_all_sizes(run_ranks: RunRanks) -> None:
    """With three ranks, one is left over by groups of two, and all three are a group."""
    curves, *others = measured(run_ranks, "collectives", 3, Collectives(SIZES, budget_s=100))
    assert others == [curves] * 2
    assert [(curve.kind, curve.ranks, curve.together) for curve in curves] == [
        (kind, size, size) for size in (2, 3) for kind in KINDS if (kind, size) != (Collective.SEND, 3)
    ]
    for curve in curves:
        assert curve.sizes == SIZES
        assert min(*curve.seconds, *curve.beside_s) > 0
        assert min(curve.slowed) >= 0


def test_what_has_not_begun_in_time_is_left_out(run_ranks: RunRanks) -> None:
    assert measured(run_ranks, "no-time", 2, Collectives(SIZES, budget_s=0)) == [()] * 2


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0], []),
        ([0, 0], [[(0, 1)]]),
        ([0] * 6, [[(0, 1), (2, 3), (4, 5)], [(0, 1, 2, 3)], [(0, 1, 2, 3, 4, 5)]]),
        (
            [0, 0, 1, 1],
            [[(0, 1), (2, 3)], [(0, 1, 2, 3)], [(0, 2), (1, 3)]],  # within nodes, all, one of each
        ),
    ],
)
def test_groups_lie_within_nodes_and_across(nodes: list[int], expected: list[list[tuple[int, ...]]]) -> None:
    assert list(groupings(nodes)) == expected
