"""The arguments of commands that measure with a spec, and show again what earlier runs recorded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import SPECS


def add_run_arguments(parser: argparse.ArgumentParser, spec: str, out: str = "the file of this run") -> None:
    """`paths`, without which it is this spec of `SPECS`, and `--out`, without which nothing is measured."""
    parser.add_argument(
        "paths",
        type=Path,
        nargs="*",
        default=[SPECS / spec],
        help=f"a spec to measure with (default: {spec}), or files of earlier runs",
    )
    parser.add_argument("--out", type=Path, help=out)


def parse_run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What is given. Exits with 2 if several specs are to be measured with."""
    given = parser.parse_args(argv)
    if given.out is not None and len(given.paths) > 1:
        parser.error("--out takes one spec")
    return given
