"""A calibration is refused where it makes no sense, and says how far predictions were off."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from search_spaces.cost import data_sheet, predict
from service.calibrate import Error, errors
from service.cli import main
from service.fitting import Observation
from service.home import Home
from service.spec import parse_spec

SPEC = (
    "{name: machines, model: llama3-8b, data: synthetic, sequence_length: 8192, global_batch_size: 8, "
    "cluster: {gpus_per_node: 8, accelerator: h200}, space: {zero_stage: [2, 3]}}"
)


def test_machines_without_a_cost_model_are_refused_before_anything_starts(home: Home, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("h200", "gpu"))
    called = CliRunner().invoke(main, ["calibrate", str(tmp_path / "spec.yaml")])
    assert (called.exit_code, called.stdout) == (2, "")
    assert called.stderr == "wattune: cluster.accelerator: there is no cost model of 'gpu' to calibrate\n"


def test_errors_are_means_of_shares_of_what_was_measured() -> None:
    spec, sheet = parse_spec(SPEC), data_sheet("h200")
    assert sheet is not None
    observed = []
    for point, seconds, watts in zip(spec.legal.layouts, (1 / 0.8, 1 / 1.1), (1 / 0.9, None), strict=True):
        predicted = predict(point, spec.workload, sheet)
        power = watts and watts * predicted.power_w
        observed.append(Observation(point, spec.workload, seconds * predicted.step_time_s, power))
    found = errors(observed, sheet)
    assert (found.step_time, found.power) == (pytest.approx(0.15), pytest.approx(0.1))
    assert errors([], sheet) == Error(None, None)
