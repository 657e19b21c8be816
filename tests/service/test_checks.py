"""What nobody can mean is refused with one line, or told, though each field by itself could be right."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.checks import EVENLY, check, check_data, check_machine, data_from_afar, notices, workers_here
from service.errors import InputError
from service.metrics import METRICS, Needs, known
from service.problem import Cluster
from telemetry.devices import count_gpus
from telemetry.devices.cpu import counts_throttling
from tests.service.records import problem

NODE = {"gpus_per_node": 8, "accelerator": "h200"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"global_batch_size": 10**12}, r"global_batch_size: 1,000,000,000,000 sequences of 64 tokens are more than "),
    ({"budget": {"trials": 10**20}}, r"budget\.trials: must be at most 1,000,000 \(given: 100,000,000,000,"),
    ({"finalists": {"repeats": 10**9}}, r"finalists\.repeats: must be at most 1,000 "),
    ({"cluster": {**NODE, "cpus_per_worker": 1e300}}, r"cluster\.cpus_per_worker: must be at most 1,000 "),
    (
        {"cluster": {**NODE, "power_limit_w": 150}},
        r"cluster\.power_limit_w: 150 W are no more than what a GPU of h200 draws while it waits for others, 215 W$",
    ),
    # Times
    ({"measurement": {"window_s": 1e308}}, r"measurement\.window_s: 1e\+308 s are more than a year$"),
    ({"measurement": {"deadline_s": 1e308}}, r"measurement\.deadline_s: 1e\+308 s are more than a year$"),
    ({"budget": {"wall_time_s": 1e9}}, r"budget\.wall_time_s: 1e\+09 s are more than a year$"),
    (
        {"measurement": {"window_s": 30, "deadline_s": 30}},
        r"measurement\.window_s: 30 s are not over by measurement\.deadline_s, 30 s$",
    ),
    (
        {"finalists": {"window_s": 700}},
        r"finalists\.window_s: 700 s are not over by measurement\.deadline_s, 600 s$",
    ),
    (
        {"budget": {"wall_time_s": 9.5}},
        r"budget\.wall_time_s: 9\.5 s are less than a window, measurement\.window_s 10$",
    ),
    (
        {"cluster": NODE, "space": {"num_gpus": [8, 4]}, "budget": {"gpu_hours": 0.01}},
        r"budget\.gpu_hours: 0\.01 is less than a window of 4 GPUs, measurement\.window_s 10$",
    ),
    # Slices
    (
        {"cluster": {"gpus_per_node": 8, "accelerator": "gpu"}, "measurement": {"explore": "slices"}},
        r"measurement\.explore: slices need to know how fast the network is, .* 'gpu': state cluster\.network\.",
    ),
    (
        {
            "cluster": NODE,
            "measurement": {"explore": "auto"},
            "space": {"tensor_parallel_size": [2], "compile": [True], "async_tensor_parallel": [False, True]},
        },
        r"space\.async_tensor_parallel: a slice is alone, and has no other GPU's memory to reach: leave true out$",
    ),
    # Constraints
    ({"constraints": ["peak_memory_gib<=-10"]}, r"constraints: 'peak_memory_gib<=-10' can never hold: .* below 0$"),
    ({"constraints": ["mfu>=40"]}, r"constraints: 'mfu>=40' can never hold: mfu is never above 1$"),
    (
        {"constraints": ["mean_power_w<=5", "tokens_per_s>=1", "mean_power_w>=10"]},
        r"constraints: 'mean_power_w>=10' and 'mean_power_w<=5' cannot both hold$",
    ),
    # Objectives
    (
        {"objectives": {"step_time_s": "maximize"}},
        r"objectives\.step_time_s: maximize would look for the worst: less of it is better$",
    ),
    (
        {"objectives": {"mfu": "minimize"}, "cluster": NODE},
        r"objectives\.mfu: minimize would look for the worst: more of it is better$",
    ),
    ({"objectives": {"mfu": "maximize"}}, r"objectives\.mfu: no trial will have it: the peak FLOP/s of .* 'cpu'"),
    (
        {"objectives": {"peak_gpu_temp_c": "minimize", "tensor_activity": "maximize"}},
        r"objectives\.peak_gpu_temp_c: no trial will have it: only GPUs have such a figure; objectives\.tensor_",
    ),
]

MEANT: list[dict[str, Any]] = [
    {},
    {"measurement": {"window_s": 30, "deadline_s": 31}},
    {
        "cluster": {**NODE, "accelerator": "gpu", "network": {"gpu_gb_per_s": 450, "node_gb_per_s": 400}},
        "measurement": {"explore": "slices"},
    },
    {"cluster": NODE, "space": {"num_gpus": [8]}, "budget": {"gpu_hours": 0.01}, "measurement": {"explore": "slices"}},
    {"finalists": {"window_s": 700, "count": 0}},
    {"budget": {"wall_time_s": 10, "gpu_hours": 0.01, "trials": 1_000_000}},
    {"constraints": ["mean_power_w>=5", "mean_power_w<=5", "throttle_ratio<=0", "min_gpu_temp_margin_c>=-5"]},
    {"objectives": {"mean_sm_clock_mhz": "minimize", "tokens_per_s": "maximize"}, "cluster": NODE},
]


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_nobody_can_mean_is_refused_with_one_line(changes: dict[str, Any], line: str) -> None:
    asked = problem(**changes)  # it is well-formed, as records of such searches are
    with pytest.raises(InputError) as error:
        check(asked, "a.yaml")
    assert re.match(f"a.yaml: {line}", str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", MEANT, ids=str)
def test_what_is_just_possible_passes(changes: dict[str, Any]) -> None:
    asked = problem(**changes)
    assert check(asked, "a.yaml") is asked


def test_what_no_trial_will_have_is_told_beside_what_some_will() -> None:
    objectives = {"tokens_per_s": "maximize", "mfu": "maximize", "joules_per_token": "minimize"}
    asked = check(problem(objectives=objectives, constraints=["peak_memory_gib<=70"]), "spec")
    assert notices(asked) == [
        "objectives.mfu: no trial will have it: the peak FLOP/s of accelerator 'cpu' are not known",
        "constraints: 'peak_memory_gib<=70': no trial will have it: only GPUs have such a figure",
    ]
    assert notices(problem(cluster=NODE, objectives=objectives, constraints=["peak_memory_gib<=70"])) == []


def test_of_a_mixture_it_is_told_that_routers_do_not_choose() -> None:
    assert EVENLY in notices(problem(model="tiny-moe"))
    assert EVENLY not in notices(problem())


def test_throttling_of_cpus_is_told_where_the_kernel_does_not_count_it() -> None:
    told = notices(problem(objectives={"tokens_per_s": "maximize", "throttle_ratio": "minimize"}))
    assert [notice.partition(":")[0] for notice in told] == (
        [] if counts_throttling() else ["objectives.throttle_ratio"]
    )


def test_what_gpus_alone_have_is_no_figure_of_a_cpu() -> None:
    """Those of the documentation's metrics that speak of GPUs' own sensors, and what torch counts on GPUs alone."""
    names = ("sm_clock", "gpu_temp", "hbm", "tensor", "dram", "pcie", "link", "power_cap", "idle_energy", "peak_memory")
    assert [metric for metric in METRICS if known(metric).needs is Needs.GPU] == [
        metric for metric in METRICS if any(name in metric for name in names)
    ]


def test_data_that_are_not_here_are_told_and_what_is_no_tokens_is_refused(tmp_path: Path) -> None:
    missing, notes = tmp_path / "missing", tmp_path / "notes.npy"
    (told,) = data_from_afar(problem(data=str(missing)))
    assert told.startswith(f"data: no tokens at {missing}")
    assert data_from_afar(problem()) == []
    np.save(tmp_path / "tokens.npy", np.arange(1000) % 500)
    assert data_from_afar(problem(data=str(tmp_path / "tokens.npy"))) == []
    notes.write_text("these are no tokens")
    short = tmp_path / "short.npy"
    np.save(short, np.arange(10))
    for path in (notes, short):
        for look in (data_from_afar, check_data):
            with pytest.raises(InputError, match=rf"^data: .*{path.name}"):
                look(problem(data=str(path)))
    with pytest.raises(InputError, match="no tokens at"):
        check_data(problem(data=str(missing)))


def test_data_that_an_operator_does_not_allow_are_refused_unread_a_trainers_too(tmp_path: Path) -> None:
    for refused in (problem(data="/absent"), problem(data="/absent", trainer={"name": "mine", "command": ["train"]})):
        with pytest.raises(InputError, match=rf"^data: /absent lies outside of .* allows: synthetic, {tmp_path}$"):
            check_data(refused, (str(tmp_path),))
    check_data(problem(), ())


def test_a_machine_without_the_gpus_is_refused_unless_there_is_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # one that other tests have started
    have = count_gpus()
    many = Cluster(nodes=2, gpus_per_node=have + 1, accelerator="h200")
    with pytest.raises(InputError, match=rf"need {many.size} GPU, NVML and AMD SMI show {have} here; set RAY_ADDRESS"):
        check_machine(many)
    check_machine(Cluster(gpus_per_node=2, accelerator="cpu"))
    with pytest.raises(InputError, match=f"too many for this machine's {os.cpu_count()} CPUs"):
        check_machine(Cluster(gpus_per_node=1_000_000, accelerator="cpu"))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_machine(many)


def test_a_cluster_that_is_not_here_has_no_more_workers_than_this_machine_can_have() -> None:
    cpus = os.cpu_count() or 1
    afar = Cluster(nodes=128, gpus_per_node=8, accelerator="h100")
    assert workers_here(afar) == count_gpus()
    assert workers_here(replace(afar, accelerator="cpu", nodes=1000 * cpus)) == cpus
    assert workers_here(Cluster(gpus_per_node=cpus + 1, accelerator="cpu")) == cpus + 1


def test_a_trace_that_cannot_be_played_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    two = Cluster(gpus_per_node=2, accelerator="cpu")
    (tmp_path / "notes.parquet").write_text("no samples")
    monkeypatch.setenv("WATTUNE_REPLAY", str(tmp_path / "notes.parquet"))
    with pytest.raises(InputError, match=r"^WATTUNE_REPLAY: .*/notes\.parquet cannot be played: .+"):
        check_machine(two)
    monkeypatch.setenv("WATTUNE_REPLAY", str(tmp_path / "missing.parquet"))
    with pytest.raises(InputError, match=r"^WATTUNE_REPLAY: there is no file .*/missing\.parquet$"):
        check_machine(two)
