from __future__ import annotations

from search_spaces.layout import Layout
from service.answers.candidates import Candidate
from service.answers.tables import breakdown_table, candidates_table
from service.result import Purpose
from tests.service.records import CONFIG, search

TP = Layout("megatron", 2, 16, tensor_parallel_size=2)


def measured(layout: Layout, **metrics: float) -> Candidate:
    return Candidate(layout, metrics, {}, ())


def test_a_breakdown_is_shown_as_shares_of_the_step() -> None:
    whole = measured(
        CONFIG,
        breakdown_span_s=2.0,
        breakdown_matmul_s=1.0,
        breakdown_attention_s=0.25,
        breakdown_other_s=0.5,
        breakdown_memory_copy_s=0.01,
        breakdown_exposed_communication_s=0.125,
        breakdown_idle_s=0.115,
    )
    table = breakdown_table([whole, measured(TP, tokens_per_s=1.0)])
    assert table is not None
    heading, _, *rows = table.splitlines()
    assert heading.split("  ")[0] == "share of a step"
    assert [row.removeprefix(CONFIG.label).split() for row in rows] == [
        ["50.0%", "12.5%", "25.0%", "0.5%", "6.2%", "5.8%"]
    ]


def test_without_a_breakdown_nothing_is_shown() -> None:
    assert breakdown_table([measured(TP, tokens_per_s=1.0)]) is None


def test_a_table_tells_what_was_measured_again() -> None:
    record = search()
    once = measured(CONFIG, tokens_per_s=50.0)
    again = Candidate(TP, {"tokens_per_s": 100.0}, {}, (), Purpose.FINALIST, {"tokens_per_s": 2.0})
    heads, _, *rows = candidates_table(record, [once, again]).splitlines()
    assert heads.split("  ")[0] == "layout"
    assert "measured" in heads
    assert rows[0].removeprefix(CONFIG.label).split()[:2] == ["once", "50"]
    assert rows[1].removeprefix(TP.label).split()[:5] == ["again,", "0x", "100.0", "±", "2.0"]
    assert "measured" not in candidates_table(record, [once])
