"""Programs that exported folders hold: plain files of their own, which know nothing of Wattune."""

from __future__ import annotations

from pathlib import Path


def source(name: str) -> str:
    """The text of one of the programs here."""
    return (Path(__file__).parent / f"{name}.py").read_text()
