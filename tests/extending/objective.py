"""Run in a copy of the tree to which docs/extending.md added the objective `tokens_per_joule`: searches look for it,
short trials extrapolate it, hopeless trials are ended by it, and answers rank, query and print it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from service.answers.query import parse_query
from service.answers.ranking import best, pareto
from service.answers.tables import candidates_table
from service.metrics import with_unit
from service.record.results import SearchRecord, TrialRecord
from service.result import Proxy, TrialResult
from service.spec import parse_spec
from service.trials import early_stop
from service.trials.extrapolation import over_batch
from service.trials.figures import of_step
from trainables.measure import Stretch
from trainables.status import Status

PROBLEM = parse_spec("""
name: extended
model: tiny-llama
data: synthetic
sequence_length: 32
global_batch_size: 64
cluster: {gpus_per_node: 2, accelerator: h200}
objectives: {tokens_per_joule: maximize}
constraints: ["tokens_per_joule>=2"]
space: {micro_batch_size: [1, 2, 4]}
""")
LAYOUTS = PROBLEM.legal.layouts
TOKENS = PROBLEM.tokens_per_step


def result(batch: int, seconds: float, joules: float) -> TrialResult:
    tokens = batch * PROBLEM.sequence_length
    metrics = of_step(PROBLEM, 2, tokens, mean_s=seconds, median_s=seconds, energy_j=joules)
    layout = replace(LAYOUTS[0], global_batch_size=batch)
    return TrialResult("t", layout, Status.OK, None, metrics, step_times_s=(seconds, seconds))


def answered() -> None:
    trials = []
    for i, (layout, joules) in enumerate(zip(LAYOUTS, (100.0, 50.0, 10_000.0), strict=True)):
        figures = of_step(PROBLEM, 2, TOKENS, mean_s=1.0, median_s=1.0, energy_j=joules)
        metrics = {name: value for name, value in figures.items() if value is not None}
        trials.append(TrialRecord(f"t{i}", layout.label, layout, "ok", None, metrics, {}, f"r{i}"))
    texts = tuple(limit.text for limit in PROBLEM.goals.limits)
    goals = dict(PROBLEM.goals.objectives)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    record = SearchRecord("s", "extended", "finished", start, goals, texts, {}, {}, (), "r", tuple(trials))
    assert [one.trial_id for one in pareto(record)] == ["t1"], "the third one breaks the constraint"
    assert best(record, parse_query(maximize="tokens_per_joule")).trial_id == "t1"
    assert best(record, parse_query(within="tokens_per_joule 60%", minimize="step_time_s")).trial_id == "t1"
    assert "tokens/J" in candidates_table(record, pareto(record)).splitlines()[0]
    assert with_unit("tokens_per_joule", 40.96, None) == "40.96 tokens/J"


def main() -> None:
    answered()
    few, many = (Proxy(PROBLEM.workload.shape.layers, result(batch, batch / 8, 10.0 * batch)) for batch in (8, 16))
    whole = over_batch(PROBLEM, result(64, 1.0, 1.0), few, many)
    assert abs((whole.metrics["tokens_per_joule"] or 0) - TOKENS / 640) < 1e-9
    assert whole.methods["tokens_per_joule"] == "short"
    steps = Stretch((1.0, 1.0, 1.0), 0, 3_000_000_000)
    bounds = early_stop.bounds(PROBLEM, 2, steps, energy_j=300.0)
    assert TOKENS / 100 < bounds["tokens_per_joule"] < 1.2 * TOKENS / 100
    assert early_stop.rival(PROBLEM.goals, bounds, [{"tokens_per_joule": 2 * TOKENS / 100}])
    assert "| `tokens_per_joule` | tokens for each J" in Path("docs/spec.md").read_text()


if __name__ == "__main__":
    main()
