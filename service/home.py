"""Where Wattune keeps what is its own: the state directory, and the tracking URI that follows from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The state directory. Nothing is created before something is written: see `create`."""

    path: Path

    @classmethod
    def locate(cls) -> Home:
        """`WATTUNE_HOME`, by default `.wattune` in the working directory; always an absolute path."""
        return cls(Path(os.environ.get("WATTUNE_HOME") or ".wattune").expanduser().absolute())

    def create(self) -> Home:
        """Make the directory, which MLflow and Optuna need before they open their databases in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self

    @property
    def tracking_uri(self) -> str:
        """MLflow's embedded store."""
        return f"sqlite:///{self.path / 'mlflow.db'}"

    @property
    def artifacts(self) -> str:
        """URI under which the embedded store keeps artifacts."""
        return (self.path / "artifacts").as_uri()

    @property
    def optuna_storage(self) -> str:
        return f"sqlite:///{self.path / 'optuna.db'}"

    @property
    def data(self) -> Path:
        """Prepared token files."""
        return self.path / "data"

    @property
    def telemetry(self) -> Path:
        """Samples as each node takes them, on its own disk: see `telemetry.spool`."""
        return self.path / "telemetry"

    def spool(self, search_id: str) -> Path:
        """What a search has on disk while it runs: raw samples, and trials that MLflow has not taken yet."""
        return self.path / "spool" / search_id


def tracking_uri(explicit: str | None = None) -> str:
    """The MLflow store in use: the one asked for, else `MLFLOW_TRACKING_URI`, else the embedded one."""
    return explicit or os.environ.get("MLFLOW_TRACKING_URI") or Home.locate().tracking_uri
