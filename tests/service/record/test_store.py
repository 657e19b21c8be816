"""Stores that cannot be opened are refused at once, with the cause; one process at a time makes a database."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import service
from service.errors import InputError
from service.record import store

OPENING = """
import sys
from service.home import Home
from service.record.tracking import Tracker
from service.sampling.study import SearchStudy
from service.spec import load_spec

home = Home.locate().create()
problem = load_spec(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
tracker = Tracker(home.tracking_uri, home)
SearchStudy(sys.argv[2], problem.legal.layouts, problem.goals, "random", 0, home.optuna_storage)
tracker.start_search(sys.argv[2], problem, {})
"""
SPEC = (
    "{name: a, model: tiny-llama, data: synthetic, sequence_length: 64, global_batch_size: 8, "
    "cluster: {gpus_per_node: 2, accelerator: cpu}}"
)


@pytest.mark.parametrize("content", [b"this is no database, but text", bytes(range(256)) * 64])
def test_a_file_that_is_no_database_is_refused_at_once(content: bytes, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    database.write_bytes(content)
    began = time.process_time()
    with pytest.raises(InputError, match=rf"^{database}: cannot be read: file is not a database; move it away"):
        store.check(f"sqlite:///{database}")
    assert time.process_time() - began < 1
    assert database.read_bytes() == content


def test_a_place_that_cannot_hold_a_database_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^/proc/mlflow\.db: cannot be made: .+"):
        store.check("sqlite:////proc/mlflow.db")
    with pytest.raises(InputError, match=f"there is no directory {tmp_path}/nowhere"):
        store.check(f"sqlite:///{tmp_path}/nowhere/mlflow.db")
    store.check(f"sqlite:///{tmp_path}/mlflow.db")
    assert list(tmp_path.iterdir()) == [], "asking makes nothing"


@pytest.mark.parametrize(
    ("uri", "packages"),
    [
        ("postgresql://me:secret@db/wattune", {"psycopg2": "psycopg2-binary", "psycopg": "'psycopg[binary]'"}),
        ("mysql://me:secret@db/wattune", {"MySQLdb": "mysqlclient"}),
        ("mysql+pymysql://me:secret@db/wattune", {"pymysql": "pymysql"}),
        ("mssql://me:secret@db/wattune", {"pyodbc": "pyodbc"}),
    ],
)
def test_a_driver_that_is_missing_is_named_as_its_package(uri: str, packages: dict[str, str]) -> None:
    """Which driver is the usual one depends on the version of SQLAlchemy."""
    if any(importlib.util.find_spec(module) for module in packages):
        pytest.skip("there is a driver")
    with pytest.raises(InputError) as error:
        store.open_client(uri)
    assert str(error.value) in [
        f"tracking URI {uri.replace('me:secret', '***')!r}: its driver is missing: pip install {package}"
        for package in packages.values()
    ]


def test_a_database_is_opened_by_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        with store.alone(tmp_path / "some.db"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(tmp_path.iterdir()) == []
    with store.alone(None):
        pass


@pytest.mark.slow
def test_searches_that_begin_at_once_in_a_fresh_home_both_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(service.__file__).parents[1]))
    command = [sys.executable, "-c", OPENING, str(tmp_path / "spec.yaml")]
    started = [
        subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in ("one", "two", "three")
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
