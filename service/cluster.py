"""The Ray that a search runs on: the cluster of `RAY_ADDRESS`, or one of its own on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # left out of its stub
from ray.exceptions import RayError

from service.checks import workers_here
from service.errors import InputError, SearchError
from service.home import Home
from service.problem import Cluster
from service.trials.accelerators import at_hand, check_type, resources_per_worker
from trainables.scratch import scratch

KNOCK_S = 5.0
KNOCK_AGAIN_S = 0.5
CONNECT_S, LEAVE_S = 20.0, 2.0
SCRATCH = "wattune-ray-"

T = TypeVar("T")


@contextlib.contextmanager
def ray_session(cluster: Cluster) -> Iterator[None]:
    """Ray for one search on `cluster`: the running one, or else one of its own that ends with the search."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    if ray.is_initialized():
        with _failing_in_a_line():
            yield
        return
    ray._private.worker._worker_logs_enabled = False  # of the raylet too, which `log_to_driver` leaves on
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as ending:
        if address := os.environ.get("RAY_ADDRESS"):
            ending.callback(ray.shutdown)
            try:
                knock(address)
                # Ray Train's helpers look for their cluster by this variable, and die where a host runs several.
                ray.init(runtime_env={"env_vars": {"RAY_ADDRESS": address}}, **quiet)
            except InputError:
                raise
            except (OSError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"RAY_ADDRESS: no Ray cluster answers at {address}: {reason}") from None
        else:
            cpus = max(os.cpu_count() or 1, math.ceil(workers_here(cluster) * cluster.cpus_per_worker))
            folder = ending.enter_context(scratch(SCRATCH))
            ending.callback(ray.shutdown)
            try:
                with _leaving_nothing_outside(folder):
                    ray.init(address="local", num_cpus=cpus, include_dashboard=True, _temp_dir=folder, **quiet)
            except Exception as error:  # Ray raises plain ones, of a start that takes too long as well
                raise SearchError(f"Ray does not start on this machine: {_reason(error)}") from error
        with _ending_with_ray(), _failing_in_a_line():
            yield


@contextlib.contextmanager
def _ending_with_ray() -> Iterator[None]:
    """Should Ray's own process here end, as it does when the head is gone, end this one in a line.

    Ray would do so some seconds later, in C++: with a trace of its own calls or without a word.
    """
    node: Any = ray._private.worker._global_node
    over, raylet = threading.Event(), node.raylet_socket_name

    def watch() -> None:
        missed = 0
        while not over.wait(KNOCK_AGAIN_S):
            with socket.socket(socket.AF_UNIX) as knocking:
                missed = missed + 1 if knocking.connect_ex(raylet) else 0
            if missed == 2 and not over.is_set():
                reason = "Ray: its process on this machine ended, and with it the cluster or this node's part in it"
                print(f"wattune: {reason}: resume the search once Ray is back", file=sys.stderr, flush=True)
                os._exit(SearchError.exit_code)

    threading.Thread(target=watch, name="ray-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def _leaving_nothing_outside(folder: str) -> Iterator[None]:
    """Processes that are started meanwhile keep in `folder` what is temporary, and compiled code for later searches."""
    before = dict(os.environ)
    os.environ["TMPDIR"] = folder
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Home.locate().compiled))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _failing_in_a_line() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise SearchError(f"Ray: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The line of Ray's text that says most: after a process's traceback the last, else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, RayError) else 0].strip()


def knock(address: str) -> None:
    """See whether there is a cluster at HOST:PORT that this process may join; Ray itself would go on for minutes.

    A token that Ray finds is used, which does no harm where none is asked for. Raises `OSError` if nothing listens
    there, `InputError` if the cluster wants another token. Of any other address, such as `auto`, nothing is asked.
    """
    if AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # reads it anew
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        return
    socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
    import grpc

    token = AuthenticationTokenLoader.instance().get_token_for_http_header()
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", metadata=list(token.items()), timeout=KNOCK_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return  # Ray has more to say of it
            wants = "the token in use is not its own" if token else "it wants its token"
            raise InputError(
                f"the Ray cluster at {address} refuses to be joined: {wants}; "
                "put the cluster's into ~/.ray/auth_token or RAY_AUTH_TOKEN"
            ) from None


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[None]:
    """This process as a client of the cluster at `address`, by default of this machine's Ray, unless it is one already.

    Raises `InputError` if no cluster answers there.
    """
    if ray.is_initialized():
        yield
        return
    try:
        knock(address or "auto")
        init = partial(ray.init, address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        within(CONNECT_S, init)
    except TimeoutError:
        raise InputError(f"{shown(address)}: no Ray cluster answers") from None
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{shown(address)}: no Ray cluster answers: {str(error).splitlines()[0]}") from None
    try:
        yield
    finally:
        with contextlib.suppress(TimeoutError):
            within(LEAVE_S, ray.shutdown)


def shown(address: str | None) -> str:
    """The cluster at an address, for readers."""
    return f"address {address}" if address else "the Ray of this machine"


def within(seconds: float, ask: Callable[[], T]) -> T:
    """The answer to `ask`, or TimeoutError: of a cluster that is gone Ray waits for minutes, then ends the process."""
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast(T, answer)


def check_cluster(cluster: Cluster) -> None:
    """Raise `InputError` unless the Ray cluster at hand has what the workers of `cluster` need."""
    check_type(cluster)
    have = at_hand(cluster)
    for name, each in resources_per_worker(cluster).items():
        need = each * cluster.size
        if have.get(name, 0) < need:
            raise InputError(
                f"cluster: {cluster.nodes} x {cluster.gpus_per_node} {cluster.accelerator} workers need "
                f"{need:g} {name}, the Ray cluster has {have.get(name, 0):g}"
            )
