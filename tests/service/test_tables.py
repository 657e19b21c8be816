from __future__ import annotations

from service.results import TrialRecord
from service.tables import breakdown_table


def trial(label: str, **metrics: float) -> TrialRecord:
    return TrialRecord(label, label, {}, "ok", None, metrics, {}, "run")


def test_a_breakdown_is_shown_as_shares_of_the_step() -> None:
    measured = trial(
        "dp2",
        breakdown_span_s=2.0,
        breakdown_matmul_s=1.0,
        breakdown_attention_s=0.25,
        breakdown_other_s=0.5,
        breakdown_memory_copy_s=0.01,
        breakdown_exposed_communication_s=0.125,
        breakdown_idle_s=0.115,
    )
    table = breakdown_table([measured, trial("pp2", tokens_per_s=1.0)])
    assert table is not None
    heading, _, *rows = table.splitlines()
    assert heading.split("  ")[0] == "share of a step"
    assert [row.split() for row in rows] == [["dp2", "50.0%", "12.5%", "25.0%", "0.5%", "6.2%", "5.8%"]]


def test_without_a_breakdown_nothing_is_shown() -> None:
    assert breakdown_table([trial("dp2", tokens_per_s=1.0)]) is None
