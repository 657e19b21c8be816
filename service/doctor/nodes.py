"""The facts of this machine, or of every node of a Ray cluster at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.doctor.facts import NodeFacts, StoreFacts
from service.doctor.gather import gather
from service.errors import InputError
from service.home import Home
from service.record import store
from service.remote import call

START_S, ANSWER_S = 30.0, 120.0
"""How long a node may take to start what examines it, and to answer."""

ASKED = 5
"""Times that a clock is read: the quickest answer is off by the least."""

BLOCK_BYTES = 2**25
"""Of an object that goes through Ray's store."""


class Examiner:
    """A Ray actor on each node."""

    def now(self) -> float:
        """The node's clock, in Unix seconds."""
        return time.time()

    def block(self) -> np.ndarray:
        """An object large enough for Ray's store."""
        return np.ones(BLOCK_BYTES, np.uint8)

    def gather(self, folder: Path) -> NodeFacts:
        """`gather`, with the GPUs that Ray lent to this actor."""
        context = ray.get_runtime_context()
        lent = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ())]
        return gather(folder, lent)


def examine_cluster(folder: Path) -> tuple[tuple[NodeFacts, ...], dict[str, str]]:
    """The facts of every node that is alive of the Ray that this process has joined, and by name why there are none."""
    listed: Callable[[], list[dict[str, Any]]] = ray.nodes
    nodes = sorted((node for node in listed() if node["Alive"]), key=lambda node: str(node["NodeManagerHostname"]))
    hosts = Counter(node["NodeManagerHostname"] for node in nodes)
    names = {node["NodeID"]: _name(node, hosts) for node in nodes}
    free = _free_gpus()
    examiners = _started({node: free.get(node, 0) for node in names})
    missing = [name for node, name in names.items() if node not in examiners]
    lost = dict.fromkeys(missing, f"nothing starts there within {START_S:.0f} s")
    try:
        found = tuple(_answers(examiners, names, lost, folder))
    finally:
        for examiner in examiners.values():
            ray.kill(examiner)
    return found, lost


def _answers(
    examiners: Mapping[str, ActorHandle[Examiner]], names: Mapping[str, str], lost: dict[str, str], folder: Path
) -> Iterator[NodeFacts]:
    """The facts of nodes whose examiners answer; the others become `lost`."""
    asked = {node: call(examiner, Examiner.gather, folder) for node, examiner in examiners.items()}
    until = time.monotonic() + ANSWER_S
    for node, answer in asked.items():
        try:
            facts: NodeFacts = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
            ahead, off = _clock(examiners[node])
        except GetTimeoutError:
            lost[names[node]] = f"no answer within {ANSWER_S:.0f} s"
        except RayError as error:
            lost[names[node]] = store.first_line(error)
        else:
            rate, unreachable = _object_store(examiners[node])
            yield replace(
                facts,
                name=names[node],
                clock_s=ahead,
                clock_error_s=off,
                object_store_bytes_per_s=rate,
                object_store_error=unreachable,
            )


def _name(node: Mapping[str, Any], hosts: Mapping[str, int]) -> str:
    host = str(node["NodeManagerHostname"])
    return host if hosts[host] == 1 else f"{host} ({node['NodeID'][:6]})"


def store_facts(tracking_uri: str, home: Home) -> StoreFacts:
    """Whether the tracking store can be used. Makes none that is not there yet."""
    shown, file = store.shown(tracking_uri), store.sqlite_file(tracking_uri)
    if file is not None and home.is_to_hold(file) and not home.path.exists():
        return StoreFacts(shown)
    try:
        store.check(tracking_uri)
        if file is None or file.exists():
            client = store.open_client(tracking_uri)
            with store.readable(tracking_uri):
                client.search_experiments(max_results=1)
    except InputError as error:
        return StoreFacts(shown, str(error))
    return StoreFacts(shown)


def _free_gpus() -> dict[str, int]:
    """GPUs that Ray has lent to nobody, by node."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return {node: int(resources.get("GPU", 0)) for node, resources in free.items()}


def _started(gpus: dict[str, int]) -> dict[str, ActorHandle[Examiner]]:
    """Examiners that are up, by node, with so many GPUs each; with none where others were faster."""
    actors = {node: _examiner(node, count) for node, count in gpus.items()}
    up = _up(actors)
    if late := [node for node in actors if node not in up and gpus[node]]:
        for node in late:
            ray.kill(actors[node])
        up |= _up({node: _examiner(node, 0) for node in late})
    return up


def _examiner(node: str, gpus: int) -> ActorHandle[Examiner]:
    actor: Any = ray.remote(Examiner)
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    handle: ActorHandle[Examiner] = actor.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=there).remote()
    return handle


def _up(actors: dict[str, ActorHandle[Examiner]]) -> dict[str, ActorHandle[Examiner]]:
    """Those that answer within `START_S`."""
    until, up = time.monotonic() + START_S, {}
    answers = {node: call(actor, Examiner.now) for node, actor in actors.items()}
    for node, answer in answers.items():
        try:
            ray.get(answer, timeout=max(0.0, until - time.monotonic()))
            up[node] = actors[node]
        except (GetTimeoutError, RayError):
            continue
    return up


def _clock(examiner: ActorHandle[Examiner]) -> tuple[float, float]:
    """Seconds by which a node's clock is ahead of this one's, and how far off that may be: half of the round trip."""
    readings = []
    for _ in range(ASKED):
        before = time.time()
        there = ray.get(call(examiner, Examiner.now))
        after = time.time()
        readings.append(((after - before) / 2, there - (before + after) / 2))
    off, ahead = min(readings)
    return ahead, off


def _object_store(examiner: ActorHandle[Examiner]) -> tuple[float | None, str | None]:
    """Bytes a second of an object from a node to here through Ray's store, or why it does not come."""
    began = time.perf_counter()
    try:
        block = ray.get(call(examiner, Examiner.block), timeout=START_S)
    except (GetTimeoutError, RayError) as error:
        return None, store.first_line(error)
    return block.nbytes / (time.perf_counter() - began), None
