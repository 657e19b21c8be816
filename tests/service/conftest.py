"""A state directory whose MLflow database exists already: creating one takes seconds, copying it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from service.home import Home
from service.record.tracking import Tracker


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = Home(tmp_path_factory.mktemp("empty"))
    Tracker(home.tracking_uri, home)
    return home.path / "mlflow.db"


@pytest.fixture
def home(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    home = Home.locate().create()
    shutil.copy(empty_database, home.path / "mlflow.db")
    return home
