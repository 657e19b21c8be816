"""What an accelerator attains: the coefficients of the cost model, by default from data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_spaces.hardware import ACCELERATORS
from search_spaces.network import NO_CURVES, Curves, Network
from search_spaces.operators import NONE_MEASURED, Timings

LINK_SHARE, NETWORK_SHARE, POWER_SHARE = 0.77, 0.8, 0.985
"""What is attained of the bandwidth of links, by a large all-reduce, and of adapters, and at what share of the power
limit mean power is held: on H200, but for the adapters, which are a guess."""

ATTENTION_SHARE = 0.61
"""Of the peak, what attention in heads 128 wide attains over many tokens, in trainings on H100 and H200."""

IDLE_SHARE = 0.9
"""Of a power limit, at most, that a GPU is taken to draw while it waits."""

STATED = "; as the spec states: "
"""In a source, between where coefficients are from and what the spec has in place of them."""

EXAMINED = "; products as the doctor found them: "
"""Likewise, before what GPUs attained."""

BY_SLICES = " by slices"
"""In a source, behind the number of trials of which no rank met another."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of one accelerator for `search_spaces.cost`, all above zero; seconds, joules, watts, bytes, FLOPs.

    - `source`: where they come from, for readers.
    - `matmul_flops`, `attention_flops`: a second, of large products in bf16 and of causal attention over many tokens
      in heads 128 wide, at the full clock; `matmul_half`: the smallest dimension of a product at which half of that is
      reached. `fp32_speed`, `fp8_speed`: of matrix products, in that of bf16.
    - `memory_bytes_per_s`: of compiled kernels that only move memory; `eager_bytes_per_s`: of those that are not
      compiled; `states_bytes_per_s`: of the kernels that update parameters and add up gradients.
    - `host_time`: what the CPU takes to launch a block, forward and backward, in what engines say of it
      (`launched_ms`); `fp8_launch_s`: in addition for an eager block with products in fp8.
    - `step_s`: what a step takes whatever the layout.
    - `link_bytes_per_s`, `link_latency_s`: of collectives within a node, by GPU and by hop; `network_bytes_per_s`,
      `network_latency_s`: of a GPU's adapter, between nodes; see `search_spaces.network.Network`. By default, the
      latencies are those that NCCL has for NVLink and networks.
    - `contention`: share of the time of communication beside computation by which the step is longer for it.
    - `expert_imbalance`: tokens that come to the experts of the busiest rank, in those of an even share.
    - `offloaded_per_s`: parameters of one GPU that the CPU updates, their transfers included.
    - `collectives`, `operators`: what was measured of these, which counts in place of what the others say of them;
      `operators_in_step`, `launches_in_step`: what these take within a step, in what they were measured to take alone,
      of the GPU and of the CPU.
    - `idle_w`: power of a GPU that waits for others within a step; `unlaunched_share`: of one that waits for the CPU,
      in that; `power_limit_w`: what its mean is held at.
    - `joules_per_flop`: of bf16, at the full clock; `joules_per_byte`: of memory; `joules_per_link_byte`: sent.
    """

    source: str
    matmul_flops: float
    attention_flops: float
    fp32_speed: float
    fp8_speed: float
    memory_bytes_per_s: float
    eager_bytes_per_s: float
    states_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    idle_w: float
    power_limit_w: float
    joules_per_flop: float
    joules_per_byte: float = 6e-11
    joules_per_link_byte: float = 2e-10
    matmul_half: float = 48.0
    host_time: float = 0.9
    fp8_launch_s: float = 7.6e-3
    step_s: float = 0.02
    link_latency_s: float = 3.4e-6
    network_latency_s: float = 14e-6
    contention: float = 0.45
    expert_imbalance: float = 1.1
    offloaded_per_s: float = 5e8
    unlaunched_share: float = 0.5
    operators_in_step: float = 1.03
    launches_in_step: float = 1.1
    operators: Timings = NONE_MEASURED
    collectives: Curves = NO_CURVES

    @property
    def told(self) -> str:
        """Where they come from, and what was measured besides, for readers."""
        told = self.source
        if count := len(self.operators.rows):
            told += f"; {count} operators measured"
        return told + "; collectives measured" * bool(self.collectives.rows)

    def network(
        self,
        gpus_per_node: int,
        gpus_per_switch: int | None = None,
        oversubscription: float = 1.0,
        rank_order: tuple[int, ...] | None = None,
    ) -> Network:
        """The network of machines with such links and adapters, so many GPUs to a node and a switch."""
        return Network(
            self.source,
            gpus_per_node,
            self.link_bytes_per_s,
            self.network_bytes_per_s,
            self.link_latency_s,
            self.network_latency_s,
            gpus_per_switch,
            oversubscription,
            rank_order,
            self.collectives.rows,
        )

    def examined(self, flops: float, usual: float) -> Coefficients:
        """The coefficients of GPUs whose products attain so many FLOP/s at their power limit, where `usual` is what the
        GPUs attain on which they were found: the clock that a power allows goes with the third root of what a FLOP
        costs."""
        source = f"{self.source}{EXAMINED}{flops / 1e12:,.0f} TFLOP/s"
        return replace(self, source=source, joules_per_flop=self.joules_per_flop * (usual / flops) ** 3)

    def stated(
        self,
        link_bytes_per_s: float | None = None,
        network_bytes_per_s: float | None = None,
        network_latency_s: float | None = None,
        power_limit_w: float | None = None,
    ) -> Coefficients:
        """The coefficients where peaks are stated, which count in place of what was fitted or is in a data sheet."""
        names = {
            "links": link_bytes_per_s,
            "network": network_bytes_per_s,
            "latency": network_latency_s,
            "power limit": power_limit_w,
        }
        said = [name for name, value in names.items() if value is not None]
        if not said:
            return self
        limit = self.power_limit_w if power_limit_w is None else POWER_SHARE * power_limit_w
        return replace(
            self,
            source=f"{self.source}{STATED}{', '.join(said)}",
            link_bytes_per_s=LINK_SHARE * link_bytes_per_s if link_bytes_per_s else self.link_bytes_per_s,
            network_bytes_per_s=NETWORK_SHARE * network_bytes_per_s
            if network_bytes_per_s
            else self.network_bytes_per_s,
            network_latency_s=network_latency_s or self.network_latency_s,
            power_limit_w=limit,
            idle_w=min(self.idle_w, IDLE_SHARE * limit),
        )


COUNTED = 6 / 3.5
"""FLOPs that MFU counts of attention, in those of causal attention: it counts the whole square, and a backward pass of
two forward ones (Chowdhery et al. 2022, appendix B), where half of it is computed, with two and a half (Dao 2023)."""


def data_sheet(name: str) -> Coefficients | None:
    """What is to be expected of the accelerator `name` of `ACCELERATORS`; None where nothing is known of it."""
    return _DATA_SHEETS.get(name)


def is_fitted(name: str, calibration: Coefficients) -> bool:
    """Whether `calibration` is more than the data sheet's of the accelerator `name`."""
    sheet = data_sheet(name)
    return sheet is None or calibration.source.split(STATED)[0].split(EXAMINED)[0] != sheet.source


