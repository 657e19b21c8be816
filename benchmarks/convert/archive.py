"""Searches of one MLflow store as small files, and such files in another store, where every answer reads them.

    python -m benchmarks.convert.archive pack SEARCH --out benchmarks/data/NAME.tar.xz
    WATTUNE_HOME=build/records python -m benchmarks.convert.archive unpack benchmarks/data/NAME.tar.xz...

A file has what MLflow keeps of a search and its trials: names, times, parameters, tags, metrics, datasets, and the
artifacts that answers are made of: spec, results and samples. What is drawn of these is left out, and of metrics all
but the last value: series are in the results. GPUs go by the first eight digits of their UUIDs.
"""

from __future__ import annotations

import argparse
import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag

from service.errors import InputError
from service.home import Home, tracking_uri
from service.record import store, view
from service.record.results import Results
from service.record.runs import Runs
from telemetry.store import read_samples, write_samples

RUNS = "runs.json"
KEPT = (store.SPEC, store.RESULT, store.SAMPLES)
LEFT_OUT = (store.HEARTBEAT, "mlflow.runName", "mlflow.user")
PAIRS = 100
"""Parameters, and tags, that MLflow takes at once."""

UUID = re.compile(r"(GPU-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def pack(key: str, uri: str, out: Path, folder: Path) -> None:
    """Write a search into a file, by way of an empty folder. Raises `InputError` as `Results.search` does."""
    search = Results(uri).search(key)
    client, kept = store.open_client(uri), Runs(uri)
    runs = [client.get_run(run) for run in (search.run_id, *(trial.run_id for trial in search.trials))]
    experiment = runs[0].info.experiment_id
    shown = client.get_experiment(experiment).tags.get(view.SHARED + search.id)
    document = {"view": shown, "experiment": experiment, "runs": [_document(run) for run in runs]}
    (folder / RUNS).write_text(json.dumps(document, indent=1))
    for run in runs:
        its = folder / run.info.run_id
        its.mkdir()
        for name in KEPT:
            if (content := kept.artifact(run.info.run_id, name)) is not None:
                (its / name).write_bytes(content)
    for file in sorted(folder.rglob("*.*")):
        _shorten(file)
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.add(file, file.relative_to(folder), filter=_plain)


def unpack(packed: Path, uri: str, home: Home, folder: Path) -> str:
    """Record the search of a file in a store, by way of a folder for its artifacts, and return its id.

    Raises `InputError` if the store has it already, or cannot be opened, and OSError or `tarfile.TarError` if the file
    cannot be read.
    """
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    document = json.loads((folder / RUNS).read_text())
    search_id = str(document["runs"][0]["tags"][store.SEARCH_ID])
    client = store.open_client(uri)
    experiment = store.open_experiment(client, uri, home.artifacts)
    if next(store.find_runs(client, experiment, {store.SEARCH_ID: search_id}), None) is not None:
        raise InputError(f"{packed}: search {search_id} is at {store.shown(uri)} already")
    if document["view"]:
        client.set_experiment_tag(experiment, view.SHARED + search_id, document["view"])
    links = view.link("", document["experiment"]), view.link("", experiment)
    known: dict[str, str] = {}
    for one in document["runs"]:
        tags = {key: value.replace(*links) for key, value in one["tags"].items()}
        if store.PARENT in tags:
            tags[store.PARENT] = known[tags[store.PARENT]]
        run = client.create_run(experiment, one["started_ms"], dict(_first(tags)), one["name"]).info.run_id
        known[one["id"]] = run
        _log(client, run, one | {"tags": tags})
        for artifact in sorted((folder / one["id"]).glob("*")):
            client.log_artifact(run, str(artifact))
        client.set_terminated(run, one["status"], one["ended_ms"])
    return search_id


def _document(run: Run) -> dict[str, Any]:
    """JSON-safe."""
    return {
        "id": run.info.run_id,
        "name": run.info.run_name,
        "started_ms": run.info.start_time,
        "ended_ms": run.info.end_time,
        "status": run.info.status,
        "tags": {key: value for key, value in run.data.tags.items() if key not in LEFT_OUT},
        "params": run.data.params,
        "metrics": {key: value for key, value in run.data.metrics.items() if not key.startswith("step/")},
        "datasets": [one.to_dictionary() for one in run.inputs.dataset_inputs] if run.inputs else [],
    }


def _log(client: MlflowClient, run: str, one: Mapping[str, Any]) -> None:
    metrics = [Metric(key, value, one["ended_ms"], 0) for key, value in one["metrics"].items()]
    client.log_batch(run, metrics=metrics)
    for params in _parts([Param(*pair) for pair in one["params"].items()]):
        client.log_batch(run, params=params)
    for tags in _parts([RunTag(*pair) for pair in one["tags"].items()]):
        client.log_batch(run, tags=tags)
    datasets = [
        DatasetInput(Dataset(**named["dataset"]), [InputTag(*tag) for tag in named["tags"].items()])
        for named in one["datasets"]
    ]
    if datasets:
        client.log_inputs(run, datasets)


def _parts(pairs: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(pairs), PAIRS):
        yield pairs[start : start + PAIRS]


def _first(tags: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What a run is to have from its beginning: by which it is found."""
    return ((key, value) for key, value in tags.items() if key.startswith("wattune.") or key == store.PARENT)


def _shorten(file: Path) -> None:
    """Give GPUs short names in a file."""
    if file.name != store.SAMPLES:
        file.write_text(UUID.sub(r"\1", file.read_text()))
        return
    table = read_samples(file)
    place = table.schema.get_field_index("device")
    names = pc.replace_substring_regex(table["device"].cast(pa.string()), UUID.pattern, r"\1")
    write_samples(table.set_column(place, "device", names), file)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what says when and by whom a file was written."""
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packs, unpacks = commands.add_parser("pack"), commands.add_parser("unpack")
    packs.add_argument("search")
    packs.add_argument("--out", type=Path, required=True)
    unpacks.add_argument("files", nargs="+", type=Path)
    for command in (packs, unpacks):
        command.add_argument("--tracking-uri")
    arguments = parser.parse_args()
    home, uri = Home.locate(), tracking_uri(arguments.tracking_uri)
    try:
        if arguments.command == "pack":
            with tempfile.TemporaryDirectory() as folder:
                pack(arguments.search, uri, arguments.out, Path(folder))
            return
        if uri == home.tracking_uri:
            home.create()
        for file in arguments.files:
            with tempfile.TemporaryDirectory() as folder:
                print(unpack(file, uri, home, Path(folder)))
    except (InputError, OSError, tarfile.TarError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
