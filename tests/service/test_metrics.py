"""What is known of metrics: the documentation says it as the table does, and values are printed by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.metrics import METRICS, TABLE, Direction, Doubt, Method, Part, heading, known, made_of, number, with_unit
from service.sampling.drift import NOISE
from service.trials.extrapolation import OVER_BATCH, OVER_DEPTH

DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()


def section(title: str) -> str:
    """The documentation's section of this title, up to the next."""
    return DOCUMENTATION.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_documentation_has_the_metrics_of_the_table_in_its_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Metrics"), re.MULTILINE)
    assert rows == [(metric.name, metric.unit) for metric in TABLE if metric.aim]


@pytest.mark.parametrize(
    ("title", "beginning", "names"),
    [("Short trials", "From the line come", OVER_BATCH), ("Depth proxies", "From it come", OVER_DEPTH)],
)
def test_the_documentation_names_what_follows_from_smaller_runs(
    title: str, beginning: str, names: tuple[str, ...]
) -> None:
    sentence = re.search(rf"{beginning}\s((?:`\w+`(?:,|\s|and)*)+)".replace(" ", r"\s"), section(title))
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) - {"short"} == set(names)


def test_the_documentation_names_what_the_sentinel_is_held_against() -> None:
    assert list(NOISE) == ["tokens_per_s", "joules_per_token"]
    assert "`sentinel_drift_` with\n`tokens_per_s` and `joules_per_token`" in DOCUMENTATION


def test_a_metric_has_one_row() -> None:
    assert len({metric.name for metric in TABLE}) == len(TABLE)
    assert known("tokens_per_s") is TABLE[0]
    assert not known("colour").aim


def test_what_is_made_of_a_step_has_a_bound_in_the_better_direction_alone() -> None:
    bounded = [name for name in METRICS for way in Direction if known(name).bounded(way)]
    floors = ["idle_energy_j", "throttle_ratio", "power_cap_ratio", "throttle_time_s"]
    assert bounded == [*made_of(Part.TIME, Part.ENERGY), *floors]
    assert not known("tokens_per_s").bounded(Direction.MINIMIZE)


def test_the_least_doubted_come_first() -> None:
    doubts = {method: Doubt.of(method) for method in Method}
    assert doubts.pop(Method.EXTRAPOLATED) is Doubt.EXTRAPOLATED
    assert doubts.pop(Method.ESTIMATED) is Doubt.ESTIMATED
    assert doubts.pop(Method.SLICE) is Doubt.SLICED
    assert {*doubts.values(), Doubt.of(None)} == {Doubt.MEASURED}
    assert Doubt.MEASURED < Doubt.SLICED < Doubt.EXTRAPOLATED < Doubt.ESTIMATED


@pytest.mark.parametrize(
    ("metric", "value", "half_width", "shown"),
    [
        ("tokens_per_s", 10452.3, 21.4, "10,452 ± 21"),
        ("tokens_per_s", 10452.3, 213.0, "10,452 ± 213"),
        ("tokens_per_s", 10452.34, 2.14, "10,452.3 ± 2.1"),
        ("joules_per_token", 0.066123, 0.000121, "0.06612 ± 0.00012"),
        ("throttle_ratio", 0.0123, 0.004, "1.23% ± 0.40%"),
        ("throttle_ratio", 0.0, 0.0, "0.00%"),
        ("tokens_per_s", 10452.3, None, "10,452"),
    ],
)
def test_an_interval_has_two_digits(metric: str, value: float, half_width: float | None, shown: str) -> None:
    assert number(metric, value, None, half_width) == shown
    assert number(metric, value, Method.ESTIMATED, half_width) == shown + "*"


def test_a_metric_that_nobody_knows_goes_by_its_name() -> None:
    assert heading("colour") == "colour"
    assert with_unit("colour", 0.123456, Method.EXTRAPOLATED) == "0.1235~ colour"
