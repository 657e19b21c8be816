"""Colours of figures, for those who see all and for those who do not: after Okabe and Ito (2008), "Color Universal
Design", and viridis for what has an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FONT = "Arial, 'Liberation Sans', Helvetica, sans-serif"
SEQUENCE = "viridis"
HOLLOW, FILLED = 0.0, 1.0
"""Opacity of the inside of a mark: hollow ones stand for what is not measured."""

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [10, 4])


@dataclass(frozen=True)
class Theme:
    """`ink` of text, `faint` of what stands back, `lines` of the grid, `paper` behind it all, `palette` of kinds."""

    ink: str
    faint: str
    lines: str
    paper: str
    palette: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """For Vega-Lite."""
        text = {"labelColor": self.ink, "titleColor": self.ink, "labelFontSize": 11, "titleFontSize": 11}
        return {
            "background": self.paper,
            "font": FONT,
            "view": {"stroke": self.lines},
            "axis": text
            | {"titleFontWeight": "normal", "gridColor": self.lines, "tickColor": self.lines, "domainColor": self.lines}
            | {"labelLimit": 330, "labelOverlap": True, "labelSeparation": 6},
            "legend": text | {"orient": "bottom", "labelLimit": 500, "titleLimit": 500, "titleFontWeight": "normal"},
            "header": text,
            "title": {"color": self.ink, "fontSize": 12, "anchor": "start", "fontWeight": "normal"},
            "point": {"opacity": 1},
            "text": {"color": self.ink, "font": FONT},
            "range": {"category": list(self.palette), "symbol": list(SHAPES)},
        }


ALONE = Theme(
    "#1c1f24",
    "#7a7f87",
    "#d9dce1",
    "#ffffff",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7f87", "#8c6d1f"),
)
"""Of a figure in a file of its own."""

IN_PAGE = Theme(
    "var(--ink)",
    "var(--faint)",
    "var(--lines)",
    "var(--paper)",
    tuple(f"var(--kind{number})" for number in range(1, len(ALONE.palette) + 1)),
)
"""Of a figure in the page, whose style sheet has the colours, for light, dark and print."""
