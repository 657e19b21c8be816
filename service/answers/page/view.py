"""A search in a notebook: its trials as a frame, its answers, its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from service.answers.candidates import Candidate
from service.answers.findings import findings
from service.answers.front import Choice, choose
from service.answers.page import draw
from service.answers.page.document import tabulated
from service.answers.page.evidence import Evidence
from service.answers.page.layouts import front as front_table
from service.answers.page.sections import SECTIONS
from service.answers.page.table import Lacking
from service.answers.page.theme import ALONE
from service.answers.query import parse_query
from service.errors import InputError
from service.metrics import nearest
from service.record.results import SearchRecord

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Picture:
    """A figure of a search, which notebooks show."""

    svg: str
    png: bytes = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write it as what the name ends with, .svg or .png. Raises `InputError` for any other."""
        to = Path(path)
        if to.suffix == ".svg":
            to.write_text(self.svg, encoding="utf-8")
        elif to.suffix == ".png":
            to.write_bytes(self.png)
        else:
            raise InputError(f"{to}: a figure is written as .svg or .png")
        return to

    def _repr_svg_(self) -> str:
        return self.svg


class Search:
    """A recorded search. What it takes of the record beside its trials is read when a figure asks for it."""

    def __init__(self, record: SearchRecord, gather: Callable[[], Evidence]) -> None:
        self.record = record
        self._gather = gather

    @cached_property
    def _evidence(self) -> Evidence:
        return self._gather()

    @property
    def trials(self) -> pd.DataFrame:
        """A row a trial by its id: label, status, cause, purpose, when it began and ended, its layout's axes, and its
        metrics; NaN is missing."""
        import pandas as pd

        rows = [
            {"label": one.label, "status": one.status, "cause": one.cause, "purpose": one.purpose.value}
            | {"started": one.started, "ended": one.ended}
            | one.layout.to_dict()
            | one.metrics
            for one in self.record.trials
        ]
        return pd.DataFrame(rows, index=pd.Index([one.trial_id for one in self.record.trials], name="trial"))

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """The layouts that no other beats on all objectives at once, the best on the first objective first."""
        return tuple(self._evidence.front)

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """What it found, in words."""
        return tuple(findings(self._evidence.found))

    def best(
        self,
        maximize: str | None = None,
        minimize: str | None = None,
        where: Sequence[str] = (),
        within: Sequence[str] = (),
        knee: bool = False,
    ) -> Choice:
        """As `Wattune.best`."""
        return choose(self.record, parse_query(maximize, minimize, where, within, knee))

    def figure(self, name: str) -> Picture:
        """A figure of the page, such as ``front``; `service.answers.page.sections` has their names.

        Raises `InputError` for a name that is none, for a figure that the record lacks, with the reason, and where the
        package that draws is not installed.
        """
        draw.check()
        sections = {section.key: section for section in SECTIONS}
        if name not in sections:
            raise InputError(f"figure {name!r} is unknown; {nearest(name, sections)}")
        table = sections[name].table(self._evidence)
        if isinstance(table, Lacking):
            raise InputError(f"figure {name!r}: {table.reason}")
        spec = sections[name].draw(table, ALONE)
        return Picture(draw.svg(spec, ALONE), draw.png(spec, ALONE))

    def __repr__(self) -> str:
        return f"<search {self.record.id}: {self.record.status}, {len(self.record.trials)} trials>"

    def _repr_html_(self) -> str:
        table = front_table(self._evidence)
        body = escape(table.reason) if isinstance(table, Lacking) else tabulated(table)
        told = "".join(f"<li>{escape(one)}</li>" for one in self.findings)
        return f"<b>{escape(self.record.id)}</b>: {escape(self.record.status)}<ul>{told}</ul>{body}"
