"""How what is measured of a trial's course is cut."""

from __future__ import annotations

from benchmarks.measure.settling import stretches, table


def test_stretches_are_whole_steps_in_a_row_and_none_is_too_short() -> None:
    assert list(stretches([0.8, 0.8, 2.0, 0.6, 0.6, 0.6, 1.0])) == [(0, 2), (2, 3), (3, 6)]
    assert list(stretches([0.5])) == []


def test_figures_are_told_relative_to_the_last_stretch_that_all_layouts_have() -> None:
    def stretch(begin_s: float, step_s: float) -> dict[str, float]:
        return {"begin_s": begin_s, "step_s": step_s, "clock_mhz": 1000.0, "temperature_c": 50.0}

    rows = [
        {"course": [stretch(0.0, 1.1), stretch(2.0, 1.0), stretch(4.0, 9.0)]},
        {"course": [stretch(0.0, 2.0), stretch(3.0, 2.0)]},
    ]
    first, last = table(rows).splitlines()[2:]
    assert first.split() == ["0.0", "s", "+5.00%", "+0.00%", "+0.00%"]
    assert last.split()[:3] == ["2.5", "s", "+0.00%"]
