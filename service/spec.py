"""The search spec: one YAML file that says it all, checked before anything starts."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Hashable, Iterable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from search_spaces.config import ENGINES, PRECISIONS, RECOMPUTE
from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.models import FAMILIES, PRESETS, ModelShape
from search_spaces.rules import RULES, Workload
from search_spaces.space import Space, enumerate_space
from service.errors import InputError
from trainables.data import located

Direction = Literal["maximize", "minimize"]
Positive = Annotated[int, Field(strict=True, ge=1)]


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


# Numbers in strings are let in: YAML 1.1 reads 1e-2 as one.
Amount = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]

METRICS = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "step_time_s",
    "joules_per_token",
    "mean_power_w",
    "peak_power_w",
    "throttle_ratio",
    "power_cap_ratio",
    "throttle_time_s",
    "mean_sm_clock_mhz",
    "peak_gpu_temp_c",
    "peak_hbm_temp_c",
    "gpu_temp_spread_c",
    "peak_memory_gib",
    "trial_overhead_s",
)
CONSTRAINT = re.compile(r"^\s*(\w+)\s*(<=|>=)\s*([-+.\deE]+)\s*$")


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def Axis(item: Any) -> Any:
    """A non-empty list of values; a single value stands for a list of one."""
    return Annotated[list[item], BeforeValidator(_as_list), Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(Strict):
    """An inline model shape; see `search_spaces.models.ModelShape`."""

    family: Literal[FAMILIES]  # type: ignore[valid-type]
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive | None = None
    ffn_hidden: Positive
    vocab: Positive
    max_sequence_length: Positive = 8192
    tie_embeddings: Switch = False
    rope_theta: Amount = 10_000.0

    @model_validator(mode="after")
    def _divides(self) -> ModelSpec:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden {self.hidden} must be an even multiple of heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self

    def shape(self) -> ModelShape:
        return ModelShape(**{**self.model_dump(), "kv_heads": self.kv_heads or self.heads})


class ClusterSpec(Strict):
    """The machines of the search. On `cpu`, a GPU is one worker process with `cpus_per_worker` cores."""

    nodes: Positive = 1
    gpus_per_node: Positive
    accelerator: Literal[tuple(ACCELERATORS)]  # type: ignore[valid-type]
    cpus_per_worker: Amount = 1.0

    @property
    def size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def device(self) -> Accelerator:
        return ACCELERATORS[self.accelerator]


class SpaceSpec(Strict):
    """The axes: the values to try of each field of a layout. `num_gpus` defaults to the whole cluster."""

    engine: Axis(Literal[ENGINES]) = ["megatron"]  # type: ignore[valid-type]
    num_gpus: Axis(Positive) | None = None  # type: ignore[valid-type]
    tensor_parallel_size: Axis(Positive) = [1]  # type: ignore[valid-type]
    pipeline_parallel_size: Axis(Positive) = [1]  # type: ignore[valid-type]
    zero_stage: Axis(Annotated[int, Field(strict=True, ge=0, le=3)]) = [0]  # type: ignore[valid-type]
    micro_batch_size: Axis(Positive) = [1]  # type: ignore[valid-type]
    recompute: Axis(Literal[RECOMPUTE]) = ["none"]  # type: ignore[valid-type]
    sequence_parallel: Axis(Switch) = [True]  # type: ignore[valid-type]
    compile: Axis(Switch) = [False]  # type: ignore[valid-type]
    precision: Axis(Literal[PRECISIONS]) = ["bf16"]  # type: ignore[valid-type]


class MeasurementSpec(Strict):
    """How a trial is timed.

    Warm-up ends when the last `steady_steps` optimizer steps agree within `warmup_tolerance` (relative), at the latest
    after `warmup_max_s`, compile time not counted. The window lasts `window_s` and `window_min_steps` at least.
    """

    steady_steps: Annotated[int, Field(strict=True, ge=2)] = 3
    warmup_tolerance: Annotated[Amount, Field(lt=1)] = 0.02
    warmup_max_s: Amount = 30.0
    window_s: Amount = 10.0
    window_min_steps: Positive = 5
    deadline_s: Amount = 600.0


class BudgetSpec(Strict):
    """The search ends at the first of these that is reached; trials under way are finished."""

    trials: Positive = 30
    wall_time_s: Amount | None = None
    gpu_hours: Amount | None = None


class SearchSpec(Strict):
    """A whole search; see docs/spec.md for every field."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    model: str | ModelSpec
    data: Annotated[str, Field(min_length=1)]
    sequence_length: Positive
    global_batch_size: Positive
    cluster: ClusterSpec
    objectives: dict[Literal[METRICS], Direction] = Field(  # type: ignore[valid-type]
        default={"tokens_per_s": "maximize", "joules_per_token": "minimize", "throttle_ratio": "minimize"},
        min_length=1,
    )
    constraints: list[str] = []
    space: SpaceSpec = SpaceSpec()
    measurement: MeasurementSpec = MeasurementSpec()
    budget: BudgetSpec = BudgetSpec()
    sampler: Literal["tpe", "gp", "nsga2", "random"] = "tpe"
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0

    @cached_property
    def shape(self) -> ModelShape:
        return self.model.shape() if isinstance(self.model, ModelSpec) else PRESETS[self.model]

    def located(self) -> SearchSpec:
        """The same search for a process with another working directory: its data under an absolute path."""
        return self.model_copy(update={"data": located(self.data)})

    @property
    def workload(self) -> Workload:
        return Workload(self.shape, self.sequence_length, self.global_batch_size, self.cluster.device.memory_gib)

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Field of `TrialConfig` -> values to try, duplicates removed."""
        axes = self.space.model_dump()
        axes["num_gpus"] = axes["num_gpus"] or [self.cluster.size]
        return {name: list(dict.fromkeys(values)) for name, values in axes.items()}

    @cached_property
    def legal(self) -> Space:
        return enumerate_space(self.axes, self.workload)

    @property
    def gang_size(self) -> int:
        """Workers of one gang: the most GPUs that a legal point uses."""
        return max(point.num_gpus for point in self.legal.points)

    @property
    def limits(self) -> list[tuple[str, str, float]]:
        """The constraints as (metric, '<=' or '>=', bound)."""
        return [parse_constraint(text) for text in self.constraints]

    @model_validator(mode="after")
    def _consistent(self) -> SearchSpec:
        if isinstance(self.model, str) and self.model not in PRESETS:
            raise ValueError(f"model: unknown model {self.model!r}; must be {_choice(PRESETS)}, or an inline shape")
        if self.shape.family == "gpt" and self.sequence_length > self.shape.max_sequence_length:
            positions = self.shape.max_sequence_length
            raise ValueError(f"sequence_length: {self.sequence_length} exceeds the model's {positions} positions")
        _ = self.limits
        self._axes_fit()
        if not self.legal.points:
            field = "global_batch_size" if self._batch_is_to_blame() else "space"
            raise ValueError(f"{field}: no legal layout among {self.legal.distinct}; {self._refusals()}")
        return self

    def _axes_fit(self) -> None:
        """Refuse values that no other choice on the other axes could make legal."""
        shape, axes, most = self.shape, self.axes, self.cluster.size
        for size in axes["num_gpus"]:
            if size > most:
                raise ValueError(f"space.num_gpus: {size} is more than the cluster's {most}")
        for size in axes["tensor_parallel_size"]:
            if shape.heads % size or shape.kv_heads % size:
                widest = min(most, shape.kv_heads)
                allowed = [n for n in range(1, widest + 1) if shape.heads % n == 0 and shape.kv_heads % n == 0]
                raise ValueError(
                    f"space.tensor_parallel_size: {size} does not divide the model's {shape.heads} heads and "
                    f"{shape.kv_heads} key-value heads; allowed: {', '.join(map(str, allowed))}"
                )
        for size in axes["pipeline_parallel_size"]:
            if shape.layers % size:
                allowed = [n for n in range(1, min(most, shape.layers) + 1) if shape.layers % n == 0]
                raise ValueError(
                    f"space.pipeline_parallel_size: {size} does not divide the model's {shape.layers} layers; "
                    f"allowed: {', '.join(map(str, allowed))}"
                )

    def _batch_is_to_blame(self) -> bool:
        """Whether points failed on the batch and none got any further through the rules."""
        names = [rule.__name__ for rule in RULES]
        refused = self.legal.refused
        return bool(refused) and max(refused, key=names.index) == "batch_divides"

    def _refusals(self) -> str:
        return "; ".join(f"{rule} refused {n} ({self.legal.reasons[rule]})" for rule, n in self.legal.refused.items())


SECTIONS: dict[str, type[BaseModel]] = {
    "": SearchSpec,
    "model": ModelSpec,
    "cluster": ClusterSpec,
    "space": SpaceSpec,
    "measurement": MeasurementSpec,
    "budget": BudgetSpec,
}


def parse_constraint(text: str) -> tuple[str, str, float]:
    """(metric, '<=' or '>=', bound) of a text such as ``peak_memory_gib<=70``. Raises `ValueError`."""
    match = CONSTRAINT.match(text)
    if match is None or match[1] not in METRICS:
        raise ValueError(f"constraints: {text!r} is not METRIC<=NUMBER or METRIC>=NUMBER, METRIC {_choice(METRICS)}")
    try:
        bound = float(match[3])
    except ValueError:
        bound = math.inf
    if not math.isfinite(bound):
        raise ValueError(f"constraints: {match[3]!r} in {text!r} is not a finite number")
    return match[1], match[2], bound


def excess(limit: tuple[str, str, float], metrics: Mapping[str, float | None]) -> float:
    """By how much `metrics` violate a parsed constraint, as a share of its bound; at most 0 where they keep it.

    A metric that is missing violates nothing.
    """
    metric, sense, bound = limit
    value = metrics.get(metric)
    if value is None:
        return 0.0
    over = (value - bound) / (abs(bound) or 1.0)
    return over if sense == "<=" else -over


class _Loader(yaml.SafeLoader):
    """Refuses a field that is given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} is given twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


