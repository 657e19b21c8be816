"""What the doctor says of each fault that is injected: the table of `tests/service/doctor/faults.py`, told.

    python -m benchmarks.judge.doctor

Each fault is injected into a fake driver, this machine, or a node of a Ray cluster on this machine, and the whole
doctor is run. Beside the fault stands the line that it printed; a fault that it says nothing of, or tells in several
lines, ends in exit code 1. Takes two minutes; needs a C compiler, and no GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.service.doctor.faults import (
    CLUSTER,
    DRIVER,
    MACHINE,
    Fault,
    fake_machine,
    names,
    of_cluster,
    of_driver,
    of_machine,
    wrong,
)


def told(fault: Fault, lines: list[str], node: str | None = None) -> list[str]:
    """The lines of a fault, as printed but for the width of their first column."""
    return [f"{check}: {rest}" for check, rest in wrong(lines) if names((check, rest), fault, node)]


def examined(folder: Path) -> Iterator[tuple[str, Fault, list[str] | str]]:
    """Where each fault was injected, and its lines, or why it could not be."""
    driver = folder / "driver"
    driver.mkdir()
    with fake_machine(driver) as machine:
        for one in DRIVER:
            lack = "no C compiler to build the fake driver with"
            yield "fake driver", one, lack if machine is None else told(one, of_driver(machine, one))
    for number, at in enumerate(MACHINE):
        home = folder / f"machine{number}"
        home.mkdir()
        lines = of_machine(home, at)
        yield "this machine", at, lines if isinstance(lines, str) else told(at, lines)
    cluster = folder / "cluster"
    cluster.mkdir()
    seen = of_cluster(cluster)
    for of in CLUSTER:
        yield "Ray cluster", of, seen if isinstance(seen, str) else told(of, seen[0], seen[1][of.name])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    counts = {"named in one line": 0, "not": 0, "not injected": 0}
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        for where, fault, lines in examined(Path(folder)):
            if isinstance(lines, str):
                outcome, said = "not injected", lines
            else:
                outcome, said = "named in one line" if len(lines) == 1 else "not", "\n    ".join(lines) or "nothing"
            counts[outcome] += 1
            print(f"{where}: {fault.name}\n    {said}", flush=True)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    sys.exit(1 if counts["not"] else 0)


if __name__ == "__main__":
    main()
