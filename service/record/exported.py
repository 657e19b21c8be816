"""A search as `wattune trials SEARCH --json` prints it, read from a file where its store is out of reach."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from service.errors import InputError
from service.record.results import SearchRecord, TrialRecord


def read(path: Path) -> SearchRecord:
    """The search, by the file's name. Its objectives, its constraints and its environment are not known.

    Raises `InputError` for a file that cannot be read, or that holds something else.
    """
    try:
        trials = tuple(TrialRecord.from_dict(row) for row in json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{path}: is not what `wattune trials SEARCH --json` prints") from None
    return SearchRecord(
        id=path.stem,
        name=path.stem,
        status="finished",
        started=min((trial.started for trial in trials if trial.started), default=datetime.fromtimestamp(0, UTC)),
        objectives={},
        constraints=(),
        params=trials[0].facts if trials else {},
        environment={},
        notices=(),
        run_id="",
        trials=trials,
    )
