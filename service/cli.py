"""The `wattune` command. What it cannot do is one line on standard error, and an exit code by kind (`EXIT_CODES`)."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from service.answers.exports import names as formats
from service.client import Wattune
from service.errors import InputError, NoAnswerError, SearchError


def recorded(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For the shell: ids of searches, the latest first, or files where none begins so."""
    from service.answers.completion import search_ids

    with contextlib.suppress(InputError):
        if found := search_ids(context.params.get("tracking_uri"), incomplete):
            return [CompletionItem(one) for one in found]
    return [CompletionItem(incomplete, type="file")]


SEARCH = click.argument("search", shell_complete=recorded)
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
ALLOW_TRAINER = click.option(
    "--allow-trainer", is_flag=True, help="Let a Ray cluster run the spec's trainer, though none of its ready ones."
)
ALLOW_POWER_LIMITS = click.option(
    "--allow-power-limits",
    is_flag=True,
    help="Let the search set the power limits of GPUs that space.power_limit_w has.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


EXIT_CODES = """Exit codes: 0 an answer; 1 none, as nothing matches or no trial came to a result, or a fault that
`doctor` found; 2 wrong input, before anything starts; 3 a search that failed, for its driver or its cluster."""


def refusing_bad_input(command: Callable[..., None]) -> Callable[..., None]:
    """Turn an `InputError` or a `SearchError` of `command` into one line and its exit code."""

    @wraps(command)
    def guarded(**arguments: Any) -> None:
        try:
            command(**arguments)
        except (InputError, SearchError) as error:
            click.echo(f"wattune: {error}", err=True)
            sys.exit(error.exit_code)

    return guarded


class UsageLine(click.ClickException):
    """A wrong option or argument, in one line where click prints the usage as well."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        command = error.ctx.info_name if error.ctx and error.ctx.parent else None
        message = " ".join(error.format_message().split()).rstrip(".")
        line = f"{message[:1].lower()}{message[1:]}; see `{' '.join(filter(None, ['wattune', command, '--help']))}`"
        super().__init__(f"{command}: {line}" if command else line)

    def show(self, file: Any = None) -> None:
        click.echo(f"wattune: {self.message}", err=True)


class Commands(click.Group):
    """Commands of which a wrong usage is told in one line."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with _told_in_a_line():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with _told_in_a_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        raise UsageLine(error) from None


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(package_name="wattune")
@click.pass_context
def main(context: click.Context) -> None:
    """Find how to split LLM training over a cluster for speed, energy and heat at once, by training short trials."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Show every legal layout.")
@JSON
@refusing_bad_input
def plan(spec: Path, every: bool, as_json: bool) -> None:
    """Print the legal layouts of SPEC, what each rule refuses, and what is predicted of them. Starts nothing."""
    from service.plan import text

    planned = Wattune().plan(spec)
    click.echo(json.dumps(planned.to_dict(), indent=2) if as_json else text(planned, every))


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@TRACKING
@ALLOW_TRAINER
@ALLOW_POWER_LIMITS
@click.option("--search-id", hidden=True, help="Id of the search, when a job was submitted under it.")
@JSON
@refusing_bad_input
def run(
    spec: Path,
    tracking_uri: str | None,
    allow_trainer: bool,
    allow_power_limits: bool,
    search_id: str | None,
    as_json: bool,
) -> None:
    """Run a search here, on the Ray cluster of RAY_ADDRESS or on this machine alone.

    With --json the front is printed in the end, and what happens meanwhile on standard error.
    """
    client = Wattune(tracking_uri)
    with _telling(as_json):
        search = client.run(spec, search_id, allow_trainer, allow_power_limits)
    _print_outcome(client, search, as_json)


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@TRACKING
@JSON
@refusing_bad_input
def calibrate(spec: Path, tracking_uri: str | None, as_json: bool) -> None:
    """Fit the cost model to the machines here, by short trials of some of SPEC's layouts, and time operators and
    collectives."""
    with _telling(as_json):
        fitted = Wattune(tracking_uri).calibrate(spec)
    if as_json:
        click.echo(json.dumps(fitted.to_dict(), indent=2))
        return
    for name, before, after in (
        ("step time", fitted.before.step_time, fitted.after.step_time),
        ("power", fitted.before.power, fitted.after.power),
    ):
        if before is not None and after is not None:
            click.echo(f"{name}: mean error {before:.1%} by the data sheet, {after:.1%} calibrated, on these trials")
    how = " by slices" * fitted.sliced
    click.echo(f"{fitted.trials} trials{how} of search {fitted.search_id}; calibration in {fitted.path}")
    click.echo(f"took {fitted.took}")
    if (found := fitted.operators) is not None:
        kept = f", {found.kept} known" * bool(found.kept)
        click.echo(f"operators: {found.measured} of {found.wanted} measured{kept}, kept in {found.path}")
    if (measured := fitted.collectives) is None:
        return
    if measured.cause is not None:
        click.echo(f"collectives: not measured: {measured.cause}")
        return
    groups = ", ".join(map(str, sorted({curve.ranks for curve in measured.curves})))
    click.echo(
        f"collectives: measured in groups of {groups}; beside matrix products large ones take {measured.beside:.2f} "
        f"times as long, and slow these by {measured.slowed:.0%} of their time; kept in {measured.path}"
    )


@main.command()
@SEARCH
@click.option("--address", metavar="URL", help="Ray's job server, for a search that was submitted to it.")
@TRACKING
@ALLOW_TRAINER
@ALLOW_POWER_LIMITS
@JSON
@refusing_bad_input
def resume(
    search: str,
    address: str | None,
    tracking_uri: str | None,
    allow_trainer: bool,
    allow_power_limits: bool,
    as_json: bool,
) -> None:
    """Go on with a search that was interrupted, from the WATTUNE_HOME and on the Ray cluster that it had."""
    client = Wattune(tracking_uri, address)
    with _telling(as_json):
        resumed = client.resume(search, allow_trainer, allow_power_limits)
    if address:
        click.echo(json.dumps({"search_id": resumed}) if as_json else resumed)
    else:
        _print_outcome(client, resumed, as_json)


@main.command()
@click.argument("spec", type=click.Path(path_type=Path))
@ADDRESS
@TRACKING
@ALLOW_TRAINER
@ALLOW_POWER_LIMITS
@JSON
@refusing_bad_input
def submit(
    spec: Path,
    address: str,
    tracking_uri: str | None,
    allow_trainer: bool,
    allow_power_limits: bool,
    as_json: bool,
) -> None:
    """Hand a search to a Ray cluster, where it goes on without this terminal."""
    search = Wattune(tracking_uri, address).submit(spec, allow_trainer, allow_power_limits)
    click.echo(json.dumps({"search_id": search}) if as_json else search)


@main.command()
@SEARCH
@click.option("--address", metavar="URL", envvar="RAY_API_SERVER_ADDRESS", help="Ray's job server, for its own view.")
@TRACKING
@JSON
@refusing_bad_input
def status(search: str, address: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """How a search stands: its trials, the failed ones with their causes, and the best so far."""
    from service.answers.tables import searches_table

    client = Wattune(tracking_uri, address)
    info = client.status(search)
    failures = client.failures(info.id) if info.trials or info.repeats else []
    if as_json:
        click.echo(json.dumps(info.to_dict() | {"failures": [trial.to_dict() for trial in failures]}, indent=2))
        return
    click.echo(searches_table([info]))
    if info.cause:
        click.echo(info.cause)
    if info.note:
        click.echo(info.note)
    for notice in info.undecided:
        click.echo(f"note: {notice}")
    for trial in failures:
        click.echo(f"{trial.status}: {trial.label}: {trial.cause}")


@main.command()
@click.argument("search", required=False, shell_complete=recorded)
@click.option("--run", "of_run", is_flag=True, help="Watch a run in training beside this command, not a search.")
@click.option("--listen", metavar="HOST:PORT", help="With --run: its WATTUNE_RUN; default: 127.0.0.1:7171.")
@click.option("--layout", multiple=True, metavar="AXIS=VALUE", help="With --run SEARCH: of the layout that it has.")
@click.option("--webhook", metavar="URL", help="Also post each event there, as JSON.")
@TRACKING
@JSON
@refusing_bad_input
def watch(
    search: str | None,
    of_run: bool,
    listen: str | None,
    layout: tuple[str, ...],
    webhook: str | None,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Follow a search until it ends: trials that start and end, what the front is, what fails.

    What has happened so far comes first. With --json, one object a line. Exit code 3 if the search failed.

    With --run: follow a run of your own that has the hook's two lines, or this machine's GPUs alone: what slows it, and
    errors. With SEARCH too, whether its layout is still the best for the machine as it is. Ctrl-C ends it.
    """
    if webhook and not webhook.startswith(("http://", "https://")):
        raise InputError(f"webhook: {webhook!r} is no URL: give http:// or https://")
    if not of_run and (search is None or listen or layout):
        raise InputError("watch: give a SEARCH" if search is None else "watch: --listen and --layout go with --run")
    if layout and search is None:
        raise InputError("watch: --layout goes with a SEARCH, which the run is held against")
    from service.answers.why import parse_choices
    from service.watch.event import text

    client = Wattune(tracking_uri)
    happening = client.watch_run(search, parse_choices(layout), listen) if of_run else client.watch(search or "")
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(happening):
        for event in happening:
            click.echo(json.dumps(event.to_dict()) if as_json else text(event))
            sys.stdout.flush()
            if webhook and (trouble := client.post(event, webhook)):
                click.echo(f"note: {trouble}", err=True)
            if event.details.get("status") == "failed":
                raise SearchError(f"search {event.search_id} failed; `wattune resume` goes on with it")


@main.command()
@SEARCH
@ADDRESS
@refusing_bad_input
def logs(search: str, address: str) -> None:
    """Follow what a submitted search prints."""
    for line in Wattune(address=address).logs(search):
        click.echo(line, nl=False)


@main.command()
@SEARCH
@ADDRESS
@refusing_bad_input
def stop(search: str, address: str) -> None:
    """End a submitted search. What it has recorded stays."""
    Wattune(address=address).stop(search)


@main.command()
@SEARCH
@click.argument("trial")
@TRACKING
@JSON
@refusing_bad_input
def cancel(search: str, trial: str, tracking_uri: str | None, as_json: bool) -> None:
    """End one trial of a search, which goes on. TRIAL is its id or its layout, as the search prints it.

    The trial is recorded as `cancelled` within some 15 s.
    """
    cancelled = Wattune(tracking_uri).cancel(search, trial)
    click.echo(json.dumps(cancelled.to_dict(), indent=2) if as_json else f"{cancelled.trial_id}: {cancelled.label}")


@main.command()
@SEARCH
@click.argument("tags", nargs=-1, metavar="[KEY=VALUE]...")
@TRACKING
@JSON
@refusing_bad_input
def tag(search: str, tags: tuple[str, ...], tracking_uri: str | None, as_json: bool) -> None:
    """Give a search tags, which `list` and MLflow's pages show; KEY= takes one away. Without any, print what it has."""
    pairs = [pair.partition("=") for pair in tags]
    for key, equals, _ in pairs:
        if not equals:
            raise InputError(f"tag {key!r}: give KEY=VALUE, or KEY= to take it away")
    client = Wattune(tracking_uri)
    info = client.tag(search, {key: value for key, _, value in pairs}) if pairs else client.status(search)
    if as_json:
        click.echo(json.dumps(dict(info.tags), indent=2))
    else:
        for key, value in info.tags.items():
            click.echo(f"{key}={value}")


@main.command()
@SEARCH
@click.argument("text", required=False)
@TRACKING
@JSON
@refusing_bad_input
def note(search: str, text: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """Note TEXT on a search, for `status` and MLflow's pages; '' takes it away. Without it, print what there is."""
    client = Wattune(tracking_uri)
    info = client.status(search) if text is None else client.note(search, text)
    if as_json:
        click.echo(json.dumps({"note": info.note}))
    elif info.note:
        click.echo(info.note)


@main.command()
@click.option(
    "--address", metavar="ADDR", help="Ray cluster, such as head:6379; default: RAY_ADDRESS, else this machine's Ray."
)
@click.option("--once", is_flag=True, help="Print once, as where the output is no terminal.")
@JSON
@refusing_bad_input
def top(address: str | None, once: bool, as_json: bool) -> None:
    """Show every GPU of a cluster while searches run: power, heat, clocks, what throttles it, its trial.

    With --json, all that is known of each node now, once.
    """
    with contextlib.closing(Wattune().top(address)) as watched:
        if as_json:
            click.echo(json.dumps([asdict(state) for state in next(watched)], indent=2))
            return
        from service.top import show

        show(watched, once)


@main.command()
@click.option("--address", metavar="ADDR", help="Ray cluster, such as head:6379; default: RAY_ADDRESS, else no Ray.")
@TRACKING
@JSON
@refusing_bad_input
def doctor(address: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """Whether this machine, or every node of a Ray cluster, is fit for searches; takes a minute, and changes nothing.

    Exit code 0: all is well; 1: something is wrong, a line each; 2: wrong input.
    """
    from service.doctor.examination import text

    examination = Wattune(tracking_uri).doctor(address)
    click.echo(json.dumps(examination.to_dict(), indent=2) if as_json else text(examination))
    sys.exit(0 if examination.well else 1)


@main.command("list")
@click.option("--address", metavar="URL", help="Ray's job server: the searches that were submitted to it.")
@TRACKING
@JSON
@refusing_bad_input
def list_searches(address: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """All recorded searches, the latest first."""
    from service.answers.tables import searches_table

    client = Wattune(tracking_uri, address)
    searches = client.searches()
    if as_json:
        click.echo(json.dumps([info.to_dict() for info in searches], indent=2))
    elif searches:
        click.echo(searches_table(searches))
    else:
        click.echo(f"no searches at {address or client.shown_uri}")


@main.command()
@click.option("--older-than", "days", type=click.FloatRange(0), default=30.0, show_default=True, metavar="DAYS")
@click.option("--resumable", is_flag=True, help="Also searches that could go on: stopped, failed, interrupted ones.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@TRACKING
@JSON
@refusing_bad_input
def gc(days: float, resumable: bool, yes: bool, tracking_uri: str | None, as_json: bool) -> None:
    """Remove the records of old searches, for good, after they were listed. One that runs is never removed.

    With --json nothing is asked: what is removed with --yes, and would be without, is printed.
    """
    from service.answers.tables import searches_table

    client = Wattune(tracking_uri)
    old = client.old_searches(days, resumable)
    if as_json:
        _print_notes(filter(None, {client.remove(info.id) for info in old} if yes else ()))
        click.echo(json.dumps([info.to_dict() for info in old], indent=2))
        return
    if not old:
        click.echo(f"no searches that are over and began more than {days:g} days ago at {client.shown_uri}")
        return
    click.echo(searches_table(old))
    if not yes and not sys.stdin.isatty():
        raise InputError("gc: nobody can be asked here: give --yes to have these removed")
    if not yes and not click.confirm(f"Remove {len(old)} searches, for good?"):
        return
    to_do = {client.remove(info.id) for info in old}
    click.echo(f"removed {len(old)} searches")
    _print_notes(filter(None, to_do))


@main.command()
@SEARCH
@TRACKING
@JSON
@refusing_bad_input
def pareto(search: str, tracking_uri: str | None, as_json: bool) -> None:
    """The layouts that no other beats on all objectives at once."""
    from service.answers.front import text

    front = Wattune(tracking_uri).pareto(search)
    click.echo(json.dumps(front.to_dict(), indent=2) if as_json else text(front))


QUERY = (
    click.option("--maximize", metavar="METRIC", help="Metric to rank by; default: the first objective of the search."),
    click.option("--minimize", metavar="METRIC", help="As --maximize, the other way."),
    click.option("--where", multiple=True, metavar="'METRIC<=X'", help="Condition; may be given several times."),
    click.option(
        "--within",
        multiple=True,
        metavar="'METRIC X%'",
        help="No more than X% off the best; may be given several times.",
    ),
    click.option("--knee", is_flag=True, help="The point at which the Pareto front bends most."),
)


def querying(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options that say which layout is best, which are the arguments of `Wattune.best`."""
    for option in reversed(QUERY):
        command = option(command)
    return command


STYLES = ("json", "yaml", "table")


@main.command()
@SEARCH
@querying
@click.option(
    "--format",
    "style",
    type=click.Choice([*STYLES, *formats()]),
    default="yaml",
    show_default=True,
    help="All that is known of it, or the layout as a framework takes it.",
)
@TRACKING
@refusing_bad_input
def best(search: str, style: str, tracking_uri: str | None, **query: Any) -> None:
    """The best layout, for the program that launches the real run.

    Least energy within 2% of the best speed: --minimize joules_per_token --within 'tokens_per_s 2%'
    """
    from service.answers.front import figures

    client = Wattune(tracking_uri)
    choice = client.best(search, **query)
    if style not in STYLES:
        formatted = client.formatted(search, choice.candidate, style)
        click.echo(formatted.text, nl=False)
        _print_notes(choice.notices, formatted.not_expressible)
        return
    if style == "table":
        click.echo(figures(choice.search, [choice.candidate]))
    elif style == "json":
        click.echo(json.dumps(choice.to_dict(), indent=2))
    else:
        import yaml

        click.echo(yaml.safe_dump(choice.to_dict(), sort_keys=False), nl=False)
    _print_notes(choice.notices)


@main.command()
@SEARCH
@querying
@click.option("--for", "target", required=True, metavar="TARGET", help="A framework, or slurm; see docs/answers.md.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@TRACKING
@JSON
@refusing_bad_input
def export(search: str, target: str, out: Path, tracking_uri: str | None, as_json: bool, **query: Any) -> None:
    """Make a folder that starts the real run of the best layout: a script, and the files that it needs."""
    client = Wattune(tracking_uri)
    choice = client.best(search, **query)
    written = client.write_folder(search, choice.candidate, target, out)
    files = [str(out / name) for name in written.files]
    if as_json:
        told = {"files": files, "not_expressible": written.not_expressible, "notices": list(choice.notices)}
        click.echo(json.dumps(told, indent=2))
        return
    for name in files:
        click.echo(name)
    _print_notes(choice.notices, written.not_expressible)


@main.command()
@SEARCH
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with all axes and metrics.")
@TRACKING
@JSON
@refusing_bad_input
def trials(search: str, as_csv: bool, as_json: bool, tracking_uri: str | None) -> None:
    """All trials of a search, failed ones included, in the order of their start."""
    from service.answers.tables import trials_csv, trials_table

    recorded = Wattune(tracking_uri).trials(search)
    if as_csv:
        click.echo(trials_csv(recorded), nl=False)
    elif as_json:
        click.echo(json.dumps([trial.to_dict() for trial in recorded], indent=2))
    else:
        click.echo(trials_table(recorded))


@main.command()
@SEARCH
@click.option("--html", type=click.Path(path_type=Path), help="Write it as one page, with figures, into this file.")
@click.option("--figures", type=click.Path(path_type=Path), help="Write every figure, PNG and SVG, into this folder.")
@TRACKING
@JSON
@refusing_bad_input
def report(search: str, html: Path | None, figures: Path | None, tracking_uri: str | None, as_json: bool) -> None:
    """How a search got there: what it found, what mattered, whether the machine drifted, what failed or was refused.

    With --html or --figures it is written there instead, which takes what `pip install 'wattune[report]'` installs.
    """
    from service.answers.report import text

    client = Wattune(tracking_uri)
    if html or figures:
        with _told_if_not_written():
            if html:
                html.write_text(client.page(search), encoding="utf-8")
            if figures:
                client.figures(search, figures)
        return
    reported = client.report(search)
    click.echo(json.dumps(reported.to_dict(), indent=2) if as_json else text(reported))


@main.command()
@click.argument("target", metavar="SEARCH|SPEC", shell_complete=recorded)
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

    explained = Wattune(tracking_uri).why(target, parse_choices(choices))
    click.echo(json.dumps(explained.to_dict(), indent=2) if as_json else text(explained, every))


@main.command()
@SEARCH
@click.option("--slow-gpu", metavar="X%", help="One GPU of each layout is so much slower, where it costs most.")
@click.option("--link", metavar="X%", help="The bandwidth of all links is so much other: -20% is a fifth less.")
@TRACKING
@JSON
@refusing_bad_input
def whatif(search: str, slow_gpu: str | None, link: str | None, tracking_uri: str | None, as_json: bool) -> None:
    """What a slow GPU or slow links make of each layout that was explored by slices."""
    from service.answers.whatif import text

    answer = Wattune(tracking_uri).whatif(search, slow_gpu, link)
    click.echo(json.dumps(answer.to_dict(), indent=2) if as_json else text(answer))


@main.command()
@click.argument("searches", nargs=-1, required=True, metavar="SEARCH|FILE...", shell_complete=recorded)
@click.option("--price-per-gpu-hour", multiple=True, type=float, metavar="$", help="Of one GPU; see below.")
@click.option("--price-per-kwh", multiple=True, type=float, metavar="$", help="Of the GPUs' energy.")
@click.option("--co2-per-kwh", multiple=True, type=float, metavar="KG", help="Carbon intensity of that energy.")
@click.option("--html", type=click.Path(path_type=Path), help="Write it as one page, with figures, into this file.")
@click.option("--figures", type=click.Path(path_type=Path), help="Write every figure, PNG and SVG, into this folder.")
@TRACKING
@JSON
@refusing_bad_input
def compare(
    searches: tuple[str, ...],
    html: Path | None,
    figures: Path | None,
    tracking_uri: str | None,
    as_json: bool,
    **rates: tuple[float, ...],
) -> None:
    """Hold searches against the first: the best per GPU, joule, dollar and CO2, layouts that both ran, up or out.

    FILE is what `wattune trials SEARCH --json` printed elsewhere. Prices and intensities are given once for all
    searches or once for each, in their order.
    """
    from service.answers.compare.comparing import text

    client = Wattune(tracking_uri)
    compared = client.compare(searches, **rates)
    if html or figures:
        with _told_if_not_written():
            if html:
                html.write_text(client.comparison_page(compared), encoding="utf-8")
            if figures:
                client.comparison_figures(compared, figures)
    else:
        click.echo(json.dumps(compared.to_dict(), indent=2) if as_json else text(compared))


@main.command()
@JSON
@refusing_bad_input
def trainers(as_json: bool) -> None:
    """The trainers that a spec can name: those that come with Wattune and those of WATTUNE_TRAINERS."""
    from service.trainers import text

    known = Wattune.trainers()
    click.echo(json.dumps([one.to_dict() for one in known], indent=2) if as_json else text(known))


@main.group()
def trainer() -> None:
    """Look at one trainer."""


@trainer.command("check")
@click.argument("reference", metavar="NAME|FILE|SPEC")
@ALLOW_TRAINER
@JSON
@refusing_bad_input
def check_trainer(reference: str, allow_trainer: bool, as_json: bool) -> None:
    """Run a few steps of a trainer here, and say what was seen of its program and what is missing.

    Of a spec, its first legal layout is run; of a trainer's name or file, the first one of a small model.
    """
    from service.trainer_check import text

    check = Wattune.check_trainer(reference, allow_trainer)
    click.echo(json.dumps(check.to_dict(), indent=2) if as_json else text(check))
    sys.exit(0 if check.passed else 1)


@main.command()
@click.argument("text", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Prefix of the .bin and .idx to write.")
@JSON
@refusing_bad_input
def data(text: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Prepare training tokens (one a byte, 257 in all) from text files and folders."""
    made = Wattune.prepare_data(text, out)
    if as_json:
        click.echo(json.dumps(asdict(made) | {"prefix": str(made.prefix)}))
        return
    skipped = f", {made.skipped_files} files skipped" if made.skipped_files else ""
    click.echo(f"{made.tokens:,} tokens of {made.documents:,} documents in {made.prefix}.bin and .idx{skipped}")


@main.command()
@click.argument("search", required=False, shell_complete=recorded)
@click.option("--port", default=5000, show_default=True, help="Port on this machine's loopback address.")
@TRACKING
@refusing_bad_input
def ui(search: str | None, port: int, tracking_uri: str | None) -> None:
    """Open MLflow's web pages on the record, for this machine alone; on SEARCH, if one is named."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(Wattune(tracking_uri).pages(port, search)) as pages:
        click.echo(f"{pages.url}    (Ctrl-C ends it)")
        sys.exit(pages.wait())


@contextlib.contextmanager
def _told_if_not_written() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None


def _print_notes(notices: Iterable[str], not_expressible: Mapping[str, str] | None = None) -> None:
    """What a reader of an answer must know, on standard error."""
    for notice in [*notices, *(f"{name}: {how}" for name, how in (not_expressible or {}).items())]:
        click.echo(f"note: {notice}", err=True)


@contextlib.contextmanager
def _telling(as_json: bool) -> Iterator[None]:
    """What a search tells while it runs, on standard error where standard output is for JSON."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def _print_outcome(client: Wattune, search: str, as_json: bool) -> None:
    """What a search that has ended came to. Raises `NoAnswerError` if to nothing."""
    from service.answers.front import text

    front = client.pareto(search)
    if not any(trial.status == "ok" for trial in front.search.trials):
        raise NoAnswerError(f"search {search}: no trial came to a result; see `wattune status {search}`")
    if as_json:
        click.echo(json.dumps(front.to_dict(), indent=2))
        return
    click.echo(text(front))
    click.echo(f"\nThe record: search {search} at {client.shown_uri}")
    click.echo(f"  wattune best {search}     the best configuration, to launch with")
    click.echo(f"  wattune report {search}   how it got there, and what to make of it")
    click.echo(f"  {client.pages_url(search) or f'wattune ui {search}'}       every trial, in the browser")


if __name__ == "__main__":
    main()
