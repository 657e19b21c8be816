"""The page: findings in front, then a section for each figure with its numbers beneath, then how to repeat it all.

It is one file that loads nothing: figures are drawn when it is written, and stand in it as SVG, so that it opens at
once, prints as it looks and needs no script. Colours come from its style sheet, for light, dark and print.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from service.answers.findings import findings
from service.answers.overview import notices
from service.answers.page import course, draw
from service.answers.page.evidence import Evidence
from service.answers.page.sections import SECTIONS, E, Section
from service.answers.page.table import Lacking, Table
from service.answers.page.theme import ALONE, IN_PAGE
from service.metrics import MARKS
from service.problem import INLINE
from service.spec import dump_spec

LONG = 60
"""Characters from which on a cell may break."""

LEFT = ' class="words"'


def html(evidence: Evidence) -> str:
    """The whole page. Raises `InputError` if what draws is not installed."""
    draw.check()
    search = evidence.search
    tables = [(section, section.table(evidence)) for section in SECTIONS]
    body = [
        f"<h1>{escape(search.name)}</h1>",
        f'<p class="facts">{escape(_facts(evidence))}</p>',
        listed("Findings", findings(evidence.found), "findings"),
        listed("Notices", notices(search), "findings"),
        *(shown(section, table) for section, table in tables if isinstance(table, Table)),
        listed(
            "Not shown", [f"{one.title}: {lack.reason}" for one, lack in tables if isinstance(lack, Lacking)], "plain"
        ),
        *_method(evidence),
    ]
    return page(f"{search.name}: report", body)


def page(title: str, body: list[str]) -> str:
    """A whole page of these parts, which loads nothing."""
    style = files("service.answers.page").joinpath("style.css").read_text(encoding="utf-8")
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(filter(None, body)) + "\n</body>\n</html>\n"


def write_figures(sections: Sequence[Section[E]], of: E, folder: Path) -> list[Path]:
    """Each figure that there is as PNG and as SVG, in a folder that is made. Raises `InputError` as `html` does."""
    draw.check()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections:
        table = section.table(of)
        if isinstance(table, Lacking):
            continue
        spec = section.draw(table, ALONE)
        vector, pixels = folder / f"{section.key}.svg", folder / f"{section.key}.png"
        vector.write_text(draw.svg(spec, ALONE), encoding="utf-8")
        pixels.write_bytes(draw.png(spec, ALONE))
        written += [vector, pixels]
    return written


def _facts(evidence: Evidence) -> str:
    search, params = evidence.search, evidence.search.params
    explored = sum(trial.purpose == "search" for trial in search.trials)
    devices = search.environment.get("devices", str(params.get("accelerator", "")))
    nodes = "one node" if params.get("nodes") == 1 else f"each of {params.get('nodes', '?')} nodes"
    gpus = f"{params.get('gpus_per_node', '?')} x {devices} on {nodes}"
    written = datetime.now(UTC)
    return (
        f"{_model(evidence)} with {gpus}; {explored} explored trials, {len(search.trials)} in all; "
        f"{search.status}, begun {search.started:%Y-%m-%d %H:%M} UTC; written {written:%Y-%m-%d %H:%M} UTC."
    )


def _model(evidence: Evidence) -> str:
    model, parameters = evidence.search.params.get("model", ""), evidence.search.params.get("parameters")
    if not model:
        return f"The trainer {evidence.search.params.get('trainer', '')}"
    size = ""
    if isinstance(parameters, int):
        scale, unit = (1e9, "billion") if parameters >= 1e9 else (1e6, "million")
        size = f"{parameters / scale:.3g} {unit} parameters"
    return f"a model of {size}" if model == INLINE and size else f"{model} ({size})" if size else str(model)


def listed(title: str, lines: Sequence[str], kind: str) -> str:
    """A heading and a list beneath; nothing if there are no lines."""
    if not lines:
        return ""
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>{title}</h2>\n<ul class="{kind}">\n{items}\n</ul>'


def shown(section: Section[Any], table: Table) -> str:
    """A section: its figure, with the numbers beneath."""
    title = f'<h2 id="{section.key}">{escape(section.title)}</h2>'
    drawn = draw.inline(draw.svg(section.draw(table, IN_PAGE), IN_PAGE), section.key, section.title)
    parts = [title, f'<p class="lead">{escape(section.lead)}</p>', f"<figure>{drawn}</figure>"]
    if table.note:
        parts.append(f'<p class="note">{escape(table.note)}</p>')
    parts.append(f"<details><summary>The numbers</summary>\n{tabulated(table)}\n</details>")
    return "\n".join(parts)


def tabulated(table: Table) -> str:
    """A table in HTML."""
    words = [any(isinstance(row.get(column.key), str) for row in table.rows) for column in table.columns]
    head = "".join(
        f"<th{LEFT if left else ''}>{escape(column.heading)}</th>"
        for column, left in zip(table.columns, words, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(map(_cell, words, [column.text(row) for column in table.columns]))}</tr>" for row in table.rows
    )
    marks = {mark: method for method, mark in MARKS.items()}
    used = {mark: method for mark, method in marks.items() if f"{mark}</td>" in rows}
    legend = "; ".join(f"{mark} {method}" for mark, method in used.items())
    below = f'<p class="note">{escape(legend)}</p>' if legend else ""
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>{below}'
    )


def _cell(words: bool, text: str) -> str:
    kind = ' class="long"' if words and len(text) > LONG else LEFT if words else ""
    return f"<td{kind}>{escape(text)}</td>"


def _method(evidence: Evidence) -> Iterator[str]:
    """Hardware, versions, the way of measuring, and the command that repeats the search."""
    yield '<h2 id="method">How this was measured, and how to repeat it</h2>'
    yield tabulated(course.method(evidence))
    if evidence.problem is None:
        yield '<p class="lead">The spec of the search cannot be read from here.</p>'
        return
    yield "<p>With this spec in a file, the command is:</p>"
    yield f"<pre>wattune run {escape(evidence.search.name)}.yaml</pre>"
    yield f"<details><summary>{escape(evidence.search.name)}.yaml</summary>\n"
    yield f"<pre>{escape(dump_spec(evidence.problem))}</pre></details>"
