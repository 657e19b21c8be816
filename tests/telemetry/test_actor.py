from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from telemetry.actor import start_telemetry
from telemetry.window import WindowSummary


@pytest.mark.timeout(120)
def test_one_actor_a_node_answers_for_a_window_stamped_elsewhere(ray_session: Any) -> None:
    actors = start_telemetry()
    assert set(actors) == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    try:
        (node_id, actor), *_ = actors.items()
        facts: Any = ray.get(actor.describe.remote(), timeout=60)
        assert facts["node_id"] == node_id
        devices = [device["uuid"] for device in facts["devices"]]
        assert devices
        assert all(device["energy_method"] in ("counter", "estimated") for device in facts["devices"])
        time.sleep(0.6)

        start_ns = time.monotonic_ns()  # on this process' clock: it is the node's
        time.sleep(1.0)
        end_ns = time.monotonic_ns()
        summary: WindowSummary = ray.get(actor.window.remote(start_ns, end_ns, devices), timeout=30)
        assert summary.problems == ()
        assert summary.energy_j is not None
        assert summary.energy_j > 0
        assert summary.duration_s == pytest.approx((end_ns - start_ns) / 1e9)
        assert summary.energy_method == facts["devices"][0]["energy_method"]

        samples = ray.get(actor.samples.remote(start_ns, end_ns, devices), timeout=30)
        assert samples.num_rows == summary.sample_count
        assert 5 * len(devices) <= samples.num_rows <= 11 * len(devices)
        assert set(samples["node"].to_pylist()) == {node_id}
        assert ray.get(actor.samples.remote(start_ns, end_ns, ["GPU-elsewhere"]), timeout=30).num_rows == 0

        before_birth = ray.get(actor.window.remote(start_ns - 10**12, end_ns, devices), timeout=30)
        assert before_birth.energy_j is None
        assert before_birth.problems
    finally:
        for actor in actors.values():
            ray.kill(actor)
