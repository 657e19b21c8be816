"""The driver of one search: starts gangs and telemetry, lets Ray Tune run trial after trial, and keeps the record."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.tune
from optuna.exceptions import StorageInternalError
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.tune.experiment import Trial
from sqlalchemy.exc import SQLAlchemyError

from search_spaces.network import Network
from service.answers.overview import contests
from service.checks import notices, routing
from service.display import Display
from service.errors import InputError, SearchError
from service.history import slower, unexamined
from service.home import Home
from service.problem import Problem
from service.queue.admission import Admission
from service.queue.claims import Claim
from service.queue.quota import Quota
from service.record.provenance import busy, described, hardware, software, surroundings
from service.record.store import first_line
from service.record.tracking import Tracker
from service.remote import ON_HEAD, call
from service.result import Purpose, TrialResult
from service.sampling import drift
from service.sampling.agenda import Agenda
from service.sampling.searcher import AgendaSearcher, outcome_of
from service.step import Step, Wish
from service.trials import thermal
from service.trials.accelerators import nodes, resources_per_worker
from service.trials.bench import Bench
from service.trials.evaluate import evaluate
from service.trials.gang import Gang, awaited, room
from service.trials.pool import Pool, start_pool
from service.trials.silent import end_cleaners
from service.trials.slices import held_against
from service.turns import Turns
from telemetry.actor import Fleet, Telemetry, start_telemetry, stop_telemetry
from telemetry.devices import is_host
from trainables.command import Command
from trainables.command_slice import CommandSlice
from trainables.program import RankProgram
from trainables.slice import Slice
from trainables.training import Training

TRIAL_RESOURCES = {"CPU": 0} | ON_HEAD
"""What Ray reserves for a Tune trial, which only waits for its gang."""


def gang_sizes(problem: Problem, at_hand: int) -> list[int]:
    """The workers of each gang of a search, where there is room for `at_hand` workers.

    A gang has as many as the largest layout has GPUs, and lends some of them to each trial. Of a search by slices, for
    which that may be more than there are, it has a node's. There are no more gangs than the search has trials for.
    """
    at_hand = min(problem.cluster.size, at_hand)
    size = problem.gang_size if problem.gang_size <= at_hand else min(problem.cluster.gpus_per_node, at_hand)
    most = min(problem.budget.trials, len(problem.legal.layouts))
    return [size] * max(1, min(at_hand // size, most))


def _program(problem: Problem) -> type[RankProgram]:
    """What the gangs of a search must be able to run, which holds for all that they run."""
    if problem.trainer is not None:
        return CommandSlice if problem.measurement.sliced else Command
    return Slice if problem.measurement.sliced or problem.borderline == "probe" else Training


class Driver:
    """One search, from its first actor to its last record."""

    def __init__(
        self,
        problem: Problem,
        search_id: str,
        home: Home,
        tracker: Tracker,
        agenda: Agenda,
        network: Network | None,
        admission: Admission,
        beforehand: Callable[[Bench], None] | None = None,
    ) -> None:
        """`network`: as far as it is known, for slices. `beforehand` has all workers of a gang for itself, before
        the agenda is asked for a trial, and may set `network` by what it measured."""
        self.problem, self.search_id, self.home = problem, search_id, home
        self.tracker, self.agenda, self.network = tracker, agenda, network
        self.admission, self.beforehand = admission, beforehand
        self.display = Display(problem.goals, problem.budget, agenda.sought)
        self.spool = home.spool(search_id)
        self.pool: ActorHandle[Pool] | None = None

    def run(self, begun: bool = False) -> None:
        """Take the agenda to its end. `begun`: whether the search has a record already."""
        for result in self.agenda.results:
            self.display.count(result)
        telemetry = start_telemetry(self.search_id, self.home.telemetry, self.problem.sets_power_limits)
        self._check_power(telemetry)
        devices = described(self._of_type(telemetry))
        environment = software() | surroundings() | hardware(devices)
        if not begun:
            self.tracker.start_search(self.search_id, self.problem, environment)
        so_far = f", {self.display.done} of them done" if begun else ""
        layouts = len(self.problem.legal.layouts)
        self.display.say(
            f"search {self.search_id}: {layouts} legal layouts, at most {self.agenda.sought} trials{so_far}"
        )
        gpus = [device["uuid"] for device in devices if not is_host(device["kind"])]
        uneven = unexamined(self.home, gpus) if self.problem.measurement.sliced else []
        for notice in [*notices(self.problem), *busy(environment), *uneven]:
            self.display.say(f"notice: {notice}")
        sizes = gang_sizes(self.problem, room(self.problem.cluster))
        if self.problem.measurement.sliced:
            self.display.say(f"explores by slices, {sum(sizes)} at a time")
        if waits_for := awaited(self.problem.cluster, sizes[0]):
            self.display.say(f"waiting for {waits_for}")
        turns = self._turns(sizes, telemetry)
        with self.tracker.beating(lambda: turns.standing, self._cancel):
            self._measure(turns, telemetry, environment)

    def _check_power(self, telemetry: Fleet) -> None:
        """Raise `InputError`, with nothing recorded, if power limits are to be set that GPUs do not take."""
        limits = [watts for watts in self.problem.axes.get("power_limit_w", ()) if watts is not None]
        if not limits:
            return
        refused = ray.get([call(actor, Telemetry.check_power, limits) for actor in self._of_type(telemetry).values()])
        if reasons := [reason for reason in refused if reason is not None]:
            stop_telemetry(telemetry)
            raise InputError(f"space.power_limit_w: {reasons[0]}")

    def _of_type(self, telemetry: Fleet) -> dict[str, ActorHandle[Telemetry]]:
        """The telemetry of the nodes that the search may be on."""
        mine = nodes(self.problem.cluster)
        return {node: actor for node, actor in list(telemetry.items()) if node in mine}

    def _cancel(self, trial_id: str, cause: str) -> None:
        if self.pool is not None:
            call(self.pool, Pool.cancel, trial_id, cause)

    def _turns(self, sizes: Sequence[int], telemetry: Fleet) -> Turns:
        """The search's part in the queue of its cluster, not begun yet."""
        cluster, storage, data = self.problem.cluster, self.spool / "train", self.problem.data
        preload = _program(self.problem).preload(self.problem.legal.layouts)
        worker, wanted = resources_per_worker(cluster), (sizes[0], len(sizes))
        claim = Claim(self.search_id, self.problem.priority, time.time(), worker, *wanted)

        def start(name: str, avoid: Collection[str]) -> Gang:
            return Gang(name, sizes[0], cluster, storage, telemetry, preload, avoid, data, self.admission.places)

        return Turns(claim, self.admission.queue, start, self.display.say)

    def _measure(self, turns: Turns, telemetry: Fleet, environment: Mapping[str, str]) -> None:
        """Have gangs run the agenda's trials, and close the record, whatever happens."""
        status = "failed"
        try:
            self._clear_spool()  # Ray would go on with the files of a driver that was killed
            end_cleaners()  # which such a driver leaves
            self.pool = pool = start_pool()
            turns.begin(pool)
            with _stop_on_signal(self.agenda, self.display):
                if self.beforehand is not None:
                    with turns.bench(self.problem, pool, telemetry) as bench:
                        self.beforehand(bench)
                self._tune(pool, turns, telemetry, environment)
            status = "stopped" if self.agenda.stopped else "finished"
        except (OSError, StorageInternalError, SQLAlchemyError) as error:
            reason = first_line(error.__cause__ or error)
            if not isinstance(error, OSError) or self.home.is_why(error):
                reason = f"the state directory {self.home.path} cannot be written ({reason})"
            self.display.say(f"failed: {reason}")  # before gangs are closed, which may take half a minute
            raise SearchError(f"{reason}: resume the search once that is mended") from error
        finally:
            # Of one that can be resumed, it is still to come what is undecided in the end.
            open_ends = contests(self.display.compared) if status == "finished" else []
            found = [*routing(self.problem), *busy(environment), *self._drift(), *open_ends]
            self.tracker.finish_search(status, summary(self.display, self.agenda), found)
            turns.end()
            stop_telemetry(telemetry)
            self._clear_spool()
            for notice in self.tracker.notices:
                self.display.say(f"notice: {notice}")

    def _tune(self, pool: ActorHandle[Pool], turns: Turns, telemetry: Fleet, environment: Mapping[str, str]) -> None:
        """Have Ray Tune run the agenda's trials, as many at a time as the workers of the pool allow."""
        known = slower(self.home, [device["uuid"] for device in described(self._of_type(telemetry))])
        self.agenda.slower = known
        recorder = _Recorder(self.tracker, self.display, self.agenda, pool, telemetry, turns, self.admission.quota)
        trainable = ray.tune.with_parameters(
            evaluate,
            problem=self.problem,
            pool=pool,
            telemetry=telemetry,
            environment=environment,
            network=self.network,
            slower=known,
        )
        tuner = ray.tune.Tuner(
            ray.tune.with_resources(trainable, TRIAL_RESOURCES),
            tune_config=ray.tune.TuneConfig(
                search_alg=AgendaSearcher(self.agenda, _Lender(pool, turns, self.home)),
                num_samples=-1,
                max_concurrent_trials=self.agenda.at_a_time,
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.trial_id,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=ray.tune.RunConfig(name="tune", storage_path=str(self.spool), callbacks=[recorder], verbose=0),
        )
        tuner.fit()
        if recorder.exceeded is not None:
            self.display.say(f"failed: {recorder.exceeded}")
            raise SearchError(f"{recorder.exceeded}: resume the search once there is more")

    def _drift(self) -> list[str]:
        """Say how far the sentinel moved. Returns what the record has to say of it: nothing within noise."""
        moves = self.agenda.drifts()
        lines = {
            metric: f"{move.share:+.2%}, from {self.display.figure(metric, move.first)} to "
            f"{self.display.figure(metric, move.farthest)}"
            for metric, move in moves.items()
        }
        if lines:
            self.display.say(f"sentinel: moved by at most {'; '.join(lines.values())}")
        noisy = [lines[metric] for metric in drift.beyond_noise(moves, self.problem.cluster.accelerator)]
        drifted = (
            f"the machine drifted, trials before and after are not alike: the sentinel moved by {'; '.join(noisy)}"
        )
        return [drifted] if noisy else []

    def _clear_spool(self) -> None:
        """Remove what Ray wrote there. Trials that the tracking store has not taken stay."""
        for name in ("train", "tune"):
            shutil.rmtree(self.spool / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or not there
            (self.spool / "unsent").rmdir()


@dataclass(frozen=True)
class _Lender:
    """The pool's workers, as the agenda asks for them."""

    pool: ActorHandle[Pool]
    turns: Turns
    home: Home

    def free(self) -> int | None:
        if (free := ray.get(call(self.pool, Pool.free))) is None:
            self.home.check_writable()  # or Ray Train would try for ever, without a word
            return None if self.turns.waiting else 0
        return free

    def lend(self, trial_id: str, wishes: Sequence[Wish]) -> int | None:
        return ray.get(call(self.pool, Pool.lend, trial_id, wishes))


class _Recorder(ray.tune.Callback):
    """Tune's events to the record and the display, on the driver's own thread.

    Of an exception at the end of a trial Tune makes a failure of the trial, of which it then tells, and goes on. So it
    is kept, as `failure`, until the step is over, where it ends the search.
    """

    def __init__(
        self,
        tracker: Tracker,
        display: Display,
        agenda: Agenda,
        pool: ActorHandle[Pool],
        telemetry: Fleet,
        turns: Turns,
        quota: Quota | None,
    ) -> None:
        self.tracker, self.display, self.agenda = tracker, display, agenda
        self.pool, self.telemetry, self.turns, self.quota = pool, telemetry, turns, quota
        self.exceeded: str | None = None
        self.failure: Exception | None = None

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        step = Step.from_config(trial.config)
        self.tracker.start_trial(trial.trial_id, step.layout, step.purpose)  # what is said to have started is on record
        self.display.began = time.monotonic() - self.agenda.elapsed_s
        self.display.started(step.layout.label, step.purpose)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial, trial.last_result)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial, None)

    def _finish(self, trial: Trial, reported: dict[str, Any] | None) -> None:
        if self.failure is not None:
            return  # of two, the first is the cause
        try:
            self._take(trial, reported)
        except Exception as error:
            self.failure = error

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self.failure is not None:
            raise self.failure

    def _take(self, trial: Trial, reported: dict[str, Any] | None) -> None:
        if not reported or "result" not in reported:
            ray.get(call(self.pool, Pool.release, trial.trial_id))
        result = outcome_of(trial.trial_id, Step.from_config(trial.config), reported)
        samples = self._samples(result)
        if result.purpose in (Purpose.FINALIST, Purpose.PLACEMENT) and samples is not None:
            result = thermal.judged(result, samples)
        if result.purpose == Purpose.FINALIST:
            result = held_against(result, self.agenda.results)
        self.tracker.finish_trial(result, samples)  # first of all: what is on disk is not run again
        if self.agenda.take(result):
            self.display.finished(result, self.agenda.to_come)
        else:
            self.display.retried(result)
        self.tracker.update_search(summary(self.display, self.agenda))
        to_come = self.agenda.to_come
        self.turns.foresee(to_come, self.display.left_s(to_come))
        if self.quota is not None and to_come and (exceeded := self.quota.exceeded()) is not None:
            self.exceeded = self.exceeded or exceeded
            self.agenda.stopped = True

    def _samples(self, result: TrialResult) -> pa.Table | None:
        """The raw telemetry of the trial's windows, from all nodes."""
        references = [
            call(self.telemetry[w.node_id], Telemetry.samples, w.start_ns, w.end_ns, w.devices) for w in result.windows
        ]
        tables = []
        for reference in references:
            with contextlib.suppress(RayError):  # a node that was lost takes its samples along
                tables.append(ray.get(reference))
        return pa.concat_tables(tables) if tables else None


def summary(display: Display, agenda: Agenda) -> dict[str, float | None]:
    """The figures of a search so far. Time and GPU hours are what a search that is resumed has spent."""
    return {
        "trials": display.done,
        "search_time_s": agenda.elapsed_s,
        "gpu_hours": agenda.gpu_seconds / 3600,
        **{f"best_{metric}": value for metric, value in display.best.items()},
        **{f"sentinel_drift_{metric}": move.share for metric, move in agenda.drifts().items()},
    }


@contextlib.contextmanager
def _stop_on_signal(agenda: Agenda, display: Display) -> Iterator[None]:
    """Interrupt ends the search after the trials under way; a second one, or terminate, ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def stop(number: int, frame: Any) -> None:
        at_once, agenda.stopped = agenda.stopped or number == signal.SIGTERM, True
        if at_once:
            raise KeyboardInterrupt
        display.say("stopping after the trials under way; once more to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        display.say("stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
