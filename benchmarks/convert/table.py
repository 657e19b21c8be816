"""All trials of a search, as a table for `python -m benchmarks.judge.search`.

    python -m benchmarks.convert.table SEARCH > benchmarks/data/NAME.csv

One row a trial, in the form of benchmarks/data/README.md: the axes on which layouts differ, what became of the trial,
what it cost, and its metrics. The lines before the header say on what it ran.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from search_spaces.layout import AXES, Layout
from service.home import tracking_uri
from service.record.results import Results, SearchRecord, TrialRecord
from service.result import Purpose
from trainables.status import Status

METRICS = (
    "tokens_per_s",
    "joules_per_token",
    "throttle_ratio",
    "step_time_s",
    "mean_power_w",
    "power_cap_ratio",
    "mean_sm_clock_mhz",
    "peak_gpu_temp_c",
    "peak_memory_gib",
)
ALWAYS = ("engine", "num_gpus", "global_batch_size")
SPENT = ("trial_overhead_s", "compile_time_s", "warmup_time_s", "window_time_s", "breakdown_time_s")


def rows(search: SearchRecord) -> Iterator[dict[str, Any]]:
    """The trials that explored and came to an end, by layout."""
    over = [trial for trial in search.trials if trial.status in list(Status) and trial.purpose == Purpose.SEARCH]
    trials = {trial.layout: trial for trial in over}
    differing = {axis for axis, row in AXES.items() if any(layout.setting(axis) != row.idle for layout in trials)}
    own = dict.fromkeys(name for layout in trials for name, _ in layout.own)
    axes = [*(name for name in Layout.__dataclass_fields__ if name in ALWAYS or name in differing), *own]
    for layout in sorted(trials, key=lambda layout: layout.label):
        trial = trials[layout]
        yield (
            {axis: written(layout.to_dict()[axis]) for axis in axes}
            | {"status": trial.status, "gpu_seconds": gpu_seconds(trial)}
            | {metric: rounded(trial.metrics.get(metric)) for metric in METRICS}
        )


def written(value: Any) -> Any:
    """A value of an axis as a search's YAML has it."""
    return json.dumps(value) if isinstance(value, bool | list) else value


def gpu_seconds(trial: TrialRecord) -> float | str:
    """For how long the trial kept its GPUs from the next one; of one that failed, from its start to its end."""
    seconds: float | None = None
    if trial.status == "ok":
        seconds = sum(trial.metrics.get(part, 0.0) for part in SPENT)
    elif trial.started and trial.ended:
        seconds = (trial.ended - trial.started).total_seconds()
    return "" if seconds is None else rounded(trial.layout.num_gpus * seconds)


def rounded(value: float | None) -> float | str:
    """Seven digits; nothing for what is not known."""
    return "" if value is None else float(f"{value:.7g}")


def write(search: SearchRecord, file: TextIO) -> None:
    """The whole table."""
    known = search.params | search.environment
    facts = ", ".join(f"{name} {value}" for name, value in known.items() if name != "data")
    print(f"# Search {search.name}: {facts}", file=file)
    table = list(rows(search))
    writer = csv.DictWriter(file, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search")
    parser.add_argument("--tracking-uri")
    arguments = parser.parse_args()
    write(Results(tracking_uri(arguments.tracking_uri)).search(arguments.search), sys.stdout)


if __name__ == "__main__":
    main()
