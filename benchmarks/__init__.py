"""What the published figures come from, in three kinds of commands.

`measure` has what runs on machines, `judge` what holds models and samplers against what was measured, `convert` what
makes data of searches and of other people's sheets. `python -m benchmarks.KIND.NAME --help` says more of each. Beside
them stands `heat`, a benchmark of machines that is for others to run.
"""

from __future__ import annotations

import lzma
import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The folder that the paths in specs' names, in records and on command lines start from."""

DATA = ROOT / "benchmarks" / "data"
"""What programs read: tables of layouts with their specs, and recorded runs."""

RESULTS = ROOT / "benchmarks" / "results"
"""What was printed."""

SPECS = ROOT / "benchmarks" / "specs"
"""What was run."""


def text_of(path: Path) -> str:
    """Of a file of `DATA`, compressed as `.xz` or not. Raises OSError, `lzma.LZMAError` or UnicodeDecodeError."""
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()


def import_path() -> str:
    """A `PYTHONPATH` by which other processes find this package, wherever the command was started."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
