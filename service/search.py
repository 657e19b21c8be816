"""The driver of one search: builds gangs, telemetry, study and record, and lets Ray Tune run trial after trial."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa
import ray
import ray.tune
from ray.actor import ActorHandle
from ray.tune.experiment import Trial

from search_spaces.config import TrialConfig
from service.errors import InputError
from service.evaluate import evaluate
from service.gang import Gang, Pool, resources_per_worker
from service.home import Home
from service.home import tracking_uri as store_uri
from service.progress import Progress
from service.searcher import StudySearcher, outcome_of
from service.spec import SearchSpec, dump_spec, new_search_id
from service.study import SearchStudy
from service.tracking import Tracker
from telemetry.actor import start_telemetry
from trainables.data import SYNTHETIC, DataError, located, open_tokens
from trainables.result import TrialResult

TRIAL_CPUS = 0.01  # a Tune trial only waits for its gang; Ray wants more than nothing reserved for it


def check_data(spec: SearchSpec) -> None:
    """Raise `InputError` unless the spec's data are tokens that its model can read."""
    try:
        open_tokens(spec.data, spec.shape.vocab).sequence(0, spec.sequence_length)
    except DataError as error:
        raise InputError(f"data: {error}") from None


def run(spec: SearchSpec, tracking_uri: str | None = None, search_id: str | None = None) -> str:
    """Run a search to its end, on the Ray cluster of `RAY_ADDRESS` or on this machine. Returns its id.

    Raises `InputError`, before anything starts, for data that are not tokens, a cluster that is too small or a
    tracking store that does not answer.
    """
    check_data(spec)
    spec = spec.model_copy(update={"data": located(spec.data)})
    home = Home.locate().create()
    search_id = search_id or new_search_id(spec)
    tracker = Tracker(store_uri(tracking_uri), home)
    with ray_session(spec):
        _check_cluster(spec)
        return _Driver(spec, search_id, home, tracker).run()


class _Recorder(ray.tune.Callback):
    """Tune's events to the record and the display, on the driver's own thread."""

    def __init__(self, tracker: Tracker, progress: Progress, pool: ActorHandle, telemetry: Mapping[str, Any]) -> None:
        self.tracker, self.progress, self.pool, self.telemetry = tracker, progress, pool, telemetry
        self.results: list[TrialResult] = []

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        config = TrialConfig.from_dict(trial.config)
        self.progress.started(config.label)
        self.tracker.start_trial(trial.trial_id, config, {})

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial, trial.last_result)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        ray.get(self.pool.release.remote(trial.trial_id))
        self._finish(trial, None)

    def _finish(self, trial: Trial, reported: dict[str, Any] | None) -> None:
        result = outcome_of(trial.trial_id, TrialConfig.from_dict(trial.config), reported)
        self.results.append(result)
        self.tracker.finish_trial(result, self._samples(result))
        self.progress.finished(result)

    def _samples(self, result: TrialResult) -> pa.Table | None:
        """The raw telemetry of the trial's windows, from all nodes."""
        references = [self.telemetry[w.node_id].samples.remote(w.start_ns, w.end_ns, w.devices) for w in result.windows]
        tables = []
        for reference in references:
            with contextlib.suppress(ray.exceptions.RayError):  # a node that was lost takes its samples along
                tables.append(ray.get(reference))
        return pa.concat_tables(tables) if tables else None


