"""Depth proxies: two runs of a layout with fewer layers, and what they say of the whole model.

A step's time and energy, and a GPU's memory, are a constant (embedding, head, loss) and a share for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.spec import SearchSpec
from trainables.result import Proxy, TrialResult

EXTRAPOLATED = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "step_time_s",
    "joules_per_token",
    "energy_per_step_j",
    "peak_memory_gib",
)
SPENT = ("trial_overhead_s", "compile_time_s", "warmup_time_s", "window_time_s", "breakdown_time_s")
"""What a trial took of its gang: the sum over its runs."""


class NotDeeper(Exception):
    """The deeper run took no more than the other, so that no line leads to the full depth."""


def line(depths: tuple[int, int], values: tuple[float, float], depth: int) -> float:
    """The value at `depth` of the straight line through `values` at `depths`."""
    (shallow, deep), (low, high) = depths, values
    return high + (high - low) * (depth - deep) / (deep - shallow)


def extrapolate(trial_id: str, spec: SearchSpec, shallow: Proxy, deep: Proxy) -> TrialResult:
    """The result of the whole model of `spec` from two runs that ended well; `invalid` if no line leads there.

    What is not in `EXTRAPOLATED` or `SPENT` is the deeper run's.
    """
    runs = (shallow, deep)
    problems = [f"at {run.layers} layers: {run.result.cause}" for run in runs if run.result.cause]
    try:
        found = full_metrics(spec, shallow, deep)
    except NotDeeper as error:
        return TrialResult(trial_id, deep.result.config, "invalid", str(error), proxies=runs)
    methods = {metric: _method(metric, runs) for metric in EXTRAPOLATED if found[metric] is not None}
    return TrialResult(
        trial_id=trial_id,
        config=deep.result.config,
        status="ok",
        cause="; ".join(problems) or None,
        metrics=deep.result.metrics | found,
        methods=deep.result.methods | methods,
        step_times_s=deep.result.step_times_s,
        losses=deep.result.losses,
        windows=deep.result.windows,
        environment=deep.result.environment,
        ranks=deep.result.ranks,
        proxies=runs,
    )


def full_metrics(spec: SearchSpec, shallow: Proxy, deep: Proxy) -> dict[str, float | None]:
    """`EXTRAPOLATED` and `SPENT` of the whole model of `spec`; None where a run lacks it. Raises `NotDeeper`."""
    depths, layers = (shallow.layers, deep.layers), spec.shape.layers
    low, high = shallow.result.metrics, deep.result.metrics

    def grown(metric: str, values: Sequence[float | None]) -> float | None:
        first, second = values
        if first is None or second is None:
            return None
        if second <= first:
            raise NotDeeper(
                f"{metric} of a step is {second:.4g} with {depths[1]} layers, {first:.4g} with {depths[0]}: "
                "no line leads to the full depth"
            )
        return line(depths, (first, second), layers)

    rates = (low["tokens_per_s"], high["tokens_per_s"])
    mean_s = grown("mean time", [rate and spec.tokens_per_step / rate for rate in rates])
    assert mean_s is not None, "every run that ended well has a speed"
    joules_per_token = grown("energy", (low.get("joules_per_token"), high.get("joules_per_token")))
    return {
        **spec.speed(spec.tokens_per_step / mean_s, deep.result.config.num_gpus),
        "step_time_s": grown("median time", (low["step_time_s"], high["step_time_s"])),
        "joules_per_token": joules_per_token,
        "energy_per_step_j": joules_per_token and joules_per_token * spec.tokens_per_step,
        "peak_memory_gib": peak_memory(layers, shallow, deep),
    } | {metric: sum(run.get(metric) or 0.0 for run in (low, high)) for metric in SPENT}


def peak_memory(layers: int, shallow: Proxy, deep: Proxy) -> float | None:
    """GiB of the fullest GPU with `layers` layers: each rank has a line of its own, and another may lead at the end."""
    lines = [
        line((shallow.layers, deep.layers), (before.peak_memory_gib, after.peak_memory_gib), layers)
        for before, after in zip(shallow.result.ranks, deep.result.ranks, strict=True)
        if before.peak_memory_gib is not None and after.peak_memory_gib is not None
    ]
    return max(lines, default=None)


def _method(metric: str, runs: Sequence[Proxy]) -> str:
    """`extrapolated`, but `estimated` stays so: it says more against a figure."""
    estimated = any(run.result.methods.get(metric) == "estimated" for run in runs)
    return "estimated" if estimated else "extrapolated"
