"""Operators are measured as a training runs them, on the host, and whatever cannot be is left out with its cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from search_spaces.coefficients import data_sheet
from search_spaces.hardware import ACCELERATORS
from search_spaces.inventory import operators_of
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.operators import Kind, Operator
from search_spaces.workload import Workload
from tests.trainables.conftest import RunRanks
from trainables import kernels
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.platforms.base import AHEAD_S, platform_of
from trainables.platforms.cpu import Cpu
from trainables.profiling import busy_s
from trainables.program import RankReport, TrialRequest

QUICK = Procedure(2, 0.5, 0.1, 0.01, 2)
ALONE = Layout("megatron", 1, 1)


def report_of(run_ranks: RunRanks, request: TrialRequest) -> RankReport:
    (outcome,) = run_ranks(request)
    assert (outcome.status, outcome.cause) == ("ok", None)
    assert outcome.report is not None
    return outcome.report


def consisting(name: str, *layouts: Layout) -> list[Operator]:
    """The operators of layouts of a preset."""
    sheet = data_sheet("cpu")
    assert sheet is not None
    return operators_of(layouts, Workload(PRESETS[name], 64, 4, ACCELERATORS["cpu"]), sheet)


def of_kernels(*kernels: Operator) -> Operators:
    return Operators(kernels, (), 100.0, 100.0)


SPLIT = Layout("megatron", 4, 4, tensor_parallel_size=2, context_parallel_size=2, zero_stage=1)
SPACE = (
    Layout("megatron", 1, 4, precision="fp32"),
    Layout("megatron", 1, 4, micro_batch_size=2),
    Layout("deepspeed", 1, 4, precision="fp32"),
    replace(SPLIT, micro_batch_size=2, precision="fp32"),
    Layout("deepspeed", 2, 4, context_parallel_size=2, zero_stage=1, precision="fp32"),
)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt", "tiny-moe"])
def test_all_operators_of_a_small_space_are_measured(run_ranks: RunRanks, name: str) -> None:
    wanted = [operator for operator in consisting(name, *SPACE) if operator.kind != Kind.LAUNCH]
    report = report_of(run_ranks, TrialRequest(f"operators-{name}", ALONE, of_kernels(*wanted), QUICK, 120.0))
    measured = {row.operator for row in report.operators}
    left = set(wanted) - measured
    assert all(row.forward_s > 0 and row.torch and torch.__version__.startswith(row.torch) for row in report.operators)
    assert all((row.backward_s is None) == (row.operator.kind == Kind.UPDATE) for row in report.operators)
    # What tensor-parallel ranks share, and what DeepSpeed's optimizer does.
    assert {operator.kind for operator in left} == {Kind.COPIES, Kind.EMBEDDING, Kind.LOSS, Kind.UPDATE}
    assert all("shared" in operator.form or operator.kind in (Kind.COPIES, Kind.UPDATE) for operator in left)
    assert len(report.problems) == len(left)
    kinds = {operator.kind for operator in measured}
    assert kinds >= {Kind.PRODUCT, Kind.ATTENTION, Kind.NORM, Kind.EMBEDDING, Kind.LOSS, Kind.UPDATE}
    assert (Kind.EXPERTS in kinds) == (name == "tiny-moe")
    assert (Kind.ACTIVATION in kinds) == (name != "tiny-moe")
    assert {operator.dims[-1] for operator in measured if operator.kind == Kind.ATTENTION} == {1, 2}


@pytest.mark.slow
def test_larger_operators_take_longer(run_ranks: RunRanks) -> None:
    shapes = [(2**5, 2**5, 2**5), (2**11, 2**11, 2**10)]
    program = of_kernels(*(Operator(Kind.PRODUCT, dims, "fp32", False) for dims in shapes))
    small, large = report_of(run_ranks, TrialRequest("sizes", ALONE, program, QUICK, 120.0)).operators
    assert large.forward_s > 10 * small.forward_s
    assert small.backward_s is not None
    assert large.backward_s is not None
    assert large.backward_s > 10 * small.backward_s


def test_what_fails_or_comes_too_late_is_left_out(run_ranks: RunRanks) -> None:
    fits = Operator(Kind.PRODUCT, (8, 8, 8), "fp32", False)
    huge = Operator(Kind.PRODUCT, (8, 2**30, 2**30), "fp32", False)
    fused = fits._replace(precision="fp8", compiled=True)
    program = of_kernels(huge, fused, fits)
    report = report_of(run_ranks, TrialRequest("failing", ALONE, program, QUICK, 120.0))
    assert [row.operator for row in report.operators] == [fits]
    first, second = report.problems
    assert first.startswith(f"{huge.label}: measuring: ")
    assert "allocate" in first
    assert second == f"{fused.label}: the compiler makes casts to fp8 part of others' kernels"
    late = report_of(run_ranks, TrialRequest("late", ALONE, Operators((fits,), (), -1.0, -1.0), QUICK, 120.0))
    assert (late.operators, late.problems) == ((), ())


class Held(Cpu):
    """A device that takes as long for anything, to which the host needs some seconds to hand anything over."""

    def __init__(self, handed_s: float, taken_s: float = 4e-3) -> None:
        self.handed, self.taken_s = handed_s, taken_s
        self.ahead: list[float] = []

    def race(self, first: Callable[[], object], *tasks: Callable[[], object], ahead_s: float = AHEAD_S) -> list[float]:
        self.ahead.append(ahead_s)
        return [self.taken_s for _ in tasks]

    def handed_s(self, task: Callable[[], object], held_s: float) -> float:
        return self.handed


@pytest.mark.parametrize(("handed_s", "ahead_s"), [(1e-3, AHEAD_S), (4e-3, 8e-3)])
def test_a_device_is_kept_waiting_until_a_slow_host_has_handed_all_over(handed_s: float, ahead_s: float) -> None:
    device = Held(handed_s)
    assert kernels._seconds(lambda: None, device) == 4e-3
    assert set(device.ahead[1:]) == {ahead_s}


@pytest.mark.parametrize(("taken_s", "rounds"), [(4e-3, 5), (20e-3, 3)])
def test_what_takes_long_is_measured_in_fewer_rounds(taken_s: float, rounds: int) -> None:
    device = Held(1e-3, taken_s)
    assert kernels._seconds(lambda: None, device) == taken_s
    assert len(device.ahead) == 1 + rounds


@pytest.mark.parametrize(("late", "taken_s"), [(2, 4e-3), (1000, 7e-3)])
def test_rounds_for_which_the_host_was_late_do_not_count(
    late: int, taken_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where others take it: a compiled attention came out three times as long as it takes on H200. If there
    are too many, the profiler tells."""

    class Late(Held):
        def race(
            self, first: Callable[[], object], *tasks: Callable[[], object], ahead_s: float = AHEAD_S
        ) -> list[float]:
            self.ahead.append(ahead_s)
            is_late = 1 < len(self.ahead) <= 1 + late
            if is_late:
                time.sleep(ahead_s)
            tasks[0]()
            return [0.1 if is_late else 4e-3]

    monkeypatch.setattr(kernels, "busy_s", lambda task, platform: 7e-3)
    assert kernels._seconds(lambda: None, Late(1e-6)) == taken_s


