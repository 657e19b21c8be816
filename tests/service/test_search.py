"""A whole search, for real: Ray, warm gangs, training, telemetry, study, MLflow, and the answers from the record."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import ray
import yaml
from click.testing import CliRunner

from benchmarks.measure.busy import busy
from search_spaces.operators import Kind
from service.answers import overview
from service.answers.overview import contests
from service.answers.page import draw
from service.answers.query import parse_query
from service.answers.ranking import best, compared, pareto
from service.calibrate import Measured, calibrate, measure_collectives
from service.checks import EVENLY
from service.cli import main
from service.client import Wattune
from service.errors import InputError
from service.fitting import load, network
from service.home import Home
from service.problem import Cluster, Problem
from service.queue.actor import Member, Queue
from service.queue.claims import Claim
from service.record.results import Results
from service.record.store import open_client
from service.result import Purpose
from service.search import resume, run
from service.spec import parse_spec
from service.turns import bench_in_turn
from telemetry.store import read_samples
from trainables.collectives import KINDS, Collectives
from trainables.data import prepare
from trainables.mailbox import Mailbox

SPEC: dict[str, Any] = {
    "name": "whole",
    "model": "tiny-llama",
    "sequence_length": 64,
    "global_batch_size": 4,
    # All the CPUs that the tests' Ray has: nothing else of a search may need one.
    "cluster": {"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu", "cpus_per_worker": 2},
    "space": {"engine": ["megatron", "deepspeed"], "zero_stage": [0, 1], "precision": "fp32"},
    "measurement": {"window_s": 0.5, "window_min_steps": 3, "warmup_max_s": 0.5, "deadline_s": 120},
    "budget": {"trials": 3},
    "finalists": {"count": 0},
    "sentinel_every": 0,
    "sampler": "random",
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text(Path(__file__).read_text() * 3)
    prepare([folder / "text.txt"], folder / "tokens")
    return str(folder / "tokens")


def spec_of(tokens: str, **changes: Any) -> Problem:
    return parse_spec(yaml.safe_dump(SPEC | {"data": tokens} | changes))


@pytest.mark.slow
def test_depth_proxies_are_run_and_extrapolated(ray_session: Any, home: Home, tokens: str) -> None:
    deep = {"family": "llama", "layers": 12, "hidden": 256, "heads": 4, "ffn_hidden": 512, "vocab": 512}
    search = run(spec_of(tokens, model=deep, depth_proxy=[1, 6], space={"precision": "fp32"}, budget={"trials": 1}))
    (trial,) = Results(home.tracking_uri).search(search).trials
    assert trial.status == "ok", trial.cause
    assert trial.methods["tokens_per_s"] == trial.methods["step_time_s"] == "extrapolated"
    client = open_client(home.tracking_uri)
    result = json.loads(Path(client.download_artifacts(trial.run_id, "result.json", str(home.path))).read_text())
    shallow, half = (proxy["result"]["metrics"] for proxy in result["proxies"])
    assert [proxy["layers"] for proxy in result["proxies"]] == [1, 6]
    assert shallow["step_time_s"] < half["step_time_s"] < trial.metrics["step_time_s"]
    assert trial.metrics["step_time_s"] == pytest.approx(
        half["step_time_s"] + 6 / 5 * (half["step_time_s"] - shallow["step_time_s"])
    )
    assert (Path(client.download_artifacts(trial.run_id, "samples.parquet", str(home.path)))).exists()


@pytest.mark.slow
def test_slices_explore_and_the_whole_gang_measures_the_finalists(
    ray_session: Any, home: Home, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"num_gpus": [2], "zero_stage": [0, 1], "expert_parallel_size": [1, 2], "pipeline_parallel_size": [1, 2]}
    search = run(
        spec_of(
            tokens,
            model="tiny-moe",
            cluster={"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu", "cpus_per_worker": 2},
            space=space | {"precision": "fp32"},
            budget={"trials": 3},
            measurement=SPEC["measurement"] | {"explore": "slices"},
            finalists={"count": 1, "repeats": 2, "window_s": 0.5},
            sentinel_every=2,
        )
    )
    assert "explores by slices, 2 at a time" in capsys.readouterr().out
    record = Results(home.tracking_uri).search(search)
    assert record.status == "finished"
    assert {trial.status for trial in record.trials} == {"ok"}
    how = {(trial.purpose, trial.methods.get("tokens_per_s")) for trial in record.trials}
    assert how == {(Purpose.SEARCH, "slice"), (Purpose.SENTINEL, "slice"), (Purpose.FINALIST, None)}
    assert best(record).confirmed, "figures by slices are not held against measured ones"
    finalist = next(trial for trial in record.trials if trial.purpose == Purpose.FINALIST)
    sliced = next(one for one in record.trials if one.purpose == Purpose.SEARCH and one.layout == finalist.layout)
    off = sliced.metrics["tokens_per_s"] / finalist.metrics["tokens_per_s"] - 1
    assert finalist.metrics["slice_error_tokens_per_s"] == pytest.approx(off)
    assert any(line.startswith("tokens_per_s by slices was off by ") for line in overview.notices(record))
    assert EVENLY in record.notices


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_explored_by_slices_alone(ray_session: Any, home: Home, tokens: str) -> None:
    cluster = {"nodes": 16, "gpus_per_node": 8, "accelerator": "cpu", "cpus_per_worker": 2}
    space = {"tensor_parallel_size": [2], "pipeline_parallel_size": [2], "precision": "fp32"}
    measurement = SPEC["measurement"] | {"explore": "auto"}
    changes = {"cluster": cluster, "space": space, "measurement": measurement, "global_batch_size": 64}
    search = run(spec_of(tokens, budget={"trials": 1}, finalists={"count": 2}, **changes))
    record = Results(home.tracking_uri).search(search)
    (trial,) = record.trials
    assert (trial.status, trial.cause) == ("ok", None)
    assert (trial.layout.num_gpus, trial.methods["tokens_per_s"]) == (128, "slice")
    notices = overview.notices(record)
    assert any("tokens_per_s is sliced from ranks that ran alone, not measured" in line for line in notices)


def test_search_trains_measures_records_and_answers(
    ray_session: Any, home: Home, tokens: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    finalists = {"count": 1, "repeats": 2, "window_s": 0.7}
    changes = {"finalists": finalists, "sentinel_every": 2, "constraints": ["peak_memory_gib<=70"]}
    space = {"zero_stage": [0, 1], "precision": "fp32"}
    search = run(spec_of(tokens, space=space, budget={"trials": 2}, **changes))
    shown = capsys.readouterr().out
    assert "notice: constraints: 'peak_memory_gib<=70': no trial will have it: only GPUs" in shown
    assert "trial 2 of at most 2" in shown
    assert "best so far" in shown
    assert shown.count("(finalist): ") >= 2
    assert "sentinel: moved by at most" in shown

    record = Results(home.tracking_uri).search(search)
    assert record.status == "finished"
    assert {trial.status for trial in record.trials} == {"ok"}
    purposes = [trial.purpose for trial in record.trials]
    assert purposes[:5] == ["search"] * 2 + ["finalist", "sentinel", "finalist"]
    assert purposes[5:].count(Purpose.FINALIST) <= 2, "on a busy machine, what is undecided is measured on"
    assert len({trial.label for trial in record.trials}) == 2
    assert record.trials[3].label == record.trials[0].label
    assert record.environment["devices"]
    assert float(record.environment["load_average"]) >= 0
    for trial in record.trials:
        assert trial.metrics["tokens_per_s"] > 0
        assert "mfu" not in trial.metrics
        if "joules_per_token" not in trial.metrics:  # nobody had the CPU for a sample
            assert trial.cause is not None
            assert "in the window" in trial.cause
            continue
        assert trial.metrics["joules_per_token"] > 0
        assert trial.methods["joules_per_token"] == "estimated"
    assert any("joules_per_token" in trial.metrics for trial in record.trials)
    again = [trial for trial in record.trials if trial.purpose == "finalist"]
    assert all(trial.metrics["window_time_s"] >= 0.7 for trial in again)
    assert best(record) == pareto(record)[0]
    assert set(contests(compared(record))) <= set(record.notices)

    client = open_client(home.tracking_uri)
    figures = client.get_run(record.run_id).data.metrics
    assert "sentinel_drift_tokens_per_s" in figures
    assert figures["best_tokens_per_s"] == best(record).metrics["tokens_per_s"]
    run_id = record.trials[0].run_id
    result = json.loads(Path(client.download_artifacts(run_id, "result.json", str(tmp_path))).read_text())
    assert result["losses"][-1] < result["losses"][0]
    assert len(result["step_times_s"]) >= 3
    samples = read_samples(Path(client.download_artifacts(run_id, "samples.parquet", str(tmp_path))))
    assert samples.num_rows >= 3
    window = result["windows"][0]
    length_s = (window["end_ns"] - window["start_ns"]) / 1e9
    assert 0.3 * length_s < sum(result["step_times_s"]) < 1.2 * length_s  # ranks exchange their times between steps

    if draw.available():
        page = Path(client.download_artifacts(record.run_id, "report.html", str(tmp_path))).read_text()
        assert '<h2 id="breakdown">' in page, "the figure of a step's parts on each rank"
        assert record.trials[0].label in page

    study = optuna.load_study(study_name=search, storage=home.optuna_storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    assert not home.spool(search).exists(), "all that was recorded has left the spool"

    called = CliRunner().invoke(main, ["best", search, "--minimize", "joules_per_token", "--format", "json"])
    told = json.loads(called.stdout)
    assert told["config"] == best(record, parse_query(minimize="joules_per_token")).layout.to_dict()
    assert "estimated" in called.stderr


@pytest.mark.slow
def test_failures_on_small_gangs_do_not_end_the_search(ray_session: Any, home: Home, tokens: str) -> None:
    """Two gangs of one worker each; a model too big for the machine's memory fails in every trial."""
    shape = {"family": "llama", "layers": 1, "hidden": 64, "heads": 2, "ffn_hidden": 2**39, "vocab": 512}
    space = {"num_gpus": 1, "micro_batch_size": [1, 2], "precision": "fp32"}
    search = run(spec_of(tokens, model=shape, space=space))
    record = Results(home.tracking_uri).search(search)
    assert record.status == "finished"
    assert [trial.status for trial in record.trials] == ["oom"] * 2
    assert all("memory" in (trial.cause or "") for trial in record.trials)
    with pytest.raises(Exception, match="no trial"):
        best(record)


