"""What a gang runs for each rank of a trial: a program, what it is given, and what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from search_spaces.layout import Layout
from search_spaces.network import Collective, Curve
from search_spaces.operators import OperatorTiming
from search_spaces.schedules import PassTime
from trainables.breakdown import Profile
from trainables.measure import Procedure, Stretch, Timing
from trainables.passes import PassTimes
from trainables.platforms.base import Platform


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its rank, its device on the node, and the key-value store at which the ranks meet.

    `devices` are what the node calls those of all ranks there, the only ones that they see: `local_rank` is the rank's
    own among them. There are none on CPU. `node` is the node's id, None where all ranks are on one.
    """

    rank: int
    local_rank: int
    store_host: str
    store_port: int
    platform: Platform
    node: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far a rank is: its phase, its GPU's UUID (None on CPU and before it has one) and the trial's latest speed.

    `steady` are the latest steps that ended a warm-up by agreeing. `report` is there once all is measured that a trial
    cannot do without, and stands whatever comes after. `awaits`: what the rank has been waiting for for a
    while, which may come late or never.
    """

    phase: str = "start"
    device: str | None = None
    tokens_per_s: float | None = None
    steady: Stretch | None = None
    report: RankReport | None = None
    awaits: str | None = None


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind in groups of `ranks` ranks during a step: how many, and their bytes in all.

    Bytes are of the whole buffer, as `search_spaces.network.Network` counts them.
    """

    kind: Collective
    ranks: int
    calls: int
    size: int


@dataclass(frozen=True)
class SliceReport:
    """What a rank measured that ran alone, beside the rest.

    By global batch size as `timings` are: `times` are means over the window, `traffic` is that of its last step, empty
    where the program does not tell. From the first to the second of `waited_ns`, stamps on this node's monotonic clock,
    the rank did nothing but wait, as for others in a collective; None where it never did.
    """

    times: dict[int, PassTimes]
    traffic: dict[int, tuple[Traffic, ...]]
    waited_ns: tuple[int, int] | None


@dataclass(frozen=True)
class RankReport:
    """What one rank measured.

    `coordinates` is the rank's place in the mesh by axis, `device` the GPU's UUID, None on CPU. `timings` are by global
    batch size in the order of time. Losses are those of the global batch; `profile` is that of one more step of the
    first size, None if none was asked for. `environment` are names of devices and versions of libraries. `slice` is of
    ranks that ran alone; their losses are their own contributions. `passes` are those of a pipeline, in steps of the
    first size. `curves`: of collectives, and `operators`, by
    programs that measure these. `tokens_per_step`: of all ranks in the window on average, by a program that counts
    them. `problems`: why what it measured wants looking at, a line each. `spent_s`: seconds by what they went into, by
    programs that measure several things. `reclaims`: how often, in the last window, torch found memory full and gave
    back what it kept unused, which it cannot count on next time.
    """

    rank: int
    coordinates: dict[str, int]
    device: str | None
    timings: dict[int, Timing]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    peak_memory_gib: float | None
    environment: dict[str, str]
    profile: Profile | None = None
    slice: SliceReport | None = None
    passes: tuple[PassTime, ...] = ()
    curves: tuple[Curve, ...] = ()
    operators: tuple[OperatorTiming, ...] = ()
    tokens_per_step: float | None = None
    problems: tuple[str, ...] = ()
    spent_s: dict[str, float] = field(default_factory=dict)
    reclaims: int = 0


class RankProgram(ABC):
    """What runs on each rank of a trial, in a process that ends with the trial. A value that can be pickled."""

    @staticmethod
    @abstractmethod
    def preload(layouts: Iterable[Layout]) -> Sequence[str]:
        """Modules that such a program needs for these layouts: imported once by a worker, before its first trial."""

    def ranks(self, layout: Layout) -> Sequence[int]:
        """Which rank of `layout` each of a gang's first workers runs as. The workers beyond them have no part in it."""
        return [layout.worker_rank(worker) for worker in range(layout.num_gpus)]

    @abstractmethod
    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Run the trial's layout as rank `place.rank` and time it. Collective over the ranks.

        `on_progress` is to be called at each phase and step. A trial whose ranks have all handed over a report in their
        progress has ended well, however they end. Raises `InvalidTrial` for a trial that ran in vain; any
        other error is a crash, or the memory having run out.
        """


@dataclass(frozen=True)
class TrialRequest:
    """A trial as a gang gets it: which program is to run a layout, and how it is to be timed.

    `batches`: the global batch sizes to time, one after the other; the layout's own if there are none.
    """

    trial_id: str
    layout: Layout
    program: RankProgram
    procedure: Procedure
    deadline_s: float
    batches: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of each worker that takes part."""
        return self.program.ranks(self.layout)


class InvalidTrial(Exception):
    """The trial ran, but not what it was to run; the text says why."""
