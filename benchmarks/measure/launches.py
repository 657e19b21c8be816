"""What the CPU takes to launch a block, in each mode in which the layouts of some specs train.

    python -m benchmarks.measure.launches SPEC...

By tiny models of which one rank is there, as `wattune calibrate` has them, on this machine and without Ray: for each
mode the milliseconds of a block and microbatch, those that its engine says of the usual hosts of GPUs, and these by
those. A mode of several ranks is measured next to the same mode of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from torch.distributed import TCPStore

from search_spaces.hardware import Accelerator
from search_spaces.launches import launch_of, specimen_of, usual_s
from search_spaces.layout import Layout
from search_spaces.operators import Operator
from service.answers.tables import render
from service.errors import InputError
from service.operators import QUICK
from service.problem import Problem
from service.spec import load_spec
from trainables.measuring import measure
from trainables.operators import Operators
from trainables.platforms.base import platform_of
from trainables.program import Place, TrialRequest


def launches_of(problems: Iterable[Problem]) -> list[Operator]:
    """Those of their layouts, each once, the modes of an engine and a model next to each other."""
    found = {launch_of(layout, problem.workload) for problem in problems for layout in problem.legal.layouts}
    return sorted(found, key=lambda launch: (launch.dims, *launch.form[:3], launch.compiled, launch.form[3:]))


def usual_ms(launch: Operator) -> float:
    """What the engine says that a block of such a launch takes, without what fp8 adds to eager ones."""
    specimen = specimen_of(launch)
    return 1e3 * usual_s(specimen.layout, specimen.workload)


def measured(launches: Iterable[Operator], accelerator: Accelerator) -> Iterator[tuple[Operator, float]]:
    """Milliseconds of each that can be measured; a line is printed why another cannot."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = Operators((), tuple(launches), 0.0, float("inf"))
    request = TrialRequest("launches", Layout("megatron", 1, 1), program, QUICK, float("inf"))
    place = Place(0, 0, "127.0.0.1", store.port, platform_of(accelerator))
    report = measure(program, request, place, lambda progress: None)
    print(*report.problems, sep="\n", end="\n" if report.problems else "")
    for row in report.operators:
        yield row.operator, 1e3 * row.forward_s


def table(rows: Iterable[tuple[Operator, float]]) -> str:
    cells = [
        [launch.label, f"{ms:.2f}", f"{usual_ms(launch):.2f}", f"{ms / usual_ms(launch):.2f}"] for launch, ms in rows
    ]
    return render(["a block's", "ms", "as engines say", "in that"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    try:
        problems = [load_spec(path).located() for path in parser.parse_args().specs]
    except InputError as error:
        parser.error(str(error))
    print(table(measured(launches_of(problems), problems[0].cluster.device)))


if __name__ == "__main__":
    main()
