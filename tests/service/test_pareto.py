from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from service import pareto


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


shapes = st.tuples(st.integers(1, 40), st.integers(1, 4))
few_values = st.integers(-3, 3).map(float)
any_values = st.floats(allow_nan=False, allow_infinity=False)


@given(shapes.flatmap(lambda shape: hnp.arrays(float, shape, elements=st.one_of(few_values, any_values))))
def test_a_row_is_on_the_front_exactly_if_no_row_dominates_it(costs: np.ndarray) -> None:
    front = pareto.pareto_front(costs)
    assert sorted(front) == [i for i, row in enumerate(costs) if not any(dominates(other, row) for other in costs)]
    assert [tuple(costs[i]) for i in front] == sorted(tuple(costs[i]) for i in front)


def test_no_rows_have_no_front_and_no_volume() -> None:
    assert pareto.pareto_front(np.array([])) == []
    assert pareto.hypervolume(np.empty((0, 2)), np.ones(2)) == 0


@given(
    st.tuples(st.integers(1, 8), st.integers(1, 4)).flatmap(
        lambda shape: hnp.arrays(float, shape, elements=st.integers(0, 4).map(float))
    )
)
def test_hypervolume_counts_the_unit_cells_that_a_row_dominates(costs: np.ndarray) -> None:
    dimensions = costs.shape[1]
    cells = np.stack(np.meshgrid(*[np.arange(4)] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    dominated = sum(any((row <= cell).all() for row in costs) for cell in cells)
    assert pareto.hypervolume(costs, np.full(dimensions, 4.0)) == dominated


def test_the_knee_is_farthest_from_the_line_between_both_ends() -> None:
    ends_and_bend = np.array([[0.0, 100.0], [1.0, 60.0], [2.0, 10.0], [10.0, 0.0]])
    assert pareto.knee(ends_and_bend) == 2
    assert pareto.knee(ends_and_bend * [1000.0, 0.001]) == 2, "whatever the units"
    assert pareto.knee(ends_and_bend[:1]) == 0
    assert pareto.knee(np.column_stack([ends_and_bend, np.ones(4)])) == 2, "an objective that is the same for all"
