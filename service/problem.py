"""What a search is about, as plain values: what is trained, on which machines, what may be tried and how it is timed.

`service.spec` makes a `Problem` of a spec's text; everything behind it takes the problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from search_spaces.coefficients import Coefficients
from search_spaces.expressions import Value
from search_spaces.hardware import ACCELERATORS, NETWORKS, Accelerator
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.space import Space, enumerate_space
from search_spaces.trainer import Trainer
from search_spaces.workload import Workload
from service.goals import Goals
from trainables.command import TRIAL_DIR
from trainables.data import located

INLINE = "inline"
"""What a model is called that is no preset."""

Sampler = Literal["auto", "gp", "tpe", "nsga2", "random", "exhaustive"]
"""Who chooses the next layout: `auto`, one of Optuna's, chance, or all in their order; see `service.sampling`."""

Explore = Literal["gang", "slices", "auto"]
"""How layouts are explored: by all their ranks, by slices (`service.trials.slices`), or by slices only where the
machines at hand are fewer than the cluster of the problem."""

Borderline = Literal["risk", "probe", "refuse"]
"""What becomes of layouts that may run out of memory: they are tried, probed before, or not tried."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """What is stated of the network; what is None is that of `preset`, one of `search_spaces.hardware.NETWORKS`, or
    else the accelerator's. Bandwidths are peaks in 10^9 bytes a second, one way.

    `gpu_gb_per_s`: of a GPU's links to its neighbours in the node together; `node_gb_per_s`: of all of a node's
    adapters; `latency_us`: of a hop between nodes. `gpus_per_switch` share one switch of the network's first level,
    whose bandwidth upwards is 1 / `oversubscription` of that downwards; all do if that is None.
    """

    preset: str | None = None
    gpu_gb_per_s: float | None = None
    node_gb_per_s: float | None = None
    latency_us: float | None = None
    gpus_per_switch: int | None = None
    oversubscription: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a search. On `cpu`, a GPU is one worker process with `cpus_per_worker` cores.

    `network`, `memory_gib` and `power_limit_w` of a GPU are stated where they are not the accelerator's own.
    """

    nodes: int = 1
    gpus_per_node: int
    accelerator: str
    cpus_per_worker: float = 1.0
    network: Interconnect | None = None
    memory_gib: float | None = None
    power_limit_w: float | None = None

    @property
    def size(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def stated(self) -> dict[str, float]:
        """What is stated of one GPU, by the fields of `Accelerator`."""
        facts = {"memory_gib": self.memory_gib, "power_limit_w": self.power_limit_w}
        found = {name: value for name, value in facts.items() if value is not None}
        if self.network is None:
            return found
        link, node = self.network.gpu_gb_per_s, self.network.node_gb_per_s
        if self.network.preset is not None:
            preset = NETWORKS[self.network.preset]
            found |= {"link_bytes_per_s": preset.link, "network_bytes_per_s": preset.network}
        if link is not None:
            found["link_bytes_per_s"] = 1e9 * link
        if node is not None:
            found["network_bytes_per_s"] = 1e9 * node / self.gpus_per_node
        return found

    @property
    def device(self) -> Accelerator:
        """Facts of one GPU, by its data sheet or as stated."""
        return replace(ACCELERATORS[self.accelerator], **self.stated)  # type: ignore[arg-type]

    def as_stated(self, known: Coefficients) -> Coefficients:
        """What is known of the accelerator, with what is stated of this cluster in place of it."""
        facts, latency_us = self.stated, None if self.network is None else self.network.latency_us
        return known.stated(
            facts.get("link_bytes_per_s"),
            facts.get("network_bytes_per_s"),
            None if latency_us is None else 1e-6 * latency_us,
            facts.get("power_limit_w"),
        )


@dataclass(frozen=True)
class Measurement:
    """How a trial is timed.

    Warm-up ends when the last `steady_steps` optimizer steps agree within `warmup_tolerance` (relative), at the latest
    after `warmup_max_s`, compile time not counted. The window lasts `window_s` and `window_min_steps` at least. With
    `breakdown`, one more step is profiled after it. With `short_trials`, trials of many microbatches a step time two
    smaller numbers of them in its place, but for finalists. After `deadline_s` a trial counts as hung. `explore` says
    how all layouts but finalists are run.
    """

    steady_steps: int = 3
    warmup_tolerance: float = 0.02
    warmup_max_s: float = 30.0
    window_s: float = 10.0
    window_min_steps: int = 5
    breakdown: bool = True
    short_trials: bool = True
    deadline_s: float = 600.0
    explore: Explore = "gang"

    @property
    def sliced(self) -> bool:
        """Whether trials that explore are run by slices."""
        return self.explore == "slices"


@dataclass(frozen=True)
class Budget:
    """No trial starts once one of these is reached; trials under way are finished.

    `trials` are those that explore; finalists and sentinels come on top of them, within the other two, which are None
    without a bound.
    """

    trials: int = 30
    wall_time_s: float | None = None
    gpu_hours: float | None = None


@dataclass(frozen=True)
class Finalists:
    """The layouts of the front that are measured again in the end, `count` at most, `repeats` times each.

    In full, in windows of `window_s`, in an order drawn by the seed. With a `count` of 0 there are none.
    """

    count: int = 4
    repeats: int = 3
    window_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a search is about. docs/spec.md says what each field does.

    `model` is a preset's name or `INLINE`, `shape` its dimensions. `data` is a source of `trainables.data.open_tokens`.
    `sequence_length` counts tokens, `global_batch_size` sequences. `goals` are its objectives and
    constraints. `axes` maps each axis of a layout to the values to try, without duplicates; `why` says of an axis why
    these, where nobody chose them. `placement` are the axes, of `rank_order` and `stage_layers`, of which the search
    finds values by itself, for the best layout, by how fast GPUs are. `baseline` names one legal
    layout by some of its settings. `priority` is that over other searches on the same Ray cluster, the higher first.
    `depth_proxy` are the layers of the two models that stand for one too big for the cluster, fewer first. `trainer` is
    the program that trains, None for Wattune's own engines; with one, `model`, `shape` and `data` may be None, of which
    nothing is known then.
    """

    name: str
    model: str | None
    shape: ModelShape | None
    data: str | None
    sequence_length: int
    global_batch_size: int
    cluster: Cluster
    goals: Goals
    axes: dict[str, list[Any]]
    measurement: Measurement = Measurement()
    budget: Budget = Budget()
    finalists: Finalists = Finalists()
    sentinel_every: int = 10
    baseline: Mapping[str, Any] | None = None
    priority: int = 0
    sampler: Sampler = "auto"
    seed: int = 0
    depth_proxy: tuple[int, int] | None = None
    borderline: Borderline = "risk"
    why: Mapping[str, str] = field(default_factory=dict, compare=False)
    trainer: Trainer | None = None
    placement: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, Value]:
        """What a trainer's templates may name beside what is of a layout; `trial_dir` is left to the worker."""
        given: dict[str, Value] = {"seed": self.seed, "trial_dir": TRIAL_DIR}
        return given if self.data is None else given | {"data": self.data}

    @property
    def workload(self) -> Workload:
        """What every trial has in common."""
        network = self.cluster.network or Interconnect()
        return Workload(
            self.shape,
            self.sequence_length,
            self.global_batch_size,
            self.cluster.device,
            depths=self.depth_proxy or (),
            gpus_per_node=self.cluster.gpus_per_node,
            gpus_per_switch=network.gpus_per_switch,
            oversubscription=network.oversubscription,
            refuse_borderline=self.borderline == "refuse",
            trainer=self.trainer,
        )

    @property
    def least(self) -> Cluster:
        """The machines that the search cannot do without: its cluster, or a GPU of it where one can explore alone."""
        if self.measurement.explore == "gang":
            return self.cluster
        return replace(self.cluster, nodes=1, gpus_per_node=1)

    def on(self, workers: int) -> Problem:
        """The problem as machines with room for so many workers can have it: explored by slices, or by gangs, as they
        allow, and without finalists where no gang fits."""
        fits = workers >= self.gang_size
        explore = self.measurement.explore
        if explore == "auto":
            explore = "gang" if fits else "slices"
        finalists = self.finalists if fits else replace(self.finalists, count=0)
        return replace(self, measurement=replace(self.measurement, explore=explore), finalists=finalists)

    @property
    def legal(self) -> Space:
        """The legal layouts, and what the rules refuse."""
        return _enumerated(tuple((axis, tuple(values)) for axis, values in self.axes.items()), self.workload)

    @property
    def sets_power_limits(self) -> bool:
        """Whether any of its layouts has a power limit of its own, which takes a person's word to set."""
        return any(limit is not None for limit in self.axes.get("power_limit_w", ()))

    @property
    def baseline_layout(self) -> Layout | None:
        """The legal layout that `baseline` names, None without one. Raises `ValueError` unless there is just one."""
        if self.baseline is None:
            return None
        wanted = {axis: tuple(value) if isinstance(value, list) else value for axis, value in self.baseline.items()}
        for axis in wanted:
            if axis not in self.axes:
                raise ValueError(f"baseline.{axis}: unknown axis; must be one of {', '.join(self.axes)}")
        named = [layout for layout in self.legal.layouts if all(layout.setting(a) == v for a, v in wanted.items())]
        if not named:
            raise ValueError(f"baseline: none of the {len(self.legal.layouts)} legal layouts is like that")
        if len(named) > 1:
            open_axes = [axis for axis in self.axes if len({layout.setting(axis) for layout in named}) > 1]
            raise ValueError(f"baseline: {len(named)} legal layouts are like that; name {', '.join(open_axes)} too")
        return named[0]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all GPUs."""
        return self.global_batch_size * self.sequence_length

    @property
    def gang_size(self) -> int:
        """Workers of one gang: the most GPUs that a legal layout uses."""
        return max(layout.num_gpus for layout in self.legal.layouts)

    def speed(self, tokens_per_s: float, gpus: int) -> dict[str, float | None]:
        """The metrics that follow from the speed of a trial on so many GPUs; `mfu` as in PaLM's appendix B."""
        return self.workload.speed(tokens_per_s, gpus)

    def located(self) -> Problem:
        """The problem for a process with another working directory: data and program under absolute paths."""
        data, trainer = self.data, self.trainer
        if trainer is not None:
            trainer = replace(trainer, directory=str(Path(trainer.directory).absolute()))
        return replace(self, data=None if data is None else located(data), trainer=trainer)

    def at_depth(self, layers: int) -> Problem:
        """The problem of a model of `layers` layers, everything else kept. It is not checked again."""
        return replace(self, model=INLINE, shape=replace(self.workload.shape, layers=layers), depth_proxy=None)

    def facts(self) -> dict[str, Any]:
        """What the record shows of the problem, as parameters of the search's run, by which searches are compared."""
        return {
            "model": self.model,
            "parameters": None if self.shape is None else self.shape.parameters,
            "accelerator": self.cluster.accelerator,
            "nodes": self.cluster.nodes,
            "gpus_per_node": self.cluster.gpus_per_node,
            "data": self.data,
            "sequence_length": self.sequence_length,
            "global_batch_size": self.global_batch_size,
            "sampler": self.sampler,
            "seed": self.seed,
            "legal_points": len(self.legal.layouts),
            **({} if self.trainer is None else {"trainer": self.trainer.name}),
        }


@lru_cache(maxsize=8)
def _enumerated(axes: tuple[tuple[str, tuple[Any, ...]], ...], work: Workload) -> Space:
    """Problems that differ only in what does not bear on it, such as where the data lie, share their legal space."""
    return enumerate_space(dict(axes), work)
