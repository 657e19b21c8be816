"""What can be tried of it without GPUs."""

from __future__ import annotations

from benchmarks.measure.drawn import table


def test_a_row_is_a_way_and_a_rank() -> None:
    found = [("all_gather of 16 MiB, alone", [[0.0011, 260.0, 0.001, 230.0], [0.0012, 250.0, 0.001, 255.0]])]
    first, second = table(found).splitlines()[-2:]
    assert first.split()[5:] == ["0", "1.100", "1.000", "260", "230", "+10.0%", "+30"]
    assert second.split()[5:] == ["1", "1.200", "1.000", "250", "255", "+20.0%", "-5"]
