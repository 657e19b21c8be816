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

from service.answers.candidates import candidates
from service.answers.ranking import leaders
from service.cluster import check_cluster, ray_session
from service.display import Display
from service.errors import InputError, SearchError
from service.fitting import load as load_calibration
from service.home import Home
from service.home import tracking_uri as store_uri
from service.record import store
from service.record.provenance import hardware, software
from service.record.results import Results, SearchRecord
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from service.sampling import drift
from service.sampling.agenda import Agenda, SearchAgenda, Spent, settled
from service.sampling.searcher import AgendaSearcher, outcome_of
from service.sampling.study import SearchStudy, study_exists
from service.sampling.warmup import open_study
from service.spec import SearchSpec, dump_spec, new_search_id, parse_spec
from service.step import Step
from service.trials import thermal
from service.trials.evaluate import evaluate
from service.trials.gang import ON_HEAD, Gang, close_gangs, start_pool
from telemetry.actor import start_telemetry, stop_telemetry
from trainables.data import SYNTHETIC, DataError, open_tokens
from trainables.status import Status

# A Tune trial only waits for its gang.
TRIAL_RESOURCES = {"CPU": 0} | ON_HEAD


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
    with home.driving(search_id), ray_session(spec):
        check_cluster(spec)
        study = _study(spec, search_id, home, Results(store_uri(tracking_uri)))
        course = SearchAgenda(study, spec, _gangs(spec))
        Driver(spec, search_id, home, tracker, course).run()
    return search_id


def resume(search: str, tracking_uri: str | None = None) -> str:
    """Go on with a search that was interrupted, stopped or failed, where it ran, within its budget. Returns its id.

    Trials with a result count and are not run again; those that were under way are. Time and GPU hours count as of the
    last trial with a result. Raises `InputError` for a search that is unknown, finished or running, or that was not
    run from this state directory, and for whatever `run` does.
    """
    home = Home.locate()
    recorded = Results(store_uri(tracking_uri))
    record = recorded.search(search)
    if any(trial.purpose == Purpose.CALIBRATION for trial in record.trials):
        raise InputError(f"search {record.id} is a calibration: calibrate anew")
    if not study_exists(record.id, home.optuna_storage):
        raise InputError(f"search {record.id} was not run from {home.path}: resume it with the WATTUNE_HOME it had")
    tracker = Tracker(store_uri(tracking_uri), home)
    with home.driving(record.id):
        record = recorded.search(record.id)
        if record.status == "finished":
            raise InputError(f"search {record.id} is finished: there is nothing to resume")
        spec = parse_spec(recorded.spec_of(record))
        check_data(spec)
        with ray_session(spec):
            check_cluster(spec)
            summary = tracker.resume_search(record)
            results = results_of(recorded.search(record.id))
            study = _study(spec, record.id, home, recorded)
            study.recall([result for result in settled(results) if result.purpose == Purpose.SEARCH])
            spent = Spent(summary.get("search_time_s", 0.0), 3600 * summary.get("gpu_hours", 0.0))
            course = SearchAgenda(study, spec, _gangs(spec), results, spent)
            Driver(spec, record.id, home, tracker, course).run(begun=True)
    return record.id


def _study(spec: SearchSpec, search_id: str, home: Home, recorded: Results) -> SearchStudy:
    """The search's study, with what is known of its machines and from the searches before it."""
    calibration = load_calibration(home, spec.cluster.accelerator)
    facts = _params(spec)
    same = {name: facts[name] for name in ("parameters", "accelerator")}
    return open_study(spec, search_id, home.optuna_storage, calibration, recorded.finished(same))


def _gangs(spec: SearchSpec) -> int:
    """How many gangs fit the cluster, of those that the search has trials for."""
    return max(1, min(spec.cluster.size // spec.gang_size, spec.budget.trials, len(spec.legal.layouts)))


def results_of(record: SearchRecord) -> list[TrialResult]:
    """The recorded trials that came to an end, without what the record keeps in files."""
    return [
        TrialResult(
            trial_id=trial.trial_id,
            layout=trial.layout,
            status=Status(trial.status),
            cause=trial.cause,
            metrics=dict(trial.metrics),
            methods=trial.methods,
            purpose=trial.purpose,
            infrastructure=trial.infrastructure,
        )
        for trial in record.trials
        if trial.status in list(Status)
    ]


class _Recorder(ray.tune.Callback):
    """Tune's events to the record and the display, on the driver's own thread."""

    def __init__(
        self,
        tracker: Tracker,
        progress: Display,
        course: Agenda,
        pool: ActorHandle,
        telemetry: Mapping[str, Any],
    ) -> None:
        self.tracker, self.progress, self.course = tracker, progress, course
        self.pool, self.telemetry = pool, telemetry
        self.failure: SearchError | None = None

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        step = Step.from_dict(trial.config)
        self.progress.started(step.layout.label, step.purpose)
        self.tracker.start_trial(trial.trial_id, step.layout, {store.PURPOSE: step.purpose})

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial, trial.last_result)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial, None)

    def _finish(self, trial: Trial, reported: dict[str, Any] | None) -> None:
        if not reported or "result" not in reported:
            self._release(trial)
        result = outcome_of(trial.trial_id, Step.from_dict(trial.config), reported)
        samples = self._samples(result)
        if result.purpose == Purpose.FINALIST and samples is not None:
            result = thermal.judged(result, samples)
        self.tracker.finish_trial(result, samples)  # first of all: what is on disk is not run again
        if self.course.take(result):
            self.progress.finished(result, self.course.to_come)
        else:
            self.progress.retried(result)
        self.tracker.update_search(_summary(self.progress, self.course))

    def _release(self, trial: Trial) -> None:
        try:
            ray.get(self.pool.release.remote(trial.trial_id))
        except ray.exceptions.RayActorError:
            self.failure = SearchError("the process that lends gangs to trials died: resume the search")
            raise self.failure from None

    def _samples(self, result: TrialResult) -> pa.Table | None:
        """The raw telemetry of the trial's windows, from all nodes."""
        references = [self.telemetry[w.node_id].samples.remote(w.start_ns, w.end_ns, w.devices) for w in result.windows]
        tables = []
        for reference in references:
            with contextlib.suppress(ray.exceptions.RayError):  # a node that was lost takes its samples along
                tables.append(ray.get(reference))
        return pa.concat_tables(tables) if tables else None


