"""The `wattune` command. Bad input is one line on standard error and exit code 2; a search with no result is 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import click
import yaml

from service.answers.candidates import Candidate
from service.answers.export import export
from service.answers.overview import SearchInfo, notices
from service.answers.ranking import answer, best, pareto
from service.answers.tables import breakdown_table, candidates_table, searches_table
from service.client import Wattune
from service.errors import InputError, SearchError
from service.home import Home
from service.home import tracking_uri as store_uri
from service.metrics import with_unit
from service.record import store
from service.record.results import Results, SearchRecord
from service.result import Purpose
from service.spec import load_spec

TRACKING = click.option(
    "--tracking-uri", metavar="URI", help="MLflow store; default: MLFLOW_TRACKING_URI, else the one in WATTUNE_HOME."
)
ADDRESS = click.option(
    "--address",
    metavar="URL",
    envvar="RAY_API_SERVER_ADDRESS",
    required=True,
    help="Ray's job server, such as http://head:8265.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def refusing_bad_input(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an `InputError` of `command` into one line and exit code 2, a `SearchError` into one and 1."""

    @wraps(command)
    def guarded(**arguments: Any) -> None:
        try:
            command(**arguments)
        except InputError as error:
            click.echo(f"wattune: {error}", err=True)
            sys.exit(2)
        except SearchError as error:
            click.echo(f"wattune: {error}", err=True)
            sys.exit(1)

    return guarded


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattune")
def main() -> None:
    """Find how to split LLM training over a cluster for speed, energy and heat at once, by training short trials."""


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Show every legal layout.")
@JSON
@refusing_bad_input
def plan(spec: Path, every: bool, as_json: bool) -> None:
    """Print the legal layouts of SPEC, what each rule refuses, and what is predicted of them. Starts nothing."""
    from service.fitting import load as load_calibration
    from service.plan import make_plan, text

    loaded = load_spec(spec)
    found = make_plan(loaded, load_calibration(Home.locate(), loaded.cluster.accelerator))
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else text(found, every))


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@TRACKING
@click.option("--search-id", hidden=True, help="Id of the search, when a job was submitted under it.")
@refusing_bad_input
def run(spec: Path, tracking_uri: str | None, search_id: str | None) -> None:
    """Run a search here, on the Ray cluster of RAY_ADDRESS or on this machine alone."""
    loaded = load_spec(spec)
    from service.search import run as run_search

    uri = store_uri(tracking_uri)
    _print_outcome(run_search(loaded, uri, search_id), uri)


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@TRACKING
@refusing_bad_input
def calibrate(spec: Path, tracking_uri: str | None) -> None:
    """Fit the cost model to the machines here, by short trials of some of SPEC's layouts."""
    done = Wattune(tracking_uri).calibrate(spec)
    for name, before, after in (
        ("step time", done.before.step_time, done.after.step_time),
        ("power", done.before.power, done.after.power),
    ):
        if before is not None and after is not None:
            click.echo(f"{name}: mean error {before:.1%} by the data sheet, {after:.1%} calibrated, on these trials")
    click.echo(f"{done.trials} trials of search {done.search_id}; calibration in {done.path}")


@main.command()
@click.argument("search")
@click.option("--address", metavar="URL", help="Ray's job server, for a search that was submitted to it.")
@TRACKING
@refusing_bad_input
def resume(search: str, address: str | None, tracking_uri: str | None) -> None:
    """Go on with a search that was interrupted, from the WATTUNE_HOME and on the Ray cluster that it had."""
    uri = store_uri(tracking_uri)
    found = Wattune(uri, address).resume(search)
    if address:
        click.echo(found)
    else:
        _print_outcome(found, uri)


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@ADDRESS
@TRACKING
@JSON
@refusing_bad_input
def submit(spec: Path, address: str, tracking_uri: str | None, as_json: bool) -> None:
    """Hand a search to a Ray cluster, where it goes on without this terminal."""
    search = Wattune(tracking_uri, address).submit(spec)
    click.echo(json.dumps({"search_id": search}) if as_json else search)


