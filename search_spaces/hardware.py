"""Data-sheet facts of the accelerators that a spec can name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Accelerator:
    """One device as Ray schedules it: memory in GiB, dense bf16 peak in FLOP/s; None where there is no such figure.

    `fp8`: has matrix units for 8-bit floats. `peer_memory`: kernels reach the memory of neighbours through torch's
    symmetric memory, which asynchronous tensor parallelism is made of. `fp32_flops`: peak of fp32 matrix products as
    torch runs them by default. `memory_bytes_per_s`: of the device's memory; `link_bytes_per_s`: to all neighbours in
    the node together, one way; `network_bytes_per_s`: the device's share of a node's usual network, one way.
    `platform`: the module of `trainables.platforms` that runs ranks on it; None for that which torch was built for.
    `published_mfu`: where Wattune itself was never measured on it, the largest MFU that others published of it, and
    `products`, `attention`: the shares of the peak that large matrix products and attention over many tokens were seen
    to attain, None where that is not known. `links_awake_w`: what the device draws more while its links are awake, as
    they are for `LINKS_AWAKE_S` after they have carried something; 0 where nobody measured it. `apart`: likewise the
    standard deviation of what two of them at their power limit take apart in the products between two meetings of their
    ranks, some 1 to 20 ms, as a share of these (`search_spaces.wander`). `examined_flops`: what `wattune doctor` has
    matrix products attain a second on those, at `power_limit_w`, on which the cost model's coefficients were found.
    """

    memory_gib: float | None = None
    peak_flops: float | None = None
    fp8: bool = False
    peer_memory: bool = False
    fp32_flops: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    power_limit_w: float | None = None
    platform: str | None = "cuda"
    published_mfu: float | None = None
    products: float | None = None
    attention: float | None = None
    links_awake_w: float = 0.0
    apart: float = 0.0
    examined_flops: float | None = None


LINKS_AWAKE_S = 0.05
"""Of NVLink: the threshold that NVML tells of H200 is 500 times 100 us, and from a pause of 100 ms on they draw less
(benchmarks/results/drawn_2xh200.txt)."""


class Bandwidth(NamedTuple):
    """Of a GPU in bytes a second, one way: to all neighbours in the node together, and its share of the node's
    adapters."""

    link: float
    network: float


NETWORKS: dict[str, Bandwidth] = {
    # NVIDIA H100 data sheet: NVLink 4, 900 GB/s both ways; one 400 Gbit/s InfiniBand adapter a GPU, as in its DGX H100.
    "nvlink4_ndr": Bandwidth(450e9, 50e9),
    # NVIDIA A100 data sheet: NVLink 3, 600 GB/s both ways; one 200 Gbit/s InfiniBand adapter a GPU, as in its DGX A100.
    "nvlink3_hdr": Bandwidth(300e9, 25e9),
    # NVIDIA HGX B200 data sheet: NVLink 5, 1.8 TB/s both ways; one 400 Gbit/s adapter a GPU, as in its DGX B200.
    "nvlink5_ndr": Bandwidth(900e9, 50e9),
    # NVLink 4 as above, and one 400 Gbit/s Ethernet adapter a GPU. Tuned, it trains as fast as InfiniBand of that
    # bandwidth (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.1).
    "roce_400g": Bandwidth(450e9, 50e9),
    # AMD Instinct MI250 data sheet: Infinity Fabric, 400 GB/s between the two devices of a card, about 100 GB/s to the
    # others; a 200 Gbit/s adapter a card.
    "infinity_fabric": Bandwidth(100e9, 12.5e9),
    # AMD Instinct MI300X platform data sheet: seven Infinity Fabric links of 128 GB/s both ways, one to each neighbour;
    # a 400 Gbit/s adapter a GPU.
    "infinity_fabric4": Bandwidth(448e9, 50e9),
}
"""Networks that a spec can name, by their data sheets."""


ACCELERATORS: dict[str, Accelerator] = {
    # NVIDIA H100 SXM and H200 SXM data sheets (dense rates); usable memory as NVML reports it. Links of three machines
    # with H200 draw 29 to 38 W while they are awake and carry little; H100 has the same. So two H200 are 4.6 and 5.2%
    # of their products apart, in two layouts (benchmarks/results/company_2xh200.txt), and H100 is taken to be. The
    # slower of two H200 attains 664 to 669 TFLOP/s on four hosts, where layouts take 0.8% longer on average than is
    # predicted, and 647 and 652 on two where they take 4.6% longer (benchmarks/results/examined.txt).
    "h100": Accelerator(
        79.6, 989.4e12, True, True, 66.9e12, 3.35e12, *NETWORKS["nvlink4_ndr"], 700.0, links_awake_w=30.0, apart=0.05
    ),
    "h200": Accelerator(
        140.4,
        989.4e12,
        True,
        True,
        66.9e12,
        4.8e12,
        *NETWORKS["nvlink4_ndr"],
        700.0,
        links_awake_w=30.0,
        apart=0.05,
        examined_flops=668e12,
    ),
    # NVIDIA A100 80GB SXM data sheet; fp32 without TF32, as torch has it. MFU: 225 TFLOP/s, GPT-3 2.7B in sequences of
    # 8192 tokens (Dao 2023, FlashAttention-2, table 1). Products: 271 TFLOP/s (Bekman, Machine Learning Engineering,
    # maximum achievable matmul FLOPS); FlashAttention-2 attains 50 to 73% of the peak (Dao 2023, abstract).
    "a100": Accelerator(
        80.0,
        312e12,
        False,
        True,
        19.5e12,
        2.039e12,
        *NETWORKS["nvlink3_hdr"],
        400.0,
        published_mfu=0.72,
        products=0.87,
        attention=0.6,
    ),
    # NVIDIA A100 40GB SXM data sheet: as that of 80 GB, but for the memory.
    "a100-40": Accelerator(
        40.0,
        312e12,
        False,
        True,
        19.5e12,
        1.555e12,
        *NETWORKS["nvlink3_hdr"],
        400.0,
        published_mfu=0.72,
        products=0.87,
        attention=0.6,
    ),
    # NVIDIA HGX B200 data sheet (dense rates); usable memory as NVML reports it. MFU: 1676 TFLOP/s, Llama 3.1 405B in
    # fp8 (Megatron-Bridge, performance summary of 25.09); none as large was published in bf16.
    "b200": Accelerator(
        179.1, 2250e12, True, True, 75e12, 7.7e12, *NETWORKS["nvlink5_ndr"], 1000.0, published_mfu=0.74
    ),
    # AMD Instinct MI300X and MI325X data sheets. Their 8-bit floats have another format than the engine's. MFU: what
    # matrix products attain at most, 708 and 843 TFLOP/s (AMD, "Measuring Max-Achievable FLOPs", part 2, 2025).
    "mi300x": Accelerator(
        192.0, 1307.4e12, False, False, 163.4e12, 5.3e12, *NETWORKS["infinity_fabric4"], 750.0, "rocm", 0.54
    ),
    "mi325x": Accelerator(
        256.0, 1307.4e12, False, False, 163.4e12, 6.0e12, *NETWORKS["infinity_fabric4"], 1000.0, "rocm", 0.64
    ),
    # AMD Instinct MI250 data sheet: 128 GB, 362.1 TFLOP/s, 3.2 TB/s and 500 W a card, two devices (GCDs) a card.
    # MFU: 166 TFLOP/s a card, MPT-7B (Databricks, "Training LLMs at Scale with AMD MI250 GPUs", 2023); on Frontier's
    # MI250X, of a higher peak, 0.38 with GPT 22B (Dash et al. 2023, arXiv 2312.12705).
    "mi250": Accelerator(
        64.0, 181.05e12, False, False, 45.3e12, 1.64e12, *NETWORKS["infinity_fabric"], 250.0, "rocm", 0.46
    ),
    # Any other GPU: nothing is known ahead, so memory is not checked and there is no MFU.
    "gpu": Accelerator(platform=None),
    "cpu": Accelerator(platform="cpu"),
}


_NAMES = (
    (r"\bH100\b.*\bHBM3\b", "h100"),
    (r"\bH200\b(?!.*NVL)", "h200"),
    (r"\bA100-SXM4-80GB\b", "a100"),
    (r"\bA100-SXM4-40GB\b", "a100-40"),
    (r"\bB200\b", "b200"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI325X\b", "mi325x"),
    (r"\bMI250\b", "mi250"),
)
"""How drivers call the accelerators; those of PCIe cards, which are slower, match none."""


def accelerator_named(name: str) -> Accelerator | None:
    """What a driver calls so, such as `NVIDIA H100 80GB HBM3`; None where its data sheet is not here."""
    known = known_as(name)
    return None if known is None else ACCELERATORS[known]


def known_as(name: str) -> str | None:
    """The name in `ACCELERATORS` of what a driver calls so; None where it has none."""
    return next((known for pattern, known in _NAMES if re.search(pattern, name)), None)
