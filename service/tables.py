"""Plain-text tables for terminals and log files."""

from __future__ import annotations

from collections.abc import Sequence

from service.results import SearchInfo, SearchRecord, TrialRecord

# Metric -> heading and number format.
FIGURES = {
    "tokens_per_s": ("tokens/s", ",.0f"),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", ",.0f"),
    "joules_per_token": ("J/token", ".4g"),
    "energy_per_step_j": ("J/step", ",.0f"),
    "idle_energy_j": ("idle J", ",.0f"),
    "throttle_ratio": ("throttle", ".2%"),
    "power_cap_ratio": ("power cap", ".1%"),
    "mean_power_w": ("power W", ",.0f"),
    "peak_power_w": ("peak W", ",.0f"),
    "mean_sm_clock_mhz": ("SM MHz", ",.0f"),
    "tensor_activity": ("tensor cores", ".1%"),
    "dram_activity": ("DRAM", ".1%"),
    "pcie_utilisation": ("PCIe peak", ".1%"),
    "link_utilisation": ("link peak", ".1%"),
    "mfu": ("MFU", ".1%"),
    "step_time_s": ("step s", ".4g"),
    "peak_memory_gib": ("memory GiB", ".1f"),
    "peak_gpu_temp_c": ("GPU degC", ".0f"),
    "peak_hbm_temp_c": ("HBM degC", ".0f"),
    "min_gpu_temp_margin_c": ("margin degC", ".0f"),
}
# Metric -> heading, of the breakdown of a step; what these leave is hidden behind or beside one of them.
SHARES = {
    "breakdown_matmul_s": "matmul",
    "breakdown_attention_s": "attention",
    "breakdown_other_s": "other",
    "breakdown_memory_copy_s": "copies",
    "breakdown_exposed_communication_s": "exposed comm.",
    "breakdown_idle_s": "idle",
}
# How a figure came about -> its mark, where it was not measured.
MARKS = {"estimated": "*", "extrapolated": "~"}
ALWAYS = ("tokens_per_s_per_gpu", "mfu", "peak_memory_gib")


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


def trials_table(search: SearchRecord, trials: Sequence[TrialRecord]) -> str:
    """One row a trial: its layout and figures. A dash is a missing figure.

    Estimated figures carry an asterisk, figures extrapolated from depth proxies a tilde.
    """
    metrics = list(dict.fromkeys([*search.objectives, *ALWAYS]))
    metrics = [m for m in metrics if m in search.objectives or any(m in trial.metrics for trial in trials)]
    headings = ["layout", *map(heading, metrics)]
    return render(headings, [[trial.label, *(_cell(trial, metric) for metric in metrics)] for trial in trials])


def breakdown_table(trials: Sequence[TrialRecord]) -> str | None:
    """One row a trial: the shares of a step, on the mean over the ranks; None if no trial has a breakdown."""
    rows = []
    for trial in trials:
        span_s = trial.metrics.get("breakdown_span_s")
        if span_s:
            rows.append([trial.label, *(f"{trial.metrics[metric] / span_s:.1%}" for metric in SHARES)])
    return render(["share of a step", *SHARES.values()], rows) if rows else None


def searches_table(searches: Sequence[SearchInfo]) -> str:
    """One row a search: what it tried, how it stands and its best figures."""
    rows = [
        [
            info.id,
            info.status,
            f"{info.started:%Y-%m-%d %H:%M} UTC",
            info.model,
            info.accelerator,
            " ".join(f"{count} {status}" for status, count in info.trials.items()) or "none",
            ", ".join(with_unit(metric, value, info.method(metric)) for metric, value in info.best.items()) or "-",
        ]
        for info in searches
    ]
    return render(["search", "status", "started", "model", "accelerator", "trials", "best"], rows)


def heading(metric: str) -> str:
    return FIGURES.get(metric, (metric, ""))[0]


def with_unit(metric: str, value: float, method: str | None) -> str:
    """``41,804 tokens/s``, with a mark at the number if by its method it is not measured."""
    return f"{_number(metric, value, method)} {heading(metric)}"


def _number(metric: str, value: float, method: str | None) -> str:
    return format(value, FIGURES.get(metric, ("", ".4g"))[1]) + MARKS.get(method or "", "")


def _cell(trial: TrialRecord, metric: str) -> str:
    if metric not in trial.metrics:
        return "-"
    return _number(metric, trial.metrics[metric], trial.methods.get(metric))
