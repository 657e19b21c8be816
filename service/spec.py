"""The search spec: one YAML file that says it all, checked before anything starts, and made a `Problem` of."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticKnownError

from search_spaces.engines import ENGINES, facts_of
from search_spaces.engines.foreign import names_of
from search_spaces.expert import choose
from search_spaces.hardware import ACCELERATORS, NETWORKS
from search_spaces.hopeless import hopeless
from search_spaces.layout import AXES, Layout
from search_spaces.models import FAMILIES, PRESETS, ModelShape
from search_spaces.placement import PLACED
from search_spaces.rules import all_rules
from search_spaces.trainer import GIVEN, Trainer
from service.axes import AUTO, SpaceSpec
from service.errors import InputError
from service.goals import Goals, parse_constraint
from service.metrics import METRICS, Direction, nearest
from service.problem import (
    INLINE,
    Borderline,
    Budget,
    Cluster,
    Explore,
    Finalists,
    Interconnect,
    Measurement,
    Problem,
    Sampler,
)
from service.reading import LARGEST, Amount, AmountOrZero, Strict, Switch, read_yaml
from service.trainer_spec import ConditionalSpec, StepsSpec, TrainerSpec, described, resolved
from trainables.data import located
from trainables.objects import holds_secret

USUAL_LENGTH = 8192
"""Tokens of a sequence where a spec says nothing, or as many as the model has positions for: what Llama 3 was trained
with at first (Grattafiori et al. 2024, section 3.4.1)."""

UNNAMED = "search"
"""The name of a search that has none, of a model that has none."""

MOST_GPUS = 1_000_000
MOST_LAYERS = 100_000

Positive = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]


class ModelSpec(Strict):
    """An inline model shape; see `search_spaces.models.ModelShape`."""

    family: Literal[FAMILIES]  # type: ignore[valid-type]
    layers: Annotated[int, Field(strict=True, ge=1, le=MOST_LAYERS)]
    hidden: Positive
    heads: Positive
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    ffn_hidden: Positive
    vocab: Positive
    max_sequence_length: Positive = 8192
    tie_embeddings: Switch = False
    rope_theta: Amount = 10_000.0
    num_experts: Annotated[int, Field(strict=True, ge=0, le=LARGEST)] = 0
    experts_per_token: Positive = 2
    router_aux_loss: AmountOrZero = 0.02

    @model_validator(mode="after")
    def _divides(self) -> ModelSpec:
        if self.head_dim is None and (self.hidden % self.heads or (self.hidden // self.heads) % 2):
            raise ValueError(f"hidden {self.hidden} must be an even multiple of heads {self.heads}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.num_experts and self.family != "llama":
            raise ValueError(f"num_experts: experts are SwiGLU networks, of the family llama, not {self.family}")
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        return self

    def shape(self) -> ModelShape:
        return ModelShape(**{**self.model_dump(), "kv_heads": self.kv_heads or self.heads})


class NetworkSpec(Strict):
    """The section of `service.problem.Interconnect`."""

    preset: Literal[tuple(NETWORKS)] | None = None  # type: ignore[valid-type]
    gpu_gb_per_s: Amount | None = None
    node_gb_per_s: Amount | None = None
    latency_us: Amount | None = None
    gpus_per_switch: Positive | None = None
    oversubscription: Annotated[Amount, Field(ge=1)] = Interconnect.oversubscription

    @model_validator(mode="after")
    def _has_switches(self) -> NetworkSpec:
        if self.oversubscription > 1 and self.gpus_per_switch is None:
            raise ValueError(
                f"oversubscription {self.oversubscription:g} needs gpus_per_switch, the GPUs below which there is none"
            )
        return self


def _as_preset(value: Any) -> Any:
    return {"preset": value} if isinstance(value, str) else value


class ClusterSpec(Strict):
    """The section of `service.problem.Cluster`."""

    nodes: Positive = Cluster.nodes
    gpus_per_node: Positive
    accelerator: Literal[tuple(ACCELERATORS)]  # type: ignore[valid-type]
    cpus_per_worker: Amount = Cluster.cpus_per_worker
    network: Annotated[NetworkSpec, BeforeValidator(_as_preset)] | None = None
    memory_gib: Amount | None = None
    power_limit_w: Amount | None = None

    @model_validator(mode="after")
    def _states_what_is_there(self) -> ClusterSpec:
        if self.network is not None and (self.network.gpus_per_switch or 0) % self.gpus_per_node:
            raise ValueError(
                f"network.gpus_per_switch {self.network.gpus_per_switch} must be a multiple of gpus_per_node "
                f"{self.gpus_per_node}"
            )
        for name in ("memory_gib", "power_limit_w"):
            if ACCELERATORS[self.accelerator].platform == "cpu" and getattr(self, name) is not None:
                raise ValueError(f"{name} is that of a GPU, not of a worker process on {self.accelerator}")
        return self

    def cluster(self) -> Cluster:
        network = None if self.network is None else Interconnect(**dict(self.network))
        return Cluster(**{**dict(self), "network": network})

    @model_validator(mode="after")
    def _is_not_boundless(self) -> ClusterSpec:
        if self.nodes * self.gpus_per_node > MOST_GPUS:
            raise ValueError(
                f"{self.nodes} x {self.gpus_per_node} GPUs are more than {MOST_GPUS:,}, the most there may be"
            )
        return self


def _chosen(value: Any) -> Any:
    """`auto`, a space that follows from model and cluster, is None, which nobody can write."""
    if value is None:
        raise PydanticKnownError("model_type", {"class_name": "SpaceSpec"})
    return None if value == AUTO else value


class MeasurementSpec(Strict):
    """The section of `service.problem.Measurement`."""

    steady_steps: Annotated[int, Field(strict=True, ge=2)] = Measurement.steady_steps
    warmup_tolerance: Annotated[Amount, Field(lt=1)] = Measurement.warmup_tolerance
    warmup_max_s: Amount = Measurement.warmup_max_s
    window_s: Amount = Measurement.window_s
    window_min_steps: Positive = Measurement.window_min_steps
    breakdown: Switch = Measurement.breakdown
    short_trials: Switch = Measurement.short_trials
    deadline_s: Amount = Measurement.deadline_s
    explore: Explore = Measurement.explore


class BudgetSpec(Strict):
    """The section of `service.problem.Budget`."""

    trials: Annotated[int, Field(strict=True, ge=1)] = Budget.trials
    wall_time_s: Amount | None = Budget.wall_time_s
    gpu_hours: Amount | None = Budget.gpu_hours


class FinalistSpec(Strict):
    """The section of `service.problem.Finalists`."""

    count: Annotated[int, Field(strict=True, ge=0)] = Finalists.count
    repeats: Annotated[int, Field(strict=True, ge=2)] = Finalists.repeats  # a single figure has no interval
    window_s: Amount = Finalists.window_s


def _metric(name: str) -> str:
    if name not in METRICS:
        raise ValueError(f"unknown metric; {nearest(name, METRICS)}")
    return name


class SearchSpec(Strict):
    """A whole search as a file says it; see docs/spec.md for every field."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None
    model: str | ModelSpec | None = None
    data: Annotated[str, Field(min_length=1)] | None = None
    sequence_length: Positive | None = None
    global_batch_size: Positive
    cluster: ClusterSpec
    trainer: Annotated[TrainerSpec | None, BeforeValidator(resolved)] = None
    objectives: dict[Annotated[str, AfterValidator(_metric)], Direction] = Field(
        default={
            "tokens_per_s": Direction.MAXIMIZE,
            "joules_per_token": Direction.MINIMIZE,
            "throttle_ratio": Direction.MINIMIZE,
        },
        min_length=1,
    )
    constraints: list[str] = Field(default=[])
    space: Annotated[SpaceSpec | None, BeforeValidator(_chosen)] = None
    measurement: MeasurementSpec = MeasurementSpec()
    budget: BudgetSpec = BudgetSpec()
    finalists: FinalistSpec = FinalistSpec()
    sentinel_every: Annotated[int, Field(strict=True, ge=0)] = Problem.sentinel_every
    baseline: dict[str, Any] | None = None
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = Problem.priority
    sampler: Sampler = Problem.sampler
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = Problem.seed
    depth_proxy: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None
    borderline: Borderline = Problem.borderline

    @property
    def _space(self) -> SpaceSpec:
        """What is said of the space; `auto` says nothing."""
        return self.space or SpaceSpec()

    @cached_property
    def problem(self) -> Problem:
        """What the spec is about, as plain values."""
        cluster = self.cluster.cluster()
        trainer = None if self.trainer is None else self.trainer.trainer
        axes = self._space.model_dump() if trainer is None else _axes_of(trainer, self._space)
        axes["num_gpus"] = axes["num_gpus"] or [cluster.size]
        placement = tuple(axis for axis in PLACED if AUTO in axes[axis])
        axes |= {axis: [value for value in axes[axis] if value != AUTO] or [None] for axis in placement}
        measurement = dict(self.measurement)
        if trainer is not None:
            measurement["short_trials"] = False
        model, shape = (
            (INLINE, self.model.shape())
            if isinstance(self.model, ModelSpec)
            else (self.model, PRESETS.get(self.model or ""))
        )
        named = UNNAMED if trainer is None else trainer.name
        length = USUAL_LENGTH if shape is None else min(USUAL_LENGTH, shape.max_sequence_length)
        problem = Problem(
            name=self.name or (self.model if isinstance(self.model, str) else named),
            model=model,
            shape=shape,
            data=self.data,
            sequence_length=self.sequence_length or length,
            global_batch_size=self.global_batch_size,
            cluster=cluster,
            goals=Goals(self.objectives, tuple(map(parse_constraint, self.constraints))),
            axes={axis: list(dict.fromkeys(values)) for axis, values in axes.items()},
            measurement=Measurement(**measurement),
            budget=Budget(**dict(self.budget)),
            finalists=Finalists(**dict(self.finalists)),
            sentinel_every=self.sentinel_every,
            baseline=self.baseline,
            priority=self.priority,
            sampler=self.sampler,
            seed=self.seed,
            depth_proxy=None if self.depth_proxy is None else (self.depth_proxy[0], self.depth_proxy[1]),
            borderline=self.borderline,
            trainer=trainer,
            placement=placement,
        )
        if self.space is not None or trainer is not None:
            return problem
        chosen = choose(problem.workload, cluster.size, alone=problem.measurement.explore != "gang")
        axes = {axis: list(chosen[axis].values) if axis in chosen else values for axis, values in problem.axes.items()}
        return replace(problem, axes=axes, why={axis: choice.why for axis, choice in chosen.items()})

    @model_validator(mode="after")
    def _consistent(self) -> SearchSpec:
        if isinstance(self.model, str) and self.model not in PRESETS:
            raise ValueError(f"model: unknown model {self.model!r}; must be {_choice(PRESETS)}, or an inline shape")
        if self.data is not None and holds_secret(self.data):
            raise ValueError("data: a password in it would be recorded: the nodes' environment is its place")
        if self.trainer is None:
            self._check_complete()
        else:
            self._check_beside_trainer(self.trainer)
        _check_model(self.problem)
        _check_depths(self.problem)
        _check_templates(self.problem)
        _check_axes(self.problem)
        _check_legal(self.problem)
        return self

    def _check_complete(self) -> None:
        """Refuse what only a spec with a trainer may lack, or have."""
        if self.model is None and "model" not in self.model_fields_set:
            raise ValueError("model: this field is required")
        if self.model is None:
            raise ValueError(f"model: must be {_MODELS}")
        for axis in self._space.model_extra or ():
            raise ValueError(f"space.{axis}: unknown field; allowed: {_fields('space')}")

    def _check_beside_trainer(self, trainer: TrainerSpec) -> None:
        """Refuse what does not go with a trainer."""
        if self.model is None and self.sequence_length is None:
            raise ValueError("sequence_length: this field is required where no model is named")
        measurement = self.measurement
        if measurement.short_trials and "short_trials" in measurement.model_fields_set:
            raise ValueError("measurement.short_trials: a trainer's program takes steps of its own batch alone: false")
        if self.depth_proxy is not None:
            raise ValueError("depth_proxy: a trainer's program has the layers that it has: leave it out")
        if self.borderline != "risk":
            raise ValueError("borderline: what a trainer's program needs of memory is learnt by trials: risk")
        for axis in self._space.model_fields_set:
            if axis == "engine":
                raise ValueError(f"space.engine: the trainer {trainer.name} stands for it: leave it out")
            if axis not in (*GIVEN, *trainer.axes):
                having = ", ".join([*trainer.axes, *GIVEN])
                raise ValueError(f"space.{axis}: the trainer {trainer.name} has no such axis; it has {having}")
        if self.problem.placement:
            raise ValueError("space.rank_order: auto goes with Wattune's own engines alone")


