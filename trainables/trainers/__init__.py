"""Programs of the trainers that come with Wattune: plain files, started by their path, that know its hook at most.

What several of them need lies beside them.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