class _Driver:
    """One search, from its first actor to its last record."""

    def __init__(self, spec: SearchSpec, search_id: str, home: Home, tracker: Tracker) -> None:
        self.spec, self.search_id, self.home, self.tracker = spec, search_id, home, tracker
        self.gangs: list[Gang] = []

    def run(self) -> str:
        spec, points = self.spec, self.spec.legal.points
        trials = min(spec.budget.trials, len(points))
        progress = Progress(spec.objectives, spec.budget, trials)
        telemetry = start_telemetry()
        environment = _environment() | _hardware(telemetry)
        self.tracker.start_search(
            self.search_id,
            dump_spec(spec),
            _params(spec),
            {"wattune.data": "synthetic" if spec.data == SYNTHETIC else "file"},
            environment,
            name=spec.name,
            objectives=spec.objectives,
            constraints=spec.constraints,
        )
        progress.say(f"search {self.search_id}: {len(points)} legal layouts, at most {trials} trials")
        status = "failed"
        try:
            spool = self.home.spool(self.search_id)
            count = max(1, min(spec.cluster.size // spec.gang_size, trials))
            self.gangs = [
                Gang(f"{self.search_id}-gang{i}", spec.gang_size, spec.cluster, spool / "train") for i in range(count)
            ]
            pool = ray.remote(num_cpus=0, max_concurrency=1000)(Pool).remote([gang.mailbox for gang in self.gangs])
            recorder = _Recorder(self.tracker, progress, pool, telemetry)
            searcher = StudySearcher(self._study(), spec.budget)
            self._tune(searcher, recorder, pool, telemetry, environment, spool)
            status = "stopped" if searcher.stopped else "finished"
        finally:
            self.tracker.finish_search(status, self._summary(progress))
            for gang in self.gangs:
                gang.close()
            for notice in self.tracker.notices:
                progress.say(f"notice: {notice}")
        return self.search_id

    def _study(self) -> SearchStudy:
        spec = self.spec
        return SearchStudy(
            self.search_id,
            spec.legal.points,
            spec.objectives,
            spec.limits,
            spec.sampler,
            spec.seed,
            self.home.optuna_storage,
        )

    def _tune(
        self,
        searcher: StudySearcher,
        recorder: _Recorder,
        pool: ActorHandle,
        telemetry: Mapping[str, Any],
        environment: Mapping[str, str],
        spool: Any,
    ) -> None:
        trainable = ray.tune.with_parameters(
            evaluate, spec=self.spec, pool=pool, telemetry=telemetry, environment=environment
        )
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(trainable, {"CPU": TRIAL_CPUS}),
            tune_config=ray.tune.TuneConfig(
                search_alg=searcher,
                num_samples=-1,
                max_concurrent_trials=len(self.gangs),
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.trial_id,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=ray.tune.RunConfig(name="tune", storage_path=str(spool), callbacks=[recorder], verbose=0),
        )
        with _stop_on_signal(searcher, recorder.progress):
            tuner.fit()

    def _summary(self, progress: Progress) -> dict[str, float | None]:
        return {"trials": float(progress.done), "search_time_s": time.monotonic() - progress.began} | {
            f"best_{metric}": value for metric, value in progress.best.items()
        }


@contextlib.contextmanager
def ray_session(spec: SearchSpec) -> Iterator[None]:
    """Ray for one search: the running one if there is one to join, else one of its own that ends with the search."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            _knock(address)
            # Ray Train's helpers look for their cluster by this variable, and die where a host runs several.
            ray.init(runtime_env={"env_vars": {"RAY_ADDRESS": address}}, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"RAY_ADDRESS: no Ray cluster answers at {address}: {reason}") from None
    else:
        cpus = max(os.cpu_count() or 1, math.ceil(spec.cluster.size * spec.cluster.cpus_per_worker))
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=True,
            _temp_dir=tempfile.mkdtemp(prefix="wattune-ray-"),
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT; Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


@contextlib.contextmanager
def _stop_on_signal(searcher: StudySearcher, progress: Progress) -> Iterator[None]:
    """Interrupt ends the search after the trials under way; a second one, or terminate, ends it at once."""

    def stop(number: int, frame: Any) -> None:
        at_once, searcher.stopped = searcher.stopped or number == signal.SIGTERM, True
        if at_once:
            raise KeyboardInterrupt
        progress.say("stopping after the trials under way; once more to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        progress.say("stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_cluster(spec: SearchSpec) -> None:
    """Raise `InputError` unless the Ray cluster has what the spec's cluster section says."""
    have = ray.cluster_resources()
    for name, each in resources_per_worker(spec.cluster).items():
        need = each * spec.cluster.size
        if have.get(name, 0) < need:
            raise InputError(
                f"cluster: {spec.cluster.nodes} x {spec.cluster.gpus_per_node} {spec.cluster.accelerator} workers need "
                f"{need:g} {name}, the Ray cluster has {have.get(name, 0):g}"
            )


def _params(spec: SearchSpec) -> dict[str, Any]:
    """The search's facts as parameters of its run."""
    return {
        "model": spec.model if isinstance(spec.model, str) else "inline",
        "parameters": spec.shape.parameters,
        "accelerator": spec.cluster.accelerator,
        "nodes": spec.cluster.nodes,
        "gpus_per_node": spec.cluster.gpus_per_node,
        "data": spec.data,
        "sequence_length": spec.sequence_length,
        "global_batch_size": spec.global_batch_size,
        "sampler": spec.sampler,
        "seed": spec.seed,
        "legal_points": len(spec.legal.points),
    }


def _environment() -> dict[str, str]:
    """Versions of what the driver runs, and the git commit of the working directory if it is a checkout."""
    found = {"python": platform.python_version()}
    for name in ("wattune", "ray", "optuna", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):  # code on the path that was never installed
            found[name] = version(name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        found["git_commit"] = commit.stdout.strip()
    return found


def _hardware(telemetry: Mapping[str, Any]) -> dict[str, str]:
    """Names and drivers of the devices in the cluster."""
    nodes = ray.get([actor.describe.remote() for actor in telemetry.values()])
    devices = [device for node in nodes for device in node["devices"]]
    drivers = {device["driver_version"] for device in devices} - {None}
    found = {"devices": ", ".join(sorted({device["name"] for device in devices}))}
    return found | ({"driver": ", ".join(sorted(drivers))} if drivers else {})
