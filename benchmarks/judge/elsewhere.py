"""How far the cost model is off on one machine by what is known of others, and after a few trials of its own.

    python -m benchmarks.judge.elsewhere ARCHIVE.tar.xz ... [--trials 6]

An archive is a search by `benchmarks.convert.archive`, such as those of benchmarks/data. Prints each layout that was
measured, worst first, by the data sheet's coefficients, which nothing measured on the machine has a part in but what
was published of its kind, and by coefficients fitted to the layouts that a calibration with so many trials would choose
among them, marked `*`; then means and largest errors of all, and of those that it did not choose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.judge.cost import observation, relative_errors
from search_spaces.coefficients import Coefficients, data_sheet
from search_spaces.layout import Layout
from service.answers.tables import render
from service.fitting import Observation, design, fit
from service.record import store
from service.result import TrialResult
from service.spec import make_problem
from trainables.status import Status

TRIALS = 6


def observed(archive: Path) -> tuple[Coefficients, list[Observation]]:
    """The data sheet of a search's accelerator, and the mean of each layout's trials.

    Raises OSError, `tarfile.TarError` or ValueError, with one line, for what is no such archive.
    """
    trials: dict[Layout, list[Mapping[str, Any]]] = defaultdict(list)
    with tarfile.open(archive) as files:
        texts = {member.name: file.read() for member in files if (file := files.extractfile(member)) is not None}
    specs = [text for name, text in texts.items() if Path(name).name == store.SPEC]
    if not specs:
        raise ValueError("no search is in it")
    problem = make_problem(yaml.safe_load(specs[0]))
    if (sheet := data_sheet(problem.cluster.accelerator)) is None:
        raise ValueError(f"nothing is known of {problem.cluster.accelerator}")
    for name, text in sorted(texts.items()):
        if Path(name).name == store.RESULT:
            result = TrialResult.from_dict(json.loads(text))
            if result.status == Status.OK:
                trials[result.layout].append(result.metrics)
    return sheet, [observation(layout, problem.workload, _mean(metrics)) for layout, metrics in trials.items()]


def _mean(trials: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of what a layout's trials took; None where one of them lacks it."""
    means: dict[str, float | None] = {}
    for name in ("step_time_s", "mean_power_w"):
        values = [value for one in trials if (value := one.get(name)) is not None]
        means[name] = statistics.fmean(values) if len(values) == len(trials) else None
    return means


def told(name: str, sheet: Coefficients, rows: Sequence[Observation], trials: int) -> str:
    """Every layout, and what it comes to."""
    chosen = design([one.layout for one in rows], rows[0].work, sheet, trials)
    fitted = fit([one for one in rows if one.layout in chosen], sheet)
    errors = {one.layout: (*relative_errors(one, sheet), *relative_errors(one, fitted)) for one in rows}
    lines = [
        ["*" * (layout in chosen), layout.label, *("" if error is None else f"{error:+.1%}" for error in four)]
        for layout, four in sorted(errors.items(), key=lambda item: -abs(item[1][0]))
    ]
    others = [four for layout, four in errors.items() if layout not in chosen]
    for title, of in (("mean", statistics.fmean), ("largest", max)):
        lines.append(["", f"{title} of {len(errors)}", *_over(errors.values(), of)[:2], "", ""])
        lines.append(["", f"{title} of the {len(others)} that it did not choose", *_over(others, of)])
    return render(["", name, "step time", "power", f"after {len(chosen)} trials", "power"], lines)


def _over(rows: Iterable[tuple[float | None, ...]], of: Callable[[list[float]], float]) -> list[str]:
    """The mean, or what else `of` makes of the sizes of each column's errors; "" where it has none."""
    columns = [[abs(error) for error in column if error is not None] for column in zip(*rows, strict=True)]
    return [f"{of(column):.1%}" if column else "" for column in columns]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE.tar.xz")
    parser.add_argument("--trials", type=int, default=TRIALS)
    arguments = parser.parse_args(argv)
    for path in arguments.archives:
        try:
            sheet, rows = observed(path)
        except (OSError, tarfile.TarError, ValueError) as error:
            parser.error(f"{path}: {error}")
        print(told(path.name.split(".")[0], sheet, rows, arguments.trials), end="\n\n")


if __name__ == "__main__":
    main()
