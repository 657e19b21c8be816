from __future__ import annotations

import base64
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from mlflow import MlflowClient

from search_spaces.layout import Layout
from search_spaces.schedules import Pass, PassTime
from service.errors import InputError
from service.goals import Goals
from service.home import Home
from service.metrics import Direction, Method
from service.record.dataset import dataset
from service.record.results import Results, SearchRecord
from service.record.tracking import Tracker
from service.result import NodeWindow, Proxy, Purpose, RankRecord, TrialResult
from service.spec import dump_spec
from telemetry.samples import SCHEMA
from telemetry.store import read_samples
from tests.conftest import free_port
from tests.service.records import problem
from trainables.breakdown import break_down
from trainables.data import BYTE_VOCAB_SIZE, open_tokens, prepare
from trainables.status import Status

CONFIG = Layout("megatron", 4, 16, micro_batch_size=2, tensor_parallel_size=2, zero_stage=1, sequence_parallel=True)
ENVIRONMENT = {"torch": "2.13.0", "git_commit": "0123abc"}


PROBLEM = problem(
    sequence_length=128,
    objectives={"tokens_per_s": "maximize", "joules_per_token": "minimize"},
    constraints=["peak_memory_gib<=70"],
)


def start(home: Home, uri: str | None = None, environment: Mapping[str, str] = ENVIRONMENT) -> Tracker:
    tracker = Tracker(uri or home.tracking_uri, home)
    tracker.start_search("s1", PROBLEM, environment)
    return tracker


def measured(trial_id: str = "s1-000") -> TrialResult:
    step = break_down(["matmul"], np.array([0]), np.array([400_000_000]), 0.5)
    return TrialResult(
        trial_id,
        CONFIG,
        Status.OK,
        metrics={"tokens_per_s": 1e5, "joules_per_token": 0.07, "step_time_s": 0.5, "peak_hbm_temp_c": None},
        methods={"joules_per_token": Method.COUNTER},
        step_times_s=(0.5, 0.6, 0.4),
        losses=(9.0, 8.0, 7.5, 7.25),
        windows=(NodeWindow("node", 5, 9, ("GPU-a", "GPU-b")),),
        environment={"gpu_name": "NVIDIA H200"},
        ranks=tuple(
            RankRecord(
                rank,
                3 - rank,
                "node",
                f"GPU-{3 - rank}",
                CONFIG.coordinates(rank),
                70.5,
                step if rank else None,
                passes=(PassTime(rank, Pass.FORWARD, 0.2, 0.1),),
            )
            for rank in range(4)
        ),
    )


def samples(ticks: int = 4, nodes: tuple[str, ...] = ("node",)) -> pa.Table:
    rows = [
        {"time_ns": 10**15 + tick * 10**8, "node": node, "device": f"GPU-{node}-{index}", "index": index}
        | {"kind": "nvidia", "power_w": 500.0 + 100 * index + tick}
        for tick in range(ticks)
        for node in nodes
        for index in (0, 1)
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def read(home: Home, uri: str | None = None) -> SearchRecord:
    return Results(uri or home.tracking_uri).search("s1")


def history(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run_id, key)]


def test_every_run_names_the_tokens_and_the_search_the_models_dimensions(home: Home, tmp_path: Path) -> None:
    prepare([Path(__file__)], tmp_path / "corpus")
    of = replace(PROBLEM, data=str(tmp_path / "corpus"))
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", of, ENVIRONMENT)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(measured())
    assert tracker.notices == []
    client, searched = MlflowClient(home.tracking_uri), read(home)
    for run_id in (searched.run_id, searched.trials[0].run_id):
        inputs = client.get_run(run_id).inputs
        assert inputs is not None
        (named,) = inputs.dataset_inputs
        assert named.dataset.name == "corpus"
        assert named.dataset.digest == open_tokens(tmp_path / "corpus", BYTE_VOCAB_SIZE).digest()
        assert json.loads(named.dataset.source) == {"uri": str(tmp_path / "corpus")}
        assert json.loads(named.dataset.profile or "{}")["tokens"] == Path(__file__).stat().st_size + 1
        assert [(tag.key, tag.value) for tag in named.tags] == [("mlflow.data.context", "training")]
    assert of.shape is not None
    assert searched.params["model.layers"] == of.shape.layers
    assert dataset(replace(of, data=str(tmp_path / "gone"))) is None
    synthetic = dataset(PROBLEM)
    assert synthetic is not None
    assert synthetic.dataset.name == "synthetic"


