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
from collections.abc import Sequence
from pathlib import Path

import yaml

from search_spaces.coefficients import data_sheet
from search_spaces.layout import Layout
from service.answers.tables import render
from service.fitting import Observation, design, fit, ratios
from service.record import store
from service.result import TrialResult
from service.spec import make_problem
from trainables.status import Status

TRIALS = 6


def observed(archive: Path) -> tuple[str, list[Observation]]:
    """The accelerator of a search, and the mean of each layout's trials. Raises OSError or `tarfile.TarError` if it
    cannot be read."""
    results: dict[Layout, list[TrialResult]] = defaultdict(list)
    with tarfile.open(archive) as files:
        texts = {member.name: file.read() for member in files if (file := files.extractfile(member)) is not None}
    (spec,) = (text for name, text in texts.items() if Path(name).name == store.SPEC)
    problem = make_problem(yaml.safe_load(spec))
    for name, text in sorted(texts.items()):
        if Path(name).name == store.RESULT:
            result = TrialResult.from_dict(json.loads(text))
            if result.status == Status.OK:
                results[result.layout].append(result)
    return problem.cluster.accelerator, [
        Observation(
            layout, problem.workload, _mean(trials, "step_time_s"), _mean(trials, "mean_power_w") / layout.num_gpus
        )
        for layout, trials in results.items()
    ]


def _mean(trials: Sequence[TrialResult], name: str) -> float:
    return statistics.fmean(value for one in trials if (value := one.metrics[name]) is not None)


def told(name: str, accelerator: str, rows: Sequence[Observation], trials: int) -> str:
    """Every layout, and what it comes to."""
    sheet = data_sheet(accelerator)
    assert sheet is not None
    chosen = design([one.layout for one in rows], rows[0].work, sheet, trials)
    fitted = fit([one for one in rows if one.layout in chosen], sheet)
    errors = {one.layout: [[ratio - 1 for ratio in ratios(one, by) if ratio] for by in (sheet, fitted)] for one in rows}
    lines = [
        ["*" * (layout in chosen), layout.label, *(f"{error:+.1%}" for of in both for error in of)]
        for layout, both in sorted(errors.items(), key=lambda item: -abs(item[1][0][0]))
    ]
    others = [both for layout, both in errors.items() if layout not in chosen]
    for title, of in (("mean", statistics.fmean), ("largest", max)):
        every, rest = (
            [f"{of([abs(both[by][column]) for both in rows]):.1%}" for by in (0, 1) for column in (0, 1)]
            for rows in (list(errors.values()), others)
        )
        lines.append(["", f"{title} of {len(errors)}", *every[:2], "", ""])
        lines.append(["", f"{title} of the {len(others)} that it did not choose", *rest])
    headings = ["", f"{name} ({accelerator})", "step time", "power", f"after {len(chosen)} trials", "power"]
    return render(headings, lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE.tar.xz")
    parser.add_argument("--trials", type=int, default=TRIALS)
    arguments = parser.parse_args(argv)
    for path in arguments.archives:
        try:
            accelerator, rows = observed(path)
        except (OSError, tarfile.TarError) as error:
            parser.error(f"{path}: {error}")
        print(told(path.name.split(".")[0], accelerator, rows, arguments.trials), end="\n\n")


if __name__ == "__main__":
    main()
