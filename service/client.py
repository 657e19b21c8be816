"""The Python client: all that the command line can do, which asks it and prints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service import home
from service.errors import InputError

if TYPE_CHECKING:
    from service.answers.candidates import Candidate
    from service.answers.commands import CommandLaunch
    from service.answers.compare.comparing import Compared
    from service.answers.exports import Formatted
    from service.answers.front import Choice, Front
    from service.answers.overview import SearchInfo
    from service.answers.page.evidence import Evidence
    from service.answers.page.view import Search
    from service.answers.report import Report
    from service.answers.start import Written
    from service.answers.whatif import WhatIf
    from service.answers.why import Explanation
    from service.calibrate import Calibrated
    from service.doctor.examination import Examination
    from service.jobs import Submission
    from service.plan import Plan
    from service.problem import Problem
    from service.record.pages import Pages
    from service.record.results import Results, SearchRecord, TrialRecord
    from service.trainer_check import TrainerCheck
    from service.trainers import ReadyTrainer
    from service.watch.event import Event
    from telemetry.actor import NodeState
    from trainables.data import PreparedData
    from trainables.launch import Launch

_OPEN = ("queued", "running", "interrupted")  # statuses of a search in whose record no end is written


class Wattune:
    """Runs searches and answers about them.

    >>> from service import Wattune
    >>> wattune = Wattune()
    >>> best = wattune.best("a-search", minimize="joules_per_token", where=["peak_memory_gib<=70"])  # doctest: +SKIP
    >>> best.candidate.layout.tensor_parallel_size, best.notices  # doctest: +SKIP

    `tracking_uri` is the MLflow store (default: `MLFLOW_TRACKING_URI`, else the embedded one under `WATTUNE_HOME`).
    `address` is the Ray cluster's job server, such as ``http://head:8265``; only `submit`, `logs` and `stop` need it.
    A spec is a file's path or a `Problem`, see `service.load_spec`. A search is named by its id or by a unique
    beginning of it. Every method raises `service.InputError`, with one line, for what the caller has to change, of
    which `service.NoAnswerError` says that nothing matches; those that run a search raise `service.SearchError` if it
    cannot begin or go on. The methods that read need neither Ray nor a GPU.
    """

    def __init__(self, tracking_uri: str | None = None, address: str | None = None) -> None:
        self.tracking_uri = home.tracking_uri(tracking_uri)
        self.address = address

    def plan(self, spec: Problem | str | Path) -> Plan:
        """What a search would try, what each rule refuses, and what is predicted of it. Starts nothing."""
        problem = _loaded(spec)
        from service.checks import data_from_afar, notices
        from service.fitting import load
        from service.plan import make_plan

        calibration = load(home.Home.locate(), problem.cluster)
        return make_plan(problem, calibration, [*data_from_afar(problem), *notices(problem)])

    def run(
        self,
        spec: Problem | str | Path,
        search_id: str | None = None,
        allow_trainer: bool = False,
        allow_power_limits: bool = False,
    ) -> str:
        """Run a search here, on the Ray cluster of `RAY_ADDRESS` or on this machine, to its end. Returns its id.

        `search_id` is the id to give it, by default a new one. `allow_trainer`: whether the cluster of `RAY_ADDRESS` is
        to run a trainer that is none of its ready ones, `allow_power_limits` whether those of GPUs may be set, if the
        spec's space says so; the same in `resume` and `submit`.
        """
        problem = _loaded(spec)
        from service.checks import check_machine

        check_machine(problem.least)
        from service.search import run

        return run(problem, self.tracking_uri, search_id, allow_trainer, allow_power_limits)

    def calibrate(self, spec: Problem | str | Path) -> Calibrated:
        """Fit the cost model to the machines here, by trials of some of the spec's layouts, and time operators and
        collectives.

        See `service.calibrate`.
        """
        problem = _loaded(spec)
        from service.calibrate import calibrate

        return calibrate(problem, self.tracking_uri)

    def doctor(self, address: str | None = None) -> Examination:
        """Whether machines are fit for searches: those of the Ray cluster at `address` or `RAY_ADDRESS`, else this one.

        GPUs that others hold are left alone. What the others attained is kept in the state directory; see
        `service.doctor`.
        """
        from service.doctor.examination import examine

        return examine(address, self.tracking_uri)

    def resume(self, search: str, allow_trainer: bool = False, allow_power_limits: bool = False) -> str:
        """Go on with a search that was interrupted. Returns its id.

        Here, to its end, see `service.search.resume`; with an `address`, as a job of the cluster that it ran on.
        """
        _check_name(search)
        if self.address:
            from service import jobs

            return jobs.resubmit(search, self.address, self.tracking_uri, allow_trainer, allow_power_limits)
        from service.search import resume

        return resume(search, self.tracking_uri, allow_trainer, allow_power_limits)

    def submit(self, spec: Problem | str | Path, allow_trainer: bool = False, allow_power_limits: bool = False) -> str:
        """Hand a search to the Ray cluster at `address`, where it goes on without this process. Returns its id."""
        problem, address = _loaded(spec), self._cluster
        from service.jobs import submit

        return submit(problem, address, self.tracking_uri, allow_trainer, allow_power_limits)

    def logs(self, search: str) -> Iterator[str]:
        """The lines, each with its line end, that a submitted search printed, as they come, until it ends."""
        _check_name(search)
        address = self._cluster
        from service.jobs import logs

        return logs(search, address)

    def stop(self, search: str) -> None:
        """Ask a submitted search to end; what it has recorded stays."""
        _check_name(search)
        address = self._cluster
        from service.jobs import stop

        stop(search, address)

    def searches(self) -> list[SearchInfo]:
        """All searches, the latest first; with an `address`, those submitted there. Statuses are those of `status`."""
        recorded = {record.id: _described(record) for record in self._results.searches()}
        if not self.address:
            return list(recorded.values())
        from service import jobs

        known = jobs.submissions(self.address)
        return [_joined(recorded.get(one.search_id), one, self.tracking_uri) for one in known]

    def old_searches(self, days: float = 30.0, resumable: bool = False) -> list[SearchInfo]:
        """The searches that began more than `days` ago and are over; with `resumable` those too that could go on."""
        from service.gc import old

        return old(self.searches(), days, resumable)

    def remove(self, search: str) -> str | None:
        """Remove the record of a search that is over, for good, with all that this machine keeps of it.

        Returns what is left to be done elsewhere, in a line; see `service.gc.remove`.
        """
        from service.gc import remove
        from service.record.store import GOING_ON

        info = self.status(search)
        if info.status in GOING_ON:
            raise InputError(f"search {info.id} is {info.status}: it is not removed")

        return remove(info.id, self.tracking_uri, home.Home.locate())

    def status(self, search: str) -> SearchInfo:
        """Where a search stands.

        Of a search that never got to say that it ended: `interrupted` if its driver is dead; with an `address`, what
        became of its job, also of one that has no record yet.
        """
        try:
            info = _described(self._record(search))
        except InputError as unrecorded:
            if not self.address:
                raise
            from service import jobs

            try:
                return _joined(None, jobs.submission(search, self.address), self.tracking_uri)
            except InputError as unknown:
                raise InputError(f"{unrecorded}; {unknown}") from None
        if self.address and info.status in _OPEN:
            from service import jobs

            with contextlib.suppress(InputError):  # a search that was started by hand is no job of the cluster
                return _joined(info, jobs.submission(info.id, self.address), self.tracking_uri)
        return info

    def cancel(self, search: str, trial: str) -> TrialRecord:
        """End one trial of a search that goes on, which it records as `cancelled`; see `service.record.remarks`.

        The driver sees to that within some 15 s.
        """
        from service.record.remarks import cancel
        from service.record.store import GOING_ON

        record = self._record(search)
        if (status := _described(record).status) not in GOING_ON:
            raise InputError(f"search {record.id} is {status}: no trial of it is under way")
        return cancel(self.tracking_uri, record, trial)

    def tag(self, search: str, tags: Mapping[str, str]) -> SearchInfo:
        """Give a search tags, and take those away whose value is empty. Returns it as it is then."""
        from service.record.remarks import tag

        tag(self.tracking_uri, self._record(search), tags)
        return self.status(search)

    def note(self, search: str, text: str) -> SearchInfo:
        """Note something on a search, in place of what was noted before. Returns it as it is then."""
        from service.record.remarks import note

        note(self.tracking_uri, self._record(search), text)
        return self.status(search)

    def trials(self, search: str) -> list[TrialRecord]:
        """Every trial of a search, in the order of their start, failed ones included."""
        return list(self._record(search).trials)

    def failures(self, search: str) -> list[TrialRecord]:
        """The trials of a search that came to no result, each with its status and cause."""
        return [trial for trial in self.trials(search) if trial.status not in ("ok", "running", "pruned")]

    def pareto(self, search: str) -> Front:
        """The layouts that no other beats on all objectives at once; see `service.answers.ranking.pareto`."""
        from service.answers.front import front

        return front(self._record(search))

    def best(
        self,
        search: str,
        maximize: str | None = None,
        minimize: str | None = None,
        where: Sequence[str] = (),
        within: Sequence[str] = (),
        knee: bool = False,
    ) -> Choice:
        """The best layout on one metric under conditions, ``peak_gpu_temp_c<=80`` or ``tokens_per_s 2%`` off its best.

        One condition may be a text alone. See `service.answers.ranking.best`.
        """
        from service.answers.front import choose
        from service.answers.query import parse_query

        query = parse_query(maximize, minimize, where, within, knee)
        return choose(self._record(search), query)

    def export(self, search: str, candidate: Candidate) -> dict[str, Any]:
        """All that is needed to launch a layout of a search's front and to judge it, JSON-safe."""
        from service.answers.export import export

        return export(self._record(search), candidate)

    def formatted(self, search: str, candidate: Candidate, format: str) -> Formatted:
        """A layout of a search as a framework takes it, such as ``megatron-lm``; see `service.answers.exports`."""
        from service.answers import exports
        from service.answers.commands import CommandLaunch, script

        export, record = exports.named(format), self._record(search)
        launch = self._launch(record, candidate)
        if isinstance(launch, CommandLaunch):
            launch.check(format)
            return exports.Formatted(script(launch, _title(record)), launch.not_expressible)
        return exports.Formatted(export.text(launch), export.not_expressible(launch))

    def write_folder(self, search: str, candidate: Candidate, target: str, out: str | Path) -> Written:
        """Make the folder `out`, which starts a run of a layout of a search; see `service.answers.start`.

        `target` is a format that has a program, such as ``megatron-lm``, or ``slurm``.
        """
        from service.answers import start

        record = self._record(search)
        written = start.folder(target, self._launch(record, candidate), _title(record))
        start.write(written.files, Path(out))
        return written

    def report(self, search: str) -> Report:
        """How a search got to its answers, what mattered, what failed and whether its machine drifted."""
        from service.answers.report import report
        from service.spec import parse_spec

        record = self._record(search)
        try:
            return report(record, parse_spec(self._results.spec_of(record)))
        except InputError as error:
            partial = report(record)
            return replace(partial, notices=(*partial.notices, f"what the rules refused is not known: {error}"))

    def search(self, search: str) -> Search:
        """A search for a notebook: its trials as a frame, its front, its figures; see `service.answers.page.view`."""
        from service.answers.page.view import Search

        record = self._record(search)
        return Search(record, lambda: self._gathered(record))

    def page(self, search: str) -> str:
        """The report as one HTML page, figures included, which loads nothing; see `service.answers.page`.

        Raises `InputError` where the package that draws is not installed, which it names.
        """
        from service.answers.page import draw
        from service.answers.page.document import html

        draw.check()
        return html(self._gathered(self._record(search)))

    def figures(self, search: str, folder: str | Path) -> list[Path]:
        """Write every figure of the page into a folder, as PNG and as SVG. Returns the files. Raises as `page` does."""
        from service.answers.page import draw
        from service.answers.page.document import write_figures
        from service.answers.page.sections import SECTIONS

        draw.check()
        return write_figures(SECTIONS, self._gathered(self._record(search)), Path(folder))

    def why(self, target: Problem | str | Path, choices: Mapping[str, Any]) -> Explanation:
        """What became of the layouts with some values, such as ``{"zero_stage": 3}``, and for what reason.

        `target` is a search or, to ask what is legal alone, a spec. See `service.answers.why.why`.
        """
        from service.answers.why import why
        from service.spec import parse_spec

        if not isinstance(target, str) or os.path.isfile(target):
            return why(_loaded(target), choices)
        record = self._record(target)
        return why(parse_spec(self._results.spec_of(record)), choices, record)

    def whatif(self, search: str, slow_gpu: str | None = None, link: str | None = None) -> WhatIf:
        """What machines unlike those measured make of the layouts that a search explored by slices.

        `slow_gpu`: by how much one GPU of each layout is slower, ``5%``; `link`: by how much the bandwidth of all links
        is other, ``-20%``. See `service.answers.whatif`.
        """
        from service.answers.whatif import parse_change, whatif
        from service.spec import parse_spec

        change, record = parse_change(slow_gpu, link), self._record(search)
        return whatif(record, parse_spec(self._results.spec_of(record)), change, self._results.result_of)

    def compare(
        self,
        searches: Sequence[str],
        price_per_gpu_hour: Sequence[float] = (),
        price_per_kwh: Sequence[float] = (),
        co2_per_kwh: Sequence[float] = (),
    ) -> Compared:
        """Searches held against the first of them; see `service.answers.compare`.

        Each is one of this record, or a file of what ``wattune trials SEARCH --json`` printed. Rates are in $ and in
        kg of CO2, given once for all searches or once for each in their order. Searches go by their names where these
        differ, else by their ids.
        """
        from service.answers.compare.comparing import compare
        from service.answers.compare.figures import rates
        from service.answers.compare.sides import Side

        of_each = rates(price_per_gpu_hour, price_per_kwh, co2_per_kwh, len(searches))
        records = [self._record_or_file(search) for search in searches]
        names = [record.name for record in records]
        if len(set(names)) < len(names):
            names = [record.id for record in records]
        return compare([Side(*one) for one in zip(names, records, of_each, strict=True)])

    @staticmethod
    def comparison_page(compared: Compared) -> str:
        """A comparison as one HTML page, as `page` is of a search. Raises as that does."""
        from service.answers.page import draw
        from service.answers.page.comparison import html

        draw.check()
        return html(compared)

    @staticmethod
    def comparison_figures(compared: Compared, folder: str | Path) -> list[Path]:
        """Write every figure of that page into a folder, as `figures` does of a search."""
        from service.answers.page import draw
        from service.answers.page.comparison import SECTIONS
        from service.answers.page.document import write_figures

        draw.check()
        return write_figures(SECTIONS, compared, Path(folder))

    def top(self, address: str | None = None) -> Generator[list[NodeState], None, None]:
        """What each node of a cluster is at, every second until the cluster is gone; empty while no search runs.

        `address` is that of the Ray cluster, such as ``head:6379``; default: `RAY_ADDRESS`, else the Ray of this
        machine. Raises `InputError` if no cluster answers there, or no search runs in the beginning.
        """
        from service.top import watch

        return watch(address)

    def watch(self, search: str) -> Generator[Event, None, None]:
        """What happened in a search, and goes on to happen, as it happens, until it has ended; see
        `service.watch.search`."""
        from service.watch.search import events

        search_id = self._record(search).id

        def read() -> tuple[SearchRecord, str]:
            record = self._results.search(search_id)
            return record, _described(record).status

        return events(search_id, read)

    def watch_run(
        self, search: str | None = None, layout: Mapping[str, Any] | None = None, listen: str | None = None
    ) -> Generator[Event, None, None]:
        """What is found of a run that trains beside this process, as it goes on, until the caller closes it.

        Its ranks tell `listen`, HOST:PORT, of their steps if they have that as `WATTUNE_RUN`; GPUs of this machine are
        seen by themselves. With a `search`, or a file as `compare` takes it, the run is held against that one's best
        layout, or the best with the values of axes in `layout`. See `service.watch.run`.
        """
        from service.watch.against import Against
        from service.watch.run import watching
        from service.watch.stamps import DEFAULT

        against = None if search is None else Against.of(self._record_or_file(search), layout or {})
        return watching(listen or DEFAULT, against)

    @staticmethod
    def post(event: Event, webhook: str) -> str | None:
        """Send an event to a webhook, as JSON. Returns what went wrong, in a line."""
        from service.watch.event import post

        return post(event, webhook)

    def pages(self, port: int = 5000, search: str | None = None) -> Pages:
        """Start MLflow's web pages on the record, for this machine alone. To be ended by their `close`.

        `search` is the one that they show first: its trials, sorted by the first objective, and charts of them.
        """
        from service.record.pages import serve

        shown = None if search is None else self._record(search).id
        return serve(self.tracking_uri, home.Home.locate(), port, shown)

    def pages_url(self, search: str) -> str | None:
        """Where a tracking server shows a search itself; None of a database, which has no pages but `pages`."""
        from service.record import store, view
        from service.record.runs import Runs

        experiment = Runs(self.tracking_uri).experiment() if store.is_server(self.tracking_uri) else None
        return None if experiment is None else view.link(self.shown_uri, experiment, search)

    @staticmethod
    def trainers() -> list[ReadyTrainer]:
        """The trainers that a spec can name here; see `service.trainers`."""
        from service.trainers import ready_trainers

        return ready_trainers()

    @staticmethod
    def check_trainer(trainer: str | Path, allow_trainer: bool = False) -> TrainerCheck:
        """A few steps of a trainer, by its name, its file or a spec's file; see `service.trainer_check`."""
        from service.trainer_check import check_trainer

        return check_trainer(str(trainer), allow_trainer)

    @staticmethod
    def prepare_data(text: Sequence[str | Path], out: str | Path) -> PreparedData:
        """Make training tokens, one a byte, of text files and folders; see `trainables.data.prepare`.

        `out` is the prefix of the .bin and .idx to write.
        """
        from trainables.data import DataError, prepare

        try:
            return prepare([Path(source) for source in text], Path(out))
        except DataError as error:
            raise InputError(str(error)) from None

    @property
    def shown_uri(self) -> str:
        """The tracking URI for people to read: without the user and password that it may hold."""
        from service.record.store import shown

        return shown(self.tracking_uri)

    @cached_property
    def _results(self) -> Results:
        from service.record.results import Results

        return Results(self.tracking_uri)

    def _record(self, search: str) -> SearchRecord:
        _check_name(search)
        return self._results.search(search)

    def _record_or_file(self, target: str) -> SearchRecord:
        if isinstance(target, str) and os.path.isfile(target):
            from service.record.exported import read

            return read(Path(target))
        return self._record(target)

    def _launch(self, record: SearchRecord, candidate: Candidate) -> Launch | CommandLaunch:
        from search_spaces.expressions import ExpressionError
        from service.answers.commands import CommandLaunch
        from service.spec import parse_spec
        from service.trials.command import command_of
        from trainables.data import located
        from trainables.launch import Launch
        from trainables.training import Training

        problem = parse_spec(self._results.spec_of(record))
        if problem.trainer is not None:
            try:
                command = command_of(candidate.layout, problem.trainer, problem)
            except ExpressionError as error:
                raise InputError(f"search {record.id}: trainer: {error}") from None
            return CommandLaunch(candidate.layout, command, problem.cluster.gpus_per_node)
        assert problem.data is not None, "only a trainer does without"
        training = Training(problem.workload.shape, located(problem.data), problem.sequence_length, problem.seed)
        return Launch(candidate.layout, training, problem.cluster.accelerator, problem.cluster.gpus_per_node)

    def _gathered(self, record: SearchRecord) -> Evidence:
        from service.answers.page.evidence import gather
        from service.fitting import load
        from service.spec import parse_spec

        try:
            problem = parse_spec(self._results.spec_of(record))
        except InputError:
            return gather(self._results, record, None, None)
        return gather(self._results, record, problem, load(home.Home.locate(), problem.cluster))

    @property
    def _cluster(self) -> str:
        if not self.address:
            raise InputError("address: give the Ray cluster's job server, such as http://head:8265")
        return self.address


