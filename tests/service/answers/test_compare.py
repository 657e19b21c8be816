"""Searches held against each other, on records whose answers are known by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from search_spaces.layout import Layout
from service import InputError, NoAnswerError, Wattune
from service.answers.candidates import Candidate
from service.answers.change import Change, Value, change, comparable
from service.answers.compare.causes import Cause, matched
from service.answers.compare.comparing import Compared, compare, in_words, text
from service.answers.compare.figures import FIGURES, Rates, rates
from service.answers.compare.scale import scalings, split_of
from service.answers.compare.sides import Side
from service.answers.page import comparison
from service.answers.page.table import Table
from service.answers.page.theme import ALONE
from service.cli import main
from service.home import Home
from service.metrics import DIRECTIONS, Method
from service.record.exported import read
from service.record.results import TrialRecord
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from telemetry.samples import SCHEMA
from telemetry.windows.trial import summarise
from tests.service.records import problem, search, trial
from trainables.status import Status

TWO = {name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token")}
PLAIN = Layout("megatron", 4, 32, zero_stage=1, sequence_parallel=False)
TENSOR = replace(PLAIN, tensor_parallel_size=4, zero_stage=0)
WIDE = replace(PLAIN, num_gpus=8)
STEP = {
    "breakdown_span_s": 1.0,
    "breakdown_matmul_s": 0.5,
    "breakdown_attention_s": 0.1,
    "breakdown_exposed_communication_s": 0.2,
    "breakdown_idle_s": 0.05,
}


def ran(layout: Layout, per_gpu: float, joules: float | None = None, **metrics: float) -> TrialRecord:
    energy = {} if joules is None else {"joules_per_token": joules}
    speed = {"tokens_per_s": per_gpu * layout.num_gpus, "tokens_per_s_per_gpu": per_gpu}
    made = trial(f"{layout.label} {per_gpu}")
    return replace(made, layout=layout, label=layout.label, metrics=speed | energy | metrics)


def side(name: str, *trials: TrialRecord, rates: Rates | None = None, **facts: Any) -> Side:
    made = search(*trials, objectives=TWO)
    known = {"accelerator": "h100", "nodes": 1, "gpus_per_node": 4, "sequence_length": 64} | facts
    return Side(name, replace(made, id=name, params=made.params | known), rates or Rates())


def samples() -> pa.Table:
    """Of two GPUs, at times that are not regular. Between 0 and 2 s the first draws 100 W, then rises to 500 W from 0.4
    to 1.2 s: 40 + 240 + 400 J. The second draws 200 W: 400 J. Its clock is 1,000 MHz, then 2,000 from 0.4 s on."""
    ticks = ((-0.5, 100), (0.0, 100), (0.4, 100), (1.2, 500), (2.0, 500), (2.5, 500))
    rows = [
        {"time_ns": 10**12 + round(second * 1e9), "node": "n", "device": f"GPU-{index}", "index": index}
        | {"kind": "nvidia", "power_w": [float(watts), 200.0][index], "gpu_temp_c": [50.0 + watts / 20, 60.0][index]}
        | {"sm_clock_mhz": [1500.0, 1000.0][index]}
        for second, watts in ticks
        for index in (0, 1)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def recorded(home: Home, name: str, accelerator: str, layouts: dict[Layout, float]) -> str:
    """A search in the record, of trials of 2 s and 1,000 tokens times a factor, with the samples above."""
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search(name, problem(cluster={"gpus_per_node": 2, "accelerator": accelerator}), {"torch": name})
    summary = summarise(samples(), 10**12, 10**12 + 2 * 10**9, ["GPU-0", "GPU-1"])
    assert summary.energy_j is not None
    for number, (layout, factor) in enumerate(layouts.items()):
        tokens = 1000 * factor
        speed = {"tokens_per_s": tokens / 2, "tokens_per_s_per_gpu": tokens / 4}
        metrics = summary.metrics() | speed | {"joules_per_token": summary.energy_j / tokens}
        tracker.start_trial(f"t{number}", layout)
        tracker.finish_trial(TrialResult(f"t{number}", layout, Status.OK, metrics=metrics), samples())
    tracker.finish_search("finished", {})
    return name


SMALL = Layout("megatron", 2, 16, sequence_parallel=False, precision="fp32")


def test_means_peaks_imbalance_dollars_and_co2_are_those_computed_by_hand(home: Home) -> None:
    a = recorded(home, "a", "h100", {SMALL: 1.0})
    b = recorded(home, "b", "h200", {SMALL: 1.5, replace(SMALL, micro_batch_size=2): 1.2})
    compared = Wattune().compare([a, b], [3.6, 7.2], [0.36], [0.5])
    values = {row.figure.key: [value and value.value for value in row.values] for row in compared.best}
    assert values["tokens_per_s_per_gpu"] == [250.0, 375.0]
    # 1,080 J are 1.08 J a token in A, 0.72 in B.
    assert values["tokens_per_joule"] == pytest.approx([1 / 1.08, 1 / 0.72])
    # A: 3.6 $ / (250 * 3600) = 4e-6 $ a token for GPUs, and 1.08 * 0.36 / 3.6e6 = 1.08e-7 $ for energy.
    # B: 7.2 $ / (375 * 3600) = 5.3333e-6 $, and 0.72 * 0.36 / 3.6e6 = 7.2e-8 $.
    assert values["million_tokens_per_dollar"] == pytest.approx([1 / 4.108, 1 / (7.2 / 1.35 + 7.2e-2)])
    # 3.6e6 / (1.08 * 0.5) and 3.6e6 / (0.72 * 0.5).
    assert values["million_tokens_per_kg_co2"] == pytest.approx([6.666666667, 10])
    (pair,) = compared.matched
    counters = pair.to_dict()["counters"]
    assert pair.one.metrics["mean_power_w"] == pytest.approx(540.0)  # the mean of the readings is 483 W
    assert pair.one.metrics["power_spread_w"] == pytest.approx(140.0)
    assert counters["peak_gpu_temp_c"] == [75.0, 75.0]
    assert counters["sm_clock_spread_mhz"] == [500.0, 500.0]
    assert counters["gpu_temp_spread_c"] == pytest.approx([7.0, 7.0])  # 67 degC on average, by time, against 60
    assert str(pair.changes["tokens_per_s_per_gpu"]) == "+50.0%"
    assert compared.differences["torch"] == ("a", "b")
    assert compared.differences["memory bandwidth (TB/s, data sheet)"] == ("3.35", "4.8")
    told = text(compared)
    assert "0.2434 at 3.6 $/GPU-hour + 0.36 $/kWh" in told
    assert "6.667 at 0.5 kg/kWh" in told


def test_rates_are_the_users_alone() -> None:
    pair = [side("a", ran(PLAIN, 100.0, 0.1)), side("b", ran(PLAIN, 120.0, 0.1))]
    assert {row.figure.key for row in compare(pair).best} == {"tokens_per_s_per_gpu", "tokens_per_joule"}
    assert rates([], [0.1], [], 2) == [Rates(kwh=0.1)] * 2
    assert rates([1.0, 2.0], [], [], 2) == [Rates(1.0), Rates(2.0)]
    for wrong in ([0.0], [-1.0], [float("nan")], [float("inf")]):
        with pytest.raises(InputError, match=r"price-per-gpu-hour: \S+ is not above 0"):
            rates(wrong, [], [], 2)
    with pytest.raises(InputError, match=r"co2-per-kwh: give it once, or once for each of the 3 searches, not 2 times"):
        rates([], [], [1.0, 1.0], 3)


def test_changes_have_the_interval_of_the_ratio_and_none_between_unlike_doubts() -> None:
    made = change(Value(120.0, 2.4), Value(100.0, 1.0))
    assert made.share == pytest.approx(0.2)
    assert made.half_width == pytest.approx(1.2 * (0.02**2 + 0.01**2) ** 0.5)
    assert made.sure
    assert not Change(0.01, 0.02).sure
    assert change(Value(120.0), Value(100.0, 1.0)).half_width is None
    assert comparable(Value(1.0, None, Method.ESTIMATED), Value(1.0, None, Method.COUNTER)) is None
    estimated = side("a", replace(ran(PLAIN, 1.0, 1.0), methods={"joules_per_token": Method.ESTIMATED}))
    compared = compare([estimated, side("b", ran(PLAIN, 1.0, 1.0))])
    joules = next(row for row in compared.best if row.figure.key == "tokens_per_joule")
    assert joules.changes == (None,)
    assert "tokens for a joule: measured and estimated values are not compared" in compared.notices


def test_a_layout_that_was_measured_again_has_an_interval_in_dollars() -> None:
    again = [replace(ran(PLAIN, speed, 0.1), purpose=Purpose.FINALIST, trial_id=f"{speed}") for speed in (99, 100, 101)]
    paid = side("a", *again, rates=Rates(gpu_hour=1.0))
    dollars = next(figure for figure in FIGURES if figure.key == "million_tokens_per_dollar")
    (one,) = paid.comparison.results
    value = paid.value(dollars, one)
    assert value is not None
    assert value.value == pytest.approx(0.36)
    assert value.half_width == pytest.approx(0.0036 * 4.3027 / 3**0.5, rel=1e-4)  # t(2) * 1 / sqrt(3)


def broken_down(per_gpu: float, clock: float | None = None, **parts: float) -> TrialRecord:
    counters = {} if clock is None else {"mean_sm_clock_mhz": clock}
    return ran(PLAIN, per_gpu, **(STEP | {f"breakdown_{name}": value for name, value in parts.items()}), **counters)


def cause_of(one: TrialRecord, other: TrialRecord, **facts: Any) -> tuple[Cause | None, tuple[str, ...]]:
    (pair,) = matched([side("a", one), side("b", other, **facts)])
    return pair.cause, pair.untold


def test_a_step_is_divided_into_clock_chip_memory_fabric_and_waiting() -> None:
    slower = broken_down(80.0, 1200.0, span_s=1.4, matmul_s=0.7, exposed_communication_s=0.3, idle_s=0.1)
    cause, untold = cause_of(broken_down(100.0, 1500.0), slower)
    assert untold == ()
    assert cause is not None
    # 0.6 s of products and attention take 0.75 s at four fifths of the clock; they took 0.8 s.
    assert cause.clock is not None
    assert cause.clock == pytest.approx(0.15)
    assert cause.chip == pytest.approx(0.05)
    assert cause.memory == pytest.approx(0.2 - 0.15)
    assert cause.fabric == pytest.approx(0.1)
    assert cause.waiting == pytest.approx(0.05)
    assert cause.step_s == pytest.approx(0.4)
    assert cause.clock + cause.chip + cause.memory + cause.fabric + cause.waiting == pytest.approx(cause.step_s)


def test_what_cannot_be_told_of_a_difference_is_said() -> None:
    known = broken_down(100.0, 1500.0)
    cause, untold = cause_of(known, ran(PLAIN, 80.0))
    assert cause is None
    assert untold == (
        "clock: no mean SM clock in b",
        "memory, fabric and waiting: no breakdown of a step (measurement.breakdown) in b",
    )
    cause, untold = cause_of(known, broken_down(80.0, 1500.0, matmul_s=0.6, span_s=1.1), accelerator="mi300x")
    assert cause is not None
    assert cause.clock is None
    assert cause.chip == pytest.approx(0.1)
    assert untold == ("clock: a cycle of h100 and of mi300x is not the same work",)
    of_h200, _ = cause_of(known, broken_down(80.0, 1000.0), accelerator="h200")
    assert of_h200 is not None
    assert of_h200.clock == pytest.approx(0.3)  # the same peak by their data sheets


def test_up_or_out_is_answered_for_each_way_to_split() -> None:
    assert split_of(TENSOR) == "megatron tp4 zero0"
    small = side("a", ran(PLAIN, 100.0, 0.2), ran(TENSOR, 90.0), accelerator="h200")
    large = side(
        "b",
        ran(WIDE, 80.0, 0.1),
        ran(replace(WIDE, micro_batch_size=2), 85.0, 0.3),
        ran(replace(TENSOR, num_gpus=8), 1),
    )
    found = {one.split: one for one in scalings([small, large])}
    assert set(found) == {"megatron zero1", "megatron tp4 zero0"}
    one = found["megatron zero1"]
    assert (one.up.machine, one.out.machine) == ("4 x h200 on 1 node", "8 x h100 on 2 nodes")
    assert one.out.candidate.layout.micro_batch_size == 2
    assert one.answer == (
        "megatron zero1: out (8 x h100 on 2 nodes) is ahead in throughput (+70.0% from up to out); up (4 x h200 on 1 "
        "node) is ahead in throughput per GPU (-15.0% from up to out), tokens for a joule (-33.3% from up to out)."
    )


@pytest.mark.parametrize(
    ("facts", "layout", "expected"),
    [
        ({}, WIDE, 1),
        ({"gpus_per_node": 8}, WIDE, 0),  # more of the same GPUs on one node
        ({"gpus_per_node": 8, "accelerator": "a100"}, WIDE, 1),
        ({"gpus_per_node": 8, "accelerator": "h200"}, WIDE, 0),  # more of bigger ones
        ({"sequence_length": 128}, WIDE, 0),
        ({"model": "another"}, WIDE, 0),
        ({}, replace(WIDE, global_batch_size=64), 0),
        ({}, replace(WIDE, zero_stage=3), 0),
        ({"accelerator": None}, WIDE, 0),
    ],
)
def test_only_the_same_work_on_more_nodes_or_other_gpus_is_up_or_out(
    facts: dict[str, Any], layout: Layout, expected: int
) -> None:
    first = side("a", ran(PLAIN, 100.0, 0.2), gpus_per_node=facts.get("gpus_per_node", 4))
    assert len(scalings([first, side("b", ran(layout, 80.0), **facts)])) == expected


def test_other_models_and_unknown_machines_are_told() -> None:
    compared = compare([side("a", ran(PLAIN, 1.0)), side("b", ran(PLAIN, 1.0), model="b", accelerator=None)])
    assert "model or sequence_length is not the same" in compared.notices[0]
    assert "b: up or out cannot be told, as its GPUs and nodes are not known" in compared.notices


def test_less_than_two_searches_the_same_twice_and_empty_ones_are_refused() -> None:
    one = side("a", ran(PLAIN, 1.0))
    with pytest.raises(InputError, match="give two searches or more"):
        compare([one])
    with pytest.raises(InputError, match="a is given twice"):
        compare([one, one])
    nothing = trial("x", tokens_per_s=1.0)
    with pytest.raises(NoAnswerError, match="no search has any of tokens_per_s_per_gpu, mfu"):
        compare([side("a", nothing), side("b", nothing)])
    with pytest.raises(NoAnswerError, match="b: no trial of it came to a result"):
        compare([one, side("b", replace(ran(PLAIN, 1.0), status="oom"))])


def full() -> Compared:
    one = broken_down(100.0, 1500.0)
    a = side("a", one, ran(TENSOR, 90.0, 0.3), rates=Rates(2.5, None, 0.35))
    other = broken_down(120.0, 1200.0, matmul_s=0.4, span_s=0.9)
    b = side("b", other, ran(TENSOR, 95.0, 0.2), ran(WIDE, 70.0), rates=Rates(3.0, None, 0.1), accelerator="h200")
    return compare([a, b, side("c", ran(TENSOR, 80.0, 0.3))])


def test_every_table_of_the_page_has_what_the_comparison_says() -> None:
    compared = full()
    tables = {section.key: section.table(compared) for section in comparison.SECTIONS}
    assert all(isinstance(table, Table) for table in tables.values())
    best = tables["best"]
    assert isinstance(best, Table)
    assert [row["rate"] for row in best.rows if row["figure"] == "million_tokens_per_dollar"] == [
        "2.5 $/GPU-hour",
        "3 $/GPU-hour",
    ]
    causes = tables["causes"]
    assert isinstance(causes, Table)
    (row,) = causes.rows
    assert row["clock"] == pytest.approx(150.0)
    assert row["step"] == pytest.approx(-100.0)


@pytest.mark.parametrize("section", comparison.SECTIONS, ids=lambda section: section.key)
def test_every_figure_is_drawn_with_all_its_rows(section: Any) -> None:
    from service.answers.page import draw

    table = section.table(full())
    drawn = draw.svg(section.draw(table, ALONE), ALONE)
    for name in {row.get("search") or row.get("other") or row["layout"] for row in table.rows}:
        assert name in drawn


def test_the_page_loads_nothing_and_escapes_names() -> None:
    compared = full()
    named = replace(compared.sides[0], name="<a>")
    page = comparison.html(compare([named, *compared.sides[1:]]))
    assert "&lt;a&gt; against b" in page
    assert "<a>" not in page
    assert "<script" not in page
    assert "src=" not in page


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_the_command_compares_searches_and_files(home: Home, tmp_path: Path) -> None:
    for name, accelerator in (("a", "h100"), ("b", "h200")):
        recorded(home, name, accelerator, {SMALL: 1.0})
    exported, page = tmp_path / "elsewhere.json", tmp_path / "page.html"
    exported.write_text(call("trials", "b", "--json").stdout)
    assert read(exported).trials == Wattune().trials("b") or list(read(exported).trials) == Wattune().trials("b")
    answer = json.loads(call("compare", "a", str(exported), "b", "--price-per-gpu-hour", "2", "--json").stdout)
    assert [one["name"] for one in answer["searches"]] == ["a", "elsewhere", "b"]
    assert answer["best"]["million_tokens_per_dollar"]["values"][1]["value"] == pytest.approx(0.45)
    assert answer["matched"][0]["config"] == SMALL.to_dict()
    assert call("compare", "a", "b", "--html", str(page)).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "<h2>In short</h2>" in page.read_text()
    assert call("compare", "a", "b", "--figures", str(tmp_path / "drawn")).exit_code == 0
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == {
        f"{key}.{kind}" for key in ("best", "layouts") for kind in ("svg", "png")
    }
    exported.write_text("[1]")
    refused = {
        ("compare", "a"): "give two searches or more",
        ("compare", "a", "none-such"): "none-such",
        ("compare", "a", str(exported)): "is not what `wattune trials SEARCH --json` or",
        ("compare", "a", "b", "--co2-per-kwh", "0"): "co2-per-kwh: 0 is not above 0",
        ("compare", "a", "b", "--price-per-kwh", "x"): "price-per-kwh",
        ("compare", "a", "b", "--html", str(tmp_path / "no" / "page.html")): "cannot be written",
    }
    for arguments, words in refused.items():
        result = call(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert words in result.stderr


def test_without_the_package_that_draws_the_command_names_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        recorded(home, name, "h100", {SMALL: 1.0})
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    for option in ("--html", "--figures"):
        refused = call("compare", "a", "b", option, str(tmp_path / "out"))
        assert refused.exit_code == 2
        assert refused.stderr == "wattune: figures need another package: pip install 'wattune[report]'\n"
    assert not (tmp_path / "out").exists()
    assert call("compare", "a", "b").exit_code == 0


def test_a_comparison_reads_like_this() -> None:
    told = text(full())
    assert "what differs" in told
    assert "b against a" in told
    assert "Up or out, by how the model is split:" in told
    counters = next(line for line in told.splitlines() if "1,500 > 1,200" in line)
    assert counters.startswith("megatron 4gpu dp4 zero1 mbs1: b ")
    assert "b: clock: no mean SM clock in a and b, in 1 of 3 alike layouts" in told


def test_in_short_each_search_is_held_against_the_first_in_words() -> None:
    again = [replace(ran(PLAIN, speed), purpose=Purpose.FINALIST, trial_id=f"{speed}") for speed in (99, 100, 101)]
    paid = Rates(gpu_hour=2.0)
    told = in_words(compare([side("a", *again, rates=paid), side("b", ran(PLAIN, 150.0), rates=paid)]))
    assert told == [
        "Throughput per GPU: 150 tokens/s in b against 100.0 ± 2.5 in a, +50.0%.",
        "Tokens for a dollar: 0.27 million tokens/$ at 2 $/GPU-hour in b against 0.1800 ± 0.0045 at 2 $/GPU-hour in a, "
        "+50.0%.",
    ]
    others = [replace(one, metrics=one.metrics, trial_id=f"b{one.trial_id}") for one in again]
    (level, *_) = in_words(compare([side("a", *again), side("b", *others)]))
    assert level.endswith("+0.0% ± 3.5%, no more than chance may make of it.")


def test_searches_go_by_their_names_where_these_differ(home: Home) -> None:
    for name in ("a", "b"):
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(f"{name}-2026", replace(problem(), name=name), {})
        tracker.start_trial("t", SMALL)
        tracker.finish_trial(TrialResult("t", SMALL, Status.OK, metrics={"tokens_per_s_per_gpu": 1.0}))
    assert [one.name for one in Wattune().compare(["a", "b"]).sides] == ["a", "b"]


def test_candidates_beyond_a_searchs_constraints_are_no_best() -> None:
    a = side("a", ran(PLAIN, 100.0, peak_memory_gib=90.0), ran(TENSOR, 50.0, peak_memory_gib=10.0))
    limited = replace(a, search=replace(a.search, constraints=("peak_memory_gib<=80",)))
    best = [one for one in compare([limited, side("b", ran(PLAIN, 1.0))]).best[0].layouts if isinstance(one, Candidate)]
    assert [one.layout for one in best] == [TENSOR, PLAIN]
