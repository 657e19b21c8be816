"""The page: its tables by hand from a synthetic record, its figures, and that it loads nothing."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from search_spaces.cost import data_sheet
from search_spaces.layout import Layout
from service import InputError, Wattune
from service.answers.findings import findings
from service.answers.page import course, devices, layouts
from service.answers.page.devices import cost_of_slowest
from service.answers.page.evidence import Evidence, Trace, foretold, gather, mean_over_time
from service.answers.page.sections import SECTIONS
from service.answers.page.table import Lacking, Table, metric_column
from service.answers.page.theme import ALONE
from service.answers.page.trial import picture, together
from service.cli import main
from service.home import Home
from service.metrics import DIRECTIONS, Method
from service.problem import Problem
from service.record.results import Results
from service.record.tracking import Tracker
from service.result import NodeWindow, Purpose, RankRecord, TrialResult
from telemetry.samples import SCHEMA
from tests.service.records import STARTED, problem, search, trial
from trainables.breakdown import break_down
from trainables.status import Status

TWO = {name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token")}
FAST = Layout("megatron", 4, 16, pipeline_parallel_size=2, zero_stage=1, sequence_parallel=False, precision="fp32")
FRUGAL = replace(FAST, micro_batch_size=2)
SLOW = replace(FAST, recompute="full")
START = 10**12
GPUS = {"GPU-a0": (0, 0), "GPU-a1": (0, 1), "GPU-b0": (1, 0), "GPU-b1": (1, 1)}
"""Device -> its node and its index there."""

CLOCKS = {"GPU-a0": 1500.0, "GPU-a1": 1600.0, "GPU-b0": 1600.0, "GPU-b1": 1700.0}


def spec() -> Problem:
    return problem(
        cluster={"nodes": 2, "gpus_per_node": 2, "accelerator": "h200"},
        space={
            "pipeline_parallel_size": 2,
            "micro_batch_size": [1, 2],
            "recompute": ["none", "full"],
            "zero_stage": 1,
            "precision": "fp32",
        },
        objectives={name: way.value for name, way in TWO.items()},
        baseline={"micro_batch_size": 1, "recompute": "none"},
    )


def samples() -> pa.Table:
    """Of four GPUs on two nodes, at times that are not regular: power is 100 W at 0 and 0.2 s, 500 W at 1 s."""
    ticks = ((0, 100.0), (200_000_000, 100.0), (1_000_000_000, 500.0))
    rows = [
        {"time_ns": START + since, "node": f"node{node}", "device": device, "index": index, "kind": "nvidia"}
        | {"power_w": watts + 10 * index, "sm_clock_mhz": CLOCKS[device], "gpu_temp_c": 50.0 + 5 * node + watts / 100}
        | {"link_rx_bytes": since * 3, "link_tx_bytes": since}
        for since, watts in ticks
        for device, (node, index) in GPUS.items()
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def ranks(layout: Layout) -> tuple[RankRecord, ...]:
    """Four ranks on two pipeline ranks; the first compute for 0.5 s, the second for 0.4 s."""
    times = {
        stage: break_down(
            ["matmul", "send_recv"],
            np.array([0, 300_000_000]),
            np.array([500_000_000 - 100_000_000 * stage, 600_000_000]),
            1.0,
        )
        for stage in (0, 1)
    }
    return tuple(
        RankRecord(rank, rank, f"node{rank // 2}", device, layout.coordinates(rank), 60.0, times[rank // 2])
        for rank, device in enumerate(GPUS)
    )


def result(number: int, layout: Layout, speed: float, joules: float, **changes: Any) -> TrialResult:
    windows = [
        NodeWindow(f"node{node}", START, START + 10**9, tuple(d for d in GPUS if GPUS[d][0] == node)) for node in (0, 1)
    ]
    return TrialResult(
        f"t{number}",
        layout,
        Status.OK,
        metrics={"tokens_per_s": speed, "joules_per_token": joules, "peak_memory_gib": 60.0, "mean_power_w": 900.0},
        methods={"joules_per_token": Method.COUNTER},
        step_times_s=(0.4, 0.6),
        windows=tuple(windows),
        ranks=ranks(layout),
        **changes,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Home:
    """The state directory of a search of three layouts and a failure, one of them measured again."""
    home = Home(tmp_path_factory.mktemp("page"))
    shutil.copy(empty_database, home.path / "mlflow.db")
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", spec(), {"devices": "NVIDIA H200", "torch": "2.13.0"})
    results = [
        result(0, FAST, 100.0, 2.0),
        result(1, FRUGAL, 90.0, 1.0),
        result(2, SLOW, 80.0, 3.0),
        result(3, FAST, 98.0, 2.0, purpose=Purpose.FINALIST),
        result(4, FAST, 102.0, 2.0, purpose=Purpose.FINALIST),
        replace(
            result(5, replace(SLOW, micro_batch_size=2), 1.0, 1.0),
            status=Status.OOM,
            cause="rank 0 is <full>",
            metrics={},
        ),
    ]
    for one in results:
        tracker.start_trial(one.trial_id, one.layout, one.purpose)
        tracker.finish_trial(one, samples() if one.status == Status.OK else None)
    tracker.finish_search("finished", {})
    return home


@pytest.fixture(scope="module")
def recorded(store: Home) -> Evidence:
    """That search as the store gives it back."""
    results = Results(store.tracking_uri)
    return gather(results, results.search("s1"), spec(), None)


def table(made: Table | Lacking) -> Table:
    assert isinstance(made, Table), made
    return made


def test_means_are_weighted_by_time_and_peaks_are_of_all_gpus(recorded: Evidence) -> None:
    rows = [row for row in table(devices.by_device(recorded)).rows if row["layout"] == FAST.label]
    assert [row["device"] for row in rows] == ["node0 gpu0", "node0 gpu1", "node1 gpu0", "node1 gpu1"]
    # Over 1 s: 0.2 s at 100 W, then from 100 to 500 W within 0.8 s. The mean of the readings would be 233 W.
    assert [row["power_w"] for row in rows] == pytest.approx([260.0, 270.0, 260.0, 270.0])
    assert [row["peak_power_w"] for row in rows] == [500.0, 510.0, 500.0, 510.0]
    assert [row["gpu_temp_c"] for row in rows] == pytest.approx([52.6, 52.6, 57.6, 57.6])
    assert max(row["peak_gpu_temp_c"] for row in rows) == 60.0
    assert [row["link"] for row in rows] == pytest.approx([4.0] * 4), "GB/s, both directions"
    assert "pcie" not in rows[0]
    assert "PCIe traffic" in table(devices.by_device(recorded)).note


def test_a_gap_in_readings_leaves_their_plain_mean() -> None:
    seconds = np.array([0, 1, 4]) * 10**9
    assert mean_over_time(seconds[:2], np.array([1.0, 2.0])) == 1.5
    assert mean_over_time(seconds, np.array([1.0, 2.0, 6.0])) == 3.0


def test_imbalance_and_what_the_slowest_gpu_costs(recorded: Evidence) -> None:
    rows = [row for row in table(devices.imbalance(recorded)).rows if row["layout"] == FAST.label]
    assert [row["clock_mhz"] for row in rows] == [-100.0, 0.0, 0.0, 100.0], "off their mean of 1600 MHz"
    assert [row["warmer_c"] for row in rows] == pytest.approx([-2.5, -2.5, 2.5, 2.5])
    # The finalist's mean of 100 tokens/s would be 1600 / 1500 of it, were it for the slowest clock.
    assert [row["cost"] for row in rows] == pytest.approx([100 * (1600 / 1500 - 1)] * 4)
    assert cost_of_slowest([1500.0, 1500.0]) == 0.0
    assert cost_of_slowest([1500.0, None]) is None


def test_a_step_is_broken_down_by_pipeline_rank(recorded: Evidence) -> None:
    rows = [row for row in table(devices.breakdown(recorded)).rows if row["layout"] == FAST.label]
    assert [(row["rank"], row["ranks"]) for row in rows] == [(0, 2), (1, 2)]
    assert [row["matmul_s"] for row in rows] == pytest.approx([0.5, 0.4])
    assert [row["exposed_communication_s"] for row in rows] == pytest.approx([0.1, 0.2])
    assert [row["overlapped_communication_s"] for row in rows] == pytest.approx([0.2, 0.1])
    assert [row["idle_s"] for row in rows] == pytest.approx([0.4, 0.4])


def test_the_front_has_intervals_and_says_what_is_dominated(recorded: Evidence) -> None:
    rows = {row["layout"]: row for row in table(layouts.front(recorded)).rows}
    assert {label: row["outcome"] for label, row in rows.items()} == {
        FAST.label: "on the front",
        FRUGAL.label: "on the front",
        SLOW.label: "dominated",
    }
    fast = rows[FAST.label]
    assert (fast["tokens_per_s"], fast["trials"]) == (100.0, 2)
    # Student's t of one degree of freedom, 12.706, times s / sqrt(2) = 2.
    assert fast["tokens_per_s_high"] - 100.0 == pytest.approx(12.706 * 2.0, rel=1e-3)
    assert "tokens_per_s_low" not in rows[SLOW.label]


def test_the_other_tables_hold_what_the_record_does(recorded: Evidence) -> None:
    sweep = table(layouts.sweep(recorded)).rows
    assert [(row["micro_batch_size"], row["tokens_per_s"]) for row in sweep] == [(1, 100.0), (2, 90.0)]
    memory = table(layouts.memory(recorded)).rows[0]
    assert memory["measured"] == 60.0
    assert sum(memory[part] for part in layouts.PARTS) == pytest.approx(memory["predicted"])
    assert memory["off"] == pytest.approx(100 * (memory["predicted"] / 60.0 - 1))
    failed = table(course.failures(recorded)).rows
    assert [(row["status"], row["cause"]) for row in failed] == [("oom", "rank 0 is <full>")]
    grown = table(course.growth(recorded)).rows
    assert grown[-1]["share"] == pytest.approx(100.0)
    assert recorded.problem is not None
    assert recorded.problem.baseline_layout == FAST
    time_s = [row["time_s"] for row in table(devices.over_time(recorded)).rows if row["quantity"] == devices.STEP]
    assert time_s == pytest.approx([0.4, 1.0])
    assert isinstance(layouts.predictions(recorded), Lacking)
    assert recorded.left_out == 0


def test_predictions_stand_beside_what_was_measured(recorded: Evidence) -> None:
    predicted = replace(recorded, predicted={FAST: {"tokens_per_s": 110.0, "joules_per_token": 1.5}}, source="a sheet")
    (row,) = table(layouts.predictions(predicted)).rows
    assert (row["tokens_per_s"], row["tokens_per_s_predicted"]) == (100.0, 110.0)
    assert (row["tokens_per_s_off"], row["joules_per_token_off"]) == pytest.approx((10.0, -25.0))
    assert {row["layout"]: row for row in table(layouts.front(predicted)).rows}[FAST.label][
        "tokens_per_s_predicted"
    ] == 110.0


def test_a_record_without_results_has_reasons_in_place_of_tables() -> None:
    bare = Evidence(search(trial("a", status="crash"), objectives=TWO))
    made = {section.key: section.table(bare) for section in SECTIONS}
    assert {key for key, one in made.items() if isinstance(one, Table)} == {"failures"}
    assert all(one.reason.endswith(".") for one in made.values() if isinstance(one, Lacking))


def test_a_page_of_a_trainer_whose_model_is_not_known_says_so(recorded: Evidence) -> None:
    unknown = replace(spec(), model=None, shape=None)
    assert foretold(recorded.search, unknown, data_sheet("h200")).predicted == {}
    lacking = layouts.memory(replace(recorded, problem=unknown))
    assert layouts.setting(Layout.plain("mine", 1, 8).having("threads", 2), "threads") == 2
    assert isinstance(lacking, Lacking)
    assert "trainer's model" in lacking.reason


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.key)
def test_every_axis_of_a_figure_has_its_unit(section: Any, recorded: Evidence) -> None:
    predicted = replace(recorded, predicted={FAST: {"tokens_per_s": 110.0, "joules_per_token": 1.5}})
    spec = section.draw(table(section.table(predicted)), ALONE)
    titles = [channel["title"] for channel in _axes_of(spec) if "title" in channel]
    assert titles or section.key == "axes", "an axis of numbers, which parallel coordinates name by their columns"
    for title in titles:
        assert re.search(r"\(.+\)", " ".join(title) if isinstance(title, list) else title), title


def _axes_of(spec: Any) -> Iterator[dict[str, Any]]:
    """The quantitative channels x, y and color of a figure that are seen."""
    if isinstance(spec, list):
        for part in spec:
            yield from _axes_of(part)
    elif isinstance(spec, dict):
        for key, value in spec.items():
            if key in ("x", "y", "color") and isinstance(value, dict):
                if value.get("type") == "quantitative" and value.get("axis", True) is not None:
                    yield value
            elif key != "data":
                yield from _axes_of(value)


def test_marks_of_what_is_not_measured_are_hollow(recorded: Evidence) -> None:
    first = recorded.search.trials[1]
    guessed = replace(first, methods={"tokens_per_s": Method.SHORT}, metrics=first.metrics)
    others = [one for one in recorded.search.trials if one is not first]
    rows = table(layouts.front(Evidence(replace(recorded.search, trials=(*others, guessed))))).rows
    assert {row["layout"]: row["how"] for row in rows}[FRUGAL.label] == "short"
    assert {row["layout"]: row["how"] for row in rows}[FAST.label] == layouts.MEASURED


def test_labels_are_cut_to_what_differs() -> None:
    assert layouts.short(["megatron dp2 mbs1", "megatron dp2 mbs2"]) == {
        "megatron dp2 mbs1": "mbs1",
        "megatron dp2 mbs2": "mbs2",
    }
    assert layouts.short(["megatron dp2", "megatron dp2 sp"]) == {
        "megatron dp2": "megatron dp2",
        "megatron dp2 sp": "megatron dp2 sp",
    }
    assert layouts.short(["megatron dp2"]) == {"megatron dp2": "megatron dp2"}


def test_columns_are_named_in_words_and_by_their_unit() -> None:
    names = ("tokens_per_s", "joules_per_token", "mean_power_w", "peak_gpu_temp_c", "mean_sm_clock_mhz")
    assert [metric_column(name).heading for name in names] == [
        "throughput (tokens/s)",
        "energy per token (J)",
        "mean power (W)",
        "peak GPU temp (degC)",
        "mean SM clock (MHz)",
    ]


class _Loads(HTMLParser):
    """What a page would load or run, and the ids that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(given[name]) for name in ("src", "href", "xlink:href") if name in given]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []
        self.ids += [str(given["id"])] if "id" in given else []


