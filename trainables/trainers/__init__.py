"""Programs of the trainers that come with Wattune: plain files, started by their path, which know nothing of Wattune
but its hook. Those that several of them need lie beside them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
