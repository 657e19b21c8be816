"""What this very machine says of itself."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main
from service.doctor.gather import disk
from service.doctor.nodes import store_facts
from service.home import Home


def test_a_disk_that_takes_no_more_is_told_with_the_reason(tmp_path: Path) -> None:
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
        full = disk(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (full.free_bytes, full.write_bytes_per_s, full.error) == (None, None, "File too large")
    good = disk(tmp_path)
    assert good.error is None
    assert good.write_bytes_per_s is not None
    assert good.write_bytes_per_s > 1e5


def test_the_command_examines_this_machine_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow is away; how busy this machine is, nobody knows."""
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    called = CliRunner().invoke(main, ["doctor", "--json", "--tracking-uri", "http://127.0.0.1:9"])
    assert called.exit_code == 1, called.output
    answer = json.loads(called.stdout)
    assert not answer["well"]
    (away,) = (one for one in answer["findings"] if one["check"] == "mlflow")
    assert (away["verdict"], away["subject"]) == ("wrong", "http://127.0.0.1:9")
    assert "no server answers there" in away["seen"]
    (node,) = answer["facts"]["nodes"]
    kept = [path.read_text().splitlines() for path in (tmp_path / "home" / "doctor").glob("*.jsonl")]
    if node["host"] is None:
        assert kept == []
        assert "left alone" in node["host_error"]
    else:
        ((line,),) = kept
        assert json.loads(line)["flops"] == node["host"]["flops"]


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    command = [sys.executable, "-m", "service.cli", "doctor", "--address", "127.0.0.1:9"]
    called = subprocess.run(command, capture_output=True, text=True, check=False)  # this process may have joined a Ray
    assert (called.returncode, called.stdout) == (2, "")
    assert called.stderr.startswith("wattune: address 127.0.0.1:9: no Ray cluster answers")
    assert called.stderr.count("\n") == 1


def test_a_machine_that_nothing_was_recorded_on_has_no_store_yet(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    own = f"sqlite:///{home.path / 'mlflow.db'}"
    assert store_facts(own, home).error is None
    assert not home.path.exists()
    assert "there is no directory" in (
        store_facts(f"sqlite:///{tmp_path / 'elsewhere' / 'mlflow.db'}", home).error or ""
    )