def _axes_of(trainer: Trainer, space: SpaceSpec) -> dict[str, list[Any]]:
    """The values to try of all axes: of the trainer's, those of `space`, or else all that it has. Raises `ValueError`
    for a value that it has not."""
    tried: dict[str, list[Any]] = {axis: [row.idle] for axis, row in AXES.items()} | {"engine": [trainer.name]}
    tried |= {axis: getattr(space, axis) for axis in GIVEN}
    for axis, values in trainer.axes:
        named = getattr(space, axis, None) if axis in space.model_fields_set else None
        if named is None:
            tried[axis] = [AXES[axis].default] if values is None else list(values)
            continue
        tried[axis] = named if isinstance(named, list) else [named]
        for value in tried[axis]:
            if values is not None and (value, type(value)) not in [(one, type(one)) for one in values]:
                raise ValueError(
                    f"space.{axis}: the trainer {trainer.name} has not {json.dumps(value)}; it has "
                    f"{', '.join(map(json.dumps, values))}"
                )
    return tried


def _check_templates(problem: Problem) -> None:
    """Refuse templates and rules of a trainer that come to nothing for any layout."""
    if (trainer := problem.trainer) is None:
        return
    layout = Layout.plain(trainer.name, 1, problem.global_batch_size)
    for axis, values in trainer.own.items():
        layout = layout.having(axis, values[0])
    of_layouts = names_of(layout, problem.workload)
    for fault in trainer.faults(of_layouts | problem.names, of_layouts):
        raise ValueError(f"trainer.{fault}")