def test_a_task_that_waits_for_the_device_takes_what_the_profiler_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "busy_s", lambda task, platform: 7e-3)
    assert kernels._seconds(lambda: None, Held(1.0)) == 7e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_task_is_told_from_the_host_that_it_keeps_waiting() -> None:
    platform = platform_of(ACCELERATORS["gpu"])
    square = torch.randn(4096, 4096, device=platform.take(0))

    def product() -> object:
        return square @ square

    def read() -> object:
        return product().sum().item()  # type: ignore[attr-defined]

    read()
    platform.race(product, product)  # another stream has cuBLAS allocate memory, for which the device waits
    held_s = 20e-3
    assert platform.handed_s(product, held_s) < held_s <= platform.handed_s(read, held_s)
    (raced,) = platform.race(product, product)
    assert busy_s(product, platform) == pytest.approx(raced, rel=0.2)
    assert kernels._seconds(read, platform) == pytest.approx(raced, rel=0.3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_products_are_measured_where_no_power_limit_slows_them() -> None:
    """Those of random values are, within a millisecond."""
    platform = platform_of(ACCELERATORS["gpu"])
    device = platform.take(0)
    operator = Operator(Kind.PRODUCT, (8192, 4096, 14336), "bf16", False)
    measured = kernels._timing(operator, device, platform)
    weights, inputs = (torch.randn(size, 4096, device=device, dtype=torch.bfloat16) for size in (14336, 8192))
    assert measured.forward_s <= 1.02 * kernels._seconds(lambda: inputs @ weights.T, platform)


@pytest.mark.slow
def test_compiled_operators_are_measured(run_ranks: RunRanks) -> None:
    layouts = [Layout("megatron", 1, 4, compile=True, precision="fp32")]
    for name in ("tiny-llama", "tiny-gpt", "tiny-moe"):
        wanted = [
            operator for operator in consisting(name, *layouts) if operator.compiled and operator.kind != Kind.LAUNCH
        ]
        program = Operators(tuple(wanted), (), 300.0, 300.0)
        report = report_of(run_ranks, TrialRequest(f"compiled-{name}", ALONE, program, QUICK, 300.0))
        assert [row.operator for row in report.operators] == wanted
        assert report.problems == ()


PLAIN = [
    ("tiny-llama", Layout("megatron", 1, 4, precision="fp32")),
    ("tiny-gpt", Layout("deepspeed", 1, 4, precision="fp32")),
]
SEVERAL = [
    ("tiny-moe", Layout("deepspeed", 1, 4, precision="fp32")),
    ("tiny-gpt", replace(SPLIT, recompute="full")),
    ("tiny-llama", replace(SPLIT, zero_stage=3, sequence_parallel=True)),
    ("tiny-moe", replace(SPLIT, expert_parallel_size=2)),
    ("tiny-llama", Layout("deepspeed", 4, 4, tensor_parallel_size=2, zero_stage=1)),
    ("tiny-llama", Layout("deepspeed", 4, 4, context_parallel_size=2, zero_stage=3)),
    ("tiny-gpt", Layout("deepspeed", 4, 4, zero_stage=0)),
    ("tiny-moe", Layout("deepspeed", 4, 4, expert_parallel_size=2, zero_stage=1)),
    ("tiny-llama", Layout("megatron", 1, 4, compile=True)),
    ("tiny-llama", Layout("deepspeed", 1, 4, compile=True, recompute="full")),
]


@pytest.mark.slow
@pytest.mark.parametrize("modes", [PLAIN, SEVERAL])
def test_launches_are_told_by_tiny_models_of_which_one_rank_is_there(
    run_ranks: RunRanks, modes: list[tuple[str, Layout]]
) -> None:
    launches = [launch for mode in modes for launch in consisting(*mode) if launch.kind == Kind.LAUNCH]
    unheard_of = launches[0]._replace(form=("unheard-of", "llama", "none"))
    program = Operators((), (unheard_of, *launches), 0.0, 100.0)
    report = report_of(run_ranks, TrialRequest(f"launches-{len(modes)}", ALONE, program, QUICK, 400.0))
    assert [row.operator for row in report.operators] == launches
    assert all(1e-5 < row.forward_s < 1 and row.backward_s is None for row in report.operators)
    (problem,) = report.problems
    assert problem.startswith(f"{unheard_of.label}: measuring: ")


def test_launches_that_come_too_late_are_left_out(run_ranks: RunRanks) -> None:
    (launch,) = (operator for operator in consisting(*PLAIN[0]) if operator.kind == Kind.LAUNCH)
    report = report_of(
        run_ranks, TrialRequest("late launches", ALONE, Operators((), (launch,), -1.0, -1.0), QUICK, 120.0)
    )
    assert (report.operators, report.problems) == ((), ())
