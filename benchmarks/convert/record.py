"""Everything that a search recorded about its trials, as one JSON document to be kept with the figures.

    python -m benchmarks.convert.record SEARCH > benchmarks/data/NAME.json

Per trial: layout, status, cause, metrics with their methods, every step time and loss, and the window on each node.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from service.home import tracking_uri
from service.record import store
from service.record.results import Results, SearchRecord


def document(search: SearchRecord, uri: str) -> dict[str, Any]:
    """The search and its finished trials, in the order of their start."""
    client = store.open_client(uri)
    with tempfile.TemporaryDirectory() as folder:
        trials = [
            json.loads(Path(client.download_artifacts(trial.run_id, "result.json", folder)).read_text())
            for trial in search.trials
            if trial.status not in ("running", "stopped")
        ]
    overheads = [t["metrics"]["trial_overhead_s"] for t in trials if t["status"] == "ok"]
    return {
        "search_id": search.id,
        "status": search.status,
        "params": search.params,
        "environment": search.environment,
        "notices": search.notices,
        "median_trial_overhead_s": statistics.median(overheads) if overheads else None,
        "trials": trials,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search")
    parser.add_argument("--tracking-uri")
    arguments = parser.parse_args()
    uri = tracking_uri(arguments.tracking_uri)
    print(json.dumps(document(Results(uri).search(arguments.search), uri), indent=1))


if __name__ == "__main__":
    main()