def test_results_samples_and_the_page_come_back_from_the_store(home: Home, tmp_path: Path) -> None:
    tracker = start(home)
    for one in (measured(), measured("s1-001")):
        tracker.start_trial(one.trial_id, CONFIG)
    tracker.finish_trial(measured(), samples())
    tracker.finish_trial(measured("s1-001"))
    results = Results(home.tracking_uri)
    first, second = results.search("s1").trials
    assert results.result_of(first) == measured()
    seen = results.samples_of(first)
    assert seen is not None
    assert seen.equals(samples())
    assert results.samples_of(second) is None
    MlflowClient(home.tracking_uri).log_text(first.run_id, '{"of": "another form"}', "result.json")
    assert results.result_of(first) is None

    def broken() -> str:
        raise ZeroDivisionError("no figure")

    tracker.attach_page(broken)
    assert tracker.notices == ["the report is not recorded: no figure"]
    tracker.attach_page(lambda: "<p>page</p>")
    assert tracker.notices == []
    page = MlflowClient(home.tracking_uri).download_artifacts(results.search("s1").run_id, "report.html")
    assert Path(page).read_text() == "<p>page</p>"


def test_a_trial_comes_back_as_it_was(home: Home, tmp_path: Path) -> None:
    tracker = start(home)
    assert read(home).status == "queued"
    tracker.start_trial("s1-000", CONFIG)
    assert read(home).status == read(home).trials[0].status == "running"
    tracker.finish_trial(measured(), samples())
    tracker.finish_search("finished", {"tokens_per_s": 1e5, "joules_per_token": None}, ["mind this"])
    assert tracker.notices == []

    search = read(home)
    (trial,) = search.trials
    assert (search.name, search.status, search.notices) == ("tiny", "finished", ("mind this",))
    tracker.finish_search("finished", {})
    assert read(home).notices == (), "those of an end that was none are over"
    assert search.params["sequence_length"] == 128
    assert search.environment == ENVIRONMENT
    assert trial.layout == CONFIG
    assert trial.metrics == {"tokens_per_s": 1e5, "joules_per_token": 0.07, "step_time_s": 0.5}
    assert trial.methods == {"joules_per_token": "counter"}
    assert (trial.status, trial.cause, trial.label) == ("ok", None, CONFIG.label)

    client = MlflowClient(home.tracking_uri)
    parent, run = client.get_run(search.run_id), client.get_run(trial.run_id)
    assert run.data.tags["mlflow.parentRunId"] == search.run_id
    assert run.data.tags["wattune.energy"] == "counter"
    assert run.data.params["env.gpu_name"] == "NVIDIA H200"
    assert (run.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert parent.data.metrics == {"tokens_per_s": 1e5}
    assert parent.data.tags["mlflow.source.git.commit"] == "0123abc"

    artifacts = Path(client.download_artifacts(trial.run_id, "", str(tmp_path)))
    assert TrialResult.from_dict(json.loads((artifacts / "result.json").read_text())) == measured()
    assert read_samples(artifacts / "samples.parquet").equals(samples())
    spec = Path(client.download_artifacts(search.run_id, "spec.yaml", str(tmp_path)))
    assert spec.read_text() == dump_spec(PROBLEM)
    assert list((home.spool("s1") / "unsent").iterdir()) == []


def test_a_record_from_before_there_were_ranks_in_it_is_read() -> None:
    values = json.loads(json.dumps(measured().to_dict()))
    assert TrialResult.from_dict(values) == measured()
    del values["ranks"]
    assert TrialResult.from_dict(values) == replace(measured(), ranks=())


def test_series_are_kept_by_step_alone_and_what_gpus_did_in_files(home: Home) -> None:
    tracker = Tracker(home.tracking_uri, home, lambda result, table: f"{result.trial_id} {table.num_rows}".encode())
    tracker.start_search("s1", PROBLEM, ENVIRONMENT)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(measured(), samples())
    client, run_id = MlflowClient(home.tracking_uri), read(home).trials[0].run_id
    assert history(client, run_id, "step/step_time_s") == [(0, 0.5), (1, 0.6), (2, 0.4)]
    assert history(client, run_id, "step/loss") == [(0, 9.0), (1, 8.0), (2, 7.5), (3, 7.25)]
    assert {key for key in client.get_run(run_id).data.metrics if "/" in key} == {"step/step_time_s", "step/loss"}
    assert {file.path for file in client.list_artifacts(run_id)} == {"result.json", "samples.parquet", "gpus.png"}
    assert Path(client.download_artifacts(run_id, "gpus.png")).read_bytes() == b"s1-000 8"


def test_a_picture_that_fails_costs_nothing_else(home: Home) -> None:
    def broken(result: TrialResult, table: pa.Table) -> bytes:
        raise ZeroDivisionError("no line")

    tracker = Tracker(home.tracking_uri, home, broken)
    tracker.start_search("s1", PROBLEM, ENVIRONMENT)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(measured(), samples())
    assert tracker.notices == ["what GPUs did in trial s1-000 is not drawn: no line"]
    assert read(home).trials[0].metrics["tokens_per_s"] == 1e5


def test_a_trial_is_on_disk_before_anything_is_drawn_of_it(home: Home) -> None:
    found: list[TrialResult] = []

    def drawn(result: TrialResult, table: pa.Table) -> None:
        (file,) = home.spool("s1").glob("**/[!.]*/result.json")
        found.append(TrialResult.from_dict(json.loads(file.read_text())))

    tracker = Tracker(home.tracking_uri, home, drawn)
    tracker.start_search("s1", PROBLEM, ENVIRONMENT)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(measured(), samples())
    assert (tracker.notices, found) == ([], [measured()])


def test_rare_metrics_are_grouped_and_read_back_by_their_names(home: Home) -> None:
    tracker = start(home)
    named: dict[str, float | None]
    named = {"tokens_per_s": 1.0, "breakdown_matmul_s": 2.0, "slice_error_tokens_per_s": 3.0, "final_loss": 4.0}
    named |= {"power_spread_w": 5.0, "peak_memory_gib": 6.0, "breakdown_time_s": 7.0, "bound_step_time_s": 8.0}
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(TrialResult("s1-000", CONFIG, Status.OK, None, named))
    (trial,) = read(home).trials
    assert trial.metrics == named
    client = MlflowClient(home.tracking_uri)
    assert set(client.get_run(trial.run_id).data.metrics) == {
        "tokens_per_s",
        "peak_memory_gib",
        "breakdown/matmul_s",
        "breakdown/time_s",
        "slice_error/tokens_per_s",
        "bound/step_time_s",
        "more/final_loss",
        "more/power_spread_w",
    }


def test_metrics_of_an_older_record_are_read_and_its_series_are_none(home: Home) -> None:
    tracker = start(home)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(measured())
    client, run_id = MlflowClient(home.tracking_uri), read(home).trials[0].run_id
    for key in ("breakdown_matmul_s", "final_loss", "power_w/gpu0", "power_w/a-gpu0"):
        client.log_metric(run_id, key, 1.0)
    assert read(home).trials[0].metrics == {
        "tokens_per_s": 1e5,
        "joules_per_token": 0.07,
        "step_time_s": 0.5,
        "breakdown_matmul_s": 1.0,
        "final_loss": 1.0,
    }


def test_an_objective_keeps_its_plain_name_however_rare_it_is(home: Home) -> None:
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", replace(PROBLEM, goals=Goals({"power_spread_w": Direction.MINIMIZE})), ENVIRONMENT)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(TrialResult("s1-000", CONFIG, Status.OK, None, {"power_spread_w": 5.0}))
    run = MlflowClient(home.tracking_uri).get_run(read(home).trials[0].run_id)
    assert run.data.metrics == {"power_spread_w": 5.0}


def test_a_trial_says_what_its_search_is_of_and_why_it_ran(home: Home) -> None:
    tracker = start(home)
    for number, purpose in enumerate((Purpose.SEARCH, Purpose.FINALIST)):
        tracker.start_trial(f"s1-00{number}", CONFIG, purpose)
        tracker.finish_trial(replace(measured(f"s1-00{number}"), purpose=purpose))
    client = MlflowClient(home.tracking_uri)
    trials = read(home).trials
    runs = [client.get_run(trial.run_id) for trial in trials]
    assert [run.info.run_name for run in runs] == [CONFIG.label, f"finalist: {CONFIG.label}"]
    assert [trial.label for trial in trials] == [CONFIG.label] * 2
    facts = {"model": "tiny-llama", "accelerator": "cpu", "nodes": 1, "gpus_per_node": 2, "sequence_length": 128}
    assert {name: runs[0].data.params[name] for name in facts} == {name: str(value) for name, value in facts.items()}
    assert trials[0].facts == facts
    note = runs[1].data.tags["mlflow.note.content"]
    assert f"| {CONFIG.label} | finalist |" in note
    assert "| tokens/s | 100,000 |" in note


def test_the_view_of_a_search_is_kept_with_the_experiment(home: Home) -> None:
    start(home)
    client = MlflowClient(home.tracking_uri)
    experiment = client.get_experiment_by_name("wattune")
    assert experiment is not None
    envelope = json.loads(experiment.tags["mlflow.sharedViewState.s1"])
    state = json.loads(zlib.decompress(base64.b64decode(envelope["state"].removeprefix("deflate;"))))
    assert envelope["name"] == "tiny (s1)"
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`tokens_per_s`", False)
    found = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert len(found) == 0
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s2", PROBLEM, ENVIRONMENT)
    tracker.start_trial("s2-000", CONFIG)
    assert client.search_runs([experiment.experiment_id], state["searchFilter"]) == []
    assert len(client.search_runs([experiment.experiment_id], state["searchFilter"].replace("s1", "s2"))) == 1
    note = client.get_run(read(home).run_id).data.tags["mlflow.note.content"]
    assert f"#/experiments/{experiment.experiment_id}/runs?" in note
    assert "viewStateShareKey=s1" in note


def test_a_view_keeps_to_what_was_measured(home: Home) -> None:
    tracker, client = start(home), MlflowClient(home.tracking_uri)

    def charts() -> list[str]:
        experiment = client.get_experiment_by_name("wattune")
        assert experiment is not None
        packed = json.loads(experiment.tags["mlflow.sharedViewState.s1"])["state"]
        state = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
        assert {one["metricSectionId"] for one in state["compareRunCharts"]} <= {
            section["uuid"] for section in state["compareRunSections"]
        }
        return [one["displayName"] for one in state["compareRunCharts"]]

    assert charts() == ["joules_per_token by tokens_per_s", "Axes and objectives"]
    for number, metrics in enumerate(({"tokens_per_s": 1.0}, {"tokens_per_s": 1.0, "peak_memory_gib": 2.0})):
        tracker.start_trial(f"s1-00{number}", CONFIG)
        tracker.finish_trial(TrialResult(f"s1-00{number}", CONFIG, Status.OK, None, {**metrics}))
        memory = ["tokens_per_s by peak_memory_gib", "peak_memory_gib"] if number else []
        assert charts() == ["Axes and objectives", *memory]


def test_a_description_joins_the_link(home: Home) -> None:
    tracker = start(home)
    tracker.attach_description(lambda: "| the front |")
    note = MlflowClient(home.tracking_uri).get_run(read(home).run_id).data.tags["mlflow.note.content"]
    assert "viewStateShareKey=s1" in note
    assert note.endswith("| the front |")


def test_a_failed_trial_keeps_its_cause_and_no_figure_is_made_up(home: Home) -> None:
    tracker = start(home)
    tracker.start_trial("s1-000", CONFIG)
    metrics = {"tokens_per_s": None, "final_loss": math.nan, "peak_memory_gib": 139.5}
    tracker.finish_trial(
        TrialResult("s1-000", CONFIG, Status.OOM, "rank 2: out of memory", metrics, losses=(9.0, math.nan))
    )
    (trial,) = read(home).trials
    assert (trial.status, trial.cause) == ("oom", "rank 2: out of memory")
    assert trial.metrics == {"peak_memory_gib": 139.5}
    client = MlflowClient(home.tracking_uri)
    assert client.get_run(trial.run_id).info.status == "FAILED"
    assert history(client, trial.run_id, "step/loss") == [(0, 9.0)]


def test_estimated_energy_is_labelled_where_people_look(home: Home) -> None:
    tracker = start(home)
    result = TrialResult(
        "s1-000", CONFIG, Status.OK, None, {"joules_per_token": 1.0}, {"joules_per_token": Method.ESTIMATED}
    )
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(result)
    tags = MlflowClient(home.tracking_uri).get_run(read(home).trials[0].run_id).data.tags
    assert tags["wattune.energy"] == tags["wattune.method.joules_per_token"] == "estimated"
    assert "estimated" in tags["mlflow.note.content"]


def test_extrapolated_figures_are_labelled_with_their_depths(home: Home) -> None:
    tracker = start(home)
    part = TrialResult("s1-000-8-layers", CONFIG, Status.OK, None, {"tokens_per_s": 9.0})
    proxies = (Proxy(8, part), Proxy(16, part))
    methods = {"tokens_per_s": Method.EXTRAPOLATED}
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(
        TrialResult("s1-000", CONFIG, Status.OK, None, {"tokens_per_s": 1.0}, methods, proxies=proxies)
    )
    (trial,) = read(home).trials
    assert trial.methods == methods
    note = MlflowClient(home.tracking_uri).get_run(trial.run_id).data.tags["mlflow.note.content"]
    assert "**extrapolated** from models of 8 and 16 layers" in note


def test_a_short_trial_is_labelled_with_its_batches(home: Home) -> None:
    tracker = start(home)
    parts = [replace(CONFIG, global_batch_size=batch) for batch in (4, 8)]
    proxies = tuple(Proxy(8, TrialResult("s1-000", part, Status.OK)) for part in parts)
    methods = {"tokens_per_s": Method.SHORT}
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(
        TrialResult("s1-000", CONFIG, Status.OK, None, {"tokens_per_s": 1.0}, methods, proxies=proxies)
    )
    note = MlflowClient(home.tracking_uri).get_run(read(home).trials[0].run_id).data.tags["mlflow.note.content"]
    assert "**short** trial: steps of 4 and 8 sequences stand for steps of 16" in note


def test_purposes_and_failures_of_the_machines_are_recorded(home: Home) -> None:
    tracker = start(home)
    for i, purpose in enumerate(Purpose):
        tracker.start_trial(f"s1-00{i}", CONFIG, purpose)
    assert [trial.purpose for trial in read(home).trials] == list(Purpose)
    for i, purpose in enumerate(Purpose):
        tracker.finish_trial(
            TrialResult(f"s1-00{i}", CONFIG, Status.CRASH, "why", purpose=purpose, infrastructure=i == 1)
        )
    trials = read(home).trials
    assert [(trial.purpose, trial.infrastructure) for trial in trials] == [(p, p == Purpose.FINALIST) for p in Purpose]


def test_limits_of_a_batch_are_kept(home: Home) -> None:
    tracker = start(home, environment={f"p{i:03d}": "x" * 7000 for i in range(150)})
    tracker.start_trial("s1-000", CONFIG)
    methods = {f"m{i:03d}": Method.COUNTER for i in range(150)}
    losses = tuple(map(float, range(2500)))
    result = TrialResult("s1-000", CONFIG, Status.CRASH, "z" * 9000, methods=methods, losses=losses)
    tracker.finish_trial(result)
    assert tracker.notices == []
    search = read(home)
    assert len(search.environment) == len(search.trials[0].methods) == 150
    assert search.trials[0].cause is not None
    client = MlflowClient(home.tracking_uri)
    assert len(history(client, search.trials[0].run_id, "step/loss")) == 2500


def test_what_mlflow_does_not_take_stays_on_disk_and_is_sent_in_the_end(home: Home) -> None:
    tracker = start(home)
    tracker.start_trial("s1-000", CONFIG)
    artifacts = home.path / "artifacts"
    shutil.move(artifacts, home.path / "moved")
    artifacts.write_text("in the way of the artifact directory")
    tracker.finish_trial(measured(), samples())
    unsent = home.spool("s1") / "unsent" / "s1-000"
    assert TrialResult.from_dict(json.loads((unsent / "result.json").read_text())) == measured()
    assert read_samples(unsent / "samples.parquet").num_rows == 8
    assert len(tracker.notices) == 1
    assert str(unsent) in tracker.notices[0]

    artifacts.unlink()
    shutil.move(home.path / "moved", artifacts)
    tracker.finish_search("finished", {})
    assert tracker.notices == []
    (trial,) = read(home).trials
    assert (trial.status, trial.metrics["tokens_per_s"]) == ("ok", 1e5)
    assert not unsent.exists()
    client = MlflowClient(home.tracking_uri)
    assert len(history(client, trial.run_id, "tokens_per_s")) == 1


def test_a_trial_under_way_when_the_search_stops_is_marked(home: Home) -> None:
    tracker = start(home)
    tracker.start_trial("s1-000", CONFIG)
    tracker.finish_search("stopped", {})
    search = read(home)
    assert (search.status, search.trials[0].status) == ("stopped", "stopped")
    client = MlflowClient(home.tracking_uri)
    assert {client.get_run(run).info.status for run in (search.run_id, search.trials[0].run_id)} == {"KILLED"}


def test_a_store_that_cannot_be_used_is_refused(home: Home, tmp_path: Path) -> None:
    (tmp_path / "junk.db").write_text("this is no database, and long enough to tell" * 50)
    for uri, named in (
        ("./mlruns", "tracking URI"),
        (f"sqlite:///{tmp_path}/nowhere/m.db", "tracking URI"),
        (f"sqlite:///{tmp_path}/junk.db", "junk.db: cannot be read: file is not a database"),
        ("http://127.0.0.1:9", "tracking URI"),
    ):
        with pytest.raises(InputError, match=named) as refused:
            Tracker(uri, home)
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError) as refused:
        Tracker("http://me:secret@127.0.0.1:9", home)
    assert "secret" not in str(refused.value)


