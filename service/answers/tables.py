"""Plain-text tables for terminals and log files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from service.answers.candidates import Candidate
from service.answers.overview import SearchInfo
from service.metrics import ALWAYS, heading, number, with_unit
from service.record.results import SearchRecord, TrialRecord

# Metric -> heading, of the breakdown of a step; what these leave is hidden behind or beside one of them.
SHARES = {
    "breakdown_matmul_s": "matmul",
    "breakdown_attention_s": "attention",
    "breakdown_other_s": "other",
    "breakdown_memory_copy_s": "copies",
    "breakdown_exposed_communication_s": "exposed comm.",
    "breakdown_idle_s": "idle",
}


def render(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; all but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def candidates_table(search: SearchRecord, candidates: Sequence[Candidate]) -> str:
    """See `candidates_rows`."""
    return render(*candidates_rows(search, candidates))


def candidates_rows(search: SearchRecord, candidates: Sequence[Candidate]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row a layout: its figures, with the confidence intervals of objectives; a dash is a missing one.

    Estimated figures carry an asterisk, figures extrapolated from depth proxies a tilde. Where some layouts were
    measured again, a column tells how many trials a row is the mean of.
    """
    metrics = list(dict.fromkeys([*search.objectives, *ALWAYS]))
    metrics = [m for m in metrics if m in search.objectives or any(m in one.metrics for one in candidates)]
    headings = ["layout", *map(heading, metrics)]
    rows = [[one.label, *(_cell(one, metric, search) for metric in metrics)] for one in candidates]
    if any(one.confirmed for one in candidates):
        headings.insert(1, "measured")
        for row, one in zip(rows, candidates, strict=True):
            row.insert(1, f"again, {len(one.trials)}x" if one.confirmed else "once")
    return headings, rows


def breakdown_table(candidates: Sequence[Candidate]) -> str | None:
    """One row a layout: the shares of a step, on the mean over the ranks; None if no layout has a breakdown."""
    rows = []
    for one in candidates:
        span_s = one.metrics.get("breakdown_span_s")
        if span_s:
            rows.append([one.label, *(f"{one.metrics[metric] / span_s:.1%}" for metric in SHARES)])
    return render(["share of a step", *SHARES.values()], rows) if rows else None


def trials_table(trials: Sequence[TrialRecord]) -> str:
    """One row a trial: why it ran, how it ended and its main figures. A dash is a missing figure."""
    metrics = [metric for metric in ALWAYS if any(metric in trial.metrics for trial in trials)]
    rows = []
    for trial in trials:
        known = trial.metrics
        figures = (number(m, known[m], trial.methods.get(m)) if m in known else "-" for m in metrics)
        rows.append([trial.label, trial.purpose.value, trial.status, *figures])
    return render(["layout", "purpose", "status", *map(heading, metrics)], rows)


def trials_csv(trials: Sequence[TrialRecord]) -> str:
    """A header, and a line a trial: what it is, what its search is of, its axes, its metrics by their names, and how
    these were obtained where that is not plain, as `METRIC_method`. What a trial lacks is empty."""
    flat = []
    for trial in trials:
        values = trial.to_dict()
        facts, config, metrics, methods = (values.pop(key) for key in ("facts", "config", "metrics", "methods"))
        flat.append(values | facts | config | metrics | {f"{metric}_method": how for metric, how in methods.items()})
    columns = dict.fromkeys(name for row in flat for name in row)
    text = StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def searches_table(searches: Sequence[SearchInfo]) -> str:
    """One row a search: what it tried, how it stands, its best figures, and its tags where any search has some."""
    rows = [
        [
            info.id,
            f"{info.status} {info.standing.told}" if info.standing else info.status,
            f"{info.started:%Y-%m-%d %H:%M} UTC",
            info.model,
            info.accelerator,
            " ".join(f"{count} {kind}" for kind, count in (info.trials | info.repeats).items()) or "none",
            ", ".join(with_unit(metric, value, info.method(metric)) for metric, value in info.best.items()) or "-",
        ]
        for info in searches
    ]
    headings = ["search", "status", "started", "model", "accelerator", "trials", "best"]
    if any(info.tags for info in searches):
        headings.append("tags")
        for row, info in zip(rows, searches, strict=True):
            row.append(" ".join(f"{key}={value}" for key, value in info.tags.items()) or "-")
    return render(headings, rows)


def _cell(candidate: Candidate, metric: str, search: SearchRecord) -> str:
    if metric not in candidate.metrics:
        return "-"
    half_width = candidate.intervals.get(metric) if metric in search.objectives else None
    return number(metric, candidate.metrics[metric], candidate.methods.get(metric), half_width)