def _check_model(problem: Problem) -> None:
    if problem.shape is None:
        return
    positions = problem.shape.max_sequence_length
    if problem.shape.family == "gpt" and problem.sequence_length > positions:
        raise ValueError(f"sequence_length: {problem.sequence_length} exceeds the model's {positions} positions")


def _check_depths(problem: Problem) -> None:
    if problem.depth_proxy is None or problem.shape is None:
        return
    shallow, deep = problem.depth_proxy
    if not shallow < deep < problem.shape.layers:
        raise ValueError(
            f"depth_proxy: must be two numbers, ascending, below the model's {problem.shape.layers} layers, "
            f"not {shallow}, {deep}"
        )
    if problem.axes["stage_layers"] != [None] or "stage_layers" in problem.placement:
        raise ValueError("depth_proxy: uneven stages (space.stage_layers) have no equal in a model of fewer layers")
    for size in problem.axes["pipeline_parallel_size"]:
        if shallow % size or deep % size:
            raise ValueError(
                f"depth_proxy: {shallow} and {deep} layers cannot both be split evenly over "
                f"space.pipeline_parallel_size {size}"
            )


def _check_axes(problem: Problem) -> None:
    """Refuse values that no other choice on the other axes could make legal."""
    for size in problem.axes["num_gpus"]:
        if size > problem.cluster.size:
            raise ValueError(f"space.num_gpus: {size} is more than the cluster's {problem.cluster.size}")
    for one in hopeless(problem.axes, problem.workload) if problem.trainer is None else ():
        value = list(one.value) if isinstance(one.value, tuple) else one.value
        allowed = f"; allowed: {', '.join(map(str, one.allowed))}" if one.allowed else ""
        raise ValueError(f"space.{one.axis}: {value}: {one.reason}{allowed}")


