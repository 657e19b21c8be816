"""The one writer of the record: a parent run per search, a nested child run per trial, in MLflow."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow

from search_spaces.layout import Layout
from service.errors import InputError
from service.home import Home, user
from service.metrics import TABLE, heading, number
from service.problem import Problem
from service.record import store, view
from service.record.dataset import dataset
from service.record.heartbeat import Heartbeat, beating
from service.record.standing import Standing
from service.result import Purpose, TrialResult
from service.spec import dump_spec
from telemetry.store import write_samples
from trainables.data import SYNTHETIC
from trainables.status import Status

if TYPE_CHECKING:
    from mlflow.entities import Metric

    from service.record.results import SearchRecord

# Limits of MLflow on one `log_batch` and on one value.
_METRICS_PER_BATCH = 1000
_PAIRS_PER_BATCH = 100
_PARAM_LENGTH = 6000
_TAG_LENGTH = 5000

_SEARCH = "the state of the search"
_VIEW = "the view for MLflow's pages"
_DATASET = "the dataset"
_RUN_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_ESTIMATED = "Energy is **estimated**: this machine has no energy counter. Not comparable with measured figures."


Picture = Callable[[TrialResult, pyarrow.Table], bytes | None]


class Tracker:
    """Writes one search. Not thread-safe: the driver calls it from one thread, beside which a heart may beat.

    Whatever becomes of the tracking server, a finished trial is on disk, under `Home.spool`, before MLflow hears of
    it, and stays there until MLflow has taken it. Once the search has started, what goes wrong with MLflow becomes one
    of the `notices` and is never raised.
    """

    def __init__(self, tracking_uri: str, home: Home, picture: Picture | None = None) -> None:
        """`picture` draws what a trial's GPUs did, as PNG, to be kept beside its samples.

        Raises `InputError` if the store cannot be opened or the server does not answer.
        """
        if tracking_uri == home.tracking_uri:
            home.create()
        self._uri = tracking_uri
        self._home = home
        self._picture = picture
        self._client = store.open_client(tracking_uri)
        self._runs: dict[str, str] = {}
        self._open: dict[str, dict[str, Any]] = {}
        self._troubles: dict[str, str] = {}
        self._queued = True

    @property
    def notices(self) -> list[str]:
        """What MLflow has not taken, and why; empty when all is recorded."""
        return list(self._troubles.values())

    def start_search(self, search_id: str, problem: Problem, environment: Mapping[str, str]) -> None:
        """Create the parent run, `queued`, with the problem's facts as its parameters and its spec as an artifact.

        `environment`: versions, devices and drivers, by name. Raises `InputError` if MLflow refuses.
        """
        self._begin(search_id, problem)
        tags = {
            **_authorship(environment),
            store.ROLE: store.SEARCH,
            store.SEARCH_ID: search_id,
            store.STATUS: "queued",
            store.HEARTBEAT: str(Heartbeat.now()),
            store.DATA: _kind_of_data(problem),
            store.OBJECTIVES: json.dumps(dict(problem.goals.objectives)),
            store.CONSTRAINTS: json.dumps([limit.text for limit in problem.goals.limits]),
        }
        with store.readable(self._uri):
            self._experiment_id = store.open_experiment(self._client, self._uri, self._home.artifacts)
            run = self._client.create_run(self._experiment_id, run_name=problem.name, tags=_clip(tags))
            self._parent = run.info.run_id
            self._log(self._parent, params={**problem.facts(), **_shape(problem), **_prefixed(environment)})
            self._client.log_text(self._parent, dump_spec(problem), store.SPEC)
            self._describe("")
        self._attempt(_VIEW, self._keep_view)
        self._attempt(_DATASET, lambda: self._name_data(self._parent))

    def resume_search(self, search: SearchRecord, problem: Problem) -> dict[str, float]:
        """Go on with a search whose driver died, `queued` as a new one is, and return the summary that it had.

        Sends what is still in the spool, and marks trials that have no result as stopped. Raises `InputError` if
        MLflow refuses.
        """
        self._begin(search.id, problem, {metric for trial in search.trials for metric in trial.metrics})
        self._parent = search.run_id
        for half in self._unsent.glob(".*"):
            shutil.rmtree(half)
        with store.readable(self._uri):
            self._experiment_id = store.open_experiment(self._client, self._uri, self._home.artifacts)
            self._send_spooled()
            if self.notices:
                raise InputError(self.notices[0])
            for run in store.find_runs(self._client, self._experiment_id, {store.PARENT: self._parent}):
                tags = run.data.tags
                if tags[store.STATUS] == "running" and tags[store.TRIAL_ID] not in self._runs:
                    self._stop_trial(run.info.run_id, "the search was interrupted")
            self._client.update_run(self._parent, "RUNNING")
            self._log(self._parent, tags={store.STATUS: "queued", store.HEARTBEAT: str(Heartbeat.now())})
            return dict(self._client.get_run(self._parent).data.metrics)

    def _begin(self, search_id: str, problem: Problem, measured: Iterable[str] = ()) -> None:
        """What all that follows goes by. `measured`: the metrics that trials have already."""
        self._search_id, self._problem = search_id, problem
        self._measured = set(measured)
        facts = problem.facts()
        self._facts = {name: facts[name] for name in store.FACTS if facts.get(name) is not None}
        asked = {*problem.goals.objectives, *(limit.metric for limit in problem.goals.limits)}
        self._plain = asked | {metric.name for metric in TABLE if metric.heading}
        self._dataset = dataset(problem)

    def beating(
        self,
        standing: Callable[[], Standing | None] = lambda: None,
        cancel: Callable[[str, str], object] = lambda trial_id, cause: None,
    ) -> AbstractContextManager[None]:
        """The search's heartbeat, from a thread of its own, and with it where it stands in the queue of its cluster,
        None if it does not wait. To be entered once the search has begun.

        With each beat `cancel` gets the ids of trials under way that somebody has cancelled, each with the cause.
        """

        def beat() -> None:
            if store.reachable(self._uri):  # or MLflow would try again and again, and say so
                tags = {store.HEARTBEAT: str(Heartbeat.now()), store.STANDING: str(standing() or "")}
                self._log(self._parent, tags=tags)
                for trial_id, cause in self._cancelled():
                    cancel(trial_id, cause)

        return beating(beat)

    def _cancelled(self) -> Iterator[tuple[str, str]]:
        """The trials under way that somebody has cancelled: id and cause."""
        for trial_id in list(self._open):
            if (run_id := self._runs.get(trial_id)) is not None:
                tags = self._client.get_run(run_id).data.tags
                if store.CANCELLED in tags:
                    yield trial_id, tags[store.CANCELLED]

    def start_trial(self, trial_id: str, layout: Layout, purpose: str = "search") -> None:
        """Create the child run, with the layout as its parameters. With its first trial a search is `running`."""
        if self._queued:
            self._attempt(_SEARCH, lambda: self._log(self._parent, tags={store.STATUS: "running"}))
            self._queued = _SEARCH in self._troubles
        tags = {store.PURPOSE: purpose}
        self._open[trial_id] = {"started_ms": _now_ms(), "config": layout.to_dict(), "tags": tags}
        self._attempt(f"trial {trial_id}", lambda: self._create_trial(trial_id, self._open[trial_id]))

    def finish_trial(self, result: TrialResult, samples: pyarrow.Table | None = None) -> None:
        """Record the outcome: the metrics that are not missing, methods, cause, steps and artifacts.

        `samples` is a table of `telemetry.samples.SCHEMA`, which MLflow gets as Parquet.
        """
        trial_id = result.trial_id
        start = self._open.get(trial_id) or {"started_ms": _now_ms(), "config": result.layout.to_dict(), "tags": {}}
        directory = self._spool(result, samples, {**start, "finished_ms": _now_ms()})
        self._open.pop(trial_id, None)
        self._attempt(f"trial {trial_id}", lambda: self._send(directory), f"; kept in {directory} to be sent again")
        known = {metric for metric, value in result.metrics.items() if value is not None}
        if new := (known & {*self._problem.goals.objectives, view.MEMORY}) - self._measured:
            self._measured |= new
            self._attempt(_VIEW, self._keep_view)

    def update_search(self, summary: Mapping[str, float | None]) -> None:
        """Record the figures of the search so far."""
        self._attempt(_SEARCH, lambda: self._log(self._parent, metrics=_final_metrics(summary, _now_ms())))

    def finish_search(self, status: str, summary: Mapping[str, float | None], notices: Iterable[str] = ()) -> None:
        """Send what is still in the spool and close the parent run. `status`: finished, stopped or failed."""
        self._send_spooled()
        self._troubles.pop(_SEARCH, None)  # what follows records it all
        self._attempt(_SEARCH, lambda: self._close(status, summary, notices))

    def attach_page(self, page: Callable[[], str]) -> None:
        """Keep the search's report, in HTML, beside its spec. Whatever fails, `page` included, becomes a notice."""
        self._attempt("the report", lambda: self._client.log_text(self._parent, page(), store.PAGE))

    def attach_description(self, text: Callable[[], str]) -> None:
        """Describe the search, in Markdown, where MLflow's pages do. Whatever fails becomes a notice."""
        self._attempt("the description", lambda: self._describe(text()))

    def _name_data(self, run_id: str) -> None:
        if self._dataset is not None:
            self._client.log_inputs(run_id, [self._dataset])

    def _keep_view(self) -> None:
        """With all objectives or, once trials have some, with these: a chart of others too would be empty."""
        name, axes = self._problem.name, [axis for axis, values in self._problem.axes.items() if len(values) > 1]
        objectives = self._problem.goals.objectives
        shown = {metric: way for metric, way in objectives.items() if metric in self._measured} or dict(objectives)
        memory = view.MEMORY in self._measured
        longest = max(len(layout.label) for layout in self._problem.legal.layouts)
        kept = view.tag(self._search_id, name, shown, axes, memory, longest, _now_ms())
        self._client.set_experiment_tag(self._experiment_id, *kept)

    def _describe(self, text: str) -> None:
        shown = f"[All trials, as a table and in charts]({view.link('', self._experiment_id, self._search_id)})"
        note = self._client.get_run(self._parent).data.tags.get(store.NOTE, "")
        told = store.described(note, "\n\n".join(filter(None, [shown, text])))
        self._log(self._parent, tags={store.DESCRIPTION: told})

    def _send_spooled(self) -> None:
        for directory in sorted(self._unsent.glob("[!.]*")):
            self._attempt(f"trial {directory.name}", partial(self._send, directory), f"; kept in {directory}")

    def _close(self, status: str, summary: Mapping[str, float | None], notices: Iterable[str]) -> None:
        for trial_id in self._open:
            if run_id := self._runs.get(trial_id):
                self._stop_trial(run_id, f"the search ended ({status})")
        self._open.clear()
        lines = "\n".join([*notices, *self.notices])
        if lines:
            self._client.log_text(self._parent, lines + "\n", "notices.txt")
        now = _now_ms()
        self._log(
            self._parent,
            metrics=_final_metrics(summary, now),
            tags={store.STATUS: status, store.NOTICES: lines},  # those of before a resumption are over
        )
        self._client.set_terminated(self._parent, _RUN_STATUS[status])

    def _stop_trial(self, run_id: str, cause: str) -> None:
        self._log(run_id, tags={store.STATUS: "stopped", store.CAUSE: cause})
        self._client.set_terminated(run_id, "KILLED")

    def _attempt(self, subject: str, action: Callable[[], None], consequence: str = "") -> None:
        """Do `action`; a tracking failure becomes a notice until `subject` succeeds, for it must not end the search."""
        try:
            if not store.reachable(self._uri):
                raise ConnectionError(f"{self._uri} does not answer")
            action()
        except Exception as error:
            self._troubles[subject] = f"{subject} is not recorded: {store.first_line(error)}{consequence}"
        else:
            self._troubles.pop(subject, None)

    def _create_trial(self, trial_id: str, start: Mapping[str, Any]) -> None:
        tags = {
            **start["tags"],
            **_authorship({}),
            store.PARENT: self._parent,
            store.ROLE: store.TRIAL,
            store.SEARCH_ID: self._search_id,
            store.TRIAL_ID: trial_id,
            store.STATUS: "running",
        }
        name, purpose = Layout.from_dict(start["config"]).label, start["tags"].get(store.PURPOSE, Purpose.SEARCH)
        if purpose != Purpose.SEARCH:
            name = f"{purpose}: {name}"
        run = self._client.create_run(self._experiment_id, start["started_ms"], _clip(tags), name)
        self._runs[trial_id] = run.info.run_id
        self._log(run.info.run_id, params={**self._facts, **start["config"]})
        self._attempt(_DATASET, lambda: self._name_data(run.info.run_id))

    @property
    def _unsent(self) -> Path:
        return self._home.spool(self._search_id) / "unsent"

    def _spool(self, result: TrialResult, samples: pyarrow.Table | None, start: Mapping[str, Any]) -> Path:
        """Write all that MLflow shall get into a directory that appears at once or not at all."""
        directory = self._unsent / result.trial_id
        half = self._unsent / f".{result.trial_id}"
        for stale in (half, directory):
            shutil.rmtree(stale, ignore_errors=True)
        half.mkdir(parents=True)
        _write_json(half / store.RESULT, result.to_dict())
        _write_json(half / "start.json", dict(start))
        if samples is not None:
            write_samples(samples, half / store.SAMPLES)
        os.replace(half, directory)
        if self._picture is not None and samples is not None and samples.num_rows:
            self._draw(self._picture, result, samples, directory / store.PICTURE)
        return directory

    def _draw(self, picture: Picture, result: TrialResult, samples: pyarrow.Table, to: Path) -> None:
        """Once the trial is on disk, whatever becomes of this; what fails becomes a notice."""
        try:
            if (drawn := picture(result, samples)) is not None:
                to.write_bytes(drawn)
        except Exception as error:
            self._troubles["pictures"] = f"what GPUs did in trial {result.trial_id} is not drawn: {error}"

    def _send(self, directory: Path) -> None:
        """Give MLflow a spooled trial. Safe to repeat after a failure half-way: MLflow drops equal points."""
        result = TrialResult.from_dict(json.loads((directory / store.RESULT).read_text()))
        start = json.loads((directory / "start.json").read_text())
        ended = start["finished_ms"]
        if result.trial_id not in self._runs:
            self._adopt_or_create(result.trial_id, start)
        run_id = self._runs[result.trial_id]
        self._log(run_id, params={**self._facts, **start["config"], **_prefixed(result.environment)})
        keys = {store.metric_key(name, self._plain): value for name, value in result.metrics.items()}
        self._log(run_id, metrics=_final_metrics(keys, ended))
        steps = {"step/step_time_s": result.step_times_s, "step/loss": result.losses}
        self._log(run_id, metrics=[p for key, values in steps.items() for p in _step_points(key, values, ended)])
        for artifact in (store.RESULT, store.SAMPLES, store.PICTURE):
            if (directory / artifact).exists():
                self._client.log_artifact(run_id, str(directory / artifact))
        self._log(run_id, tags=_outcome(result))
        self._client.set_terminated(run_id, "FINISHED" if result.status == "ok" else "FAILED", ended)
        shutil.rmtree(directory)

    def _adopt_or_create(self, trial_id: str, start: Mapping[str, Any]) -> None:
        """A run may exist although the reply that it was created got lost."""
        tags = {store.SEARCH_ID: self._search_id, store.TRIAL_ID: trial_id}
        for run in store.find_runs(self._client, self._experiment_id, tags):
            self._runs[trial_id] = run.info.run_id
            return
        self._create_trial(trial_id, start)

    def _log(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Param, RunTag

        all_params = [Param(key, store.to_param(value)[:_PARAM_LENGTH]) for key, value in (params or {}).items()]
        all_tags = [RunTag(key, value) for key, value in _clip(tags or {}).items()]
        for i in range(0, len(all_params), _PAIRS_PER_BATCH):
            self._client.log_batch(run_id, params=all_params[i : i + _PAIRS_PER_BATCH])
        for i in range(0, len(all_tags), _PAIRS_PER_BATCH):
            self._client.log_batch(run_id, tags=all_tags[i : i + _PAIRS_PER_BATCH])
        for i in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=metrics[i : i + _METRICS_PER_BATCH])


