"""Processes of Ray that nobody hears of any more: workers that do not answer, such as stopped ones, for which Ray Train
would wait, and what Ray Train leaves behind of a run whose controller was killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainables.mailbox import Member

_CONTROLLER, _CLEANER = "TrainController", "PlacementGroupCleaner"
KILL_S = 30.0
"""How long that may take: of a node that was lost too there is nothing to be killed."""


def end_workers(members: Sequence[Member]) -> None:
    """Kill these workers' processes, for Ray Train to start others in their place."""
    _end([(member.node_id, member.pid) for member in members if member.pid is not None])


def end_cleaners(mine: bool = False) -> None:
    """Kill what is to remove a run's placement group once its controller is dead: when it has done so, it means to end
    its own process, from a thread that cannot. Those of searches that are over, with `mine` of this one as well."""
    actors: Mapping[str, Mapping[str, Any]] = ray._private.state.actors(actor_state_name="ALIVE")
    controllers = {one["JobID"] for one in actors.values() if one["ActorClassName"] == _CONTROLLER}
    me = ray.get_runtime_context().get_job_id()
    _end(
        [
            (one["Address"]["NodeID"], one["Pid"])
            for one in actors.values()
            if one["ActorClassName"] == _CLEANER and (one["JobID"] not in controllers or (mine and one["JobID"] == me))
        ]
    )


def _end(processes: Sequence[tuple[str, int]]) -> None:
    """Kill processes, each on its node."""
    task: Any = ray.remote(_kill)
    killed = [
        task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(pid)
        for node_id, pid in processes
    ]
    for reference in killed:
        with contextlib.suppress(RayError):
            ray.get(reference, timeout=KILL_S)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