def _check_legal(problem: Problem) -> None:
    """Refuse a problem without a legal layout, or whose baseline is not just one."""
    space = problem.legal
    if not space.layouts:
        layout, own = (
            Layout.plain(problem.axes["engine"][0], 1, 1),
            () if problem.trainer is None else problem.trainer.own,
        )
        engines = ENGINES.values() if problem.trainer is None else [facts_of(layout, problem.workload)]
        names = [rule.__name__ for rule in all_rules(engines, own)]
        farthest = sorted(space.refused, key=names.index, reverse=True)  # what the others would meet in the end
        field = "global_batch_size" if farthest[:1] == ["batch_divides"] else "space"
        refusals = (f"{rule} refused {space.refused[rule]} ({space.reasons[rule]})" for rule in farthest)
        raise ValueError(f"{field}: no legal layout among {space.distinct}; {'; '.join(refusals)}")
    _ = problem.baseline_layout


SECTIONS: dict[str, type[BaseModel]] = {
    "": SearchSpec,
    "trainer": TrainerSpec,
    "trainer.command": ConditionalSpec,
    "trainer.steps": StepsSpec,
    "model": ModelSpec,
    "cluster": ClusterSpec,
    "cluster.network": NetworkSpec,
    "space": SpaceSpec,
    "measurement": MeasurementSpec,
    "budget": BudgetSpec,
    "finalists": FinalistSpec,
}


