"""A calibration is refused where it makes no sense, and says how far predictions were off."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from search_spaces.cost import data_sheet, predict
from search_spaces.operators import Kind, Operator, OperatorTiming, Timings
from service.calibrate import Calibrated, Error, errors
from service.cli import main
from service.fitting import Observation
from service.home import Home
from service.operators import MeasuredOperators, is_wanted
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


def test_a_kernel_is_measured_once_with_a_release_of_torch_and_a_launch_each_time() -> None:
    product = Operator(Kind.PRODUCT, (8, 8, 8), "bf16", False)
    launch = Operator(Kind.LAUNCH, (), "bf16", False, ("megatron", "gpt", "none"))
    known = Timings((OperatorTiming(product, 1.0, 2.0, "2.13.0"), OperatorTiming(launch, 1.0)))
    assert not is_wanted(product, known, "2.13.0")
    assert is_wanted(product, known, "2.14.0")
    assert is_wanted(product._replace(dims=(8, 8, 16)), known, "2.13.0")
    assert is_wanted(launch, known, "2.13.0")
    assert is_wanted(product, Timings((OperatorTiming(product, 1.0, 2.0),)), "2.13.0"), "by nobody knows which"


def test_it_is_told_where_seconds_went() -> None:
    operators = MeasuredOperators(Path("kept"), 4, 3, 2, (), {"kernels": 40.2, "launches": 20.1})
    spent_s = {"start": 19.6, "operators": 61.0, "trials": 44.0, "rest": 1.8}
    came = Calibrated("id", Path("file"), 2, Error(None, None), Error(None, None), operators, None, spent_s)
    assert came.took == "126 s: start 20 s, operators 61 s (kernels 40 s, launches 20 s), trials 44 s, rest 2 s"
    assert came.to_dict()["spent_s"] == spent_s
    assert came.to_dict()["operators"]["spent_s"] == {"kernels": 40.2, "launches": 20.1}
