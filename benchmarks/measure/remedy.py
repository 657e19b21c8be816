"""What uneven stages recover where one GPU of a pipeline is slow, and whether they leave alone what is well.

    python -m benchmarks.measure.remedy [SPEC] [--pairs 12] [--seconds 400] [--out FILE.json]
    python -m benchmarks.measure.remedy FILE.json...

The spec's first legal layout, of two pipeline stages, trains on two devices in windows. In some of them one device is
slowed by a program beside the trial (`benchmarks.measure.slowing`), in `CALM` windows none is. In each window the ranks
are profiled, layers are cut by what that shows, as `stage_layers: auto` does, and if the cut is not the plain one,
steps with the plain stages and with these are timed by turns (`benchmarks.measure.recutting`). They are adopted where
the 95% interval of what they save excludes zero.

A window takes four steps, and where anything is tried ten more and `--pairs` of two each. It is then told as well how
long a layer takes each rank with the cut: a GPU at its power limit may take longer for each if it has more of them.

What they can recover in theory is what the best of all cuts saves of a step that is played by its schedule
(`search_spaces.playing`), with layers as long as they were measured to be on either device in that window.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure.gang import one_bench, require_ok
from benchmarks.measure.recutting import Recut
from benchmarks.measure.runs import add_run_arguments, parse_run
from benchmarks.measure.slowing import Draws, competing
from search_spaces.layout import Layout
from search_spaces.messages import scripts
from search_spaces.playing import play
from search_spaces.schedules import Action, Pass
from service.answers.tables import render
from service.paired import Difference, difference
from service.problem import Problem
from service.spec import load_spec
from service.trials.evaluate import make_request

SLOW = (0.05, 0.1, 0.2)
TIMES = 4
"""Windows of each slowness, half of them on either device."""

CALM = 20

PAIRS = 12
"""Of steps in a window: of as many, one that the host held up does not decide whether a saving is proven."""

HISTORY, CALIBRATING = 8, 3
"""Windows of some steps only, before those in which anything is tried."""

BY_RANK = ("compute_s", "other_compute_s")
"""What ranks tell of a window each by itself."""

STARTED_S = 180.0
"""Beyond the windows' own time, until a trial is taken to hang."""

BACKWARD = 2 / 3
"""The backward pass's share of a layer's time: twice the matrix products of the forward pass."""


@dataclass(frozen=True)
class Window:
    """One window: who was `meant` to be slow by how much, how many times as long as usual each rank took (`slower`),
    the `cut` by that, what it was `measured` to save, None of the plain one, and what it (`foretold`) and the best one
    save in theory. `longer`: how many times as long a layer takes each rank with the cut, where that was recorded."""

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
    some = [(number % 2, share) for number in range(times) for share in slow]
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
        "layers": spec.workload.shape.layers,
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


def step_s(layout: Layout, cut: Sequence[int], layer_s: Sequence[float]) -> float:
    """Seconds of a step by its schedule, of a layer's as they are on each pipeline rank for a microbatch."""

    def seconds(rank: int, action: Action) -> float:
        share = {Pass.FORWARD: 1 - BACKWARD, Pass.BACKWARD: BACKWARD}[action.step]
        return cut[action.stage] * layer_s[rank] * share

    return play(scripts(layout), seconds, lambda sender, receiver: 0.0).seconds


def best_s(layout: Layout, cut: tuple[int, ...], layer_s: Sequence[float]) -> float:
    """Of all cuts into two stages, by moving layers from one to the other for as long as that helps: a step takes the
    less the nearer the cut is to the best one."""
    best = step_s(layout, cut, layer_s)
    for way in (-1, 1):
        moved = cut
        while min(moved := (moved[0] + way, moved[1] - way)) > 0 and (seconds := step_s(layout, moved, layer_s)) < best:
            best = seconds
    return best


def read_windows(record: Mapping[str, Any]) -> list[Window]:
    """The windows of a record in which anything was tried."""
    layout, layers = Layout.from_dict(record["layout"]), record["layers"]
    draws, windows = Draws(**record["draws"]), record["windows"]
    plain = tuple(layout.layers_of(rank, layers) for rank in range(2))
    usual = [statistics.median(one["compute_s"][rank] for one in windows[: draws.history]) for rank in range(2)]
    found = []
    for one in windows[draws.first :]:
        layer_s = [one["compute_s"][rank] / plain[rank] / layout.gradient_accumulation_steps for rank in range(2)]
        taken = step_s(layout, plain, layer_s)
        best = best_s(layout, plain, layer_s)
        rank, meant = draws.drawn(one["window"])
        cut = zip(one.get("other_compute_s", ()), one["compute_s"], one["cut"], plain, strict=False)
        longer = tuple(other / before * layers_before / layers for other, before, layers, layers_before in cut)
        found.append(
            Window(
                rank,
                meant,
                tuple(seconds / before for seconds, before in zip(one["compute_s"], usual, strict=True)),
                tuple(one["cut"]),
                difference(one["plain_s"], one["other_s"]) if "plain_s" in one else None,
                1 - step_s(layout, one["cut"], layer_s) / taken,
                1 - best / taken,
                longer,
            )
        )
    return found


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
    print(records[0]["environment"], Layout.from_dict(records[0]["layout"]).label, f"{records[0]['layers']} layers")
    steps = [second for record in records for one in record["windows"] for second in one.get("plain_s", ())]
    print(f"steps of {statistics.median(steps):.4f} s, of which shares are saved; kept is what was adopted\n")
    print(table(windows))
    print(f"\nthose in which anything was tried\n\n{each(windows)}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, "remedy_2gpu.yaml")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of steps a window")
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
