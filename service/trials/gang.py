"""Gangs: long-lived Ray Train runs whose workers stay warm between trials, and the pool that lends them out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from service.problem import Cluster
from telemetry.actor import Fleet
from trainables.mailbox import Mailbox
from trainables.platforms.base import platform_of
from trainables.worker import GangTorchConfig, worker_loop

CLOSE_TIMEOUT_S = 30.0
RETRY_S = 1.0
# What takes no CPU has to ask for something, to be on the head, which a search needs anyway. Every head has this.
ON_HEAD = {"node:__internal_head__": 0.001}


class Gang:
    """`size` workers under one `TorchTrainer.fit()`, which a thread of the driver waits for.

    Ray Train starts all workers anew when one dies, as often as that happens; should the whole run end early, the
    thread starts another. A mailbox that dies is started again, empty; its workers fail, and join it when they are up.
    """

    def __init__(
        self, name: str, size: int, cluster: Cluster, storage: Path, telemetry: Fleet, preload: Sequence[str]
    ) -> None:
        """`preload`: modules that the programs of its trials need, as `RankProgram.preload` names them."""
        actor: Any = ray.remote(Mailbox)
        self.mailbox: ActorHandle[Mailbox] = actor.options(
            num_cpus=0, resources=ON_HEAD, max_concurrency=1000, max_restarts=-1
        ).remote(size)
        self._closing = False
        resources = resources_per_worker(cluster)
        # Ray Train looks for dead workers every 2 s unless told otherwise.
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        self._trainer: Callable[[], Any] = lambda: TorchTrainer(
            worker_loop,
            train_loop_config={
                "mailbox": self.mailbox,
                "telemetry": telemetry,
                "accelerator": cluster.device,
                "preload": preload,
            },
            torch_config=GangTorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=size, use_gpu="GPU" in resources, resources_per_worker=resources),
            run_config=RunConfig(name=name, storage_path=str(storage), failure_config=FailureConfig(max_failures=-1)),
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
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

    def wait(self) -> None:
        """Wait for the run of a gang that was dismissed to end, but not for ever."""
        self._thread.join(CLOSE_TIMEOUT_S)


def close_gangs(gangs: Sequence[Gang]) -> None:
    """Dismiss all, then wait for all."""
    for gang in gangs:
        gang.dismiss()
    for gang in gangs:
        gang.wait()


class Pool:
    """Lends each gang whose workers are up to one trial at a time. An actor; all methods run on one event loop.

    A gang may wait for the cluster's GPUs, or for Ray Train to start it anew. That is no trial's fault, so no trial
    gets such a gang.
    """

    def __init__(self, mailboxes: list[ActorHandle[Mailbox]]) -> None:
        self._starting = list(mailboxes)
        self._free: asyncio.Queue[ActorHandle[Mailbox]] = asyncio.Queue()
        self._lent: dict[str, ActorHandle[Mailbox]] = {}
        self._offers: set[asyncio.Task[None]] = set()

    async def lease(self, trial_id: str, timeout_s: float) -> ActorHandle[Mailbox] | None:
        """A gang's mailbox for one trial, once one is free; None if none was in time."""
        while self._starting:
            self._offer(self._starting.pop())
        try:
            self._lent[trial_id] = await asyncio.wait_for(self._free.get(), timeout_s)
        except TimeoutError:
            return None
        return self._lent[trial_id]

    async def release(self, trial_id: str) -> None:
        """Take the gang of a trial back, whatever it is doing. Releasing twice does nothing."""
        mailbox = self._lent.pop(trial_id, None)
        if mailbox is not None:
            with contextlib.suppress(RayError):  # a mailbox that died has no trial under way
                await mailbox.give_up.remote("the trial was ended")
            self._offer(mailbox)

    def _offer(self, mailbox: Any) -> None:
        async def once_ready() -> None:
            while True:
                try:
                    await mailbox.ready.remote()
                    break
                except RayError:  # it died, and will be back
                    await asyncio.sleep(RETRY_S)
            self._free.put_nowait(mailbox)

        task = asyncio.ensure_future(once_ready())
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)


def start_pool(gangs: Sequence[Gang]) -> ActorHandle[Pool]:
    """The actor that lends these gangs."""
    actor: Any = ray.remote(Pool)
    options = {"num_cpus": 0, "resources": ON_HEAD, "max_concurrency": 1000}
    pool: ActorHandle[Pool] = actor.options(**options).remote([gang.mailbox for gang in gangs])
    return pool


def resources_per_worker(cluster: Cluster) -> dict[str, float]:
    """What Ray reserves for one worker of a gang."""
    resources = {"CPU": cluster.cpus_per_worker}
    device = platform_of(cluster.device).ray_resource
    return resources if device is None else resources | {device: 1}
