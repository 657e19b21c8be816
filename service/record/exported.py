"""A search as one JSON file, read where its store is out of reach.

Either what `wattune trials SEARCH --json` prints, the trials alone, or an object that has beside them, under `search`,
what `document` gives; whatever else it has is its writer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.errors import InputError
from service.metrics import Direction
from service.record.results import SearchRecord, TrialRecord


def document(search: SearchRecord) -> dict[str, Any]:
    """JSON-safe: what `read` takes."""
    facts = {name: getattr(search, name) for name in ("id", "name", "status", "objectives", "params", "environment")}
    lists = {"constraints": list(search.constraints), "notices": list(search.notices)}
    return {
        "search": facts | lists | {"started": search.started.isoformat()},
        "trials": [trial.to_dict() for trial in search.trials],
    }


def read(path: Path) -> SearchRecord:
    """The search. Of trials alone, which go by the file's name, its objectives, its constraints and its environment are
    not known.

    Raises `InputError` for a file that cannot be read, or that holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["trials"] if isinstance(content, dict) else content
        trials = tuple(TrialRecord.from_dict(row) for row in rows)
        return _described(content["search"], trials) if isinstance(content, dict) else _bare(path.stem, trials)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{path}: is not what `wattune trials SEARCH --json` or `benchmarks.heat` writes") from None


def _described(search: Mapping[str, Any], trials: tuple[TrialRecord, ...]) -> SearchRecord:
    return SearchRecord(
        id=search["id"],
        name=search["name"],
        status=search["status"],
        started=datetime.fromisoformat(search["started"]),
        objectives={metric: Direction(way) for metric, way in search["objectives"].items()},
        constraints=tuple(search["constraints"]),
        params=dict(search["params"]),
        environment=dict(search["environment"]),
        notices=tuple(search["notices"]),
        run_id="",
        trials=trials,
    )


def _bare(name: str, trials: tuple[TrialRecord, ...]) -> SearchRecord:
    return SearchRecord(
        id=name,
        name=name,
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
