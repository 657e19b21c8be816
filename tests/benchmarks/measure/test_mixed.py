"""What is told of searches that faults befell; that they run is a test of `test_node`."""

from __future__ import annotations

import multiprocessing
import time
from datetime import UTC, datetime
from typing import Any

import psutil
import pytest

from benchmarks.measure.mixed import HUNG, back_s, last_seen, recovered, refuse_memory, wrong
from search_spaces.layout import Layout
from service.record.results import TrialRecord

READ = [(0.0, 0.6), (1.0, 40.0), (9.0, 40.0), (9.3, 12.0), (9.6, 0.7), (10.0, 55.0)]


def failed(ended_s: float) -> TrialRecord:
    at = datetime.fromtimestamp(ended_s, UTC)
    return TrialRecord("t", "l", Layout("megatron", 2, 8), "crash", "killed", {}, {}, "run", ended=at)


def test_memory_is_back_when_it_is_what_it_was_before() -> None:
    assert back_s(READ, 0.6, 9.0) == pytest.approx(0.6)
    assert back_s(READ, 0.6, 9.9) is None, "the next trial has it"
    assert back_s(READ, 0.2, 9.0) is None


def test_a_trial_s_memory_is_back_when_that_of_its_last_gpu_is() -> None:
    seen = last_seen(
        iter(
            [
                {"trial_id": "t", "device": "a", "time_s": 8.0},
                {"trial_id": "u", "device": "b", "time_s": 8.5},
                {"trial_id": "t", "device": "a", "time_s": 9.0},
                {"trial_id": "t", "device": "b", "time_s": 9.0},
            ]
        )
    )
    read = {"a": READ, "b": [(9.0, 40.0), (11.0, 0.6)]}
    before = {"a": 0.6, "b": 0.6}
    assert recovered(failed(9.7), ["a", "b"], seen["t"], read, before) == pytest.approx(2.0)
    assert recovered(failed(9.7), ["a"], {"a": 14.0}, read, before) is None, "told for long, it had ended before"
    assert recovered(failed(9.55), ["a"], {"a": 14.0}, read, before) == pytest.approx(0.05)
    assert recovered(failed(9.55), ["a"], {}, read, before) == pytest.approx(0.05), "nobody looked while it ran"
    told = seen["t"] | {"cpu:host": 9.0}
    assert recovered(failed(9.7), ["a", "b"], told, read, before) == pytest.approx(2.0), "the host's is not"
    assert recovered(failed(9.7), ["a", "cpu:host"], told, read, before) is None, "the host is not watched"
    assert recovered(failed(9.7), [], seen["t"], read, before) is None


def test_what_is_wrong_is_named() -> None:
    def one(status: str, back: float | None) -> dict[str, Any]:
        return {"trial_id": f"t-{status}", "status": status, "back_s": back}

    ended = {"id": "mixed-0", "status": "finished", "exit_code": 0}
    well = {"on_cpu": False, "searches": [ended], "failed": [one("crash", 0.4), one("hang", 1.0), one("oom", 0.2)]}
    assert wrong(well) == []
    kept = well | {"failed": [one("crash", 0.4), one("hang", None)]}
    assert wrong(kept | {"on_cpu": True}) == ["no trial ended as oom"]
    assert wrong(kept)[1:] == ["t-hang: hang: memory was not seen to be back within 5 s"]
    assert wrong(well | {"searches": [ended | {"status": "failed", "exit_code": 3}]}) == [
        "mixed-0: failed, exit code 3"
    ]


def needs_memory(ready: Any, told: Any) -> None:
    ready.set()
    time.sleep(1.0)
    try:
        told.put(len(bytearray(2**28)))
    except MemoryError:
        told.put("no memory")


def test_a_process_that_is_refused_memory_gets_none_and_one_that_is_stopped_stands_still() -> None:
    context = multiprocessing.get_context("spawn")
    ready, told = context.Event(), context.SimpleQueue()
    process = context.Process(target=needs_memory, args=(ready, told), daemon=True)
    process.start()
    assert ready.wait(60)
    refuse_memory(psutil.Process(process.pid))
    assert told.get() == "no memory"
    other = context.Process(target=time.sleep, args=(600,), daemon=True)
    other.start()
    HUNG.befall(psutil.Process(other.pid))
    until = time.monotonic() + 30
    while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.05)
    other.kill()
    other.join()
    process.join()
