"""Data-sheet facts of the accelerators that a spec can name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One device as Ray schedules it: memory in GiB, dense bf16 peak in FLOP/s; None where there is no such figure.

    `fp8`: has matrix units for 8-bit floats. `peer_memory`: kernels reach the memory of neighbours through torch's
    symmetric memory, which asynchronous tensor parallelism is made of.
    """

    memory_gib: float | None = None
    peak_flops: float | None = None
    fp8: bool = False
    peer_memory: bool = False


ACCELERATORS: dict[str, Accelerator] = {
    # NVIDIA H100 SXM and H200 SXM data sheets (dense rates); usable memory as NVML reports it.
    "h100": Accelerator(79.6, 989.4e12, fp8=True, peer_memory=True),
    "h200": Accelerator(140.4, 989.4e12, fp8=True, peer_memory=True),
    # AMD Instinct MI250 data sheet: 128 GB and 362.1 TFLOP/s a card, two devices (GCDs) a card.
    "mi250": Accelerator(64.0, 181.05e12),
    # Any other GPU: nothing is known ahead, so memory is not checked and there is no MFU.
    "gpu": Accelerator(),
    "cpu": Accelerator(),
}
