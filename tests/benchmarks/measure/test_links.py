"""Steps of a pipeline by one group and by links: what playing foretells, and that they run."""

from __future__ import annotations

import pytest

from benchmarks.measure.links import LINKS, ONE_GROUP, foretold_s, layouts, main


def test_links_are_foretold_to_have_interleaved_stages_wait_as_long_as_the_formula_says() -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v m) of the work, and (p - 1) / m with one stage a rank."""
    seconds = {name: foretold_s(name, layout, 1.0) for name, layout in layouts(4, 2, 8).items()}
    assert seconds["1f1b"] == pytest.approx(24 * (1 + 3 / 8))
    assert seconds[LINKS] == pytest.approx(24 * (1 + 3 / 16))
    assert seconds[ONE_GROUP] > seconds["1f1b"]


@pytest.mark.slow
def test_each_way_is_measured_beside_what_is_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "2", "--microbatches", "4", "--pass-ms", "5", "--steps", "1"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == [
        "1f1b",
        f"interleaved_1f1b, {ONE_GROUP}",
        f"interleaved_1f1b, {LINKS}",
    ]
    for row in rows:
        _, seconds, played, *_ = row.rsplit(maxsplit=4)
        assert float(seconds) > 0.9 * float(played) > 0
