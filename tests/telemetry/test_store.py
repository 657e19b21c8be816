from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.samples import SCHEMA
from telemetry.store import read_samples, thin, write_samples


def some_samples(count: int = 500) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "time_ns": 10**15 + number * 100_000_000,
                "node": "n",
                "device": device,
                "energy_mj": 2**63 + number,
                "power_w": None if number == 3 else 100.0 + number,
                "gpu_utilisation": 0.5,
                "tensor_activity": 0.25 if number % 100 == 0 else None,
            }
            for number in range(count)
            for device in ("GPU-a", "GPU-b")
        ],
        schema=SCHEMA,
    )


def test_parquet_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    write_samples(some_samples(), path)
    assert read_samples(path).equals(some_samples())
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert [file.name for file in tmp_path.iterdir()] == ["samples.parquet"]


def test_files_from_before_a_column_came_in_are_read(tmp_path: Path) -> None:
    pq.write_table(some_samples().drop_columns("energy_ns"), tmp_path / "old.parquet")
    assert read_samples(tmp_path / "old.parquet").equals(some_samples())
    pq.write_table(some_samples().drop_columns("energy_mj"), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="does not hold telemetry samples"):
        read_samples(tmp_path / "other.parquet")


def test_no_samples_are_samples_too(tmp_path: Path) -> None:
    write_samples(SCHEMA.empty_table(), tmp_path / "none.parquet")
    assert read_samples(tmp_path / "none.parquet").equals(SCHEMA.empty_table())
    assert thin(SCHEMA.empty_table()) == {}


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ValueError, match=r"other\.parquet does not hold telemetry samples"):
        read_samples(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"other\.parquet does not hold telemetry samples"):
        read_samples(path)


def test_thinned_series_have_the_gauges_that_have_values() -> None:
    series = thin(some_samples(), points=60)
    assert set(series) == {"GPU-a", "GPU-b"}
    assert set(series["GPU-a"]) == {"power_w", "gpu_utilisation", "tensor_activity"}
    points = series["GPU-a"]["power_w"]
    assert len(points) == 60
    times, values = zip(*points, strict=True)
    assert list(times) == sorted(times)
    for time_ns, value in points[1:]:  # a ramp's means lie on the ramp; the first part has a hole
        assert value == pytest.approx(100 + (time_ns - 10**15) / 1e8, abs=1e-6)
    assert min(values) >= 100
    assert max(values) <= 100 + 499


@settings(max_examples=30)
@given(gaps=st.lists(st.integers(0, 10**9), min_size=1, max_size=40), points=st.integers(1, 50))
def test_thinning_never_exceeds_its_points_and_keeps_few_samples_whole(gaps: list[int], points: int) -> None:
    times = [10**15 + sum(gaps[: number + 1]) for number in range(len(gaps))]
    rows = [{"time_ns": time_ns, "node": "n", "device": "GPU-a", "power_w": 7.0} for time_ns in times]
    series = thin(pa.Table.from_pylist(rows, schema=SCHEMA), points)["GPU-a"]["power_w"]
    assert 1 <= len(series) <= points
    assert all(value == pytest.approx(7.0) for _, value in series)
    assert times[0] <= series[0][0] <= series[-1][0] <= times[-1]
