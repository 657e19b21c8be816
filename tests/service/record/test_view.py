"""How MLflow's pages show a search: from the link to the chart, in a browser, and what the tag of a view may hold."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest

from search_spaces.layout import AXES
from service import Wattune
from service.answers.front import front, markdown
from service.home import Home
from service.metrics import METRICS, Direction
from service.record import view
from service.record.results import Results
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from tests.browser import FOUND, Browser
from tests.conftest import free_port
from tests.service.records import problem
from trainables.status import Status

PICTURES = Path(__file__).parents[3] / "build" / "screenshots"
MOST = 5000
"""Characters that MLflow takes in the value of an experiment's tag."""

CELLS = "[...document.querySelectorAll('.ag-cell[col-id=\"{}\"]')]"
TEXTS = f"{CELLS}.sort((a, b) => a.closest('[row-index]').getAttribute('row-index') - "
TEXTS += "b.closest('[row-index]').getAttribute('row-index')).map(cell => cell.innerText.trim())"


def column(name: str) -> str:
    return TEXTS.replace("{}", name)


def test_the_view_of_a_search_over_all_axes_fits_into_a_tag() -> None:
    objectives = dict.fromkeys(itertools.islice(METRICS, 6), Direction.MINIMIZE)
    axes = [*AXES, *(f"an_axis_of_my_own_{number}" for number in range(10))]
    key, value = view.tag("a" * 60, "a search with a long name", objectives, axes, True, 80, 1)
    assert key == f"mlflow.sharedViewState.{'a' * 60}"
    assert set(json.loads(value)) == {"name", "createdAt", "updatedAt", "state"}
    assert len(value) < MOST


def test_links_lead_to_a_search_or_to_all() -> None:
    shown = "#/experiments/1/runs?workflowType=machine_learning"
    assert view.link("http://mlflow:5000/", "1") == f"http://mlflow:5000/{shown}"
    assert view.link("http://mlflow:5000", "1", "s1") == f"http://mlflow:5000/{shown}&viewStateShareKey=s1"
    assert view.link("", "1", "s1") == f"{shown}&viewStateShareKey=s1"


def _figures(number: int) -> dict[str, float | None]:
    objectives = {"tokens_per_s": 1000.0 - 100 * number, "joules_per_token": (5 - number) / 10}
    return {**objectives, "peak_memory_gib": 10.0 + number, "breakdown_matmul_s": 0.25, "final_loss": 3.0}


@pytest.fixture
def searched(home: Home) -> list[dict[str, float | None]]:
    """A search of four trials, one of them a finalist, and a failure; beside it another search. Returns the figures."""
    space = {"tensor_parallel_size": [1, 2], "micro_batch_size": [1, 2], "zero_stage": 0, "precision": "fp32"}
    objectives = {"tokens_per_s": "maximize", "joules_per_token": "minimize"}
    of = problem(space=space, objectives=objectives)
    figures = [_figures(number) for number in range(4)]
    for name in ("s0", "s1"):
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(name, of, {})
        for number, (layout, values) in enumerate(zip(of.legal.layouts, figures, strict=True)):
            purpose = Purpose.FINALIST if number == 3 else Purpose.SEARCH
            tracker.start_trial(f"{name}-{number}", layout, purpose)
            tracker.finish_trial(TrialResult(f"{name}-{number}", layout, Status.OK, metrics=values, purpose=purpose))
        tracker.finish_search("finished", {})
        found = front(Results(home.tracking_uri).search(name))
        tracker.attach_description(partial(markdown, found))
        assert tracker.notices == []
    return figures


@pytest.mark.slow
@pytest.mark.skipif(FOUND is None, reason="there is no Chromium")
def test_a_person_gets_from_the_link_to_the_chart(
    searched: list[dict[str, float | None]], home: Home, tmp_path: Path
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    pages = Wattune().pages(free_port(), "s1")
    try:
        with Browser(tmp_path / "profile", 2400, 1400) as browser:
            browser.open(pages.url)
            browser.wait_for(f"{column('metrics.`tokens_per_s`')}.length == 4")
            read = {
                name: browser.evaluate(column(f"metrics.`{name}`")) for name in ("tokens_per_s", "joules_per_token")
            }
            assert read == {
                "tokens_per_s": ["1000", "900", "800", "700"],
                "joules_per_token": ["0.5", "0.4", "0.3", "0.2"],
            }
            assert browser.evaluate(column("tags.`wattune.purpose`")) == ["search", "search", "search", "finalist"]
            assert browser.evaluate(column("params.`tensor_parallel_size`")) == ["1", "1", "2", "2"]
            names = browser.evaluate(column("attributes.`Run Name`"))
            assert "finalist: megatron 2gpu dp1 tp2" in names[3]
            cut = f"{CELLS.format('attributes.`Run Name`')}.some(e => e.querySelector('a').scrollWidth > e.clientWidth)"
            assert browser.evaluate(cut) is False
            browser.screenshot(PICTURES / "mlflow_table.png")

            browser.click("document.querySelector('input[value=CHART]')")
            drawn = "[...document.querySelectorAll('.js-plotly-plot')]"
            points = browser.wait_for(
                f"{drawn}[0].data[0].x.length == 4 && [{drawn}[0].data[0].x, {drawn}[0].data[0].y]"
            )
            pairs = sorted(zip(*points, strict=True))
            assert pairs == sorted((one["tokens_per_s"], one["joules_per_token"]) for one in searched)
            for title in ("Objectives", "Axes and objectives", "Memory", "Parallel Coordinates"):
                browser.wait_for(f"document.body.innerText.includes({json.dumps(title)})")
            browser.screenshot(PICTURES / "mlflow_charts.png")

            run = Results(home.tracking_uri).search("s1").run_id
            browser.open(f"{pages.url.partition('/runs?')[0]}/runs/{run}?workflowType=machine_learning")
            browser.wait_for("document.querySelector('table').innerText.includes('tokens/s')")
            browser.wait_for("document.body.innerText.includes('synthetic (')")
            browser.screenshot(PICTURES / "mlflow_search.png")
            described = "[...document.querySelectorAll('a')].find(a => a.innerText.includes('All trials')).href"
            assert browser.evaluate(described) == pages.url
    finally:
        pages.close()