def _shape(problem: Problem) -> dict[str, Any]:
    """The model's dimensions."""
    shape = {} if problem.shape is None else asdict(problem.shape)
    return {store.MODEL + name: value for name, value in shape.items()}


def _kind_of_data(problem: Problem) -> str:
    if problem.trainer is not None:
        return "trainer"  # which reads its own
    return "synthetic" if problem.data == SYNTHETIC else "file"


def _outcome(result: TrialResult) -> dict[str, str]:
    """The tags of a finished trial."""
    tags: dict[str, str] = {store.STATUS: result.status, store.PURPOSE: result.purpose}
    if result.infrastructure:
        tags[store.INFRASTRUCTURE] = "true"
    if result.beside is not None:
        tags[store.BESIDE] = "true" if result.beside else "false"
    tags |= {store.METHOD + metric: method for metric, method in result.methods.items()}
    notes = [_figures(result)] if result.status == Status.OK else []
    if result.straggler is not None:
        tags[store.STRAGGLER] = json.dumps(asdict(result.straggler))
        notes.append(f"The trial's {result.straggler}.")
    if result.cause:
        tags[store.CAUSE] = result.cause
        notes.append(f"**{result.status}**: {result.cause}")
    if method := result.methods.get("joules_per_token"):
        tags[store.ENERGY] = method
        if method == "estimated":
            notes.append(_ESTIMATED)
    if "extrapolated" in result.methods.values():
        layers = " and ".join(str(proxy.layers) for proxy in result.proxies)
        notes.append(f"Figures are **extrapolated** from models of {layers} layers; both results are in result.json.")
    elif "short" in result.methods.values():
        few, many = (proxy.result.layout.global_batch_size for proxy in result.proxies)
        whole = result.layout.global_batch_size
        notes.append(f"Of a **short** trial: steps of {few} and {many} sequences stand for steps of {whole}.")
    return tags | ({"mlflow.note.content": "\n\n".join(notes)} if notes else {})


