"""One rank of a layout that runs a program of the user's, without the programs of the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean

import trainables
from search_spaces.network import Collective
from trainables.breakdown import Profile
from trainables.command_slice import CommandSlice
from trainables.foreign.output import ProgramFailed
from trainables.foreign.rank import CommandRank, Member, torchrun_environment
from trainables.losses import check_finite
from trainables.passes import PassTimes
from trainables.program import InvalidTrial, Place, Progress, RankReport, SliceReport, TrialRequest
from trainables.slice import UNNAMED
from trainables.standin.program import SETTING, Setting

ALONE = Path(trainables.__path__[0]) / "alone"
"""The folder that is first on the program's `PYTHONPATH`."""

HOST = "127.0.0.1"
WAITED_IN_VAIN = "wait timeout"
"""What torch.distributed's store says to who waits for what nobody writes."""


def run_alone(
    program: CommandSlice, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
) -> RankReport:
    """`CommandSlice.run`, which says more."""
    return LoneRank(program, request, place, on_progress).report()


class LoneRank(CommandRank):
    """A rank whose program is told that there are others, and finds a stand-in for them in torch.distributed.

    Where it would meet them otherwise, at the address that torchrun gives it, nobody answers.
    """

    def __init__(
        self, program: CommandSlice, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
    ) -> None:
        self.slice, self.door = program, socket.create_server((HOST, 0))
        super().__init__(program.command, request, place, on_progress)

    @property
    def setting(self) -> Path:
        return self.folder / "standin.json"

    @property
    def seen(self) -> Path:
        """What the stand-in tells of itself."""
        return self.folder / "standin.seen"

    def torchrun(self) -> dict[str, str]:
        """The variables that torchrun would set for this rank of the whole layout, whose GPU is here the worker's."""
        layout, per_node = self.request.layout, self.slice.network.gpus_per_node
        gpus = layout.rank_order or range(layout.num_gpus)
        members = [Member(str(gpu // per_node), gpu % per_node, HOST) for gpu in gpus]
        environment = torchrun_environment(self.place.rank, members, self.door.getsockname()[1])
        return environment | {"LOCAL_RANK": str(self.place.local_rank)}

    def write_files(self) -> None:
        super().write_files()
        device = str(self.place.platform.device(self.place.local_rank))
        size, network, usable = self.request.layout.num_gpus, self.slice.network, self.slice.usable_bytes
        Setting(self.place.rank, size, device, network, usable, str(self.seen)).write(self.setting)

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        path = os.pathsep.join([str(ALONE), environment["PYTHONPATH"]])
        return environment | {"PYTHONPATH": path, SETTING: str(self.setting)}

    def measure(self) -> RankReport:
        """Time the steps, in each of which the rank is busy from end to end."""
        report = super().measure()
        times = {
            batch: PassTimes(0.0, {}, fmean(timing.window_steps_s), 0.0, 0.0)
            for batch, timing in report.timings.items()
        }
        return replace(report, problems=(*report.problems, *self.unseen()), slice=SliceReport(times, {}, None))

    def await_first(self) -> None:
        super().await_first()
        if self.request.layout.num_gpus > 1 and not self.seen.exists():
            raise InvalidTrial(
                "the program has taken a step without torch.distributed.init_process_group, in which its other ranks "
                "would have been stood in for: it cannot run by slices"
            )

    def check(self, losses: tuple[float, ...]) -> None:
        check_finite("loss", losses)

    def unseen(self) -> list[str]:
        """What of the step no rank sees that runs alone."""
        if self.seen.exists() and Collective.SEND in self.seen.read_text().split():
            return ["messages between two ranks are taken to need no time, as only their schedule could tell"]
        return []

    def profile(self) -> Profile:
        platform = self.place.platform
        if platform.profiler_device is not None and not platform.names_kernels:
            return Profile(None, UNNAMED, 0.0)
        return super().profile()

    def watch(self) -> None:
        """Raise if the program failed, or looks for ranks that are not there."""
        if not self.measured and wait([self.door], 0):
            raise InvalidTrial(
                "the program connects to MASTER_ADDR and MASTER_PORT itself to meet its other ranks, which are stood "
                "in for in torch.distributed.init_process_group alone: it cannot run by slices"
            )
        try:
            super().watch()
        except ProgramFailed as error:
            said = str(error).partition("\n")[0]
            if WAITED_IN_VAIN not in said.lower():
                raise
            raise InvalidTrial(f"the program waits for what another rank is to write in a store: {said}") from None