class Driver:
    """One search, from its first actor to its last record."""

    def __init__(self, spec: SearchSpec, search_id: str, home: Home, tracker: Tracker, course: Agenda) -> None:
        self.spec, self.search_id, self.home, self.tracker, self.course = spec, search_id, home, tracker, course
        self.gangs: list[Gang] = []

    def run(self, begun: bool = False) -> None:
        """Take the course to its end. `begun`: whether the search has a record already."""
        spec, course = self.spec, self.course
        progress = Display(spec.goals, spec.budget, course.sought, course.began)
        for result in course.results:
            progress.count(result)
        telemetry = start_telemetry(self.search_id, self.home.telemetry)
        environment = software() | hardware(telemetry)
        if not begun:
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
        so_far = f", {progress.done} of them done" if begun else ""
        layouts = len(spec.legal.layouts)
        progress.say(f"search {self.search_id}: {layouts} legal layouts, at most {course.sought} trials{so_far}")
        status, spool = "failed", self.home.spool(self.search_id)
        self._clear(spool)  # Ray would go on with the files of a driver that was killed
        try:
            self.gangs = [
                Gang(f"{self.search_id}-gang{i}", spec.gang_size, spec.cluster, spool / "train", telemetry)
                for i in range(_gangs(spec))
            ]
            pool = start_pool(self.gangs)
            recorder = _Recorder(self.tracker, progress, course, pool, telemetry)
            self._tune(recorder, pool, telemetry, environment, spool)
            status = "stopped" if course.stopped else "finished"
        finally:
            moved = self._drift(progress)
            self.tracker.finish_search(status, _summary(progress, course), moved)
            close_gangs(self.gangs)
            stop_telemetry(telemetry)
            self._clear(spool)
            for notice in self.tracker.notices:
                progress.say(f"notice: {notice}")

    def _drift(self, progress: Display) -> list[str]:
        """Say how far the sentinel moved. Returns what the record has to say of it: nothing within noise."""
        moves = self.course.drifts()
        told = {
            metric: f"{move.share:+.2%}, from {progress.figure(metric, move.first)} to "
            f"{progress.figure(metric, move.farthest)}"
            for metric, move in moves.items()
        }
        if told:
            progress.say(f"sentinel: moved by at most {'; '.join(told.values())}")
        noisy = [told[metric] for metric in drift.beyond_noise(moves, self.spec.cluster.accelerator)]
        drifted = (
            f"the machine drifted, trials before and after are not alike: the sentinel moved by {'; '.join(noisy)}"
        )
        return [drifted] if noisy else []

    def _tune(
        self,
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
                search_alg=AgendaSearcher(self.course),
                num_samples=-1,
                max_concurrent_trials=len(self.gangs),
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.trial_id,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=ray.tune.RunConfig(name="tune", storage_path=str(spool), callbacks=[recorder], verbose=0),
        )
        try:
            with _stop_on_signal(self.course, recorder.progress):
                tuner.fit()
        except ray.tune.TuneError:  # what a callback raises, Tune passes on as text
            if recorder.failure is None:
                raise
            raise recorder.failure from None

    @staticmethod
    def _clear(spool: Path) -> None:
        """Remove what Ray wrote there. Trials that the tracking store has not taken stay."""
        for name in ("train", "tune"):
            shutil.rmtree(spool / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or not there
            (spool / "unsent").rmdir()


@contextlib.contextmanager
def _stop_on_signal(course: Agenda, progress: Display) -> Iterator[None]:
    """Interrupt ends the search after the trials under way; a second one, or terminate, ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def stop(number: int, frame: Any) -> None:
        at_once, course.stopped = course.stopped or number == signal.SIGTERM, True
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


def _summary(progress: Display, course: Agenda) -> dict[str, float | None]:
    """The figures of a search so far. Time and GPU hours are what a search that is resumed has spent."""
    compared = course.spec.goals.among(candidates(course.results))
    return {
        "trials": progress.done,
        "search_time_s": time.monotonic() - progress.began,
        "gpu_hours": course.gpu_seconds / 3600,
        **{f"best_{metric}": one.metrics[metric] for metric, one in leaders(compared).items()},
        **{f"sentinel_drift_{metric}": move.share for metric, move in course.drifts().items()},
    }


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
        "legal_points": len(spec.legal.layouts),
    }
