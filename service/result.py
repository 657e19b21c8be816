"""What one trial came to: the value that goes from the gang to the record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from search_spaces.composition import RankTimes
from search_spaces.kinds import RankKind
from search_spaces.layout import Layout
from search_spaces.network import Network
from search_spaces.schedules import Action, Pass, PassTime
from service.metrics import Method
from trainables.breakdown import Breakdown
from trainables.status import Status


class Purpose(StrEnum):
    """Why a layout is run; its text is what records hold."""

    SEARCH = "search"
    """To explore."""
    FINALIST = "finalist"
    """To measure one of the front again."""
    SENTINEL = "sentinel"
    """To watch the machine."""
    PLACEMENT = "placement"
    """To hold a layout against itself with other places of its ranks."""
    CALIBRATION = "calibration"
    """To fit the cost model to the machine."""

    @property
    def explores(self) -> bool:
        """Whether it may have other trials beside it."""
        return self in (Purpose.SEARCH, Purpose.SENTINEL)

    @property
    def as_explored(self) -> bool:
        """Whether it is measured in the way in which the search explores: by slices, if that is how."""
        return self.explores or self is Purpose.CALIBRATION


@dataclass(frozen=True)
class NodeWindow:
    """The measured window on one node: edges in ns of that node's `time.monotonic_ns`, and the devices that worked."""

    node_id: str
    start_ns: int
    end_ns: int
    devices: tuple[str, ...]


@dataclass(frozen=True)
class RankRecord:
    """Who held which place of the mesh, and what came of it there.

    `rank` is the rank in the trial, `coordinates` its place in the mesh by axis: pp, dp, cp, tp. `worker` is the
    worker of the gang that took it, `device` that one's GPU, None on CPU. `breakdown` is the mean of the steps that
    were profiled; `own_s`, `interrupted_s` and `compute_alone_s` are as `trainables.breakdown.Profile` has them,
    `passes` those of its stages in a pipeline; records made before they were kept have none.
    """

    rank: int
    worker: int
    node_id: str
    device: str | None
    coordinates: dict[str, int]
    peak_memory_gib: float | None
    breakdown: Breakdown | None
    own_s: tuple[float, ...] = ()
    interrupted_s: float | None = None
    passes: tuple[PassTime, ...] = ()
    compute_alone_s: tuple[float, ...] = ()

    @property
    def work_s(self) -> float:
        """Seconds of a step for which its GPU computes, as if alone, or on CPU it does all but communicate; 0 of one of
        which no step was profiled."""
        if self.breakdown is None:
            return 0.0
        return self.breakdown.own_s if self.device is None else self.breakdown.compute_alone_s

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankRecord:
        breakdown, passes = values["breakdown"], PassTime.of_rows(values.get("passes", ()))
        of_steps = {name: tuple(values.get(name, ())) for name in ("own_s", "compute_alone_s")}
        return cls(**{**values, **of_steps, "breakdown": breakdown and Breakdown(**breakdown), "passes": passes})


def slowest_passes(ranks: Iterable[RankRecord]) -> list[PassTime]:
    """The passes of each stage of a pipeline, as the slowest of its ranks has them; none of ranks that tell of none."""
    by_speed = sorted((one for rank in ranks for one in rank.passes), key=lambda one: one.later_s)
    return list({(one.stage, one.step): one for one in by_speed}.values())


@dataclass(frozen=True)
class DeviceRecord:
    """What one device did in the window of `duration_s` seconds; None is unknown, all of it of a trial without one.

    `throttle_s` has seconds by cause (`telemetry.samples.THROTTLE_CAUSES`), of which several may be at once. Means are
    over time.
    """

    device: str
    node_id: str
    duration_s: float | None = None
    energy_j: float | None = None
    mean_sm_clock_mhz: float | None = None
    min_sm_clock_mhz: float | None = None
    mean_gpu_temp_c: float | None = None
    peak_gpu_temp_c: float | None = None
    peak_hbm_temp_c: float | None = None
    throttle_s: dict[str, float | None] = field(default_factory=dict)

    @property
    def mean_power_w(self) -> float | None:
        """Energy by time."""
        return None if self.energy_j is None or self.duration_s is None else self.energy_j / self.duration_s


class SlowCause(StrEnum):
    """What makes a rank slower than others with the same work; its text is what records hold."""

    HEAT = "heat"
    POWER_CAP = "power limit"
    CLOCK = "clock"
    """Lower than that of the others, though neither heat nor the power limit is said to hold it."""
    HOST = "host"
    """The GPU waits for work; without GPUs, a slow processor."""
    LINK = "link"
    """Copies from and to the host."""
    EXPERT = "fullest expert"
    """More tokens are routed to its experts."""
    SHARED = "other programs"
    """Some of its kernels take longer now and then, at the same clock: something else runs on the GPU."""
    UNKNOWN = "unknown"
    """All of its kernels take longer at the same clock, such as where its memory is slow; or nobody can tell."""


