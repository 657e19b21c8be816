"""Searches as small files: what one store has of them, another has too, but for what is left out."""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.convert.archive import pack, unpack
from service import InputError
from service.home import Home
from service.record import store
from service.record.results import Results
from service.record.tracking import Tracker
from service.result import NodeWindow
from tests.service.record.test_tracking import CONFIG, ENVIRONMENT, PROBLEM, measured, samples

UUID = "GPU-6e3cf9d9-0a1b-2c3d-4e5f-0123456789ab"


def test_a_search_in_a_file_is_in_another_store_what_it_was(home: Home, empty_database: Path, tmp_path: Path) -> None:
    tracker = Tracker(home.tracking_uri, home, picture=lambda result, table: b"drawn")
    tracker.start_search("s1", PROBLEM, ENVIRONMENT)
    result = replace(measured(), windows=(NodeWindow("node", 5, 9, (UUID,)),))
    seen = samples()
    devices = [UUID if name == "GPU-node-0" else name for name in seen["device"].to_pylist()]
    seen = seen.set_column(seen.schema.get_field_index("device"), "device", [devices])
    tracker.start_trial(result.trial_id, CONFIG)
    tracker.finish_trial(result, seen)
    tracker.finish_search("finished", {"search_time_s": 5.0}, ["a notice"])
    tracker.attach_description(lambda: "A description.")
    (tmp_path / "packed").mkdir()
    pack("s1", home.tracking_uri, tmp_path / "s1.tar.xz", tmp_path / "packed")
    with tarfile.open(tmp_path / "s1.tar.xz") as archive:
        names = {Path(entry.name).name for entry in archive}
    assert names == {"runs.json", "spec.yaml", "result.json", "samples.parquet"}

    other = Home(tmp_path / "other").create()
    shutil.copy(empty_database, other.path / "mlflow.db")
    Tracker(other.tracking_uri, other).start_search("s0", PROBLEM, {})
    assert unpack(tmp_path / "s1.tar.xz", other.tracking_uri, other, tmp_path / "unpacked") == "s1"
    here, there = (Results(one.tracking_uri) for one in (home, other))
    before, after = here.search("s1"), there.search("s1")
    (old,), (new,) = before.trials, after.trials
    assert replace(after, run_id=before.run_id, heartbeat=before.heartbeat, trials=()) == replace(before, trials=())
    assert replace(new, run_id=old.run_id) == old
    assert there.spec_of(after) == here.spec_of(before)
    short = UUID[:12]
    assert there.result_of(new) == replace(result, windows=(NodeWindow("node", 5, 9, (short,)),))
    table = there.samples_of(new)
    assert table is not None
    assert table["device"].to_pylist() == [short if name == UUID else name for name in devices]
    client = store.open_client(other.tracking_uri)
    for run_id in (after.run_id, new.run_id):
        inputs = client.get_run(run_id).inputs
        assert inputs is not None
        assert [one.dataset.name for one in inputs.dataset_inputs] == ["synthetic"]
    assert "A description." in client.get_run(after.run_id).data.tags["mlflow.note.content"]
    with pytest.raises(InputError, match=r"search s1 is at .* already"):
        unpack(tmp_path / "s1.tar.xz", other.tracking_uri, other, tmp_path / "again")
