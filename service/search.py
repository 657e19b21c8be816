"""The driver of one search: builds gangs, telemetry, study and record, and lets Ray Tune run trial after trial."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.tune
from ray.actor import ActorHandle
from ray.tune.experiment import Trial

from search_spaces.config import TrialConfig
from service.cluster import check_cluster, ray_session
from service.errors import InputError
from service.evaluate import evaluate
from service.gang import Gang, close_gangs, start_pool
from service.home import Home
from service.home import tracking_uri as store_uri
from service.progress import Progress
from service.provenance import hardware, software
from service.searcher import StudySearcher, outcome_of
from service.spec import SearchSpec, dump_spec, new_search_id
from service.study import SearchStudy
from service.tracking import Tracker
from telemetry.actor import start_telemetry
from trainables.data import SYNTHETIC, DataError, open_tokens
from trainables.result import TrialResult

# A Tune trial only waits for its gang, so it takes no CPU; Ray wants it to ask for something, and every head has this.
TRIAL_RESOURCES = {"CPU": 0, "node:__internal_head__": 0.001}


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
    spec = spec.located()
    home = Home.locate().create()
    search_id = search_id or new_search_id(spec)
    tracker = Tracker(store_uri(tracking_uri), home)
    with ray_session(spec):
        check_cluster(spec)
        return _Driver(spec, search_id, home, tracker).run()


class _Recorder(ray.tune.Callback):
    """Tune's events to the record and the display, on the driver's own thread."""

    def __init__(self, tracker: Tracker, progress: Progress, pool: ActorHandle, telemetry: Mapping[str, Any]) -> None:
        self.tracker, self.progress, self.pool, self.telemetry = tracker, progress, pool, telemetry

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
        progress = Progress(spec.objectives, spec.budget, trials, spec.limits)
        telemetry = start_telemetry(self.search_id, self.home.telemetry)
        environment = software() | hardware(telemetry)
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
        status, spool = "failed", self.home.spool(self.search_id)
        try:
            count = max(1, min(spec.cluster.size // spec.gang_size, trials))
            self.gangs = [
                Gang(f"{self.search_id}-gang{i}", spec.gang_size, spec.cluster, spool / "train", telemetry)
                for i in range(count)
            ]
            pool = start_pool(self.gangs)
            recorder = _Recorder(self.tracker, progress, pool, telemetry)
            searcher = StudySearcher(self._study(), spec.budget)
            self._tune(searcher, recorder, pool, telemetry, environment, spool)
            status = "stopped" if searcher.stopped else "finished"
        finally:
            self.tracker.finish_search(status, self._summary(progress))
            close_gangs(self.gangs)
            self._clear(spool)
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
        spool: Path,
    ) -> None:
        trainable = ray.tune.with_parameters(
            evaluate, spec=self.spec, pool=pool, telemetry=telemetry, environment=environment
        )
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(trainable, TRIAL_RESOURCES),
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

    @staticmethod
    def _summary(progress: Progress) -> dict[str, float | None]:
        best = {f"best_{metric}": value for metric, value in progress.best.items()}
        return {"trials": progress.done, "search_time_s": time.monotonic() - progress.began, **best}

    @staticmethod
    def _clear(spool: Path) -> None:
        """Remove what Ray wrote there. Trials that the tracking store has not taken stay."""
        for name in ("train", "tune"):
            shutil.rmtree(spool / name, ignore_errors=True)
        for folder in (spool / "unsent", spool):
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()


@contextlib.contextmanager
def _stop_on_signal(searcher: StudySearcher, progress: Progress) -> Iterator[None]:
    """Interrupt ends the search after the trials under way; a second one, or terminate, ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

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
