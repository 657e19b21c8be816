"""Figures as pictures, by vl-convert: Vega-Lite in its own process, without a browser or a network."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any
from xml.sax.saxutils import escape

from service.answers.page.theme import Theme
from service.errors import InputError

VERSION = "6.1"
"""Of Vega-Lite."""

SCALE = 2.0
"""Pixels of a PNG for one of the figure's."""

_DESCRIBED = re.compile(r'<(path|rect|line|text|circle)( aria-label="([^"]*)"[^>]*?)(/>|>([^<]*)</\1>)')


def available() -> bool:
    """Whether what draws is installed."""
    return find_spec("vl_convert") is not None


def check() -> None:
    """Raise `InputError` unless what draws is installed."""
    if not available():
        raise InputError("figures need another package: pip install 'wattune[report]'")


def svg(spec: dict[str, Any], theme: Theme) -> str:
    """A figure as SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(spec | {"config": theme.config}, vl_version=VERSION))


def png(spec: dict[str, Any], theme: Theme) -> bytes:
    """A figure as PNG."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png(spec | {"config": theme.config}, vl_version=VERSION, scale=SCALE))


def inline(drawn: str, name: str, title: str) -> str:
    """An SVG to stand in a page beside others: ids of its own, and the description of each mark where a pointer rests.

    Browsers show an element's `title` there, but not the `aria-label` that Vega gives it.
    """
    drawn = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', drawn)
    drawn = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", drawn)
    drawn = _DESCRIBED.sub(lambda m: f"<{m[1]}{m[2]}><title>{m[3]}</title>{m[5] or ''}</{m[1]}>", drawn)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(title, {chr(34): "&quot;"})}" ', 1)