def parse_spec(text: str, source: str = "spec", folder: Path = Path()) -> Problem:
    """The problem of a spec's YAML text. Its trainer's paths are relative to `folder`, that of its data to the working
    directory.

    Raises `InputError` with one line for whatever is wrong with it.
    """
    try:
        fields = read_yaml(text)
    except ValueError as error:
        raise _input_error(f"{source}: {error}") from None
    if not isinstance(fields, dict):
        raise _input_error(f"{source}: a spec is a mapping with the fields {_fields('')}")
    return make_problem(fields, source, folder)


def make_problem(fields: Mapping[str, Any], source: str = "spec", folder: Path = Path()) -> Problem:
    """The problem of a spec's fields, as its YAML has them; see `parse_spec`.

    Raises `InputError` with one line for the first bad one.
    """
    try:
        return SearchSpec.model_validate(dict(fields), context={"folder": folder}).problem
    except ValidationError as error:
        raise _input_error(f"{source}: {explanation(error)}") from None


def dump_spec(problem: Problem, named: bool = False) -> str:
    """The problem as a spec's YAML text, defaults filled in; `parse_spec` reads it back.

    `named`: whether a trainer is named alone, and so looked up where the text is read.
    """
    values, trainer = asdict(problem), problem.trainer
    preset = problem.model is not None and PRESETS.get(problem.model) == problem.shape
    if trainer is not None:
        having = (*GIVEN, *dict(trainer.axes))
        values["axes"] = {axis: tried for axis, tried in values["axes"].items() if axis in having}
        values["trainer"] = trainer.name if named else described(trainer)
    values["axes"] |= {axis: [*values["axes"][axis], AUTO] for axis in problem.placement}
    values |= {
        "model": problem.model if preset else values["shape"],
        "objectives": dict(problem.goals.objectives),
        "constraints": [limit.text for limit in problem.goals.limits],
        "space": values["axes"],
    }
    fields = [name for name in SearchSpec.model_fields if name != "trainer" or trainer is not None]
    plain = json.loads(json.dumps({name: values[name] for name in fields}))  # lists in place of tuples
    return yaml.safe_dump(plain, sort_keys=False)


