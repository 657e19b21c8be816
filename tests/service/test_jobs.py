"""Searches on a Ray cluster of their own: `ray start`, with token authentication, and an MLflow server."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from service import InputError, SearchError, Wattune, jobs
from service.cli import main
from service.home import Home
from service.problem import Problem
from service.record import store
from service.spec import parse_spec
from tests.conftest import free_port

SPEC = """
name: tiny
model: {{family: llama, layers: 2, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 257}}
data: {data}
sequence_length: 64
global_batch_size: 4
cluster: {{nodes: 1, gpus_per_node: 2, accelerator: cpu, cpus_per_worker: 0.5}}
space: {{tensor_parallel_size: [1, 2], zero_stage: [0, 1, 2], micro_batch_size: [1, 2], precision: fp32}}
measurement: {{window_s: {window_s}, warmup_max_s: 1, deadline_s: 120}}
budget: {{trials: 3}}
finalists: {{count: 0}}
sentinel_every: 0
"""


class Cluster:
    """A Ray cluster of this machine alone, with a token and a state directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.token, self.home, self.log = secrets.token_hex(16), directory / "home", directory / "ray.log"
        self.policy = directory / "policy.yaml"
        self.policy.write_text("{}")
        self.temp = tempfile.mkdtemp(prefix="wattune-ray-")  # Ray's sockets need a short path
        port, dashboard, client, agent = (str(free_port()) for _ in range(4))
        self.address, self.gcs = f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
        command += [f"--temp-dir={self.temp}", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        command += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_"))}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "WATTUNE_HOME": str(self.home)}
        environment |= {"WATTUNE_POLICY": str(self.policy)}
        environment |= {"RAY_worker_niceness": "0"}  # or its workers stand back behind all other tests
        with self.log.open("w") as log:
            self.process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def processes(self) -> dict[int, str]:
        """Id and title of every process of the cluster."""
        found = {}
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found[process.pid] = " ".join(process.cmdline())
        return found

    def of_searches(self) -> dict[int, str]:
        """Those of them that a search started: what is left without Ray's own, which outlive any job."""
        own = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_AutoscalingCoordinatorActor")
        return {
            pid: title
            for pid, title in self.processes().items()
            if (title.startswith("ray::") and not title.startswith(own))
            or any(mark in title for mark in ("trainables.", "wattune run", "wattune resume", "JobSupervisor"))
        }

    def workers(self) -> list[int]:
        """The workers of gangs that have a trial under way: each has a child of its fork server."""
        titles = self.processes()
        workers = [pid for pid, title in titles.items() if title.startswith("ray::RayTrainWorker")]
        return [pid for pid in workers if len(psutil.Process(pid).children(recursive=True)) > 2]

    def close(self) -> None:
        processes = [self.process, *self.process.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        shutil.rmtree(self.temp, ignore_errors=True)


def wait_until(holds: Callable[[], Any], seconds: float) -> Any:
    """The first true value of `holds()`."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.2)
    return value


def takes_jobs(address: str, token: str) -> bool:
    """Whether the job server answers and has an agent to give jobs to, which comes up later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", token)
        with contextlib.suppress(InputError), jobs._cluster(address) as client:
            return bool(client.submit_job(entrypoint="true"))
    return False


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        wait_until(lambda: takes_jobs(cluster.address, cluster.token), 240)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", running_cluster.token)
    monkeypatch.setattr(jobs, "PROBE_S", 60.0)  # of a busy machine
    return running_cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server; its URL."""
    directory, port = tmp_path_factory.mktemp("server"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db", "--artifacts-destination", str(directory)]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (directory / "server.log").open("w") as log:
        process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: store.reachable(f"http://127.0.0.1:{port}"), 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        for child in [*process.children(recursive=True), process]:
            child.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.tile(np.arange(257, dtype=np.uint16), 100))
    return path


def spec(data: object = "synthetic", window_s: float = 1.0) -> Problem:
    return parse_spec(SPEC.format(data=data, window_s=window_s))


def test_a_store_that_the_cluster_cannot_reach_is_refused_before_the_cluster_is_asked() -> None:
    for hand_in in (partial(jobs.submit, spec()), partial(jobs.resubmit, "a-search")):
        with pytest.raises(InputError, match=r"needs an MLflow server .* --tracking-uri or MLFLOW_TRACKING_URI"):
            hand_in("http://127.0.0.1:9", "sqlite:////somewhere/mlflow.db")
        with pytest.raises(InputError, match="no server answers there"):
            hand_in("http://127.0.0.1:9", "http://127.0.0.1:9")


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://[::", "127.0.0.1:8265", "ray://127.0.0.1:10001"])
def test_an_address_that_cannot_be_used_is_one_line_at_once(address: str) -> None:
    began = time.monotonic()
    for ask in (jobs.stop, jobs.submission, lambda *arguments: next(jobs.logs(*arguments))):
        with pytest.raises(InputError, match=r"^address .*job server") as refusal:
            ask("a-search", address)
        assert "\n" not in str(refusal.value)
    assert time.monotonic() - began < 60, "Ray's own client goes on for minutes"


def test_an_address_that_never_answers_is_given_up_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PROBE_S", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(InputError, match="no Ray job server answers there"),
    ):
        jobs.stop("a-search", f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_the_token_comes_from_where_ray_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert jobs.cluster_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("default\n")
    assert jobs.cluster_token() == "default"
    (tmp_path / "other").write_text("named")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    assert jobs.cluster_token() == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert jobs.cluster_token() == "given"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert jobs.cluster_token() is None


def test_a_cluster_refuses_with_one_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"search 'nowhere' is unknown at http://127"):
        jobs.stop("nowhere", cluster.address)
    # Ray's own client would let these decide.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"search 'nowhere' is unknown"):
        jobs.submission("nowhere", cluster.address)
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:9"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(InputError, match="the token in use is not the cluster's"):
        jobs.stop("nowhere", cluster.address)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match="the cluster asks for its token"):
        jobs.stop("nowhere", cluster.address)


@pytest.mark.parametrize(
    ("token", "command", "answer"),
    [
        (None, "run", "the Ray cluster at {} refuses to be joined: it wants its token; put the cluster's"),
        ("wrong", "top", "the Ray cluster at {} refuses to be joined: the token in use is not its own; put the"),
        ("its own", "top", "no telemetry at address {}: no search is running there"),
    ],
)
def test_who_joins_a_cluster_needs_its_token_and_nothing_else(
    token: str | None, command: str, answer: str, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.format(data="synthetic", window_s=1))
    if token is not None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text(cluster.token if token == "its own" else token)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path), "RAY_ADDRESS": cluster.gcs, "WATTUNE_HOME": str(tmp_path / "home")}
    arguments = [command, "spec.yaml"] if command == "run" else [command]
    refused = subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(jobs.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"wattune: {answer.format(cluster.gcs)}")
    assert refused.returncode == 2


def told(cluster: Cluster, *arguments: str) -> Any:
    asked = CliRunner().invoke(main, [*arguments, "--address", cluster.address, "--json"])
    assert asked.exit_code == 0, asked.output
    return json.loads(asked.stdout)


@pytest.mark.slow  # several drivers, 20 s
def test_what_only_the_cluster_can_see_is_told_to_the_submitter(
    cluster: Cluster, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The data are looked at before the tracking store: any server will do for one.
    with pytest.raises(InputError, match=r"^search tiny-\S+ did not start: data: ") as refusal:
        jobs.submit(spec("absent/tokens.npy"), cluster.address, cluster.address)
    assert str(tmp_path / "absent/tokens.npy") in str(refusal.value)
    search = str(refusal.value).split()[1]
    assert "wattune: data: " in "".join(jobs.logs("tiny", cluster.address))
    with pytest.raises(InputError, match="is not running: its job has failed"):
        jobs.stop("tiny", cluster.address)
    info = told(cluster, "status", search[:-1])
    assert (info["id"], info["status"], info["trials"]) == (search, "failed", {})
    assert info["cause"].startswith("data: ")
    assert (search, "failed") in [(one["id"], one["status"]) for one in told(cluster, "list")]
    assert Wattune().searches() == []
    with pytest.raises(InputError, match=r"is unknown at sqlite.*; search 'nowhere' is unknown at http"):
        Wattune(address=cluster.address).status("nowhere")


@pytest.mark.slow  # half a minute: what the head and workers say alone is tested beside their rooms
def test_data_that_the_operator_does_not_allow_are_refused_however_a_search_comes(
    cluster: Cluster, home: Home, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.gcs)
    (team := tmp_path / "team").mkdir()
    (team / "tokens.npy").symlink_to(tokens)
    file = tmp_path / "spec.yaml"
    lies, leads = "/absent lies", f"{team}/tokens.npy leads by a symbolic link"  # what is not there is not told
    said = f"data: {{}} outside of what WATTUNE_POLICY allows: synthetic, {team}, s3://bucket/team\n"
    cluster.policy.write_text(f"data: [{team}, 's3://bucket/team']\n")
    try:
        file.write_text(SPEC.format(data="team/tokens.npy", window_s=1))
        run = [sys.executable, "-m", "service.cli", "run", str(file)]
        joined = subprocess.run(run, capture_output=True, text=True, check=False)  # by a process without WATTUNE_POLICY
        assert (joined.returncode, joined.stdout, joined.stderr) == (2, "", f"wattune: {said.format(leads)}")
        file.write_text(SPEC.format(data="/absent", window_s=1))
        submit = ["submit", str(file), "--address", cluster.address, "--tracking-uri", cluster.address]
        submitted = CliRunner().invoke(main, submit)
        assert (submitted.exit_code, submitted.stdout) == (2, "")
        search = submitted.stderr.split()[2]
        assert submitted.stderr == f"wattune: search {search} did not start: {said.format(lies)}"
    finally:
        cluster.policy.write_text("{}")
    assert Wattune().searches() == []


@pytest.mark.slow
def test_a_search_that_has_not_begun_in_time_is_known_by_its_job(
    cluster: Cluster, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hurried:
        hurried.setattr(jobs, "START_S", 0.0)
        with pytest.raises(
            SearchError, match=r"^search \S+ has not begun within 0 s: .*`wattune stop` calls it off$"
        ) as late:
            jobs.submit(replace(spec("/absent/tokens.npy"), name="unrecorded"), cluster.address, cluster.address)
    search = str(late.value).split()[1]
    assert told(cluster, "status", search)["status"] in ("pending", "running")
    wait_until(lambda: told(cluster, "status", search)["status"] == "failed", 60)


@pytest.mark.slow
def test_a_submitted_search_survives_its_submitter_and_the_death_of_a_worker(
    cluster: Cluster, server: str, tokens: Path, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.format(data=os.path.relpath(tokens, tmp_path), window_s=4))
    submit = [sys.executable, "-m", "service.cli", "submit", str(tmp_path / "spec.yaml"), "--address", cluster.address]
    done = subprocess.run([*submit, "--tracking-uri", server], capture_output=True, text=True, check=True)
    search = done.stdout.strip()
    client = Wattune(server, cluster.address)
    assert client.status(search).status in ("queued", "running")
    assert search in [one.id for one in client.searches()]

    wait_until(lambda: client.status(search).trials.get("ok") and len(cluster.workers()) == 2, 120)
    os.kill(cluster.workers()[1], signal.SIGKILL)
    printed = list(client.logs(search))

    assert printed[-1].endswith("\n")
    assert [line for line in printed if line.startswith(f"search {search}:")]
    assert client.status(search).status == "finished"
    assert client.status(search).trials == {"ok": 3, "crash": 1}, "the layout that lost its worker was run again"
    assert client.best(search).candidate.metrics["tokens_per_s"] > 0
    assert jobs.submission(search, cluster.address).status == "finished"
    wait_until(lambda: not cluster.of_searches(), 120)
    assert (cluster.home / "optuna.db").exists()


@pytest.mark.slow
def test_a_stopped_search_keeps_its_record_and_leaves_no_process(cluster: Cluster, server: str, tokens: Path) -> None:
    client = Wattune(server, cluster.address)
    search = jobs.submit(spec(tokens, window_s=5), cluster.address, server)
    wait_until(lambda: {"ok", "running"} <= set(client.status(search).trials), 120)
    client.stop(search)
    wait_until(lambda: client.status(search).status != "running", 120)
    info = client.status(search)
    assert (info.status, info.trials) == ("stopped", {"ok": 1, "stopped": 1})
    wait_until(lambda: jobs.submission(search, cluster.address).status == "stopped", jobs.STOP_S / 2)
    wait_until(lambda: not cluster.of_searches(), 120)
    with pytest.raises(InputError, match="is not running: its job has stopped"):
        client.stop(search)


@pytest.mark.slow
def test_a_search_whose_driver_died_is_told_from_a_running_one_and_resumed(
    cluster: Cluster, server: str, tokens: Path
) -> None:
    client = Wattune(server, cluster.address)
    search = jobs.submit(spec(tokens, window_s=5), cluster.address, server)
    wait_until(lambda: "running" in client.status(search).trials, 120)
    (driver,) = (pid for pid, title in cluster.processes().items() if "wattune run" in title and search in title)
    os.kill(driver, signal.SIGKILL)
    wait_until(lambda: jobs.submission(search, cluster.address).status == "failed", 120)
    assert client.status(search).status == "failed"
    wait_until(lambda: not cluster.of_searches(), 60)

    assert client.resume(search[:-1]) == search
    printed = list(client.logs(search))
    assert [line for line in printed if "0 of them done" in line], "of its latest job"
    assert client.status(search).status == "finished"
    assert client.status(search).trials == {"stopped": 1, "ok": 3}
    assert jobs.submission(search, cluster.address).status == "finished"
    with pytest.raises(InputError, match=f"search {search} did not start: search {search} is finished"):
        client.resume(search)
    wait_until(lambda: not cluster.of_searches(), 60)