def test_making_and_writing_the_store_prints_nothing(tmp_path: Path) -> None:
    code = """
import sys
from service.home import Home
from service.record.tracking import Tracker
from service.spec import parse_spec
home = Home.locate()
tracker = Tracker(home.tracking_uri, home)
tracker.start_search("s", parse_spec(sys.argv[1]), {})
tracker.finish_search("finished", {})
"""
    environment = {**os.environ, "WATTUNE_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code, dump_spec(PROBLEM)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@contextmanager
def mlflow_server(home: Home, port: int, backend: str | None = None) -> Iterator[str]:
    """A real tracking server on loopback, which keeps its artifacts itself; `backend`: its database."""
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    options += ["--backend-store-uri", backend or home.tracking_uri]
    options += ["--artifacts-destination", str(home.path / "kept-by-server")]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *options],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300  # others may have the cores
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:  # it waits for those who are connected
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)


@pytest.mark.slow
def test_what_a_server_that_is_gone_for_good_has_not_taken_is_sent_when_the_search_is_resumed(home: Home) -> None:
    port = free_port()
    with mlflow_server(home, port) as uri:
        tracker = start(home, uri)
        tracker.start_trial("s1-000", CONFIG)
    tracker.finish_trial(measured("s1-000"), samples())
    tracker.start_trial("s1-001", CONFIG)
    tracker.finish_trial(measured("s1-001"), samples())
    tracker.finish_search("finished", {})
    kept = home.spool("s1") / "unsent"
    assert all(any(f"; kept in {kept / trial}" in told for told in tracker.notices) for trial in ("s1-000", "s1-001"))
    assert {path.name for path in kept.iterdir()} == {"s1-000", "s1-001"}
    with mlflow_server(home, port) as uri:
        assert read(home, uri).status == "running", "it never heard of the end"
        again = Tracker(uri, home)
        again.resume_search(read(home, uri), PROBLEM)
        assert [(t.trial_id, t.status) for t in read(home, uri).trials] == [("s1-000", "ok"), ("s1-001", "ok")]
        assert not list(kept.iterdir())
        again.finish_search("finished", {})
        assert read(home, uri).status == "finished"


@pytest.mark.slow
def test_a_server_that_goes_away_during_the_search_loses_nothing(
    home: Home, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with mlflow_server(home, port) as uri:
        tracker = start(home, uri)
        tracker.start_trial("s1-000", CONFIG)
        tracker.finish_trial(measured("s1-000"), samples())
        tracker.start_trial("s1-001", CONFIG)
    tracker.finish_trial(measured("s1-001"), samples())
    tracker.start_trial("s1-002", CONFIG)
    tracker.finish_trial(measured("s1-002"), samples())
    assert {path.name for path in (home.spool("s1") / "unsent").iterdir()} == {"s1-001", "s1-002"}
    with mlflow_server(home, port) as uri:
        tracker.finish_search("finished", {})
        assert tracker.notices == []
        search = read(home, uri)
        assert [(t.trial_id, t.status) for t in search.trials] == [(f"s1-00{i}", "ok") for i in range(3)]
        assert search.trials[2].layout == CONFIG
        client = MlflowClient(uri)
        path = client.download_artifacts(search.trials[2].run_id, "samples.parquet", str(tmp_path))
        assert read_samples(Path(path)).equals(samples())
    assert capfd.readouterr().out == ""