@main.command()
@click.argument("search")
@click.option("--address", metavar="URL", envvar="RAY_API_SERVER_ADDRESS", help="Ray's job server, for its own view.")
@TRACKING
@JSON
@refusing_bad_input
def status(search: str, address: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """How a search stands: its trials, the failed ones with their causes, and the best so far."""
    client = Wattune(tracking_uri, address)
    info = client.status(search)
    failures = [t for t in client.trials(info.id) if t.status not in ("ok", "running", "pruned")]
    if as_json:
        told = _info(info) | {"failures": [trial.to_dict() for trial in failures]}
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(searches_table([info]))
    for trial in failures:
        click.echo(f"{trial.status}: {trial.label}: {trial.cause}")


@main.command()
@click.argument("search")
@ADDRESS
@refusing_bad_input
def logs(search: str, address: str) -> None:
    """Follow what a submitted search prints."""
    for line in Wattune(address=address).logs(search):
        click.echo(line, nl=False)


@main.command()
@click.argument("search")
@ADDRESS
@refusing_bad_input
def stop(search: str, address: str) -> None:
    """End a submitted search. What it has recorded stays."""
    Wattune(address=address).stop(search)


@main.command()
@click.option(
    "--address", metavar="ADDR", help="Ray cluster, such as head:6379; default: RAY_ADDRESS, else this machine's Ray."
)
@click.option("--once", is_flag=True, help="Print once, as where the output is no terminal.")
@refusing_bad_input
def top(address: str | None, once: bool) -> None:
    """Show every GPU of a cluster while searches run: power, heat, clocks, what throttles it, its trial."""
    from service.jobs import cluster_token

    if cluster_token():  # a cluster that asks for one; Ray looks at this when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from service.top import top as show

    show(address, once)


@main.command("list")
@TRACKING
@JSON
@refusing_bad_input
def list_searches(tracking_uri: str | None, as_json: bool) -> None:
    """All recorded searches, the latest first."""
    searches = Wattune(tracking_uri).searches()
    if as_json:
        click.echo(json.dumps([_info(info) for info in searches], indent=2))
    elif searches:
        click.echo(searches_table(searches))
    else:
        click.echo(f"no searches at {store_uri(tracking_uri)}")


@main.command("pareto")
@click.argument("search")
@TRACKING
@JSON
@refusing_bad_input
def pareto_command(search: str, tracking_uri: str | None, as_json: bool) -> None:
    """The configurations that no other beats on all objectives at once."""
    record = Results(store_uri(tracking_uri)).search(search)
    if as_json:
        front = [export(record, candidate) for candidate in pareto(record)]
        click.echo(json.dumps({"search_id": record.id, "pareto": front, "notices": notices(record)}, indent=2))
    else:
        _print_front(record)


@main.command("best")
@click.argument("search")
@click.option("--maximize", metavar="METRIC", help="Metric to rank by; default: the first objective of the search.")
@click.option("--minimize", metavar="METRIC", help="As --maximize, the other way.")
@click.option("--where", multiple=True, metavar="'METRIC<=X'", help="Condition; may be given several times.")
@click.option(
    "--within", multiple=True, metavar="'METRIC X%'", help="No more than X% off the best; may be given several times."
)
@click.option("--knee", is_flag=True, help="The point at which the Pareto front bends most.")
@click.option("--format", "style", type=click.Choice(["json", "yaml", "table"]), default="yaml", show_default=True)
@TRACKING
@refusing_bad_input
def best_command(
    search: str,
    maximize: str | None,
    minimize: str | None,
    where: tuple[str, ...],
    within: tuple[str, ...],
    knee: bool,
    style: str,
    tracking_uri: str | None,
) -> None:
    """The best configuration, for the program that launches the real run.

    Least energy within 2% of the best speed: --minimize joules_per_token --within 'tokens_per_s 2%'
    """
    record = Results(store_uri(tracking_uri)).search(search)
    chosen, told = answer(record, maximize, minimize, where, within, knee)
    if style == "table":
        _print_candidates(record, [chosen])
    elif style == "json":
        click.echo(json.dumps(export(record, chosen), indent=2))
    else:
        click.echo(yaml.safe_dump(export(record, chosen), sort_keys=False), nl=False)
    for notice in dict.fromkeys([*notices(record, maximize or minimize), *told]):
        click.echo(f"note: {notice}", err=True)


@main.command()
@click.argument("search")
@TRACKING
@JSON
@refusing_bad_input
def report(search: str, tracking_uri: str | None, as_json: bool) -> None:
    """How a search got there: hypervolume by GPU hours, what mattered, drift, what failed or was refused."""
    from service.answers.report import text

    told = Wattune(tracking_uri).report(search)
    click.echo(json.dumps(told.to_dict(), indent=2) if as_json else text(told))


@main.command()
@click.argument("target", metavar="SEARCH|SPEC")
@click.argument("choices", nargs=-1, metavar="[AXIS=VALUE]...")
@TRACKING
@click.option("--all", "every", is_flag=True, help="Name every layout that was not tried.")
@JSON
@refusing_bad_input
def why(target: str, choices: tuple[str, ...], tracking_uri: str | None, every: bool, as_json: bool) -> None:
    """What became of the layouts with these values, and why: beaten, failed, refused, not tried.

    For example: wattune why SEARCH tensor_parallel_size=4 zero_stage=3
    """
    from service.answers.why import parse_choices, text

    told = Wattune(tracking_uri).why(target, parse_choices(choices))
    click.echo(json.dumps(told.to_dict(), indent=2) if as_json else text(told, every))


@main.command()
@click.argument("text", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Prefix of the .bin and .idx to write.")
@refusing_bad_input
def data(text: tuple[Path, ...], out: Path) -> None:
    """Prepare training tokens (one a byte, 257 in all) from text files and folders."""
    from trainables.data import DataError, prepare

    try:
        made = prepare(text, out)
    except DataError as error:
        raise InputError(str(error)) from None
    skipped = f", {made.skipped_files} files skipped" if made.skipped_files else ""
    click.echo(f"{made.tokens:,} tokens of {made.documents:,} documents in {made.prefix}.bin and .idx{skipped}")


@main.command()
@click.option("--port", default=5000, show_default=True, help="Port on this machine's loopback address.")
@TRACKING
@refusing_bad_input
def ui(port: int, tracking_uri: str | None) -> None:
    """Open MLflow's web pages on the record, for this machine alone."""
    uri = store_uri(tracking_uri)
    if uri.startswith(("http://", "https://")):
        raise InputError(f"{uri} serves its own pages; open it in a browser")
    if not Wattune(uri).searches():
        raise InputError(f"nothing is recorded at {uri} yet")
    found = store.open_client(uri).get_experiment_by_name(store.EXPERIMENT)
    assert found is not None
    experiment = found.experiment_id
    page = f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs?workflowType=machine_learning"
    click.echo(f"{page}    (Ctrl-C ends it)")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    command += ["--default-artifact-root", Home.locate().artifacts, "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    try:
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    except KeyboardInterrupt:
        sys.exit(0)


def _info(info: SearchInfo) -> dict[str, Any]:
    return asdict(info) | {"started": info.started.isoformat()}


def _print_outcome(found: str, uri: str) -> None:
    """What a search that has ended found; exit code 1 if it found nothing."""
    record = Results(uri).search(found)
    if not any(trial.status == "ok" for trial in record.trials):
        click.echo(f"search {found}: no trial came to a result; see `wattune status {found}`", err=True)
        sys.exit(1)
    _print_front(record)
    click.echo(f"\nThe record: search {found} at {uri}")
    click.echo(f"  wattune best {found}     the best configuration, to launch with")
    click.echo(f"  wattune report {found}   how it got there, and what to make of it")
    click.echo("  wattune ui    every trial, in the browser")


def _print_front(record: SearchRecord) -> None:
    front = pareto(record)
    trials = sum(trial.purpose == Purpose.SEARCH for trial in record.trials)
    click.echo(f"\nPareto front of {', '.join(record.objectives)}, of {trials} trials:\n")
    _print_candidates(record, front)
    if front:
        click.echo("\nBest on each objective:")
        for metric, direction in record.objectives.items():
            if any(metric in one.metrics for one in front):
                one = best(record, maximize=metric) if direction == "maximize" else best(record, minimize=metric)
                figure = with_unit(metric, one.metrics[metric], one.methods.get(metric), one.intervals.get(metric))
                click.echo(f"  {figure}: {one.label}")
    for notice in notices(record):
        click.echo(f"note: {notice}")


def _print_candidates(record: SearchRecord, candidates: list[Candidate]) -> None:
    click.echo(candidates_table(record, candidates))
    if shares := breakdown_table(candidates):
        click.echo("\n" + shares)


if __name__ == "__main__":
    main()
