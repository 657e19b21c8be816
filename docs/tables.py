"""Writes the tables of docs/spec.md that follow from the code, those of the axes and of the metrics: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from search_spaces.layout import AXES
from service.metrics import TABLE

SPEC = Path(__file__).parent / "spec.md"


def main() -> None:
    text = SPEC.read_text()
    text = with_rows(text, "space", [axis.documentation for axis in AXES.values()])
    text = with_rows(text, "Metrics", [f"| `{metric.name}` | {metric.unit} |" for metric in TABLE if metric.aim])
    SPEC.write_text(text)


def with_rows(text: str, section: str, rows: list[str]) -> str:
    """`text` with `rows` in place of those of the first table of a section."""
    before, title, rest = text.partition(f"\n## {section}\n")
    assert title, f"{SPEC} has no section {section}"
    table = "".join(f"{row}\n" for row in rows)
    return before + title + re.sub(r"(?:^\| `.*\n)+", lambda _: table, rest, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
