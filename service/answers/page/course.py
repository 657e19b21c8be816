"""Tables of how the search went: hypervolume over GPU hours, failures, method."""

from __future__ import annotations

from service.answers.growth import advances, spent_gpu_hours
from service.answers.page.evidence import Evidence
from service.answers.page.table import Column, Lacking, Table
from trainables.status import Status

SETTINGS = ("model", "parameters", "accelerator", "nodes", "gpus_per_node", "sequence_length", "global_batch_size")

MACHINE = {
    "devices": "devices",
    "driver": "driver of the devices",
    "cores": "CPU cores where the search was run from",
    "load_average": "load average there before",
    "git_commit": "git commit there",
}
"""What of the environment is no version -> what it is."""


def growth(evidence: Evidence) -> Table | Lacking:
    """The share of the last front's hypervolume that was reached, by GPU hours, to the end of the search."""
    steps = advances(evidence.search)
    if not steps:
        return Lacking("No trial came to a result that could be ranked.")
    rows = [
        {"layout": step.label, "trials": step.trials, "gpu_hours": step.gpu_hours, "share": 100 * step.hypervolume}
        for step in steps
    ]
    end = {"layout": "end of the search", "trials": len(evidence.search.trials), "share": rows[-1]["share"]}
    rows.append(end | {"gpu_hours": spent_gpu_hours(evidence.search)})
    columns = (Column("layout", "the front grew by"), Column("trials", "trials"))
    hours = Column("gpu_hours", "spent", "GPU hours", ".3g")
    return Table((*columns, hours, Column("share", "hypervolume reached", "%", ".1f")), rows)


def failures(evidence: Evidence) -> Table | Lacking:
    """Each trial that came to no result, and why."""
    rows = [
        {
            "layout": trial.label,
            "status": f"{trial.status} of the machines" if trial.infrastructure else trial.status,
            "purpose": trial.purpose.value,
            "cause": trial.cause,
        }
        for trial in evidence.search.trials
        if trial.status not in (Status.OK, "running")
    ]
    if not rows:
        return Lacking("No trial failed or was stopped early.")
    columns = (Column("layout", "layout"), Column("status", "status"), Column("purpose", "purpose"))
    return Table((*columns, Column("cause", "why")), rows)


def method(evidence: Evidence) -> Table:
    """On what, with what and how the search was run."""
    search, problem = evidence.search, evidence.problem
    facts = {"search": search.id, "status": search.status, "began": f"{search.started:%Y-%m-%d %H:%M} UTC"}
    settings = {name.replace("_", " "): search.params[name] for name in SETTINGS if name in search.params}
    facts |= {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in settings.items()}
    facts["objectives"] = ", ".join(f"{way.value} {metric}" for metric, way in search.objectives.items())
    if search.constraints:
        facts["constraints"] = ", ".join(search.constraints)
    if problem is not None:
        measured = problem.measurement
        facts["window"] = f"{measured.window_s:g} s and {measured.window_min_steps} optimizer steps at least"
        facts["warm-up"] = (
            f"until {measured.steady_steps} steps agree within {measured.warmup_tolerance:.0%}, "
            f"at most {measured.warmup_max_s:g} s"
        )
        facts["explored"] = "by slices: one rank of each kind alone" if measured.sliced else "by whole gangs"
        facts["finalists"] = (
            f"{problem.finalists.count} at most, {problem.finalists.repeats} times each, windows of "
            f"{problem.finalists.window_s:g} s"
        )
        facts["sampler"] = f"{problem.sampler}, seed {problem.seed}"
    facts |= {name: search.environment[key] for key, name in MACHINE.items() if key in search.environment}
    facts |= {f"version of {k}": value for k, value in sorted(search.environment.items()) if k not in MACHINE}
    rows = [{"fact": fact, "value": value} for fact, value in facts.items()]
    return Table((Column("fact", ""), Column("value", "")), rows)
