"""Depth proxies and short trials: a line is exact where things are linear, and says so where they cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import ray
from hypothesis import assume, given
from hypothesis import strategies as st

from search_spaces.layout import Layout
from service.metrics import METRICS, Method
from service.result import Proxy, RankRecord, TrialResult
from service.spec import make_problem
from service.trials.bench import Bench
from service.trials.evaluate import run_trial
from service.trials.extrapolation import OVER_BATCH, OVER_DEPTH, SPENT, Growth, line, over_batch, over_depth
from trainables.child import Outcome
from trainables.mailbox import Mailbox, Member
from trainables.status import Status

CONFIG = Layout("megatron", 2, 16)
LAYERS = 32
SPEC = make_problem(
    {
        "name": "deep",
        "model": "llama3-8b",
        "data": "synthetic",
        "sequence_length": 128,
        "global_batch_size": 16,
        "cluster": {"gpus_per_node": 2, "accelerator": "h200"},
        "depth_proxy": [2, 4],
        "space": {"zero_stage": 3},
    }
)
TOKENS = 16 * 128


def measured(layers: int, step_s: float, joules: float | None, memory_gib: list[float | None], **changed: Any) -> Proxy:
    """What a run of `layers` layers comes to whose steps take `step_s` and `joules`, each of them the same."""
    rate = TOKENS / step_s
    metrics = {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / 2,
        "mfu": SPEC.at_depth(layers).workload.shape.flops_per_token(128) * rate / (2 * 989.4e12),
        "step_time_s": step_s,
        "joules_per_token": joules and joules / TOKENS,
        "energy_per_step_j": joules,
        "peak_memory_gib": max((gib for gib in memory_gib if gib is not None), default=None),
        "mean_power_w": 500.0 + layers,
        "peak_gpu_temp_c": 60.0 + layers,
        "throttle_ratio": layers / 100,
        "final_loss": 5.0 / layers,
    } | dict.fromkeys(SPENT, float(layers))
    ranks = tuple(
        RankRecord(rank, rank, "node", f"GPU-{rank}", CONFIG.coordinates(rank), gib, None)
        for rank, gib in enumerate(memory_gib)
    )
    methods = dict.fromkeys(("joules_per_token", "throttle_ratio"), Method.COUNTER)
    result = TrialResult(
        f"t-{layers}", CONFIG, Status.OK, None, metrics, methods, (step_s,) * 5, (6.0, 5.0 / layers), ranks=ranks
    )
    return Proxy(layers, replace(result, **changed))


amounts = st.floats(0.01, 100.0)
depths = st.tuples(st.integers(1, 30), st.integers(1, 31)).filter(lambda pair: pair[0] < pair[1])


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 1000), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_a_line_is_followed_exactly(shallow: int, deep: int, depth: int, constant: float, slope: float) -> None:
    assume(shallow != deep)
    found = line((shallow, deep), (constant + slope * shallow, constant + slope * deep), depth)
    scale = abs(constant) + abs(slope) * max(shallow, deep)
    assert found == pytest.approx(constant + slope * depth, abs=1e-9 * depth * (1 + scale))


@given(depths, amounts, amounts, amounts, amounts, st.lists(st.tuples(amounts, amounts), min_size=2, max_size=2))
def test_what_is_linear_in_layers_is_found_exactly(
    pair: tuple[int, int],
    step_s: float,
    layer_s: float,
    joules: float,
    layer_j: float,
    memory: list[tuple[float, float]],
) -> None:
    def at(layers: int) -> Proxy:
        gib: list[float | None] = [constant + layers * share for constant, share in memory]
        return measured(layers, step_s + layers * layer_s, joules + layers * layer_j, gib)

    found, truth = over_depth("t", SPEC, *map(at, pair)), at(LAYERS).result
    assert found.status == "ok"
    for metric in OVER_DEPTH:
        assert found.metrics[metric] == pytest.approx(truth.metrics[metric], rel=1e-6), metric
        assert found.methods[metric] == "extrapolated"


def test_another_gpu_may_be_the_fullest_at_full_depth() -> None:
    """The one with the head is fuller at first, the one with more in flight at last."""
    found = over_depth("t", SPEC, measured(2, 1, 1, [10.0, 4.0]), measured(4, 2, 2, [11.0, 8.0]))
    assert found.metrics["peak_memory_gib"] == 8 + (32 - 4) * 2


def test_the_rest_is_the_deeper_run_s_and_costs_are_of_both() -> None:
    shallow, deep = measured(2, 1.0, 10.0, [1.0, 1.0]), measured(4, 2.0, 20.0, [2.0, 2.0], cause="GPU-1: was reset")
    found = over_depth("t", SPEC, shallow, deep)
    assert (found.trial_id, found.layout, found.cause) == ("t", CONFIG, "at 4 layers: GPU-1: was reset")
    for metric in ("mean_power_w", "peak_gpu_temp_c", "throttle_ratio", "final_loss"):
        assert found.metrics[metric] == deep.result.metrics[metric]
    assert [found.metrics[metric] for metric in SPENT] == [6.0] * len(SPENT)
    assert found.methods["throttle_ratio"] == "counter"
    assert (found.step_times_s, found.losses) == (deep.result.step_times_s, deep.result.losses)
    assert found.proxies == (shallow, deep)


def test_every_metric_of_the_record_has_its_place() -> None:
    """What is neither extrapolated nor summed must not depend on how much work a step is."""
    states = {
        "idle_energy_j",
        "mean_power_w",
        "peak_power_w",
        "power_spread_w",
        "mean_hbm_power_w",
        "energy_ratio",
        "throttle_ratio",
        "power_cap_ratio",
        "throttle_time_s",
        "mean_sm_clock_mhz",
        "min_sm_clock_mhz",
        "sm_clock_spread_mhz",
        "mean_gpu_temp_c",
        "peak_gpu_temp_c",
        "gpu_temp_spread_c",
        "min_gpu_temp_margin_c",
        "peak_hbm_temp_c",
        "tensor_activity",
        "dram_activity",
        "pcie_bytes_per_s",
        "pcie_utilisation",
        "link_bytes_per_s",
        "link_utilisation",
    }
    assert set(METRICS) == {*OVER_DEPTH, "trial_overhead_s"} | states


def test_what_a_machine_does_not_measure_stays_missing() -> None:
    cpu = replace(SPEC, cluster=replace(SPEC.cluster, accelerator="cpu"))
    found = over_depth("t", cpu, measured(2, 1.0, None, [None, None]), measured(4, 2.0, None, [None, None]))
    for metric in ("joules_per_token", "peak_memory_gib", "mfu"):
        assert found.metrics[metric] is None
        assert found.methods.get(metric) != "extrapolated"
    assert found.metrics["step_time_s"] == 16.0


def test_an_estimate_does_not_become_better_by_being_extrapolated() -> None:
    guess = {"methods": {"joules_per_token": "estimated"}}
    runs = measured(2, 1.0, 1.0, [1.0, 1.0], **guess), measured(4, 2.0, 2.0, [1.0, 1.0], **guess)
    found = over_depth("t", SPEC, *runs)
    assert found.methods["joules_per_token"] == "estimated"
    assert found.methods["tokens_per_s"] == "extrapolated"


@pytest.mark.parametrize(
    ("deep", "cause"),
    [
        (measured(4, 1.0, 20.0, [1.0, 1.0]), "mean time of a step is 1 with 4 layers, 1 with 2: no line leads"),
        (measured(4, 0.5, 20.0, [1.0, 1.0]), "mean time of a step is 0.5 with 4 layers, 1 with 2: no line leads"),
        (measured(4, 2.0, 0.002, [1.0, 1.0]), "energy of a step is "),
    ],
)
def test_a_deeper_run_that_takes_no_more_is_invalid(deep: Proxy, cause: str) -> None:
    found = over_depth("t", SPEC, measured(2, 1.0, 10.0, [1.0, 1.0]), deep)
    assert (found.status, found.metrics, found.methods) == ("invalid", {}, {})
    assert found.cause is not None
    assert found.cause.startswith(cause)
    assert len(found.proxies) == 2


def test_both_results_survive_json() -> None:
    found = over_depth("t", SPEC, measured(2, 1.0, 10.0, [1.0, 1.0]), measured(4, 2.0, 20.0, [2.0, 2.0]))
    kept = json.loads(json.dumps(found.to_dict()))
    assert TrialResult.from_dict(kept) == found
    assert [(proxy["layers"], proxy["result"]["metrics"]["step_time_s"]) for proxy in kept["proxies"]] == [
        (2, 1.0),
        (4, 2.0),
    ]
    del kept["proxies"]  # as in records made before there were any
    assert TrialResult.from_dict(kept) == replace(found, proxies=())


def test_a_depth_that_fails_ends_the_trial_and_is_named(ray_session: Any) -> None:
    mailbox: Any = ray.remote(Mailbox).options(num_cpus=0, max_concurrency=100).remote(1)

    @ray.remote(num_cpus=0)
    def work(mailbox: Any) -> int:
        ray.get(mailbox.join.remote(Member(0, "a", "host", 1, "GPU-0")))
        order = ray.get(mailbox.next.remote(0, 0))
        ray.get(
            mailbox.hand_in.remote(
                0, order.number, Outcome(Status.OOM, "step: out of memory", "step", traceback="Traceback ...")
            )
        )
        ray.get(mailbox.leave.remote(0, order.number, ()))
        return order.request.program.model.layers

    asked = work.remote(mailbox)
    result = run_trial(Bench(SPEC, mailbox, {}, {}), "t", replace(CONFIG, num_gpus=1))
    assert ray.get(asked) == 4  # the deeper first: what does not fit fails at once
    assert (result.trial_id, result.status, result.cause) == ("t", "oom", "at 4 layers: rank 0: step: out of memory")
    assert result.traceback == "Traceback ..."
    assert [(proxy.layers, proxy.result.status) for proxy in result.proxies] == [(4, "oom")]


def timed(microbatches: int, step_s: float, joules: float | None, *steps_s: float) -> Proxy:
    """A window of steps of so many microbatches on each of two GPUs, which took `step_s` and `joules` on average."""
    layout = replace(CONFIG, global_batch_size=2 * microbatches)
    rate = layout.global_batch_size * 128 / step_s
    metrics: dict[str, float | None] = {"tokens_per_s": rate, "step_time_s": step_s, "energy_per_step_j": joules}
    return Proxy(
        LAYERS,
        TrialResult(
            "t", layout, Status.OK, None, metrics, {"joules_per_token": Method.COUNTER}, steps_s or (step_s,) * 5
        ),
    )


WHOLE = TrialResult(
    "t",
    replace(CONFIG, global_batch_size=512),
    Status.OK,
    "GPU-1: was reset",
    {"throttle_ratio": 0.5, "peak_memory_gib": 70.0, "mean_power_w": 1.0, "trial_overhead_s": 3.0},
    {"throttle_ratio": Method.COUNTER, "mean_power_w": Method.COUNTER},
)
LARGE = replace(SPEC, global_batch_size=512, depth_proxy=None)


@given(amounts, amounts, amounts, amounts, st.integers(1, 8), st.integers(2, 4))
def test_what_is_linear_in_microbatches_is_found_exactly(
    step_s: float, microbatch_s: float, joules: float, microbatch_j: float, few: int, spread: int
) -> None:
    def at(count: int) -> Proxy:
        return timed(count, step_s + count * microbatch_s, joules + count * microbatch_j)

    found, truth = over_batch(LARGE, WHOLE, at(few), at(few * spread)), at(256).result.metrics
    assert found.metrics["tokens_per_s"] == pytest.approx(truth["tokens_per_s"], rel=1e-6)
    assert found.metrics["step_time_s"] == pytest.approx(truth["step_time_s"], rel=1e-6)
    assert found.metrics["energy_per_step_j"] == pytest.approx(truth["energy_per_step_j"], rel=1e-6)
    power = (joules + 256 * microbatch_j) / (step_s + 256 * microbatch_s)
    assert found.metrics["mean_power_w"] == pytest.approx(power, rel=1e-6)
    assert {found.methods[name] for name in OVER_BATCH} == {"short"}
    assert found.metrics["extrapolation_error"] == pytest.approx(0, abs=1e-9)


def test_a_short_trial_keeps_what_steps_of_any_size_have() -> None:
    few, many = timed(2, 1.0, 10.0), timed(6, 2.0, 20.0)
    found = over_batch(LARGE, WHOLE, few, many)
    assert (found.layout, found.status, found.cause) == (WHOLE.layout, "ok", "GPU-1: was reset")
    for metric in ("throttle_ratio", "peak_memory_gib", "trial_overhead_s"):
        assert found.metrics[metric] == WHOLE.metrics[metric]
    assert found.methods["throttle_ratio"] == "counter"
    assert found.proxies == (few, many)
    assert TrialResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_steps_that_vary_make_what_follows_from_them_uncertain() -> None:
    many = timed(6, 3.0, 30.0, 2.9, 3.1, 2.9, 3.1)
    error = Growth((2, 6), 256, "microbatches").error([(1.0, 1.0), (2.9, 3.1, 2.9, 3.1)])
    assert error is not None
    # The deviation of the four is 0.1155, that of their mean half as much; from 2 and 6 on to 256 it grows 63.5-fold.
    assert error == pytest.approx(63.5 * 0.1155 / 2, rel=1e-3)
    found = over_batch(LARGE, WHOLE, timed(2, 1.0, 10.0), many).metrics
    assert found["step_time_s"] == pytest.approx(128)
    assert found["extrapolation_error"] == pytest.approx(error / 128)


def test_of_a_single_step_nobody_knows_how_much_steps_vary() -> None:
    found = over_batch(LARGE, WHOLE, timed(2, 1.0, 10.0), timed(6, 3.0, 30.0, 3.0))
    assert (found.status, found.metrics["extrapolation_error"]) == ("ok", None)
    assert found.metrics["step_time_s"] == pytest.approx(128)


def test_more_microbatches_that_take_no_longer_are_invalid() -> None:
    found = over_batch(LARGE, WHOLE, timed(2, 1.0, 10.0), timed(6, 1.0, 30.0))
    assert (found.status, found.metrics) == ("invalid", {})
    assert found.cause == "mean time of a step is 1 with 12 sequences, 1 with 4: no line leads to 512"


def test_short_runs_at_two_depths_lead_to_the_whole_model_and_batch() -> None:
    def at(layers: int) -> Proxy:
        def of(count: int) -> Proxy:
            return timed(count, 0.5 + layers * count * 0.25, 5.0 + layers * count * 2.5)

        ranks = measured(layers, 1.0, 1.0, [float(layers)] * 2).result.ranks
        whole = replace(WHOLE, ranks=ranks)
        return Proxy(layers, over_batch(LARGE.at_depth(layers), whole, of(2), of(6)))

    found = over_depth("t", LARGE, at(2), at(4))
    assert found.metrics["step_time_s"] == pytest.approx(0.5 + LAYERS * 256 * 0.25)
    assert found.metrics["joules_per_token"] == pytest.approx((5.0 + LAYERS * 256 * 2.5) / (512 * 128))
    assert found.methods["tokens_per_s"] == "extrapolated"
    assert [proxy.layers for proxy in found.proxies] == [2, 4]
    assert [proxy.result.proxies[0].result.layout.global_batch_size for proxy in found.proxies] == [4, 4]
