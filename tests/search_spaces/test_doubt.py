"""Predictions are in the more doubt the less their like was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.cost import Coefficients, data_sheet, predict
from search_spaces.doubt import LAUNCHED, UNLAUNCHED, Doubt, doubt
from search_spaces.hardware import ACCELERATORS
from search_spaces.launches import launch_of
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.operators import OperatorTiming, Timings
from search_spaces.workload import Workload

PLAIN = Layout("megatron", 8, 64, zero_stage=1, compile=True)


def off(accelerator: str, layout: Layout = PLAIN, fitted: bool = False, how: str = "") -> float:
    sheet = data_sheet(accelerator)
    assert sheet is not None
    known = replace(sheet, source=f"16 trials{how}, from {sheet.source}") if fitted else sheet
    return told(layout, Workload(PRESETS["llama3-8b"], 8192, 64, ACCELERATORS[accelerator]), accelerator, known).off


def told(layout: Layout, work: Workload, accelerator: str, known: Coefficients) -> Doubt:
    return doubt(layout, work, accelerator, known, predict(layout, work, known))


@pytest.mark.parametrize(
    "settings",
    [
        {"context_parallel_size": 2},
        {"precision": "fp8"},
        {"tensor_parallel_size": 2, "compile": False},
        {"num_gpus": 64},
        {"engine": "megatron-earlier", "expert_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_tensor_parallel": True},
    ],
)
def test_what_was_measured_less_is_in_more_doubt(settings: dict[str, Any]) -> None:
    assert off("h200", replace(PLAIN, **settings)) > off("h200")


def test_experts_that_all_get_equally_many_tokens_are_in_no_more_doubt() -> None:
    assert off("h200", replace(PLAIN, expert_parallel_size=2)) == off("h200")


def test_machines_that_were_never_measured_are_in_more_doubt_until_they_are() -> None:
    assert off("h200") < off("a100") < off("cpu")
    for name in ("h200", "a100", "cpu"):
        assert off(name, fitted=True) <= off("h200")
    assert off("a100", replace(PLAIN, num_gpus=64), fitted=True) == off("a100", fitted=True)
    sliced = off("a100", replace(PLAIN, num_gpus=64), fitted=True, how=" by slices")
    assert sliced > off("a100", fitted=True, how=" by slices") == off("a100", fitted=True), "no network was seen"
    stated = data_sheet("h200")
    assert stated is not None
    work = Workload(PRESETS["llama3-8b"], 8192, 64, ACCELERATORS["h200"])
    assert told(PLAIN, work, "h200", stated.stated(power_limit_w=500)).off == off("h200")


def test_what_may_wait_for_the_cpu_is_less_in_doubt_once_launches_are_measured() -> None:
    sheet = data_sheet("h100")
    assert sheet is not None
    work = Workload(PRESETS["gpt3-1.3b"], 2048, 32, ACCELERATORS["h100"])
    waiting, busy = (Layout("megatron", 1, 32, micro_batch_size=size, compile=True) for size in (1, 16))
    usual = told(busy, work, "h100", sheet)
    assert told(waiting, work, "h100", sheet) == UNLAUNCHED
    assert usual.off < UNLAUNCHED.off
    assert usual.apart < UNLAUNCHED.apart
    experts = replace(work, model=PRESETS["mixtral-8x7b"])
    assert told(Layout("deepspeed", 1, 32), experts, "h100", sheet).off == UNLAUNCHED.off
    for mode in (waiting, replace(waiting, recompute="full")):
        measured = replace(sheet, operators=Timings((OperatorTiming(launch_of(mode, work), 1e-3),)))
        assert told(waiting, work, "h100", measured) == LAUNCHED
        assert told(busy, work, "h100", measured) == usual
    assert usual.off < LAUNCHED.off < UNLAUNCHED.off