def _figures(result: TrialResult) -> str:
    """What a trial came to, as a table in Markdown."""
    rows = [
        f"| {heading(metric.name)} | {number(metric.name, value, result.methods.get(metric.name))} |"
        for metric in TABLE
        if metric.heading and (value := result.metrics.get(metric.name)) is not None
    ]
    return "\n".join([f"| {result.layout.label} | {result.purpose} |", "|---|---:|", *rows])


def _authorship(environment: Mapping[str, str]) -> dict[str, str]:
    """What MLflow's own columns show: who, with what, at which commit."""
    tags = {"mlflow.source.name": "wattune", "mlflow.source.type": "LOCAL", store.USER: user()}
    if commit := environment.get("git_commit"):
        tags["mlflow.source.git.commit"] = commit
    return tags


def _final_metrics(metrics: Mapping[str, float | None], time_ms: int) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(k, float(v), time_ms, 0) for k, v in metrics.items() if v is not None and math.isfinite(v)]


def _step_points(key: str, values: Iterable[float | None], time_ms: int) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(key, v, time_ms, step) for step, v in enumerate(values) if v is not None]


def _prefixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {store.ENVIRONMENT + key: value for key, value in environment.items()}


def _clip(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: value[:_TAG_LENGTH] for key, value in tags.items()}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
