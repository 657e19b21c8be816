"""What uneven stages recover where one GPU of a pipeline is slow, and whether they leave alone what is well.

    python -m benchmarks.measure.remedy [SPEC] [--pairs 6] [--seconds 400] [--out FILE.json]
    python -m benchmarks.measure.remedy FILE.json...

The spec's first legal layout, of two pipeline stages, trains on two devices in windows. In some of them one device is
slowed by a program beside the trial (`benchmarks.measure.slowing`), in `CALM` windows none is. In each window layers
are cut by how long passes take the ranks, as `stage_layers: auto` does, and if the cut is not the plain one, steps with
the plain stages and with these are timed by turns (`benchmarks.measure.recutting`). They are adopted where the 95%
interval of what they save excludes zero, of pairs of one turn each, by its median step.

A window takes three steps, and where anything is tried seven more and seven for each of `--pairs`.

What they can recover in theory is what the best of all cuts saves of a step that is played by its schedule, with passes
as they were measured with the plain stages in that window, longer by the layers (`search_spaces.placement`): of the
turns, where there were any. A GPU at its power limit takes longer for each layer if it has more of them, and waits
less; `a layer, with the cut` says how much, of the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.measure.gang import one_bench, require_ok
from benchmarks.measure.recutting import Recut, computing_s
from benchmarks.measure.runs import add_run_arguments, parse_run
from benchmarks.measure.slowing import Draws, competing
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.placement import step_by_cut
from search_spaces.schedules import PassTime
from service.answers.tables import render
from service.paired import Difference, difference
from service.problem import Problem
from service.spec import load_spec
from service.trials.evaluate import make_request

SLOW = (0.05, 0.1, 0.2)
TIMES = 4
"""Windows of each slowness, half of them on either device."""

CALM = 20

PAIRS = 6
"""Of turns in a window, as many as a search has of a placement's trials."""

HISTORY, CALIBRATING = 3, 2
"""Windows of some steps only, before those in which anything is tried."""

BY_RANK = ("passes", "plain_passes", "other_passes")
"""What ranks tell of a window each by itself."""

STARTED_S = 180.0
"""Beyond the windows' own time, until a trial is taken to hang."""


@dataclass(frozen=True)
class Window:
    """One window: who was `meant` to be slow by how much, how many times as long as usual each rank took (`slower`),
    the `cut` by that, what it was `measured` to save, None of the plain one, and what it (`foretold`) and the best one
    save in theory. `longer`: how many times as long a layer takes each rank with the cut."""

    rank: int | None
    meant: float
    slower: tuple[float, ...]
    cut: tuple[int, ...]
    measured: Difference | None
    foretold: float
    theory: float
    longer: tuple[float, ...] = ()

    @property
    def adopted(self) -> bool:
        return self.measured is not None and self.measured.proven

    @property
    def saves(self) -> float:
        """The share of a step that the cut was measured to save, whether it was adopted or not."""
        return 0.0 if self.measured is None else self.measured.saves


def turns(slow: Sequence[float], times: int, calm: int) -> list[tuple[int | None, float]]:
    """Who is slow in which window: calm ones between the others, so that what drifts is no matter."""
    some = [((number + index) % 2, share) for number in range(times) for index, share in enumerate(slow)]
    slots: list[tuple[float, tuple[int | None, float]]] = [((i + 0.5) / len(some), one) for i, one in enumerate(some)]
    slots += [((i + 0.5) / calm, (None, 0.0)) for i in range(calm)]
    return [one for _, one in sorted(slots, key=lambda slot: slot[0])]


def while_training(spec: Problem, draws: Draws, pairs: int, seconds: float) -> dict[str, Any]:
    """All that is recorded of one trial."""
    layout = spec.legal.layouts[0]
    with competing(draws) as folder, one_bench(spec, layout.num_gpus) as bench:
        request = make_request("remedy", layout, spec)
        program = Recut(**vars(request.program), folder=str(folder), draws=draws, pairs=pairs, seconds=seconds)
        result = bench.run(replace(request, program=program, deadline_s=seconds + STARTED_S))
        by_rank = [list(_told(folder / f"{rank}.jsonl")) for rank in range(layout.num_gpus)]
    if min(map(len, by_rank)) <= draws.first:
        require_ok(result)
        raise SystemExit(f"{seconds:.0f} s are over before the first window in which anything is tried")
    if result.status != "ok":
        print(f"the trial did not end well, these are its windows until then: {result.status}: {result.cause}")
    return {
        "environment": result.environment,
        "layout": layout.to_dict(),
        "shape": asdict(spec.workload.shape),
        "draws": asdict(draws),
        "windows": [
            {**ranks[0], **{name: [one[name] for one in ranks] for name in BY_RANK if name in ranks[0]}}
            for ranks in zip(*by_rank, strict=False)
        ],
    }