@contextlib.contextmanager
def killing(actor: str) -> Iterator[None]:
    """Kill this actor's process of the search that is run meanwhile, once its first trial is under way."""
    over = threading.Event()
    earlier = titles_of_descendants().items()  # processes of searches before may take a while to end

    def kill() -> None:
        while not over.wait(0.2):
            titles = dict(titles_of_descendants().items() - earlier)
            if any("trainables.child" in title and at_work(process) for process, title in titles.items()):
                for process, title in titles.items():
                    if title.startswith(f"ray::{actor}"):
                        process.kill()
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def titles_of_descendants() -> dict[psutil.Process, str]:
    """Of all processes that this one has started; those of Ray change when it reuses them."""
    titles = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            titles[process] = " ".join(process.cmdline())
    return titles


def at_work(server: psutil.Process) -> bool:
    """Whether a fork of this server is more than the first one, which does nothing."""
    with contextlib.suppress(psutil.Error):
        return any(child.cpu_times().user > 0.2 for child in server.children())
    return False


@pytest.mark.slow
def test_a_search_whose_mailbox_dies_completes_its_budget(ray_session: Any, home: Home, tokens: str) -> None:
    with killing("Mailbox"):
        search = run(spec_of(tokens))
    record = Results(home.tracking_uri).search(search)
    assert record.status == "finished"
    lost = [trial for trial in record.trials if trial.infrastructure]
    assert [trial.status for trial in lost] == ["crash"]
    assert [trial.status for trial in record.trials if trial not in lost] == ["ok"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["Pool", "Telemetry"])
