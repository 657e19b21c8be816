"""One rank of a trial that runs a program of the user's: it starts it, and times the steps that it tells of."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from trainables.breakdown import Profile
from trainables.command import TRIAL_DIR, Command
from trainables.foreign.output import OutOfMemory, blames_others, failure, kernel_kills
from trainables.foreign.peers import Peers
from trainables.foreign.process import Program
from trainables.foreign.steps import HOOK, HookSteps, LogSteps, StepEnd, Steps, Told
from trainables.losses import check_learning
from trainables.measure import Step, Stretch, Timing, time_steps
from trainables.profiling import Event, linked_s, of_events
from trainables.program import InvalidTrial, Place, Progress, RankReport, TrialRequest

POLL_S = 0.1
AWAITED_S = 0.3
"""How long a step may take until it is said to be waited for."""
PROFILE_AHEAD_S = 1.0
"""For all ranks to hear which step is to be profiled."""
OTHERS_FIRST_S = 3.0
"""How long a rank keeps to itself that its program lost a connection: the one that broke it is to be heard first."""
LOG_TOLERANCE = 0.02
"""How far the times of steps in a log may be from those at which its lines came."""


def run_command(
    command: Command, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
) -> RankReport:
    """`Command.run`, which says more."""
    return CommandRank(command, request, place, on_progress).report()


@dataclass(frozen=True)
class Member:
    """A rank, as all others are told of it: its node, its number there, and the node's address for the others."""

    node: str | None
    local_rank: int
    host: str


