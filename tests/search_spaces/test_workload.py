"""What follows from the speed of a trial."""

from __future__ import annotations

import pytest

from search_spaces.cost import data_sheet, predicted_metrics
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.workload import Workload

WORK = Workload(PRESETS["llama3-8b"], 8192, 16, ACCELERATORS["h200"])


def test_mfu_is_the_share_of_the_peak_of_all_gpus() -> None:
    flops = WORK.shape.flops_per_token(8192)
    speed = WORK.speed(4 * 989.4e12 / flops / 2, 4)
    assert speed["mfu"] == pytest.approx(0.5)
    assert speed["tokens_per_s"] == 4 * (speed["tokens_per_s_per_gpu"] or 0)


def test_without_a_peak_there_is_no_mfu() -> None:
    unknown = Workload(WORK.shape, 8192, 16, ACCELERATORS["cpu"])
    assert unknown.speed(100.0, 4) == {"tokens_per_s": 100.0, "tokens_per_s_per_gpu": 25.0, "mfu": None}
    sheet = data_sheet("cpu")
    assert sheet is not None
    assert "mfu" not in predicted_metrics(Layout("megatron", 4, 16), unknown, sheet)


def test_predictions_have_the_speed_of_trials() -> None:
    sheet, layout = data_sheet("h200"), Layout("megatron", 4, 16, zero_stage=1)
    assert sheet is not None
    predicted = predicted_metrics(layout, WORK, sheet)
    assert predicted.items() >= WORK.speed(predicted["tokens_per_s"], 4).items()
