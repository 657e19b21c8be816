from __future__ import annotations

import errno
from pathlib import Path

import pytest

from service.errors import InputError, SearchError
from service.home import Home, tracking_uri


def test_default_is_an_absolute_directory_under_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATTUNE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert Home.locate().path == tmp_path / ".wattune"
    monkeypatch.setenv("WATTUNE_HOME", "elsewhere")
    assert Home.locate().path == tmp_path / "elsewhere"
    (tmp_path / "elsewhere").touch()
    with pytest.raises(InputError, match="elsewhere is no directory: it is a file"):
        Home.locate()


def test_everything_lies_in_the_directory_and_asking_creates_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "state")
    assert home.tracking_uri == f"sqlite:///{tmp_path}/state/mlflow.db"
    assert home.optuna_storage == f"sqlite:///{tmp_path}/state/optuna.db"
    assert home.artifacts == f"file://{tmp_path}/state/artifacts"
    assert home.spool("a-search").is_relative_to(home.path)
    assert home.data.is_relative_to(home.path)
    assert not home.path.exists()
    assert home.create().path.is_dir()


def test_a_home_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "home", Path("/proc/wattune"), Path("/proc")):
        with pytest.raises(InputError, match=rf"^WATTUNE_HOME: {path} is no directory to write to: .+"):
            Home(path).create()


def test_tracking_uri_prefers_what_is_asked_for_then_mlflow_then_the_embedded_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert tracking_uri("http://asked:5000") == "http://asked:5000"
    assert tracking_uri() == "http://mlflow:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"


def drive(home: Home, failure: Exception | None = None) -> None:
    with home.driving("s"):
        assert home.driven("s") is True
        with pytest.raises(InputError, match="is running"), home.driving("s"):
            pass
        if failure is not None:
            raise failure


def test_a_lock_stays_where_a_search_did_not_come_to_its_end(tmp_path: Path) -> None:
    home = Home(tmp_path)
    drive(home)
    assert home.driven("s") is None
    with pytest.raises(InputError, match="refused"):
        drive(home, InputError("refused"))
    assert home.driven("s") is None, "nothing has begun"
    with pytest.raises(SearchError):
        drive(home, SearchError("failed"))
    assert home.driven("s") is False
    with pytest.raises(InputError, match="refused"):
        drive(home, InputError("refused"))
    assert home.driven("s") is False, "as it was before"
    drive(home)
    assert not home.spool("s").exists()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),  # a file that is open
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "HOME/spool/s/unsent/t"), True),
        (PermissionError(errno.EACCES, "Permission denied", b"HOME/mlflow.db"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/tokens.bin"), False),
        (ConnectionError("Failed to connect to Ray cluster"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (TimeoutError("it took too long"), False),
    ],
)
def test_a_directory_that_cannot_be_written_is_told_from_other_errors(
    error: OSError, why: bool, tmp_path: Path
) -> None:
    if isinstance(error.filename, bytes):
        error.filename = error.filename.replace(b"HOME", bytes(tmp_path))
    elif error.filename is not None:
        error.filename = error.filename.replace("HOME", str(tmp_path))
    assert Home(tmp_path).is_why(error) == why


def test_a_directory_that_cannot_be_written_is_told_and_a_look_leaves_nothing(tmp_path: Path) -> None:
    Home(tmp_path).check_writable()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Home(tmp_path / "file").check_writable()
