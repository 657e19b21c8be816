"""AMD's GPUs, which torch's build for ROCm shows as `cuda` devices, with RCCL under NCCL's name."""

from __future__ import annotations

from trainables.platforms.cuda import Cuda


class Rocm(Cuda):
    """A GPU, or half of a card of two, for each rank."""

    visible = "HIP_VISIBLE_DEVICES"
    names_kernels = False  # all of RCCL's are one generic kernel


PLATFORM = Rocm()
