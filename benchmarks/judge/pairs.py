"""What is found in pairs of files of `benchmarks.measure.blind`, of slices and of the same layouts in full."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.measure.blind import Row, read
from service.result import TrialResult

Point = TypeVar("Point")


def both(sliced: Iterable[Row], measured: Iterable[Row]) -> Iterator[tuple[str, TrialResult, TrialResult]]:
    """The spec of each layout that was run by slices and in full, and what came of it in either way."""
    full = {(row["spec"], row["layout"]): row["full"] for row in measured}
    for row in sliced:
        if "slices" in row and (gang := full.get((row["spec"], row["layout"]))) is not None:
            yield row["spec"], TrialResult.from_dict(row["slices"]), TrialResult.from_dict(gang)


def found(
    description: str | None,
    argv: Sequence[str] | None,
    points: Callable[[list[Row], list[Row]], Iterable[Point]],
    nothing: str,
) -> list[Point]:
    """The `points` of all pairs that a command is given. Ends the command if files are not in pairs, and if there are
    none, for which `nothing` is the reason."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    files = parser.parse_args(argv).files
    if len(files) % 2:
        parser.error("files come in pairs, of slices and of what was measured")
    pairs = zip(files[::2], files[1::2], strict=True)
    told = [point for one, other in pairs for point in points(read(one), read(other))]
    if not told:
        parser.error(nothing)
    return told
