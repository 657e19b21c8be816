"""The two answers that a search is run for: the layouts that no other beats, and the best one under a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.answers.candidates import Candidate
from service.answers.export import export
from service.answers.overview import notices
from service.answers.query import Query
from service.answers.ranking import answer, compared, leaders
from service.answers.tables import breakdown_table, candidates_rows, candidates_table
from service.metrics import with_unit
from service.record.results import SearchRecord


@dataclass(frozen=True)
class Front:
    """The layouts of a search that no other beats on all objectives at once, the best on the first objective first.

    `best`: objective -> the one of them that is best on it, of objectives that were measured. `notices` are what a
    reader of the ranking must know.
    """

    search: SearchRecord
    candidates: tuple[Candidate, ...]
    best: dict[str, Candidate]
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Each layout with all that is needed to launch it, JSON-safe."""
        exported = [export(self.search, candidate) for candidate in self.candidates]
        return {"search_id": self.search.id, "pareto": exported, "notices": list(self.notices)}


@dataclass(frozen=True)
class Choice:
    """The best layout of a search under a query. `notices` are what a reader of the choice must know."""

    search: SearchRecord
    candidate: Candidate
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All that is needed to launch the layout and to judge it, JSON-safe."""
        return export(self.search, self.candidate)


def front(search: SearchRecord) -> Front:
    """See `service.answers.ranking.pareto` for which layouts take part."""
    comparison = compared(search)
    return Front(search, tuple(comparison.front()), leaders(comparison), tuple(notices(search)))


def choose(search: SearchRecord, query: Query) -> Choice:
    """See `service.answers.ranking.best` for the query, and for what raises `InputError`."""
    candidate, of_choice = answer(search, query)
    return Choice(search, candidate, tuple(dict.fromkeys([*notices(search, query.metrics), *of_choice])))


def text(front: Front) -> str:
    """For a terminal: the layouts' figures, the best on each objective, and the notices."""
    search = front.search
    trials = sum(trial.purpose == "search" for trial in search.trials)
    lines = [f"\nPareto front of {', '.join(search.objectives)}, of {trials} trials:\n"]
    lines.append(figures(search, front.candidates))
    if front.candidates:
        lines.append("\nBest on each objective:")
    for metric, one in front.best.items():
        figure = with_unit(metric, one.metrics[metric], one.methods.get(metric), one.intervals.get(metric))
        lines.append(f"  {figure}: {one.label}")
    return "\n".join([*lines, *(f"note: {notice}" for notice in front.notices)])


def markdown(front: Front) -> str:
    """For MLflow's pages: the layouts' figures as a table, the best on each objective, and the notices."""
    headings, rows = candidates_rows(front.search, front.candidates)
    lines = [f"Nothing beats these layouts on {' and '.join(front.search.objectives)} at once:", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows)]
    if not rows:
        lines = ["No trial came to a result."]
    return "\n".join([*lines, "", *(f"- {notice}" for notice in front.notices)]).strip()


def figures(search: SearchRecord, candidates: Sequence[Candidate]) -> str:
    """Tables of some layouts: their figures, and the shares of a step where they are known."""
    return "\n\n".join(filter(None, [candidates_table(search, candidates), breakdown_table(candidates)]))
