"""Gangs: long-lived Ray Train runs whose workers stay warm between trials."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from service.problem import Cluster
from service.remote import ON_HEAD
from service.trials.accelerators import at_hand, free, resources_per_worker
from service.trials.silent import end_cleaners
from telemetry.actor import Fleet
from trainables.mailbox import Mailbox
from trainables.worker import GangConfig, worker_loop

CLOSE_TIMEOUT_S = 30.0
RETRY_S = 1.0


class Gang:
    """`size` workers under one `DataParallelTrainer.fit()`, which a thread of the driver waits for.

    Ray Train starts a worker anew that dies, as often as that happens, and leaves the others alone; should the whole
    run end early, the thread starts another. A mailbox that dies is started again, empty; its workers fail, and join it
    when they are up.
    """

    def __init__(
        self,
        name: str,
        size: int,
        cluster: Cluster,
        storage: Path,
        telemetry: Fleet,
        preload: Sequence[str],
        avoid: Iterable[str] = (),
        data: str | None = None,
        places: Sequence[str] | None = None,
    ) -> None:
        """`preload`: modules that the programs of its trials need, as `RankProgram.preload` names them. `avoid`: the
        nodes that no worker may be on, by Ray's ids. `data`: what trials read, and `places`: those below which it must
        lie, None without a bound."""
        actor: Any = ray.remote(Mailbox)
        self.address = f"mailbox-{uuid4().hex}"
        self.mailbox: ActorHandle[Mailbox] = actor.options(
            name=self.address, num_cpus=0, resources=ON_HEAD, max_concurrency=1000, max_restarts=-1
        ).remote(size)
        self._closing = False
        self._awaited = partial(awaited, cluster, size)
        resources, barred = resources_per_worker(cluster), ",".join(sorted(avoid))
        scaling: dict[str, Any] = {"use_gpu": "GPU" in resources, "resources_per_worker": resources}
        if barred:
            scaling["label_selector"] = {"ray.io/node-id": f"!in({barred})"}
        # Ray Train looks for dead workers every 2 s unless told otherwise.
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        self._trainer: Callable[[], Any] = lambda: DataParallelTrainer(
            worker_loop,
            train_loop_config={
                "mailbox": self.mailbox,
                "telemetry": telemetry,
                "accelerator": cluster.device,
                "preload": preload,
                "data": data,
                "places": places,
            },
            backend_config=GangConfig(),
            scaling_config=ScalingConfig(num_workers=size, **scaling),
            run_config=RunConfig(name=name, storage_path=str(storage), failure_config=FailureConfig(max_failures=-1)),
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing and self._awaited():  # a run that waits in Ray Train cannot be called off
            time.sleep(RETRY_S)
        while not self._closing:
            cause = "the gang's Ray Train run ended"
            try:
                self._trainer().fit()
            except Exception as error:
                cause = f"{cause}: {error}".splitlines()[0]
            if not self._closing:
                with contextlib.suppress(RayError):  # a mailbox that died has no trial under way
                    ray.get(self.mailbox.give_up.remote(cause))
                time.sleep(RETRY_S)

    def dismiss(self) -> None:
        """Send the workers home, without waiting for it."""
        self._closing = True
        self.mailbox.close.remote()

    @property
    def ended(self) -> bool:
        """Whether the run of a gang that was dismissed is over, and what it had is Ray's again."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the run of a gang that was dismissed to end, but not for ever."""
        self._thread.join(CLOSE_TIMEOUT_S)


def close_gangs(gangs: Sequence[Gang]) -> None:
    """Dismiss all, then wait for all."""
    for gang in gangs:
        gang.dismiss()
    for gang in gangs:
        gang.wait()
    with contextlib.suppress(RayError):  # a cluster that is gone
        end_cleaners(mine=True)


def room(cluster: Cluster) -> int:
    """How many workers the Ray cluster has what they need for, whoever has it now."""
    have = at_hand(cluster)
    return min(int(have.get(name, 0) / each + 1e-9) for name, each in resources_per_worker(cluster).items())


def awaited(cluster: Cluster, size: int) -> str | None:
    """What a gang has to wait for while others hold it, such as `2 GPUs: 0 of 2 free`; None if for nothing."""
    have, left, each = at_hand(cluster), free(cluster), resources_per_worker(cluster)
    for name in [name for name in ("GPU", "CPU") if name in each]:  # a device says more than CPUs
        if left.get(name, 0) < (need := each[name] * size) <= have.get(name, 0):
            return f"{need:g} {name}s: {left.get(name, 0):g} of {have[name]:g} free"
    return None
