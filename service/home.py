"""Where Wattune keeps what is its own: the state directory, and the tracking URI that follows from it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.errors import InputError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What writing to a file that is open fails with when its disk takes no more."""


@dataclass(frozen=True)
class Home:
    """The state directory. Nothing is created before something is written: see `create`."""

    path: Path

    @classmethod
    def locate(cls) -> Home:
        """`WATTUNE_HOME`, by default `.wattune` in the working directory; always an absolute path.

        Raises `InputError` if it is a file.
        """
        path = Path(os.environ.get("WATTUNE_HOME") or ".wattune").expanduser().absolute()
        if path.is_file():
            raise InputError(f"WATTUNE_HOME: {path} is no directory: it is a file")
        return cls(path)

    def create(self) -> Home:
        """Make the directory, which MLflow and Optuna need before they open their databases in it.

        Raises `InputError` if that is not possible, or nothing can be written there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.check_writable()
        except OSError as error:
            raise InputError(f"WATTUNE_HOME: {self.path} is no directory to write to: {error.strerror}") from None
        return self

    def is_to_hold(self, file: Path) -> bool:
        """Whether a file's place is right in this directory, which need not be there yet: what records makes it."""
        return file.absolute().parent == self.path

    def check_writable(self) -> None:
        """Raise `OSError` if nothing can be written here any more."""
        with tempfile.TemporaryFile(dir=self.path) as file:
            file.write(bytes(4096))

    def is_why(self, error: OSError) -> bool:
        """Whether an error is that this directory cannot be written, by the file that it names or else by its kind."""
        if isinstance(error.filename, str | bytes):
            return Path(os.fsdecode(error.filename)).is_relative_to(self.path)
        return error.errno in _NO_SPACE

    @property
    def tracking_uri(self) -> str:
        """MLflow's embedded store."""
        return f"sqlite:///{self.path / 'mlflow.db'}"

    @property
    def artifact_folder(self) -> Path:
        """Where the embedded store keeps artifacts, a folder for each run."""
        return self.path / "artifacts"

    @property
    def artifacts(self) -> str:
        """That folder's URI."""
        return self.artifact_folder.as_uri()

    @property
    def optuna_database(self) -> Path:
        return self.path / "optuna.db"

    @property
    def optuna_storage(self) -> str:
        return f"sqlite:///{self.optuna_database}"

    @property
    def data(self) -> Path:
        """Prepared token files."""
        return self.path / "data"

    @property
    def telemetry(self) -> Path:
        """Samples as each node takes them, on its own disk: see `telemetry.spool`."""
        return self.path / "telemetry"

    @property
    def compiled(self) -> Path:
        """What torch compiled for layouts, taken again by later searches on this machine."""
        return self.path / "compiled"

    @property
    def examinations(self) -> Path:
        """What devices attained each time that they were examined: see `service.history`."""
        return self.path / "doctor"

    def calibration(self, accelerator: str) -> Path:
        """The cost model's coefficients as trials on these machines have them: see `service.fitting`."""
        return self.path / "calibration" / f"{accelerator}.json"

    def operators(self, accelerator: str) -> Path:
        """What operators take on these machines, as it was measured: see `service.fitting`."""
        return self.path / "calibration" / f"{accelerator}-operators.json"

    def collectives(self, accelerator: str) -> Path:
        """What collectives take on these machines, as it was measured: see `service.fitting`."""
        return self.path / "calibration" / f"{accelerator}-collectives.json"

    def spool(self, search_id: str) -> Path:
        """What a search has on disk while it runs: raw samples, and trials that MLflow has not taken yet."""
        return self.path / "spool" / search_id

    @contextlib.contextmanager
    def driving(self, search_id: str) -> Iterator[None]:
        """Be the one driver of a search. Raises `InputError` if another process is.

        The lock is the kernel's, which takes it from a process that dies. The file stays where a search did not come to
        its end: where a driver was killed or failed, or where one that should take its place was refused.
        """
        lock = self._lock(search_id)
        lock.parent.mkdir(parents=True, exist_ok=True)
        left, keep = lock.exists(), True
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"search {search_id} is running: its driver is alive") from None
            try:
                yield
                keep = False
            except InputError:
                keep = left
                raise
            finally:
                if not keep:
                    lock.unlink()
                    with contextlib.suppress(OSError):  # trials that the tracking store has not taken stay
                        lock.parent.rmdir()

    def driven(self, search_id: str) -> bool | None:
        """Whether a driver of the search is alive by the lock here; None if it never ran here, or came to its end."""
        try:
            with self._lock(search_id).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return True
        return False

    def _lock(self, search_id: str) -> Path:
        return self.spool(search_id) / "driver.lock"


def user() -> str:
    """Whose searches these are: of who submitted them, as `WATTUNE_USER` says, else of this process's user."""
    if name := os.environ.get("WATTUNE_USER"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user id without a name
        return str(os.getuid())


def tracking_uri(explicit: str | None = None) -> str:
    """The MLflow store in use: the one asked for, else `MLFLOW_TRACKING_URI`, else the embedded one."""
    return explicit or os.environ.get("MLFLOW_TRACKING_URI") or Home.locate().tracking_uri