def _described(record: SearchRecord) -> SearchInfo:
    """The search as a line of a listing: `interrupted` where the record says that it goes on and its driver is dead."""
    from service.answers.overview import describe
    from service.record.heartbeat import silent
    from service.record.store import GOING_ON

    info = describe(record)
    dead = record.status in GOING_ON and silent(record.heartbeat, home.Home.locate().driven(record.id))
    return replace(info, status="interrupted", standing=None) if dead else info


def _joined(info: SearchInfo | None, submission: Submission, tracking_uri: str) -> SearchInfo:
    """What a record, if there is one, and the cluster say of a search: where no end is recorded, its job decides."""
    from service.answers.overview import unrecorded
    from service.record.store import shown

    if info is None:
        cause = submission.cause or f"it has no record at {shown(tracking_uri)}"
        return unrecorded(submission.search_id, submission.status, submission.started, cause)
    alive = submission.status == "running" and info.status == "interrupted"  # clocks may differ, a store be away
    over = submission.status in ("failed", "stopped") and info.status in _OPEN
    return replace(info, status=submission.status, cause=submission.cause, standing=None) if alive or over else info


def _check_name(search: str) -> None:
    if not isinstance(search, str):
        raise InputError(f"search: give its id, which is text, not {search!r}")


def _title(record: SearchRecord) -> str:
    return f"search {record.id} ({record.name})"


def _loaded(spec: Problem | str | Path) -> Problem:
    """The problem of a spec, well-formed and to be meant as it is."""
    from service.checks import check
    from service.problem import Problem
    from service.spec import load_spec

    if isinstance(spec, str | Path):
        return check(load_spec(spec), str(spec))
    if not isinstance(spec, Problem):
        raise InputError(
            f"spec: give a file's path or what load_spec or parse_spec return, not a {type(spec).__name__}"
        )
    return check(spec, "spec")