@dataclass(frozen=True)
class Straggler:
    """The rank for which the others of a trial waited.

    `cost` is the share of a step by which that would be shorter were it as fast as the next slowest; `confidence` the
    probability that it is slower at all, by how well steps repeat.
    """

    rank: int
    node_id: str
    device: str | None
    cost: float
    cause: SlowCause
    confidence: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Straggler:
        return cls(**{**values, "cause": SlowCause(values["cause"])})

    def __str__(self) -> str:
        where = f" ({self.device})" if self.device else ""
        return f"rank {self.rank}{where} holds the others up for {self.cost:.1%} of a step: {self.cause}"


@dataclass(frozen=True)
class SliceRecord:
    """One kind of the ranks of a trial by slices, and what it was measured to do, in a step with the batch of the
    result that holds this.

    Records made when tokens came to experts unevenly name a kind's `share` of them, and may have two of a kind: the
    first with an even share, the second with that of the fullest rank.
    """

    kind: RankKind
    times: RankTimes

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        passes, reduces = (
            [[*action, seconds] for action, seconds in of.items()] for of in (self.times.passes, self.times.reduces)
        )
        times = {field.name: getattr(self.times, field.name) for field in fields(self.times)}
        told = {"passes": passes, "reduces": reduces, "exposed_s": dict(self.times.exposed_s)}
        return {"kind": asdict(self.kind), "times": times | told}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SliceRecord:
        kind = {name: value for name, value in values["kind"].items() if name != "share"}
        times = values["times"]
        passes, reduces = (
            {Action(stage, Pass(step), number): seconds for stage, step, number, seconds in times.get(name, ())}
            for name in ("passes", "reduces")
        )
        return cls(
            RankKind(**{**kind, "stands_for": tuple(kind["stands_for"])}),
            RankTimes(**{**times, "passes": passes, "reduces": reduces}),
        )


@dataclass(frozen=True)
class Proxy:
    """The result of running a trial's layout with a model of `layers` layers, or with another global batch, or both, in
    place of the search's own. The batch is that of the result's `layout`."""

    layers: int
    result: TrialResult


@dataclass(frozen=True)
class TrialResult:
    """Outcome of one trial.

    `metrics` holds the names of the record (`tokens_per_s`, `joules_per_token`, ...); None is missing.
    A trial that was pruned has no figures but the bounds for which it was, prefixed `bound_`.
    `methods` says how energy and throttle metrics were obtained, and which metrics follow from the runs in `proxies`,
    smaller first, of whose larger one is all that does not: `EXTRAPOLATED` over layers, or `SHORT`, over microbatches.
    `cause` is one line on what failed, `traceback` what Python said of it.
    `straggler`: the rank for which the others waited; None where there is none, or nobody knows.
    `infrastructure`: whether it was the machines that failed, not the layout.
    `beside`: whether other trials of the search ran on its nodes meanwhile, or another search had workers there; None
    in records made before it was kept.
    `devices` are those that worked, of a trial that did not end well those of the workers that took part; records made
    before they were kept have none.
    `ranks` are those of the trial in their order; records made before there were any have none. Of a trial by slices
    they are those that ran, one of each kind, of which `slices` has more, and `network` is what they were taken to
    communicate over; records made before it was kept have none.
    `step_times_s` and `losses` cover the optimizer steps of the window and of the whole trial respectively.
    """

    trial_id: str
    layout: Layout
    status: Status
    cause: str | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    methods: dict[str, Method] = field(default_factory=dict)
    step_times_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    windows: tuple[NodeWindow, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    traceback: str | None = None
    ranks: tuple[RankRecord, ...] = ()
    proxies: tuple[Proxy, ...] = ()
    slices: tuple[SliceRecord, ...] = ()
    network: Network | None = None
    purpose: Purpose = Purpose.SEARCH
    infrastructure: bool = False
    straggler: Straggler | None = None
    beside: bool | None = None
    devices: tuple[DeviceRecord, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        proxies = [{"layers": proxy.layers, "result": proxy.result.to_dict()} for proxy in self.proxies]
        values = asdict(replace(self, proxies=(), slices=()))
        del values["layout"]
        slices = [one.to_dict() for one in self.slices]
        return values | {"config": self.layout.to_dict(), "proxies": proxies, "slices": slices}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrialResult:
        """Inverse of `to_dict`, also after a round trip through JSON."""
        windows = tuple(NodeWindow(**{**w, "devices": tuple(w["devices"])}) for w in values["windows"])
        return cls(
            **{
                **{name: value for name, value in values.items() if name != "config"},
                "layout": Layout.from_dict(values["config"]),
                "status": Status(values["status"]),
                "methods": {metric: Method(method) for metric, method in values["methods"].items()},
                "purpose": Purpose(values.get("purpose", Purpose.SEARCH)),
                "step_times_s": tuple(values["step_times_s"]),
                "losses": tuple(values["losses"]),
                "windows": windows,
                "proxies": tuple(Proxy(p["layers"], cls.from_dict(p["result"])) for p in values.get("proxies", ())),
                "slices": tuple(SliceRecord.from_dict(one) for one in values.get("slices", ())),
                "network": Network.from_dict(network) if (network := values.get("network")) else None,
                "straggler": Straggler.from_dict(slow) if (slow := values.get("straggler")) else None,
                "devices": tuple(DeviceRecord(**one) for one in values.get("devices", ())),
                "ranks": tuple(RankRecord.from_dict(rank) for rank in values.get("ranks", ())),
            }
        )
