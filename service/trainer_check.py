"""A few steps of a trainer's program on this machine, and in words what was seen of it and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from search_spaces.layout import Layout
from search_spaces.trainer import HOOK
from service.checks import check_data, check_machine
from service.cluster import check_cluster, ray_session
from service.errors import InputError
from service.problem import Problem
from service.queue.actor import Member
from service.queue.policy import read_policy
from service.reading import read_yaml
from service.result import TrialResult
from service.spec import load_spec, parse_spec
from service.trainer_spec import ENDINGS
from service.trainers import check_allowed
from service.trials.evaluate import program_of, run_trial
from service.turns import bench_in_turn
from telemetry.devices import count_gpus
from trainables.command import Command
from trainables.status import Status

STEPS: dict[str, Any] = {
    "steady_steps": 2,
    "warmup_max_s": 1.0,
    "window_s": 0.1,
    "window_min_steps": 2,
    "breakdown": False,
}
"""Few, as only whether they come is to be seen."""

DEADLINE_S = 180.0

TWO_LINES = "add two lines to the program: `import wattune_steps`, and `wattune_steps.step(loss=loss)` after each step"
"""What to do about a program that was never heard of."""


@dataclass(frozen=True)
class TrainerCheck:
    """What was seen of a trainer's program: the command of the layout, and what its trial came to."""

    layout: Layout
    command: Command
    result: TrialResult

    @property
    def passed(self) -> bool:
        """Whether a trial of it would have figures."""
        return self.result.status == Status.OK

    @property
    def advice(self) -> list[str]:
        """What is missing, and what to do about it, a line each."""
        return list(_advice(self.command, self.result))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        command = {name: getattr(self.command, name) for name in ("arguments", "directory")}
        made = {"environment": dict(self.command.environment), "files": dict(self.command.files)}
        return {**command, **made, "passed": self.passed, "advice": self.advice, "result": self.result.to_dict()}


def check_trainer(reference: str, allow_trainer: bool = False) -> TrainerCheck:
    """Run a few steps of the first legal layout of a spec's file, or of a trainer's name or file, for which a small
    model on one GPU of this machine stands in, or one of its CPUs.

    Raises `InputError` for what is wrong with the trainer or the spec, and where a cluster is not to run it.
    """
    problem = _problem(reference)
    check_allowed(problem.trainer, allow_trainer)
    check_data(problem, read_policy().data)
    check_machine(problem.least)
    problem = problem.located()
    layout = problem.legal.layouts[0]
    command = program_of(layout, problem)
    assert isinstance(command, Command)
    with ray_session(problem.cluster):
        check_cluster(problem.least)
        name, preload = f"trainer-check-{uuid4().hex}", Command.preload([layout])
        with bench_in_turn(name, problem, layout.num_gpus, preload, Member()) as bench:
            result = run_trial(bench, "check", layout)
    return TrainerCheck(layout, command, result)


def text(check: TrainerCheck) -> str:
    """For a terminal."""
    command, result = check.command, check.result
    ranks = {rank.rank: rank.device or "a CPU" for rank in result.ranks}
    rows = [
        ("layout", check.layout.label),
        ("command", " ".join(command.arguments)),
        ("directory", command.directory),
        ("environment", ", ".join(f"{name}={value}" for name, value in command.environment) or "that of the worker"),
        *(
            (f"file {name}", "\n" + "".join(f"    {line}\n" for line in made.splitlines()))
            for name, made in command.files
        ),
        ("ended", result.status if result.cause is None else f"{result.status}: {result.cause}"),
    ]
    if check.passed:
        times = ", ".join(f"{seconds:.4g}" for seconds in result.step_times_s)
        rows += [
            ("steps", f"{len(result.step_times_s)} in the window, seen by {_means(command)}, of {times} s"),
            ("losses", ", ".join(f"{loss:.4f}" for loss in result.losses) or "none"),
            ("memory", _memory(result)),
            ("ranks", ", ".join(f"{rank} on {device}" for rank, device in sorted(ranks.items()))),
        ]
    elif result.traceback:
        rows.append(("said", "\n" + "".join(f"    {line}\n" for line in result.traceback.splitlines()[-20:])))
    lines = [f"{name}: {value}".rstrip() for name, value in rows]
    return "\n".join([*lines, *(f"missing: {line}" for line in check.advice)])


def _problem(reference: str) -> Problem:
    """That of a spec's file, or one that a trainer is to be tried on. Raises `InputError`."""
    if reference.endswith(ENDINGS) and _is_spec(Path(reference)):
        problem = load_spec(reference)
    else:
        accelerator = "gpu" if count_gpus() else "cpu"
        given = {
            "name": "trainer-check",
            "trainer": reference,
            "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 176}
            | {"vocab": 512, "max_sequence_length": 128},
            "data": "synthetic",
            "sequence_length": 128,
            "global_batch_size": 8,
            "cluster": {"nodes": 1, "gpus_per_node": 1, "accelerator": accelerator},
        }
        problem = parse_spec(yaml.safe_dump(given), reference, Path())
    if problem.trainer is None:
        raise InputError(f"{reference}: has no trainer; Wattune's own engines need no such check")
    deadline_s = min(DEADLINE_S, problem.measurement.deadline_s)
    return replace(
        problem, measurement=replace(problem.measurement, deadline_s=deadline_s, short_trials=False, **STEPS)
    )


def _is_spec(file: Path) -> bool:
    """Whether a file has a spec, rather than a trainer. What cannot be read is told by whoever reads it."""
    try:
        fields = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and "command" not in fields


def _means(command: Command) -> str:
    return f"the {HOOK}" if command.steps is None else "its log"


def _memory(result: TrialResult) -> str:
    known = [rank.peak_memory_gib for rank in result.ranks if rank.peak_memory_gib is not None]
    return f"{max(known):.2f} GiB at most" if known else "not told"


def _advice(command: Command, result: TrialResult) -> Iterator[str]:
    hooked = command.steps is None
    if result.status == Status.OK:
        if not result.losses:
            told = "wattune_steps.step(loss=loss)" if hooked else "a group (?P<loss>...) of the pattern `step`"
            yield f"no loss was told, so nothing is known of whether it trains: {told}"
        if any(rank.device for rank in result.ranks) and _memory(result) == "not told":
            yield "no memory was told: a group (?P<memory_gib>...) of the patterns, or the hook, which reads torch's"
        return
    cause = result.cause or ""
    if "waited for the first step" in cause or "without having told of a step" in cause:
        yield "no step was seen: " + (
            TWO_LINES if hooked else "no line of its output is one of `steps`; let it log every step, or " + TWO_LINES
        )
    elif "before they were timed" in cause:
        yield "it ended of its own: give it so many steps that it is ended by Wattune, once it is measured"
    elif result.status == Status.OOM:
        yield "memory ran out at its first layout: name a smaller one in a spec's `space`, and check that spec"
    elif result.status == Status.CRASH:
        yield "the command above, run by hand under torchrun, should fail in the same way"
    elif result.status == Status.INVALID:
        yield "it ran, and its losses are not those of a training that begins"
