"""Measure on this machine what can be measured on it without asking: `make bench`."""

from __future__ import annotations

from benchmarks.measure.overhead import main

if __name__ == "__main__":
    main(["examples/tiny_cpu.yaml", "--trials", "3"])
