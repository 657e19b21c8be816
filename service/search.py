"""Searches on the Ray that is at hand: begin one, or go on with one that was interrupted."""

from __future__ import annotations

from search_spaces.coefficients import Coefficients
from service.answers.front import front, markdown
from service.answers.page import draw
from service.answers.page.document import html
from service.answers.page.evidence import gather
from service.answers.page.trial import picture
from service.checks import check_data, check_machine, check_power_limits
from service.cluster import check_cluster, ray_session
from service.driver import Driver, gang_sizes
from service.errors import InputError
from service.fitting import load as load_calibration
from service.fitting import network
from service.home import Home
from service.home import tracking_uri as store_uri
from service.problem import Problem
from service.queue.actor import Member
from service.queue.admission import admit
from service.queue.policy import read_policy
from service.record import store
from service.record.heartbeat import silent
from service.record.results import Results, SearchRecord
from service.record.store import GOING_ON
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from service.sampling.agenda import SearchAgenda, Spent, settled
from service.sampling.study import SearchStudy, study_exists
from service.sampling.warmup import open_study
from service.spec import new_search_id, parse_spec
from service.trainers import check_allowed
from service.trials.gang import room
from trainables.status import Status


def run(
    problem: Problem,
    tracking_uri: str | None = None,
    search_id: str | None = None,
    allow_trainer: bool = False,
    allow_power_limits: bool = False,
) -> str:
    """Run a search to its end, on the Ray cluster of `RAY_ADDRESS` or on this machine. Returns its id.

    `allow_trainer`: whether a cluster is to run a trainer that is none of its ready ones; `allow_power_limits`: whether
    those of GPUs may be set, if the space says so. Raises `InputError`, before anything starts, for what is not
    allowed, data that are not tokens, a cluster that is too small or a tracking store that does not answer.
    """
    check_allowed(problem.trainer, allow_trainer)
    check_power_limits(problem, allow_power_limits)
    check_data(problem, read_policy().data)
    problem = problem.located()
    home = Home.locate().create()
    store.check(store_uri(tracking_uri))
    store.check_database(home.optuna_database)
    search_id = search_id or new_search_id(problem)
    with home.driving(search_id), ray_session(problem.cluster):
        check_cluster(problem.least)
        queue = Member()
        problem = problem.on(at_hand := room(problem.cluster))
        tracker = _tracker(tracking_uri, home)
        calibration = load_calibration(home, problem.cluster)
        admission = admit(queue, store_uri(tracking_uri), problem.data)
        study = _study(problem, search_id, home, Results(store_uri(tracking_uri)), calibration)
        agenda = SearchAgenda(study, problem, workers=sum(gang_sizes(problem, at_hand)))
        Driver(problem, search_id, home, tracker, agenda, network(home, problem.cluster), admission).run()
        _keep_answers(tracker, search_id, problem, tracking_uri, calibration)
    return search_id


def resume(
    search: str, tracking_uri: str | None = None, allow_trainer: bool = False, allow_power_limits: bool = False
) -> str:
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
    tracker = _tracker(tracking_uri, home)
    with home.driving(record.id):
        record = recorded.search(record.id)
        if record.status == "finished":
            raise InputError(f"search {record.id} is finished: there is nothing to resume")
        beat = record.heartbeat
        if record.status in GOING_ON and beat is not None and not beat.here and not silent(beat, None):
            raise InputError(
                f"search {record.id} is running: its driver on {beat.host} was alive {beat.age_s:.0f} s ago"
            )
        problem = parse_spec(recorded.spec_of(record))
        check_allowed(problem.trainer, allow_trainer)
        check_power_limits(problem, allow_power_limits)
        check_data(problem, read_policy().data)
        check_machine(problem.least)
        with ray_session(problem.cluster):
            check_cluster(problem.least)
            admission = admit(Member(), store_uri(tracking_uri), problem.data)
            summary = tracker.resume_search(record, problem)
            results = results_of(recorded.search(record.id))
            calibration = load_calibration(home, problem.cluster)
            study = _study(problem, record.id, home, recorded, calibration)
            study.recall([result for result in settled(results) if result.purpose == Purpose.SEARCH])
            spent = Spent(summary.get("search_time_s", 0.0), 3600 * summary.get("gpu_hours", 0.0))
            workers = sum(gang_sizes(problem, room(problem.cluster)))
            agenda = SearchAgenda(study, problem, results, spent, workers)
            known = network(home, problem.cluster)
            Driver(problem, record.id, home, tracker, agenda, known, admission).run(begun=True)
            _keep_answers(tracker, record.id, problem, tracking_uri, calibration)
    return record.id


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
            straggler=trial.straggler,
            beside=trial.beside,
        )
        for trial in record.trials
        if trial.status in list(Status)
    ]


def _tracker(tracking_uri: str | None, home: Home) -> Tracker:
    """What keeps the record, and pictures of GPUs in it if what draws them is installed."""
    return Tracker(store_uri(tracking_uri), home, picture if draw.available() else None)


def _keep_answers(
    tracker: Tracker, search_id: str, problem: Problem, tracking_uri: str | None, calibration: Coefficients | None
) -> None:
    """Put what was found into the record: a description and, if what draws it is installed, the report as a page.

    Nothing that fails ends the search.
    """
    results = Results(store_uri(tracking_uri))

    def page() -> str:
        return html(gather(results, results.search(search_id), problem, calibration))

    told = tracker.notices
    tracker.attach_description(lambda: markdown(front(results.search(search_id))))
    if draw.available():
        tracker.attach_page(page)
    for notice in tracker.notices:
        if notice not in told:
            print(f"notice: {notice}", flush=True)


def _study(
    problem: Problem, search_id: str, home: Home, recorded: Results, calibration: Coefficients | None
) -> SearchStudy:
    """The search's study, with what is known of its machines and from the searches before it."""
    facts = problem.facts()
    alike = recorded.finished({name: facts[name] for name in ("parameters", "accelerator", "trainer") if name in facts})
    return open_study(problem, search_id, home.optuna_storage, calibration, alike)