def is_fitted_to_gangs(name: str, calibration: Coefficients) -> bool:
    """Whether it is fitted to trials whose ranks communicated with each other."""
    return is_fitted(name, calibration) and BY_SLICES not in calibration.source


def is_unproven(name: str, calibration: Coefficients) -> bool:
    """Whether `calibration` is but the data sheet's of the accelerator `name`, on which nothing was ever measured."""
    return ACCELERATORS[name].published_mfu is not None and not is_fitted(name, calibration)


def _gpu(name: str, joules_per_flop: float, idle_w: float) -> Coefficients:
    """Peaks of the data sheet, by the shares that were reached on H200; see docs/cost.md.

    Where nothing was measured and it is not known what products attain, neither they nor attention are faster than
    would make an MFU that was published: then no layout's is predicted to be larger.
    """
    sheet = ACCELERATORS[name]
    facts = (sheet.peak_flops, sheet.fp32_flops, sheet.memory_bytes_per_s, sheet.link_bytes_per_s)
    peak, fp32, memory, link, network, limit = (*facts, sheet.network_bytes_per_s, sheet.power_limit_w)
    assert peak is not None
    assert fp32 is not None
    assert memory is not None
    assert link is not None
    assert network is not None
    assert limit is not None
    most = sheet.published_mfu or COUNTED
    return Coefficients(
        source=f"data sheet of {name}",
        matmul_flops=(sheet.products or min(0.9, most)) * peak,
        attention_flops=(sheet.attention or min(ATTENTION_SHARE, most / COUNTED)) * peak,
        fp32_speed=fp32 / peak,
        fp8_speed=1.5 if sheet.fp8 else 1.0,
        memory_bytes_per_s=0.8 * memory,
        eager_bytes_per_s=0.65 * memory,
        states_bytes_per_s=0.6 * memory,
        link_bytes_per_s=LINK_SHARE * link,
        network_bytes_per_s=NETWORK_SHARE * network,
        idle_w=idle_w,
        power_limit_w=POWER_SHARE * limit,
        joules_per_flop=joules_per_flop,
    )


_DATA_SHEETS = {
    # Energy and idle power are in no data sheet: of H200 as its trials have them, of the others a guess, by which large
    # products need about their power limit.
    "h100": _gpu("h100", joules_per_flop=1.2e-12, idle_w=215.0),
    "h200": _gpu("h200", joules_per_flop=1.2e-12, idle_w=215.0),
    "a100": _gpu("a100", joules_per_flop=1.2e-12, idle_w=120.0),
    "a100-40": _gpu("a100-40", joules_per_flop=1.2e-12, idle_w=100.0),
    "b200": _gpu("b200", joules_per_flop=0.75e-12, idle_w=300.0),
    "mi300x": _gpu("mi300x", joules_per_flop=1.2e-12, idle_w=250.0),
    "mi325x": _gpu("mi325x", joules_per_flop=1.2e-12, idle_w=300.0),
    "mi250": _gpu("mi250", joules_per_flop=1.2e-12, idle_w=100.0),
    # CPUs differ too much for a data sheet: a guess at a core, right for small models within a factor of three.
    "cpu": Coefficients(
        source="guess at a CPU",
        matmul_flops=1e11,
        attention_flops=5e10,
        fp32_speed=1.0,
        fp8_speed=1.0,
        memory_bytes_per_s=2e10,
        eager_bytes_per_s=1e10,
        states_bytes_per_s=2e10,
        link_bytes_per_s=1e9,
        network_bytes_per_s=1e9,
        idle_w=2.0,
        power_limit_w=4.0,
        joules_per_flop=2e-11,
        joules_per_byte=1e-10,
        host_time=0.5,
        operators_in_step=1.0,
        step_s=5e-3,
        link_latency_s=1.5e-3,
        network_latency_s=2e-3,
    ),
}