def parse_spec(text: str, source: str = "spec") -> SearchSpec:
    """Read a spec from YAML text. Raises `InputError` with one line for whatever is wrong with it."""
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2025-13-01 is no date
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _input_error(f"{source}: not valid YAML{where}: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        raise _input_error(f"{source}: a spec is a mapping with the fields {_fields('')}")
    try:
        return SearchSpec.model_validate(values)
    except ValidationError as error:
        raise _input_error(f"{source}: {_explanation(error)}") from None


def dump_spec(spec: SearchSpec) -> str:
    """The spec as YAML, defaults filled in; `parse_spec` reads it back."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)


def new_search_id(spec: SearchSpec) -> str:
    """A name that sorts by time and that no other search has."""
    return f"{spec.name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def load_spec(path: str | Path) -> SearchSpec:
    """Read the spec file at `path`. Raises `InputError` with one line for whatever is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise InputError(f"{path}: cannot read the spec: {reason}") from None
    return parse_spec(text, str(path))


def _input_error(text: str) -> InputError:
    return InputError(" ".join(text.split()))


def _choice(values: Iterable[object]) -> str:
    return f"one of {', '.join(map(str, values))}"


def _fields(section: str) -> str:
    return ", ".join(SECTIONS[section].model_fields)


def _explanation(error: ValidationError) -> str:
    """The most telling of pydantic's errors: the field, what is wrong with it and what is allowed."""
    # A model given inline fails as a string too; that half of the union says nothing.
    details = [d for d in error.errors(include_url=False) if d["loc"][:2] != ("model", "str")]
    # A misspelt field is both unknown and missing.
    detail = min(details, key=lambda d: d["type"] != "extra_forbidden")
    path = tuple(
        part
        for part in detail["loc"]
        if isinstance(part, str) and part not in ("[key]", "ModelSpec") and not part.startswith("function-")
    )
    field = ".".join(path)
    if not field:
        return detail["msg"].removeprefix("Value error, ")
    value = detail["input"]
    given = f" (given: {json.dumps(value, ensure_ascii=False)})" if isinstance(value, str | int | float | None) else ""
    match detail["type"]:
        case "extra_forbidden":
            return f"{field}: unknown field; allowed: {_fields('.'.join(path[:-1]))}"
        case "missing":
            return f"{field}: this field is required"
        case "model_type" if field == "model":
            message = f"must be {_choice(PRESETS)}, or an inline shape with the fields {_fields(field)}"
        case "model_type":
            message = f"must be a mapping with the fields {_fields(field)}"
        case "dict_type":
            message = "must be a mapping of metric to maximize or minimize"
        case "string_pattern_mismatch":
            message = "must be letters, digits, '.', '_' and '-', at most 63, the first a letter or a digit"
        case "too_short" | "string_too_short":
            message = "must not be empty"
        case _:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return f"{field}: {message}{given}"