def _told(file: Path) -> Iterator[dict[str, Any]]:
    """The windows that a rank has ended; of the last line there may be a part."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return (json.loads(line) for line in lines if line.endswith("\n"))


def read_windows(record: Mapping[str, Any]) -> list[Window]:
    """The windows of a record in which anything was tried."""
    layout, shape = Layout.from_dict(record["layout"]), ModelShape(**record["shape"])
    draws, windows, rounds = Draws(**record["draws"]), record["windows"], layout.gradient_accumulation_steps
    plain = tuple(layout.layers_of(rank, shape.layers) for rank in range(2))
    usual = [
        statistics.median(_computing(one["passes"], rounds)[rank] for one in windows[: draws.history])
        for rank in range(2)
    ]
    found = []
    for one in windows[draws.first :]:
        passes = one.get("plain_passes", one["passes"])
        step_s = step_by_cut(layout, shape, PassTime.of_rows(chain.from_iterable(passes)))
        measured = None
        whole_s = step_s(plain)
        longer: tuple[float, ...] = ()
        if "plain_s" in one:
            turns = [[statistics.median(turn) for turn in one[name]] for name in ("plain_s", "other_s")]
            measured, whole_s = difference(*turns), statistics.median(turns[0])
            spent = (_computing(one[name], rounds) for name in ("plain_passes", "other_passes"))
            longer = tuple(
                other / before * layers_before / layers
                for before, other, layers, layers_before in zip(*spent, one["cut"], plain, strict=True)
            )
        rank, meant = draws.drawn(one["window"])
        found.append(
            Window(
                rank,
                meant,
                tuple(s / u for s, u in zip(_computing(passes, rounds), usual, strict=True)),
                tuple(one["cut"]),
                measured,
                (step_s(plain) - step_s(one["cut"])) / whole_s,
                (step_s(plain) - min(map(step_s, cuts(shape.layers)))) / whole_s,
                longer,
            )
        )
    return found


def cuts(layers: int) -> list[tuple[int, int]]:
    """All of them, into two stages."""
    return [(first, layers - first) for first in range(1, layers)]


def _computing(by_rank: Sequence[Sequence[Any]], rounds: int) -> list[float]:
    """Seconds of a step in which each rank has passes to compute."""
    return [computing_s(PassTime.of_rows(passes), rounds) for passes in by_rank]


def table(windows: Sequence[Window]) -> str:
    rows = []
    for meant in sorted({one.meant for one in windows}):
        those = [one for one in windows if one.meant == meant]
        theory = statistics.fmean(one.theory for one in those)
        kept = statistics.fmean(one.saves if one.adopted else 0.0 for one in those)
        rows.append(
            [
                f"{meant:.0%}",
                str(len(those)),
                f"{statistics.median(max(one.slower) / min(one.slower) - 1 for one in those):.1%}",
                " ".join(sorted({"-".join(map(str, one.cut)) for one in those})),
                str(sum(one.measured is not None for one in those)),
                str(sum(one.adopted for one in those)),
                f"{statistics.fmean(one.saves for one in those):.2%}",
                f"{statistics.fmean(one.foretold for one in those):.2%}",
                f"{theory:.2%}",
                f"{kept:.2%}",
                f"{kept / theory:.0%}" if meant and theory else "",
            ]
        )
    header = (
        "slower by",
        "windows",
        "measured",
        "stages",
        "tried",
        "adopted",
        "saves",
        "foretold",
        "best in theory",
        "kept",
        "recovered",
    )
    return render(header, rows)


def each(windows: Sequence[Window]) -> str:
    """Those in which anything was tried, the worst first."""
    rows = [
        [
            "nobody" if one.rank is None else f"{one.rank} by {one.meant:.0%}",
            ", ".join(f"{times - 1:+.1%}" for times in one.slower),
            ", ".join(f"{times - 1:+.1%}" for times in one.longer),
            "-".join(map(str, one.cut)),
            str(one.measured),
            f"{one.foretold:.2%}",
            f"{one.theory:.2%}",
            "yes" if one.adopted else "no",
        ]
        for one in sorted(windows, key=lambda one: one.saves - one.theory)
        if one.measured is not None
    ]
    header = (
        "slow rank",
        "longer than usual",
        "a layer, with the cut",
        "stages",
        "saves (95%)",
        "foretold",
        "best in theory",
        "adopted",
    )
    return render(header, rows)


def show(records: Sequence[Mapping[str, Any]]) -> None:
    windows = [one for record in records for one in read_windows(record)]
    print(
        records[0]["environment"],
        Layout.from_dict(records[0]["layout"]).label,
        f"{records[0]['shape']['layers']} layers",
    )
    print(f"\n{table(windows)}\n")
    steps = [s for record in records for one in record["windows"] for turn in one.get("plain_s", ()) for s in turn]
    if not steps:
        print("nothing was tried in any of them")
        return
    print(f"of steps of {statistics.median(steps):.4f} s shares are saved; kept is what was adopted\n")
    print(f"those in which anything was tried\n\n{each(windows)}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, "remedy_2gpu.yaml")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of turns a window")
    parser.add_argument("--seconds", type=float, default=400.0, help="of windows; those left by then are left out")
    parser.add_argument("--slow", type=float, nargs="+", default=SLOW, help="shares by which a device is slowed")
    parser.add_argument("--times", type=int, default=TIMES, help="windows of each")
    parser.add_argument("--calm", type=int, default=CALM, help="windows without a slow device")
    given = parse_run(parser, argv)
    if given.out is None:
        show([json.loads(path.read_text()) for path in given.paths])
        return
    spec = load_spec(given.paths[0]).located()
    calibrating = 0 if spec.cluster.accelerator == "cpu" else CALIBRATING
    listed = turns(given.slow, given.times, given.calm)
    draws = Draws(0, 2, min(given.slow), max(given.slow), HISTORY, calibrating, listed)
    record = while_training(spec, draws, given.pairs, given.seconds)
    given.out.write_text(json.dumps(record))
    show([record])


if __name__ == "__main__":
    main()
