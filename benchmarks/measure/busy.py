"""How much of a search's workers its trials made use of, while it explored.

    python -m benchmarks.measure.busy SEARCH

Reads the record of a search, of which it may be the beginning of the id, in the state directory at hand. Between the
start of the first trial that explored and the end of the last, of all the time of the cluster's workers: what trials
had for themselves, and what of it went into training and measuring in those that ended well. Then the median of what
those cost beside that. A trial counts as one that has as many workers as its layout has GPUs, whatever was kept for it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from service.home import tracking_uri
from service.metrics import Part, made_of
from service.record.results import Results, SearchRecord, TrialRecord

OVERHEAD = "trial_overhead_s"


@dataclass(frozen=True)
class Busy:
    """Shares of the workers' time in `span_s` seconds, and the median overhead in s, None if no trial ended well."""

    span_s: float
    lent: float
    trained: float
    overhead_s: float | None

    def __str__(self) -> str:
        overhead = "none ended well" if self.overhead_s is None else f"{self.overhead_s:.2f} s"
        return (
            f"of the workers' time in {self.span_s:.0f} s, trials had {self.lent:.1%}, "
            f"and trained or measured for {self.trained:.1%}; median overhead of a trial: {overhead}"
        )


def busy(search: SearchRecord) -> Busy:
    """Raises `SystemExit` for a search of which no trial that explored has ended."""
    trials = [trial for trial in search.trials if trial.purpose.explores and trial.started and trial.ended]
    if not trials:
        raise SystemExit(f"search {search.id}: no trial that explored has ended")
    workers = search.params["nodes"] * search.params["gpus_per_node"]
    start, end = min(_start(trial) for trial in trials), max(_end(trial) for trial in trials)
    whole = workers * (end - start)
    well = [trial for trial in trials if trial.status == "ok"]
    overheads = [trial.metrics[OVERHEAD] for trial in well if OVERHEAD in trial.metrics]
    return Busy(
        span_s=end - start,
        lent=sum(trial.layout.num_gpus * (_end(trial) - _start(trial)) for trial in trials) / whole,
        trained=sum(trial.layout.num_gpus * _trained_s(trial) for trial in well) / whole,
        overhead_s=statistics.median(overheads) if overheads else None,
    )


def _start(trial: TrialRecord) -> float:
    assert trial.started is not None
    return trial.started.timestamp()


def _end(trial: TrialRecord) -> float:
    assert trial.ended is not None
    return trial.ended.timestamp()


def _trained_s(trial: TrialRecord) -> float:
    """Seconds that a trial compiled, warmed up, and was measured and profiled."""
    return sum(trial.metrics.get(name, 0.0) for name in made_of(Part.HELD) if name != OVERHEAD)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search")
    search = Results(tracking_uri(None)).search(parser.parse_args(argv).search)
    print(f"{search.id}: {busy(search)}")


if __name__ == "__main__":
    main()