def test_the_page_loads_nothing_and_holds_every_figure_with_its_numbers(recorded: Evidence) -> None:
    pytest.importorskip("vl_convert")
    from service.answers.page.document import html

    predicted = replace(recorded, predicted={FAST: {"tokens_per_s": 110.0, "joules_per_token": 1.5}})
    page = html(predicted)
    seen = _Loads()
    seen.feed(page)
    assert seen.loads == []
    assert set(re.findall(r"https?://[^\"' <]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in page
    assert len(seen.ids) == len(set(seen.ids))
    assert page.count("<figure>") == len(SECTIONS) == page.count("The numbers")
    assert "it is your own layout" in page, "a finding"
    assert "rank 0 is &lt;full&gt;" in page, "escaped"
    assert f"<title>{FAST.label}: " in page, "what a pointer is told"
    assert "wattune run tiny.yaml" in page


def test_a_page_of_many_trials_stays_small() -> None:
    """300 trials with all axes: what a browser opens at once. Pages of this size take it some 0.2 s."""
    pytest.importorskip("vl_convert")
    from service.answers.page.document import html

    axes = itertools.product((1, 2, 4), (0, 1, 2, 3), (1, 2, 4, 8, 16), ("none", "full"), (True, False), (64, 128, 256))
    trials = []
    for i, (tp, zero, mbs, recompute, overlap, batch) in enumerate(itertools.islice(axes, 300)):
        layout = Layout(
            "megatron", 8, batch, mbs, tp, zero_stage=zero, recompute=recompute, overlap_grad_reduce=overlap
        )
        made = trial(str(i), tokens_per_s=1000.0 + 7 * i % 113, joules_per_token=0.1 + i % 17 / 100, mean_power_w=900.0)
        start = STARTED + timedelta(minutes=i)
        trials.append(
            replace(made, layout=layout, label=layout.label, started=start, ended=start + timedelta(seconds=30))
        )
    began = time.monotonic()
    page = html(Evidence(search(*trials, objectives=TWO)))
    assert time.monotonic() - began < 60, "some seconds on an idle core"
    assert len(page) < 4_000_000


def test_a_trials_gpus_are_drawn_together_however_many_they_are() -> None:
    series = {f"gpu{i}": {"power_w": [(0.0, 100.0 * i), (10.0, 200.0 * i)]} for i in (1, 2, 6)}
    trace = together(Trace("one", series, (5.0,), False))
    assert trace.series == {
        "highest of all": {"power_w": [(0.0, 600.0), (10.0, 1200.0)]},
        "mean of all": {"power_w": [(0.0, 300.0), (10.0, 600.0)]},
        "lowest of all": {"power_w": [(0.0, 100.0), (10.0, 200.0)]},
    }
    alone = Trace("one", {"gpu1": series["gpu1"]}, (), False)
    assert together(alone) == alone


def test_the_picture_of_a_trial_is_a_png(recorded: Evidence) -> None:
    drawn = picture(result(0, FAST, 100.0, 2.0), samples())
    assert drawn is not None
    assert drawn.startswith(b"\x89PNG")
    assert picture(result(0, FAST, 100.0, 2.0), samples().slice(0, 0)) is None


def test_a_search_in_a_notebook(store: Home, recorded: Evidence, tmp_path: Path) -> None:
    found = Wattune(store.tracking_uri).search("s1")
    trials = found.trials
    assert list(trials.index) == [f"t{number}" for number in range(6)]
    assert trials.loc["t1", "micro_batch_size"] == 2
    assert trials["tokens_per_s"].isna().to_list() == [False] * 5 + [True]
    assert [one.label for one in found.front] == [FAST.label, FRUGAL.label]
    assert found.best(minimize="joules_per_token").candidate.layout == FRUGAL
    assert found.findings == tuple(findings(recorded.found))
    shown = found._repr_html_()
    assert FAST.label in shown
    assert "dominated" in shown
    pytest.importorskip("vl_convert")
    picture = found.figure("front")
    assert picture._repr_svg_().startswith("<svg")
    assert picture.save(tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="unknown; did you mean front"):
        found.figure("fronts")
    with pytest.raises(InputError, match=r"\.svg or \.png"):
        picture.save(tmp_path / "front.pdf")


def test_without_the_package_that_draws_the_command_names_it(
    store: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    for option in ("--html", "--figures"):
        refused = CliRunner().invoke(
            main, ["report", "s1", "--tracking-uri", store.tracking_uri, option, str(tmp_path / "out")]
        )
        assert refused.exit_code == 2
        assert refused.stderr == "wattune: figures need another package: pip install 'wattune[report]'\n"
    assert CliRunner().invoke(main, ["report", "s1", "--tracking-uri", store.tracking_uri]).exit_code == 0


def test_the_command_writes_the_page_and_the_figures(store: Home, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    ask = ["report", "s1", "--tracking-uri", store.tracking_uri]
    to = tmp_path / "page.html", tmp_path / "figures"
    done = CliRunner().invoke(main, [*ask, "--html", str(to[0]), "--figures", str(to[1])])
    assert (done.exit_code, done.output) == (0, "")
    assert to[0].read_text().startswith("<!doctype html>")
    drawn = {path.name for path in to[1].iterdir()}
    assert drawn == {f"{section.key}.{kind}" for section in SECTIONS for kind in ("svg", "png")}
    assert (to[1] / "front.png").read_bytes().startswith(b"\x89PNG")
    assert "var(--" not in (to[1] / "front.svg").read_text()
    refused = CliRunner().invoke(main, [*ask, "--html", str(tmp_path / "no" / "page.html")])
    assert refused.exit_code == 2
    assert "cannot be written" in refused.stderr
