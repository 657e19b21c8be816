"""What runs beside a training is told from what it costs the steps of the same rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import SPECS
from benchmarks.measure.watching import ALONE, DOCTOR, ORDERS, WATCH, main, medians, show

STEP_NS, TURN_NS = 50_000_000, 1_500_000_000


def recorded(longer: dict[str, float], rounds: int = 12) -> dict[str, Any]:
    """Steps that drift by a tenth, and are longer beside some by a share."""
    turns, ends, now = [], [0], 0
    for number in range(rounds):
        for one in ORDERS[number % len(ORDERS)]:
            start = now
            while now < start + TURN_NS:
                drift = 1 + 0.1 * number / rounds
                now += round(STEP_NS * drift * (1 + longer.get(one, 0.0)))
                ends.append(now)
            turns.append({"beside": one, "start_ns": start, "end_ns": now})
    about = {"on": "CPU", "label": "1gpu", "examinations": 3, "heard": True}
    return about | {"ends_ns": ends, "turns": turns}


def test_what_each_costs_is_told_whatever_drifts(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(json.dumps(recorded({WATCH: 0.0002, DOCTOR: 0.02})))
    found = medians(record)
    assert {len(of_all) for of_all in found.values()} == {12}
    ratios = np.array(found[DOCTOR]) / np.array(found[ALONE])
    assert ratios == pytest.approx(1.02)
    show([record, record])
    watch, doctor = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert watch == ["watch", "24", "+0.0200%", "+0.0200%", "to", "+0.0200%", "yes"]
    assert doctor == ["doctor", "24", "+2.0000%", "+2.0000%", "to", "+2.0000%", "no"]


def test_a_round_without_a_step_in_one_of_its_turns_is_left_out() -> None:
    record = recorded({}, rounds=2)
    first = record["turns"][0]
    record["ends_ns"] = [end for end in record["ends_ns"] if not first["start_ns"] < end <= first["end_ns"]]
    assert {len(of_all) for of_all in medians(record).values()} == {1}


@pytest.mark.slow
def test_a_training_is_measured_with_both_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPU, where both cost more than they may: they take what the training would have."""
    out = tmp_path / "run.json"
    main([str(SPECS / "slowed_cpu.yaml"), "--seconds", "60", "--out", str(out)])
    said = capsys.readouterr().out
    assert "the watcher heard of its steps" in said
    assert len(medians(json.loads(out.read_text()))[WATCH]) >= 2
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if "benchmarks.measure.beside" in (one.info["cmdline"] or ())
    ]
