"""The Python client: the same questions and requests as the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service import home
from service.answers import overview, ranking
from service.answers.candidates import Candidate
from service.answers.overview import SearchInfo
from service.errors import InputError
from service.record.results import Results, TrialRecord

if TYPE_CHECKING:
    from service.answers.report import Report
    from service.answers.why import Explanation
    from service.calibrate import Calibrated
    from service.spec import SearchSpec


class Wattune:
    """Runs searches and answers about them.

    >>> from service import Wattune
    >>> wattune = Wattune()
    >>> wattune.best("a-search", minimize="joules_per_token", where=["peak_memory_gib<=70"]).config  # doctest: +SKIP

    `tracking_uri` is the MLflow store (default: `MLFLOW_TRACKING_URI`, else the embedded one under `WATTUNE_HOME`).
    `address` is the Ray cluster's job server, such as ``http://head:8265``; only `submit`, `logs` and `stop` need it.
    A search is named by its id or by a unique beginning of it. Every method raises `service.InputError`, with one line,
    for what the caller has to change. The methods that read need neither Ray nor a GPU.
    """

    def __init__(self, tracking_uri: str | None = None, address: str | None = None) -> None:
        self.tracking_uri = home.tracking_uri(tracking_uri)
        self.address = address

    @cached_property
    def _results(self) -> Results:
        return Results(self.tracking_uri)

    def searches(self) -> list[SearchInfo]:
        """All searches, the latest first. Their status is that of `status`."""
        return [_noticed(overview.describe(record)) for record in self._results.searches()]

    def status(self, search: str) -> SearchInfo:
        """Where a search stands.

        Of a search that never got to say that it ended: `interrupted` if it ran from this state directory; with an
        `address`, what became of its job.
        """
        info = _noticed(overview.describe(self._results.search(search)))
        if self.address and info.status == "running":
            from service import jobs

            with contextlib.suppress(InputError):  # a search that was started by hand is no job of the cluster
                job = jobs.job_status(info.id, self.address).lower()
                if job in ("failed", "stopped"):
                    return replace(info, status=job)
        return info

    def trials(self, search: str) -> list[TrialRecord]:
        """Every trial of a search, in the order of their start, failed ones included."""
        return list(self._results.search(search).trials)

    def pareto(self, search: str) -> list[Candidate]:
        """The layouts that no other beats on all objectives at once; see `service.answers.ranking.pareto`."""
        return ranking.pareto(self._results.search(search))

    def best(
        self,
        search: str,
        maximize: str | None = None,
        minimize: str | None = None,
        where: Sequence[str] = (),
        within: Sequence[str] = (),
        knee: bool = False,
    ) -> Candidate:
        """The best layout on one metric under conditions, ``peak_gpu_temp_c<=80`` or ``tokens_per_s 2%`` off its best.

        See `service.answers.ranking.best`.
        """
        return ranking.best(self._results.search(search), maximize, minimize, where, within, knee)

    def report(self, search: str) -> Report:
        """How a search got to its answers, what mattered, what failed and whether its machine drifted."""
        from service.answers.report import report
        from service.spec import parse_spec

        record = self._results.search(search)
        try:
            return report(record, parse_spec(self._results.spec_of(record)).legal)
        except InputError as error:
            told = report(record)
            return replace(told, notices=(*told.notices, f"what the rules refused is not known: {error}"))

    def why(self, target: SearchSpec | str | Path, choices: Mapping[str, Any]) -> Explanation:
        """What became of the layouts with some values, such as ``{"zero_stage": 3}``, and for what reason.

        `target` is a search or, to ask what is legal alone, a spec or its file. See `service.answers.why.why`.
        """
        from service.answers.why import why
        from service.spec import SearchSpec, load_spec, parse_spec

        if isinstance(target, SearchSpec):
            return why(target, choices)
        if Path(target).is_file():
            return why(load_spec(target), choices)
        record = self._results.search(str(target))
        return why(parse_spec(self._results.spec_of(record)), choices, record)

    def calibrate(self, spec: SearchSpec | str | Path) -> Calibrated:
        """Fit the cost model to the machines here, by trials of some of the spec's layouts; see `service.calibrate`."""
        loaded = _loaded(spec)
        from service.calibrate import calibrate

        return calibrate(loaded, self.tracking_uri)

    def run(self, spec: SearchSpec | str | Path) -> str:
        """Run a search here, to its end. Returns its id."""
        loaded = _loaded(spec)
        from service.search import run

        return run(loaded, tracking_uri=self.tracking_uri)

    def resume(self, search: str) -> str:
        """Go on with a search that was interrupted. Returns its id.

        Here, to its end, see `service.search.resume`; with an `address`, as a job of the cluster that it ran on.
        """
        if self.address:
            from service import jobs

            return jobs.resume(search, self.address, self.tracking_uri)
        from service.search import resume

        return resume(search, self.tracking_uri)

    def submit(self, spec: SearchSpec | str | Path) -> str:
        """Hand a search to the Ray cluster at `address`, where it goes on without this process. Returns its id."""
        loaded, address = _loaded(spec), self._cluster
        from service.jobs import submit

        return submit(loaded, address, self.tracking_uri)

    def logs(self, search: str) -> Iterator[str]:
        """The lines that a submitted search printed, as they come, until it ends."""
        address = self._cluster
        from service.jobs import logs

        return logs(search, address)

    def stop(self, search: str) -> None:
        """Ask a submitted search to end; what it has recorded stays."""
        address = self._cluster
        from service.jobs import stop

        stop(search, address)

    @property
    def _cluster(self) -> str:
        if not self.address:
            raise InputError("address: give the Ray cluster's job server, such as http://head:8265")
        return self.address


def _noticed(info: SearchInfo) -> SearchInfo:
    """The same, but `interrupted` where the record says that it runs and its driver, of this machine, is dead."""
    dead = info.status == "running" and home.Home.locate().interrupted(info.id)
    return replace(info, status="interrupted") if dead else info


def _loaded(spec: SearchSpec | str | Path) -> SearchSpec:
    from service.spec import load_spec

    return load_spec(spec) if isinstance(spec, str | Path) else spec
