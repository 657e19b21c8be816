from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from telemetry import export
from telemetry.devices import DeviceInfo
from telemetry.export import COLUMNS, MetricsExporter
from telemetry.samples import COUNTERS, EVENTS, SCHEMA

DASHBOARD = json.loads(Path(export.__file__).with_name("grafana.json").read_text())

INFOS = [
    DeviceInfo(uuid=f"GPU-{index}", index=index, name="a GPU", kind="nvidia", energy_method="counter")
    for index in (0, 1)
]


class Exporting:
    def __init__(self) -> None:
        self._exporter = MetricsExporter("the-node", INFOS)

    def publish(self, rows: dict[str, dict[str, Any]]) -> None:
        self._exporter.publish(rows)


def scraped(port: int) -> dict[tuple[str, str], tuple[float, dict[str, str]]]:
    """Values and labels by metric and device."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            (sample.name, sample.labels["device"]): (sample.value, sample.labels)
            for family in families
            for sample in family.samples
            if sample.name.startswith("ray_wattune_") and sample.labels["node"] == "the-node"
        }


def test_rays_endpoint_shows_the_latest_row(ray_session: Any) -> None:
    """Under the columns' names, with tags; what has become null is not shown, nor is what never was."""
    actor: Any = ray.remote(Exporting).options(num_cpus=0).remote()
    row = {"time_ns": 1, "device": "GPU-0", "power_w": 512.5, "gpu_temp_c": 61.0, "energy_mj": 2**52 + 1, "xid": 79}
    ray.get(actor.publish.remote({"GPU-0": row, "GPU-1": row | {"device": "GPU-1"}}))
    ray.get(actor.publish.remote({"GPU-0": row | {"power_w": None, "energy_mj": 2**52 + 3}}))
    (node,) = (node for node in ray.nodes() if node["Alive"])
    deadline = time.monotonic() + 60
    while not (seen := scraped(node["MetricsExportPort"])) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {(name, device): value for (name, device), (value, _) in seen.items()} == {
        ("ray_wattune_gpu_temp_c", "GPU-0"): 61,
        ("ray_wattune_energy_mj", "GPU-0"): 2**52 + 3,
        ("ray_wattune_xid", "GPU-0"): 79,
    }
    labels = seen["ray_wattune_energy_mj", "GPU-0"][1]
    assert (labels["index"], labels["kind"], labels["energy_method"]) == ("0", "nvidia", "counter")
    ray.kill(actor)


def test_every_measured_column_is_exported() -> None:
    labels = {"time_ns", "node", "device", "index", "kind", "energy_method", "energy_ns"}
    assert set(SCHEMA.names) - set(COLUMNS) == labels


def expressions() -> Iterator[tuple[str, str]]:
    """Title and PromQL of each line of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_the_dashboard_asks_for_what_is_exported(title: str, expression: str) -> None:
    """Running totals are shown as rates or growth, and nothing else is."""
    columns = re.findall(r"\bray_wattune_(\w+)", expression)
    assert columns
    assert set(columns) <= set(COLUMNS)
    assert len(columns) == expression.count("wattune_")
    for column in columns:
        grows = re.search(rf"\b(rate|increase)\(ray_wattune_{column}\b", expression) is not None
        assert grows == (column in COUNTERS)


def test_the_dashboard_leaves_out_no_event_and_no_throttle_cause() -> None:
    shown = "".join(expression for _, expression in expressions())
    wanted = {column for column in COLUMNS if column.startswith("throttle_") and column.endswith("_ns")} | {*EVENTS}
    assert {column for column in wanted if f"ray_wattune_{column}" not in shown} == set()