def new_search_id(problem: Problem) -> str:
    """A name that sorts by time and that no other search has."""
    return f"{problem.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def load_spec(path: str | Path) -> Problem:
    """The problem of the spec file at `path`, to whose folder its paths are relative.

    Raises `InputError` with one line for whatever is wrong with it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"{path}: cannot read the spec: {reason}") from None
    problem = parse_spec(text, str(path), Path(path).parent)
    return problem if problem.data is None else replace(problem, data=located(problem.data, Path(path).parent))


def _input_error(text: str) -> InputError:
    return InputError(" ".join(text.split()))


def _choice(values: Iterable[object]) -> str:
    return f"one of {', '.join(map(str, values))}"


def _fields(section: str) -> str:
    return ", ".join(SECTIONS[section].model_fields)


def explanation(error: ValidationError) -> str:
    """The most telling of pydantic's errors: the field, what is wrong with it and what is allowed."""
    # A model given inline fails as a string too; that half of the union says nothing, as others of sections do not.
    details = [d for d in error.errors(include_url=False) if not _is_text_of_section(d)]
    # A misspelt field is both unknown and missing.
    detail = min(details, key=lambda d: d["type"] != "extra_forbidden")
    path = tuple(
        part
        for part in detail["loc"]
        if isinstance(part, str)
        and part not in _BRANCHES
        and not part.startswith(("function-", "constrained-", "tuple[", "literal["))
    )
    field = ".".join(path)
    if detail["type"] == "invalid_key":
        return f"{'.'.join([*path, str(detail['input'])])}: a field's name must be text"
    if not field:
        return detail["msg"].removeprefix("Value error, ")
    value = detail["input"]
    shown = json.dumps(value, ensure_ascii=False) if isinstance(value, str | int | float | None) else ""
    given = f" (given: {shown if len(shown) <= 80 else shown[:80] + '...'})" if shown else ""
    match detail["type"]:
        case "extra_forbidden":
            return f"{field}: unknown field; allowed: {_fields('.'.join(path[:-1]))}"
        case "missing":
            return f"{field}: this field is required"
        case "model_type" if field == "model":
            message = f"must be {_MODELS}"
        case "model_type" if field == "space":
            message = f"must be {AUTO}, or a mapping with the fields {_fields(field)}"
        case "model_type":
            message = f"must be a mapping with the fields {_fields(field)}"
        case "dict_type" if field == "baseline":
            message = "must be a mapping of axis to value"
        case "dict_type":
            message = "must be a mapping of metric to maximize or minimize"
        case "string_pattern_mismatch":
            message = "must be letters, digits, '.', '_' and '-', at most 63, the first a letter or a digit"
        case "too_short" | "too_long" if field == "depth_proxy":
            message = "must be two numbers of layers"
        case "too_short" | "string_too_short":
            message = "must not be empty"
        case "tuple_type":
            message = f"must be a list of whole numbers, several such lists, {AUTO}, or null"
        case _:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return f"{field}: {message}{given}"


_BRANCHES = ("[key]", "str", "ModelSpec", "StepsSpec", "ConditionalSpec")
"""What pydantic puts into the place of an error beside the names of fields."""


_MODELS = f"{_choice(PRESETS)}, or an inline shape with the fields {_fields('model')}"


def _is_text_of_section(detail: ErrorDetails) -> bool:
    """Whether it only says of what may be a section, too, that it is no text."""
    branch = str(detail["loc"][-1]) if detail["type"] == "string_type" else ""
    if not (branch == "str" or branch.startswith("function-")):
        return False
    return isinstance(detail["input"], dict) or detail["loc"][0] == "model"
