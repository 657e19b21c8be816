"""The report, as one page, of trials that are committed as data: what `wattune report SEARCH --html` makes of one.

    python -m benchmarks.convert.page benchmarks/data/llama3_12l_2xh200.yaml \
        benchmarks/data/llama3_12l_2xh200.jsonl.xz --out page.html [--figures FOLDER]

The trials are the results in JSON, a line each, the document of `benchmarks.convert.record`, or a table. When each ran
is not kept there: they are taken to have run back to back, as long as their parts took.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks import text_of
from benchmarks.convert.table import SPENT
from benchmarks.judge.search import Table
from search_spaces.coefficients import data_sheet
from service.answers.page.document import html, write_figures
from service.answers.page.evidence import Evidence, foretold
from service.answers.page.sections import SECTIONS
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.result import TrialResult
from service.spec import load_spec

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def evidence(problem: Problem, results: Iterable[TrialResult]) -> Evidence:
    """What a page is made of, of these results of the problem's search, with predictions by the data sheet.

    Of a layout that was run several times the last run counts.
    """
    known = {result.trial_id: result for result in {result.layout: result for result in results}.values()}
    trials = tuple(_trials(known.values()))
    environment = next((result.environment for result in known.values() if result.environment), {})
    search = SearchRecord(
        id=problem.name,
        name=problem.name,
        status="finished",
        started=BEGAN,
        objectives=dict(problem.goals.objectives),
        constraints=tuple(limit.text for limit in problem.goals.limits),
        params=problem.facts(),
        environment=dict(environment),
        notices=(),
        run_id=problem.name,
        trials=trials,
    )
    return replace(foretold(search, problem, data_sheet(problem.cluster.accelerator)), results=known)


def _trials(results: Iterable[TrialResult]) -> Iterator[TrialRecord]:
    now = BEGAN
    for result in results:
        spent = timedelta(seconds=sum(result.metrics.get(part) or 0.0 for part in SPENT))
        yield TrialRecord(
            trial_id=result.trial_id,
            label=result.layout.label,
            layout=result.layout,
            status=result.status,
            cause=result.cause,
            metrics={name: value for name, value in result.metrics.items() if value is not None},
            methods=dict(result.methods),
            run_id=result.trial_id,
            purpose=result.purpose,
            infrastructure=result.infrastructure,
            started=now,
            ended=now + spent,
        )
        now += spent


def read(path: Path) -> list[TrialResult]:
    """The results in a file of benchmarks/data."""
    if path.suffix == ".csv":
        return list(Table(path).results.values())
    text = text_of(path)
    documents: list[dict[str, Any]] = (
        json.loads(text)["trials"] if ".jsonl" not in path.name else [json.loads(line) for line in text.splitlines()]
    )
    return [TrialResult.from_dict(document) for document in documents]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    made = evidence(load_spec(arguments.spec), read(arguments.results))
    arguments.out.write_text(html(made), encoding="utf-8")
    if arguments.figures:
        write_figures(SECTIONS, made, arguments.figures)


if __name__ == "__main__":
    main()
