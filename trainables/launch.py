"""A layout trained without Ray, by torchrun: `torchrun --nproc-per-node=8 -m trainables.launch run.yaml`.

Needs no torch until it runs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from trainables.data import DataError
from trainables.hook import wattune_steps
from trainables.measure import Procedure
from trainables.program import InvalidTrial, Place, Progress, TrialRequest
from trainables.training import Training

WARMUP_STEPS = 3
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Launch:
    """A layout, what it trains, and the machines: `gpus_per_node` of an accelerator of `search_spaces.hardware`."""

    layout: Layout
    training: Training
    accelerator: str
    gpus_per_node: int

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON and YAML."""
        machines = {"accelerator": self.accelerator, "gpus_per_node": self.gpus_per_node}
        return {"layout": self.layout.to_dict(), "training": asdict(self.training), **machines}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Launch:
        """Inverse of `to_dict`. Raises `ValueError`, with one line, for what is missing or unknown."""
        try:
            training = dict(values["training"])
            model = ModelShape(**training.pop("model"))
            layout = Layout.from_dict(values["layout"])
            launch = cls(layout, Training(model, **training), values["accelerator"], values["gpus_per_node"])
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from None
        except (TypeError, ValueError) as error:
            raise ValueError(str(error).replace(".__init__()", "")) from None
        if launch.accelerator not in ACCELERATORS:
            raise ValueError(f"accelerator {launch.accelerator!r} is unknown; known: {', '.join(ACCELERATORS)}")
        return launch


def read(path: Path) -> Launch:
    """The launch that a YAML file holds. Raises `ValueError`, with one line."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds no mapping")
    try:
        return Launch.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def place_of(launch: Launch, worker: Mapping[str, str]) -> Place:
    """Where this process runs, by the variables that torchrun sets for each of its processes.

    Raises `ValueError`, with one line, where they are not set or do not fit the layout.
    """
    from trainables.platforms.base import platform_of

    try:
        size, number, local = (int(worker[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
        host, port = worker["MASTER_ADDR"], int(worker["MASTER_PORT"])
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is not set: start this by torchrun") from None
    if size != launch.layout.num_gpus:
        raise ValueError(f"the layout is one of {launch.layout.num_gpus} GPUs, and torchrun started {size} processes")
    platform = platform_of(ACCELERATORS[launch.accelerator])
    # torchrun itself keeps the key-value store at which the ranks meet.
    return Place(launch.layout.worker_rank(number), local, host, port, platform)


def train(launch: Launch, place: Place, steps: int, tell: Callable[[str], None]) -> None:
    """Train `steps` optimizer steps after a few that warm up, and `tell` how fast. Collective.

    Raises what `Training.run` does.
    """
    os.environ.update(place.platform.environment)
    # Steps agree by any tolerance, so that the warm-up is as short as it can be.
    procedure = Procedure(WARMUP_STEPS - 1, math.inf, 0.0, 0.0, steps)
    request = TrialRequest("launch", launch.layout, launch.training, procedure, TIMEOUT_S)
    report = launch.training.run(request, place, _Steps(tell))
    window = report.timings[launch.layout.global_batch_size].window_steps_s
    tokens = launch.layout.global_batch_size * launch.training.sequence_length
    memory = "" if report.peak_memory_gib is None else f", {report.peak_memory_gib:.1f} GiB at most on rank 0"
    tell(f"loss {report.losses[0]:.4f} at first, {report.losses[-1]:.4f} at last{memory}")
    tell(f"{tokens * len(window) / sum(window):,.0f} tokens/s over {len(window)} steps")
    import torch.distributed as dist

    dist.destroy_process_group()


class _Steps:
    """Tells of each step that has ended, by the hook as well, so that this too can be the program of a trainer."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell, self.phase, self.count = tell, "", 0

    def __call__(self, progress: Progress) -> None:
        if progress.phase == self.phase and progress.tokens_per_s is not None:
            self.count += 1
            wattune_steps.step()
            self.tell(f"step {self.count} ({self.phase}): {progress.tokens_per_s:,.0f} tokens/s")
        self.phase = progress.phase


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for a training in vain, 2 for wrong input. Rank 0 tells of the steps."""
    parser = argparse.ArgumentParser(prog="trainables.launch", description="Train a layout without Ray, by torchrun.")
    parser.add_argument("run", type=Path, help="YAML file, as `wattune export --for torchrun` writes it")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to time (default: 20)")
    options = parser.parse_args(arguments)
    try:
        if options.steps < 1:
            raise ValueError(f"--steps {options.steps}: must be at least 1")
        launch = read(options.run)
        place = place_of(launch, os.environ)
    except ValueError as error:
        return _refuse(error, 2)
    try:
        train(launch, place, options.steps, print if place.rank == 0 else _nothing)
    except DataError as error:
        return _refuse(error, 2)
    except InvalidTrial as error:
        return _refuse(error, 1)
    return 0


def _nothing(_: str) -> None:
    pass


def _refuse(error: Exception, exit_code: int) -> int:
    """Told by one process of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"trainables.launch: {error}", file=sys.stderr)
    return exit_code


def _leave(exit_code: int) -> None:
    """End this process as those of trials end, without taking Python down first.

    Threads of gloo's groups outlive `destroy_process_group`, and aborted the process then, after a training that had
    gone well: on two busy cores in 6 of 21 runs of two ranks (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _leave(main())