def test_a_search_whose_pool_or_telemetry_dies_completes_its_budget(
    actor: str, ray_session: Any, home: Home, tokens: str
) -> None:
    with killing(actor):
        search = run(spec_of(tokens))
    record = Results(home.tracking_uri).search(search)
    assert record.status == "finished"
    lost = [trial for trial in record.trials if trial.infrastructure]
    assert [trial.status for trial in lost] == ["crash"] * len(lost)
    assert [trial.status for trial in record.trials if trial not in lost] == ["ok"] * 3


@pytest.mark.slow
def test_layouts_of_all_sizes_run_side_by_side_and_finalists_alone(
    ray_session: Any, home: Home, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"gpus_per_node": 4, "accelerator": "cpu", "cpus_per_worker": 0.5}
    space = {"num_gpus": [1, 2, 4], "micro_batch_size": [1, 2], "precision": "fp32"}
    measurement = SPEC["measurement"] | {"window_s": 8}  # longer than it takes to begin another
    finalists = {"count": 1, "repeats": 2, "window_s": 1}
    changes = {"cluster": cluster, "space": space, "measurement": measurement, "finalists": finalists}
    search = run(spec_of(tokens, budget={"trials": 6}, sampler="exhaustive", global_batch_size=8, **changes))
    record = Results(home.tracking_uri).search(search)
    assert {trial.status for trial in record.trials} <= {"ok", "pruned"}
    explored = [trial for trial in record.trials if trial.purpose == Purpose.SEARCH]
    assert sorted(trial.layout.num_gpus for trial in explored) == [1, 1, 2, 2, 4, 4]
    assert {trial.beside for trial in explored if trial.layout.num_gpus == 4} == {False}
    assert any(trial.beside for trial in explored)
    assert {trial.beside for trial in record.trials if trial.purpose == Purpose.FINALIST} == {False}
    assert any("had others beside them on a node" in line for line in overview.notices(record))
    told = busy(record)
    assert 0 < told.trained < told.lent <= 1


