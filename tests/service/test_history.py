"""What is kept of examined devices, and how far they differ in speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from service.history import Figures, add, load, slower, slowest_flops, unexamined
from service.home import Home


def figures(flops: float) -> Figures:
    return Figures(time_s=0.0, flops=flops, memory_bytes_per_s=1e12, launch_s=1e-6)


def test_what_was_kept_is_read_oldest_first_and_half_a_line_is_passed_over(tmp_path: Path) -> None:
    home = Home(tmp_path)
    add(home, {"GPU-a": figures(1.0)})
    add(home, {"GPU-a": figures(2.0), "GPU-b": figures(3.0)})
    with next(home.examinations.glob("GPU-a*")).open("a") as file:
        file.write('{"time_s": 1')
    assert [one.flops for one in load(home, ["GPU-a", "GPU-b", "GPU-c"])["GPU-a"]] == [1.0, 2.0]


def test_all_wait_for_the_slowest_as_it_was_examined_last(tmp_path: Path) -> None:
    home = Home(tmp_path)
    add(home, {"GPU-a": figures(500.0), "GPU-b": figures(100.0), "GPU-elsewhere": figures(1.0)})
    add(home, {"GPU-b": figures(400.0)})
    assert slower(home, ["GPU-a", "GPU-b", "GPU-new"]) == pytest.approx({"GPU-a": 1.25, "GPU-b": 1.0})
    assert slower(home, ["GPU-new"]) == {}


def test_of_one_kind_at_one_limit_the_slowest_is_told(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert slowest_flops(home, "h200", 700.0) is None
    h200 = replace(figures(650.0), accelerator="h200", power_limit_w=700.0)
    add(home, {"GPU-a": replace(h200, flops=1.0), "GPU-b": h200, "GPU-c": figures(2.0), "cpu:a": figures(3.0)})
    add(home, {"GPU-a": replace(h200, flops=660.0)})
    add(home, {"GPU-d": replace(h200, flops=4.0, accelerator="h100"), "GPU-e": replace(h200, power_limit_w=500.0)})
    assert slowest_flops(home, "h200", 700.0) == 650.0


def test_several_gpus_of_which_some_were_never_examined_are_told(tmp_path: Path) -> None:
    home = Home(tmp_path)
    add(home, {"GPU-a": figures(500.0)})
    assert unexamined(home, ["GPU-new"]) == unexamined(home, ["GPU-a"]) == []
    (line,) = unexamined(home, ["GPU-a", "GPU-new"])
    assert line.startswith("1 of 2 GPUs were never examined")
    add(home, {"GPU-new": figures(400.0)})
    assert unexamined(home, ["GPU-a", "GPU-new"]) == []
