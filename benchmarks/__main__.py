"""Measure on this machine what can be measured on it without asking: `make bench`."""

from __future__ import annotations

import runpy
import sys

sys.argv = ["benchmarks.overhead", "examples/tiny_cpu.yaml", "--trials", "3"]
runpy.run_module("benchmarks.overhead", run_name="__main__")