@pytest.mark.slow
def test_a_search_that_cannot_write_its_results_fails_with_one_line_and_goes_on_later(
    ray_session: Any, home: Home, tokens: str
) -> None:
    (home.path / "spec.yaml").write_text(yaml.safe_dump(SPEC | {"data": tokens}))
    unsent = home.spool("full") / "unsent"
    unsent.parent.mkdir(parents=True)
    unsent.write_text("in the way, as no space on the device would be")
    called = CliRunner().invoke(main, ["run", str(home.path / "spec.yaml"), "--search-id", "full"])
    assert isinstance(called.exception, SystemExit), called.exception
    assert called.stderr.splitlines()[-1].startswith(f"wattune: the state directory {home.path} cannot be written (")
    record = Results(home.tracking_uri).search("full")
    assert (record.status, [trial.status for trial in record.trials]) == ("failed", ["stopped"])
    unsent.unlink()
    resume("full")
    record = Results(home.tracking_uri).search("full")
    assert (record.status, [trial.status for trial in record.trials]) == ("finished", ["stopped"] + ["ok"] * 3)


@pytest.mark.slow
def test_a_search_that_waits_for_others_is_queued_and_spends_nothing(
    ray_session: Any, home: Home, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    actor: Any = ray.remote(Mailbox)
    holding = actor.options(num_cpus=1).remote(1)
    ray.get(holding.give_up.remote("nothing"))  # it is there
    budget = {"trials": 2, "wall_time_s": 20}
    search = threading.Thread(target=run, args=(spec_of(tokens, budget=budget), None, "waiting"))
    search.start()
    try:
        client, waited_until = Wattune(), time.monotonic() + 25
        while time.monotonic() < waited_until:
            if any(info.id == "waiting" for info in client.searches()):
                assert client.status("waiting").status == "queued"
                assert client.trials("waiting") == []
            time.sleep(1)
        ray.kill(holding)
    finally:
        search.join()
    record = Results(home.tracking_uri).search("waiting")
    assert (record.status, [trial.status for trial in record.trials]) == ("finished", ["ok"] * 2)
    assert re.search(r"^waiting for 4 CPUs: 3 of 4 free$", capsys.readouterr().out, re.MULTILINE)
    summary = open_client(home.tracking_uri).get_run(record.run_id).data.metrics
    assert summary["gpu_hours"] * 3600 <= 2 * summary["search_time_s"]
    (ended,) = (trial.ended for trial in record.trials[-1:])
    assert ended is not None
    assert summary["search_time_s"] < (ended - record.started).total_seconds() - 15


@pytest.mark.slow
def test_collectives_are_measured_when_it_is_their_turn(
    ray_session: Any, home: Home, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, space = Member(), {"precision": "fp32"}
    cluster = {"gpus_per_node": 2, "accelerator": "cpu"}
    problem = spec_of(tokens, cluster=cluster, space=space)
    other = Claim("another", 0, time.time(), {"CPU": 1.0}, size=1, gangs=1)
    other = replace(other, grants=queue.ask(Queue.check_in, other).grants)

    def gangs() -> set[str]:
        return {one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "mailbox" in one["name"]}

    before = gangs()  # of searches that are over, while their drivers' memory is not cleaned up
    with ThreadPoolExecutor() as beside:

        def measure() -> Measured:
            with bench_in_turn("collectives", problem, 2, Collectives.preload([]), Member()) as bench:
                return measure_collectives(bench, home)

        measuring = beside.submit(measure)
        asked = time.monotonic()
        while time.monotonic() < asked + 20:
            queue.ask(Queue.check_in, other)
            time.sleep(1)
        assert gangs() <= before, "the node is another's"
        queue.ask(Queue.check_out, other.search)
        measured = measuring.result()
    assert measured.cause is None
    assert {curve.kind for curve in measured.curves} == set(KINDS)
    assert "queued: 1 of 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_calibration_is_run_recorded_and_kept(ray_session: Any, home: Home, tokens: str) -> None:
    cluster: dict[str, Any] = {"gpus_per_node": 2, "accelerator": "cpu"}
    space = {"micro_batch_size": [1, 2, 4], "precision": "fp32"}
    done = calibrate(spec_of(tokens, name="machines", cluster=cluster, space=space, budget={"trials": 2}))
    record = Results(home.tracking_uri).search(done.search_id)
    assert record.name == "machines-calibration"
    assert [(trial.purpose, trial.status) for trial in record.trials] == [("calibration", "ok")] * 2
    assert len({trial.label for trial in record.trials}) == 2
    assert (done.trials, done.path, done.sliced) == (2, home.calibration("cpu"), False)
    fitted = load(home, Cluster(**cluster))
    assert fitted is not None
    assert "2 trials" in fitted.source
    assert done.before.step_time is not None
    assert done.after.step_time is not None
    assert done.after.step_time < done.before.step_time
    assert done.after.power is None, "power of a CPU machine is estimated"
    assert done.operators is not None
    assert 0 < done.operators.measured <= done.operators.wanted
    assert done.operators.path == home.operators("cpu")
    assert {row.operator.kind for row in fitted.operators.rows} >= {Kind.PRODUCT, Kind.ATTENTION, Kind.LAUNCH}
    assert len(fitted.operators.rows) == done.operators.measured
    assert done.collectives is not None
    assert (done.collectives.cause, done.collectives.path) == (None, home.collectives("cpu"))
    found = network(home, Cluster(**cluster))
    assert found is not None
    assert found.measured == done.collectives.curves
    assert {(curve.kind, curve.ranks) for curve in found.measured} == {(kind, 2) for kind in KINDS}
    assert done.collectives.beside > 0
    with pytest.raises(InputError, match="is a calibration: calibrate anew"):
        resume(done.search_id)


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_calibrated_by_slices_where_it_may_be_explored_so(
    ray_session: Any, home: Home, tokens: str
) -> None:
    cluster: dict[str, Any] = {"nodes": 16, "gpus_per_node": 8, "accelerator": "cpu", "cpus_per_worker": 2}
    space = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": [0, 1], "precision": "fp32"}
    changes = {"cluster": cluster, "space": space, "global_batch_size": 64, "budget": {"trials": 2}}
    with pytest.raises(InputError, match="16 x 8 cpu workers need"):
        calibrate(spec_of(tokens, **changes))
    done = calibrate(spec_of(tokens, measurement=SPEC["measurement"] | {"explore": "slices"}, **changes))
    trials = Results(home.tracking_uri).search(done.search_id).trials
    assert [(trial.purpose, trial.status, trial.cause) for trial in trials] == [("calibration", "ok", None)] * 2
    assert {(trial.layout.num_gpus, trial.methods["step_time_s"]) for trial in trials} == {(128, "slice")}
    assert done.collectives is not None
    assert {curve.ranks for curve in done.collectives.curves} == {2}, "of the machine at hand"
    assert done.before.step_time is not None
    assert done.after.step_time is not None
    assert done.after.step_time < done.before.step_time
    fitted = load(home, Cluster(**cluster))
    assert fitted is not None
    assert "2 trials by slices" in fitted.source
    assert done.sliced
