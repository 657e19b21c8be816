"""Accelerators by the names that drivers give them."""

from __future__ import annotations

import pytest

from search_spaces.hardware import ACCELERATORS, accelerator_named


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_only_what_a_data_sheet_is_of_has_its_figures(name: str, known: str | None) -> None:
    assert accelerator_named(name) is (known and ACCELERATORS[known])
