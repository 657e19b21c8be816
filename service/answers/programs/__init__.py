"""Programs that exported folders hold: plain files of their own, which know nothing of Wattune."""

from __future__ import annotations

from pathlib import Path

from trainables import trainers


def source(name: str) -> str:
    """The text of one of the programs here, or of a file that those of trainers need too."""
    own = Path(__file__).parent / f"{name}.py"
    return (own if own.exists() else trainers.FOLDER / own.name).read_text()