class CommandRank:
    """One rank's program, how far it is and what it told.

    Steps are those of all ranks where each calls the hook. Of programs whose log is read, mostly one rank tells: the
    first that does so is followed by the others, which take a step for over when they hear of it.
    """

    def __init__(
        self, command: Command, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]
    ) -> None:
        """Start the program, once all ranks are there. Collective."""
        self.command, self.request, self.place = command, request, place
        self.progress, self.on_progress = Progress(), on_progress
        self.enter("start")
        self.kills = kernel_kills()
        self.peers = Peers(request, place)
        self.folder = Path(tempfile.gettempdir()) / f"wattune-{self.peers.gather(secrets.token_hex(4))[0]}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.ends: list[StepEnd] = []
        self.count = 0
        self.speaks, self.measured = True, False
        self.heard_s = time.monotonic()
        try:
            self.steps: Steps = self.listen()
            self.write_files()
            self.program = Program(
                [self.placed(argument) for argument in command.arguments],
                self.environment(),
                self.placed(command.directory or TRIAL_DIR),
                self.folder,
                self.steps.hear,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)  # from here on the program's guard does it
            raise
        self.step_ended_ns = self.program.start_ns
        self.peers.watch = self.watch

    def torchrun(self) -> dict[str, str]:
        """The variables that torchrun would set, once there is where the programs are to meet. Collective."""
        members = self.peers.gather(Member(self.place.node, self.place.local_rank, own_address(self.place)))
        # As torchrun does it, rank 0's agent keeps the store at which the programs meet, so no port is taken twice.
        first = self.place.rank == 0
        self.store = TCPStore(members[0].host, 0, is_master=True, wait_for_workers=False) if first else None
        port = self.peers.gather(self.store.port if self.store else None)[0]
        return torchrun_environment(self.place.rank, members, port)

    def listen(self) -> Steps:
        """Be ready to hear of steps."""
        if self.command.steps is None:
            return HookSteps(self.folder / f"{self.place.rank}.sock")
        return LogSteps(self.command.steps)

    def write_files(self) -> None:
        """Write the configuration files, as the other ranks of this node do."""
        for name, text in self.command.files:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{self.place.rank}")
            part.write_text(self.placed(text))
            part.replace(path)

    def placed(self, text: str) -> str:
        """The text with the trial's own folder in it."""
        return text.replace(TRIAL_DIR, str(self.folder))

    def environment(self) -> dict[str, str]:
        """The program's environment variables: this process's, torchrun's, the command's and the hook's, the last wins.
        Collective.

        Programs of this Python's environment are found first, and Python keeps no lines to itself.
        """
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        environment |= self.torchrun()
        environment |= {name: self.placed(value) for name, value in self.command.environment}
        path = [str(HOOK), *filter(None, [environment.get("PYTHONPATH")])]
        return environment | self.steps.environment | {"PYTHONPATH": os.pathsep.join(path)}

    def report(self) -> RankReport:
        """Time the steps, and have one more profiled if that is asked for. Collective."""
        report = self.measure()
        self.progress = replace(self.progress, report=report, awaits=None)
        self.measured = True  # from here on it does not matter how the program ends
        breakdown = self.request.procedure.breakdown
        self.enter("breakdown" if breakdown else "over")
        self.peers.meet()  # else a rank would end its program, which another still measures
        if breakdown:
            report = replace(report, profile=self.profile())
            self.peers.meet()
        return report

    def measure(self) -> RankReport:
        """Time the steps. Collective."""
        self.await_first()
        timing = time_steps(self.step, self.request.procedure, False, self.enter, self.agreed)
        self.window_steps_s = timing.window_steps_s
        self.enter("report")
        told = self.told()
        losses = self.peers.means(padded(told.losses, self.count))
        known = tuple(loss for loss in losses if loss is not None)
        if known:
            self.check(known)
        grad_norms = self.peers.means(padded(told.grad_norms, self.count))
        window = len(timing.window_steps_s)
        counted = self.peers.means(padded([end.tokens for end in self.ends], self.count))[-window:]
        tokens = [count for count in counted if count is not None]
        return RankReport(
            rank=self.place.rank,
            coordinates=self.request.layout.coordinates(self.place.rank),
            device=self.progress.device,
            timings={self.request.layout.global_batch_size: timing},
            losses=known,
            grad_norms=tuple(norm for norm in grad_norms if norm is not None),
            peak_memory_gib=told.peak_memory_gib,
            environment=told.environment,
            tokens_per_step=sum(tokens) / len(tokens) if tokens else None,
            problems=self.disagreement(timing),
        )

    def check(self, losses: tuple[float, ...]) -> None:
        """Raise `InvalidTrial` for losses of a training that went wrong."""
        check_learning(losses)

    def await_first(self) -> None:
        """Wait until a step has ended, and find out whether the steps that count are this rank's. Collective."""
        store, key = self.peers.store, "speaker"
        while not self.steps.wait(POLL_S):
            self.watch()
            self.ended_early()
            if self.command.steps is not None and store.check([key]):
                break
            self.wait_for("the first step")
        if self.command.steps is not None:
            # The first one to set it is the one.
            self.speaks = store.compare_set(key, "", str(self.place.rank)).decode() == str(self.place.rank)
        own = self.place.platform.device(self.place.local_rank)
        self.progress = replace(self.progress, device=self.steps.device or self.place.platform.identity(own))

    def step(self) -> Step:
        """Wait for the end of the next step."""
        if self.speaks:
            while not self.steps.wait(POLL_S):
                self.watch()
                self.ended_early()
                self.wait_for(f"step {self.count + 1}")
            end = self.steps.take()
            self.ends.append(end)
            seconds, now = self.peers.largest((end.ns - self.step_ended_ns) / 1e9), end.ns
        else:
            seconds, now = self.peers.largest(0.0), time.monotonic_ns()
        self.step_ended_ns, self.heard_s = now, time.monotonic()
        self.count += 1
        speed = self.command.tokens_per_step / seconds if seconds else None
        self.progress = replace(self.progress, tokens_per_s=speed, awaits=None)
        self.on_progress(self.progress)
        return Step(seconds, now)

    def told(self) -> Told:
        """What the program says of itself and of the steps that count."""
        if not self.speaks:
            while self.steps.wait(0) and len(self.ends) < self.count:
                self.ends.append(self.steps.take())
        while (told := self.steps.told(self.ends, POLL_S)) is None:
            self.watch()
            if self.program_ended():
                raise InvalidTrial("the program ended without an account of its losses, as by os._exit()")
            self.wait_for("the program's account of its losses, at its next step")
        return told

    def disagreement(self, timing: Timing) -> tuple[str, ...]:
        """How the times of steps in a log differ from those at which its lines came, if they do."""
        ends = self.ends[-len(timing.window_steps_s) :]
        logged = [end.seconds for end in ends if end.seconds is not None]
        if not self.speaks or len(logged) < len(timing.window_steps_s):
            return ()
        logged_s, seen_s = sum(logged) / len(logged), sum(timing.window_steps_s) / len(logged)
        if abs(logged_s / seen_s - 1) <= LOG_TOLERANCE:
            return ()
        return (f"steps take {logged_s:.4g} s by the program's log, but its lines came every {seen_s:.4g} s",)

    def profile(self) -> Profile:
        """What a step is made of, by the hook, once all ranks have handed over their report. Collective."""
        began = time.monotonic()
        steps_per_s = len(self.window_steps_s) / sum(self.window_steps_s)
        ahead = 3 + math.ceil(PROFILE_AHEAD_S * steps_per_s)  # in one it is heard of, in one the profiler warms up
        number = round(self.peers.largest(self.steps.newest)) + ahead
        path, device = self.folder / f"profile-{self.place.rank}.json", self.place.platform.profiler_device
        answer: dict[str, Any] | None = None
        problem = "the program does not call wattune_steps"
        if isinstance(self.steps, HookSteps):
            problem = "the program ended before"
            while (answer := self.steps.profile(number, path, device, POLL_S)) is None and not self.program_ended():
                pass
        span_s = self.peers.largest((answer and answer["span_s"]) or 0.0)
        breakdown, linked = None, None
        try:
            if answer is not None and (problem := answer["problem"]) is None:
                events = [Event(*event) for event in json.loads(path.read_text())]
                breakdown, linked = of_events(events, device, None, span_s), linked_s(events, span_s)
        except Exception as error:
            problem = f"the profiler failed: {type(error).__name__}: {error}"
        return Profile(breakdown, problem, time.monotonic() - began, linked_s=linked)

    def watch(self) -> None:
        """Raise if the program failed, or cannot be followed."""
        if self.measured:
            return
        if self.steps.problem is not None:
            raise InvalidTrial(self.steps.problem)
        if self.program.ending is None:
            return
        kills = kernel_kills()
        killed = kills is not None and self.kills is not None and kills > self.kills
        error = failure(self.program.ending, list(self.program.tail), self.command.out_of_memory, killed)
        if error is not None:
            if not isinstance(error, OutOfMemory) and blames_others(str(error)):
                time.sleep(OTHERS_FIRST_S)
            raise error

    def program_ended(self) -> bool:
        """Whether the program has ended, and all is known that it told."""
        return self.program.ending is not None and self.steps.complete

    def ended_early(self) -> None:
        """Raise `InvalidTrial` if the program ended well, with no step that was not taken yet."""
        if self.program_ended() and not self.steps.wait(0):
            if not self.count:
                raise InvalidTrial(f"the program ended without having told of a step: {self.steps.awaited}")
            lacking = "before they were timed: it must train on until it is ended"
            raise InvalidTrial(f"the program ended after {self.count} steps, {lacking}")

    def enter(self, phase: str) -> None:
        self.progress = replace(self.progress, phase=phase, awaits=None)
        self.on_progress(self.progress)

    def wait_for(self, what: str) -> None:
        """Say what is waited for, should it be in vain, once it has been for a while."""
        if time.monotonic() - self.heard_s < AWAITED_S:
            return
        tail = self.program.tail
        said = f"its last line of output is {tail[-1]!r}" if tail else "it printed nothing"
        self.progress = replace(self.progress, awaits=f"waited for {what}: {self.steps.awaited}; {said}")
        self.on_progress(self.progress)

    def agreed(self, steps: Stretch) -> None:
        """Note the steps that ended the warm-up; they are passed on with the next phase."""
        self.progress = replace(self.progress, steady=steps)


def own_address(place: Place) -> str:
    """This node's address towards that of the gang's store, which all ranks can reach."""
    family, kind, _, _, address = socket.getaddrinfo(place.store_host, place.store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)  # sends nothing
        host: str = towards.getsockname()[0]
        return host


def torchrun_environment(rank: int, members: list[Member], port: int) -> dict[str, str]:
    """The variables that torchrun sets for a process (`_create_args` of torch's `LocalElasticAgent`).

    `members` are by rank; the ranks of a node need not follow each other.
    """
    nodes = list(dict.fromkeys(member.node for member in members))
    here = members[rank].node
    local = str(sum(member.node == here for member in members))
    world = str(len(members))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(members[rank].local_rank),
        "GROUP_RANK": str(nodes.index(here)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": members[0].host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "wattune",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def padded(values: list[float | None], count: int) -> list[float | None]:
    """`count` of the values, None for those that lack."""
    return [*values[:count], *[None] * (count - len(values))]
