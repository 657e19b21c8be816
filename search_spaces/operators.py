"""What the work of a GPU consists of: operators, and the seconds that they were measured to take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Self


class Kind(StrEnum):
    """Kinds of operators, each with its `dims` and what its `form` may say. Between two products of a block lies one
    operator, which the compiler makes kernels of without regard to others.

    - `PRODUCT`: rows, width in, width out; `bias`.
    - `ATTENTION`: sequences, queries of each, width of all queries, width of all keys, width of a head, and on how many
      times as many keys as queries; all between the products, so `rotary` positions and copies, too.
    - `NORM`: rows, width; a norm and the sum before it, in the family's form; `autocast`.
    - `ACTIVATION`: rows, width; the activation function, with the gate of a `llama`, or that of a `gpt`.
    - `EXPERTS`: tokens, width, width of an expert, experts, experts of a token; all from the router to the sum of what
      experts made: `grouped`, one product of all experts, or one after the other, each `filled` up to the fullest.
    - `COPIES`: rows, width; of hidden states, for gathers and scatters along the sequence.
    - `EMBEDDING`: tokens, width, entries of the table; `shared` by tensor-parallel ranks.
    - `LOSS`: tokens, entries; `shared`.
    - `UPDATE`: parameters; of the engine. It has no backward pass.
    - `LAUNCH`: experts and experts of a token, or nothing; the time of the CPU for a block forward and backward, by
      engine and mode: see `search_spaces.launches`.
    """

    PRODUCT = "product"
    ATTENTION = "attention"
    NORM = "norm"
    ACTIVATION = "activation"
    EXPERTS = "experts"
    COPIES = "copies"
    EMBEDDING = "embedding"
    LOSS = "loss"
    UPDATE = "update"
    LAUNCH = "launch"


class Operator(NamedTuple):
    """One of a GPU's share of the model. `precision` is that of its arithmetic, as in a layout; one in `fp8` includes
    the casts. `compiled`: whether by torch's compiler, where that matters."""

    kind: Kind
    dims: tuple[int, ...]
    precision: str
    compiled: bool
    form: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation. Those in fp8 are kept in bf16."""
        return 4 if self.precision == "fp32" else 2

    @property
    def label(self) -> str:
        """Such as ``product 8192x4096x14336 bf16``."""
        said = [self.kind, "x".join(map(str, self.dims)), *self.form, self.precision, *["compiled"] * self.compiled]
        return " ".join(filter(None, said))


class OperatorTiming(NamedTuple):
    """Seconds of an operator on one GPU at its full clock; `backward_s` is None where that is no pass of its own.
    `torch`: the release that brought the kernels, None where nobody noted it."""

    operator: Operator
    forward_s: float
    backward_s: float | None = None
    torch: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return self._asdict() | {"operator": self.operator._asdict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`, also after a round trip through JSON. Raises ValueError, KeyError or TypeError."""
        said, forward_s, backward_s = values["operator"], values["forward_s"], values["backward_s"]
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in (forward_s, backward_s or forward_s)):
            raise ValueError(f"no seconds: {forward_s}, {backward_s}")
        operator = Operator(
            Kind(said["kind"]), tuple(said["dims"]), said["precision"], said["compiled"], tuple(said["form"])
        )
        return cls(operator, forward_s, backward_s, values.get("torch"))


@dataclass(frozen=True)
class Timings:
    """What was measured, an operator once."""

    rows: tuple[OperatorTiming, ...] = ()

    def of(self, operator: Operator) -> OperatorTiming | None:
        return self._by_operator.get(operator)

    @cached_property
    def launches(self) -> tuple[OperatorTiming, ...]:
        """What the CPU took to launch blocks."""
        return tuple(row for row in self.rows if row.operator.kind == Kind.LAUNCH)

    def updated(self, newer: Iterable[OperatorTiming]) -> Timings:
        """With what was measured since, which counts in place of what there is."""
        return Timings(tuple((self._by_operator | {row.operator: row for row in newer}).values()))

    @cached_property
    def _by_operator(self) -> dict[Operator, OperatorTiming]:
        return {row.operator: row for row in self.rows}

    def __hash__(self) -> int:
        """Predictions ask for it all the time: what more differs, a comparison tells."""
        return len(self.rows)


NONE_MEASURED = Timings()
