"""What one trial came to: the value that goes from the gang to the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from search_spaces.config import TrialConfig

STATUSES = ("ok", "oom", "hang", "crash", "invalid", "pruned")


@dataclass(frozen=True)
class NodeWindow:
    """The measured window on one node: edges in ns of that node's `time.monotonic_ns`, and the devices that worked."""

    node_id: str
    start_ns: int
    end_ns: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class TrialResult:
    """Outcome of one trial.

    `metrics` holds the names of the record (`tokens_per_s`, `joules_per_token`, ...); None is missing.
    `methods` says how energy and throttle metrics were obtained: counter, integrated, sampled or estimated.
    `cause` is one line on what failed, `traceback` what Python said of it.
    `step_times_s` and `losses` cover the optimizer steps of the window and of the whole trial respectively.
    """

    trial_id: str
    config: TrialConfig
    status: str
    cause: str | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    step_times_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    windows: tuple[NodeWindow, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    traceback: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self) | {"config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrialResult:
        """Inverse of `to_dict`, also after a round trip through JSON."""
        windows = tuple(NodeWindow(**{**w, "devices": tuple(w["devices"])}) for w in values["windows"])
        return cls(
            **{
                **values,
                "config": TrialConfig.from_dict(values["config"]),
                "step_times_s": tuple(values["step_times_s"]),
                "losses": tuple(values["losses"]),
                "windows": windows,
            }
        )
