"""How small a slowness of one GPU is found, while a layout trains, and how often one that is not there.

    python -m benchmarks.measure.slowed [SPEC] [--seconds 280] [--seed 0] --out FILE.jsonl
    python -m benchmarks.measure.slowed FILE.jsonl[.xz]...

One long trial trains the spec's first legal layout, on all of its devices, in windows of a few profiled steps. In most
of them one device, by the luck of a draw, is slowed by a program beside the trial (`benchmarks.measure.slowing`). What
trials have to find stragglers, `service.trials.straggler`, looks at each window without knowing of the draw: at the
ranks alone, as in a trial of a search, and against what they differed by in windows in which nothing was found, as one
that watches a run can. A rank without others is held against itself.

What is true is measured, over all windows: what a GPU computes in a step, less what that takes longer beside
communication, over what it is in clean windows, against the other's; on CPU a rank's own time. Single windows scatter,
so each counts with what it was meant to cost times the median ratio of what windows of the rank did cost to what they
were meant to. Of files of earlier runs the same is printed of all of them together. A file has a
line that says what was run, and then one for each window, written while the trial goes on: a run that is cut off leaves
all but its last seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import text_of
from benchmarks.measure.following import followed
from benchmarks.measure.gang import one_bench, require_ok
from benchmarks.measure.runs import add_run_arguments, parse_run
from benchmarks.measure.slowing import AIMED, Draws, Watched, competing
from search_spaces.layout import Layout
from service.answers.tables import render
from service.problem import Problem
from service.result import NodeWindow, RankRecord, SlowCause, Straggler
from service.spec import load_spec
from service.trials.evaluate import make_request
from service.trials.straggler import slowed, straggler
from service.trials.windows import Nodes, summaries
from telemetry.windows.device import DeviceWindow
from trainables.breakdown import FEWEST

LEAST, MOST = 0.005, 0.2
HISTORY, CALIBRATING = 20, 8
SLOW = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
"""Of these the curve tells; what was measured counts as the nearest, by its ratio."""

KEPT = 50
"""Windows of a rank's history that it is held against, the latest ones."""

SURE = 0.01
"""What it costs to slow a rank is told from windows that are to cost this share of its time or more."""

FEWEST_DRAWN = 5

TOGETHER = 8
"""Windows of which telemetry is asked at once: each time it has counters read that take the driver milliseconds."""

STARTED_S = 180.0
"""Beyond the windows' own time, until a trial is taken to hang."""


@dataclass(frozen=True)
class Seen:
    """A window as the detector sees it: its ranks and devices. `seconds` are from its beginning to its end."""

    number: int
    seconds: float
    ranks: tuple[RankRecord, ...]
    devices: tuple[DeviceWindow, ...]


@dataclass(frozen=True)
class Judged:
    """A window of one slow rank or none, by what share of its time it was `meant` to be and `was` slower, and what was
    `found` with the ranks' history and `alone`, from this window only."""

    seconds: float
    rank: int | None
    meant: float
    was: float
    found: Straggler | None
    alone: Straggler | None
    cause: SlowCause

    def right(self, of: Callable[[Judged], Straggler | None]) -> bool:
        """Whether it names the slow rank."""
        told = of(self)
        return told is not None and told.rank == self.rank


def blames_device(found: Straggler | None) -> bool:
    """Whether a device is told to be slow, and not its host, which now and then keeps one waiting by itself."""
    return found is not None and (found.device is None or found.cause is not SlowCause.HOST)


def while_training(spec: Problem, seconds: float, draws: Draws) -> Iterator[dict[str, Any]]:
    """All that is recorded of one trial with so many seconds of windows, or `FEWEST_DRAWN` that are drawn: what it is,
    and then each window, soon after it has ended."""
    layout = spec.legal.layouts[0]
    with ThreadPoolExecutor(1) as pool, competing(draws) as folder, one_bench(spec, layout.num_gpus) as bench:
        request = make_request("slowed", layout, spec)
        fewest = draws.first + FEWEST_DRAWN
        program = Watched(**vars(request.program), folder=str(folder), seconds=seconds, fewest=fewest)
        trial = pool.submit(bench.run, replace(request, program=program, deadline_s=seconds + STARTED_S))
        told = followed([folder / f"{rank}.jsonl" for rank in range(layout.num_gpus)], trial.done)
        if (heads := next(told, None)) is not None:
            (node_id,) = bench.telemetry
            ranks = [
                RankRecord(rank, rank, node_id, one["device"], one["coordinates"], None, None)
                for rank, one in enumerate(heads)
            ]
            yield {
                "environment": heads[0]["environment"],
                "layout": layout.to_dict(),
                "draws": asdict(draws),
                "ranks": [asdict(rank) for rank in ranks],
            }
            while some := list(islice(told, TOGETHER)):
                seen = _summaries(ranks, [of_ranks[0] for of_ranks in some], bench.telemetry)
                yield from (_window(of_ranks, devices) for of_ranks, devices in zip(some, seen, strict=True))
        require_ok(trial.result())


def _window(of_ranks: Sequence[Mapping[str, Any]], devices: Sequence[DeviceWindow]) -> dict[str, Any]:
    return {
        "number": of_ranks[0]["window"],
        "seconds": (of_ranks[0]["end_ns"] - of_ranks[0]["began_ns"]) / 1e9,
        "ranks": [
            {name: one[name] for name in ("breakdown", "own_s", "interrupted_s", "compute_alone_s")} for one in of_ranks
        ],
        "devices": [asdict(device) for device in devices],
    }


def _summaries(
    ranks: Sequence[RankRecord], windows: Sequence[Mapping[str, Any]], telemetry: Nodes
) -> list[tuple[DeviceWindow, ...]]:
    """What telemetry saw of the ranks' GPUs in each window; nothing on CPU."""
    devices = tuple(rank.device for rank in ranks if rank.device is not None)
    if not devices:
        return [() for _ in windows]
    asked = [[NodeWindow(ranks[0].node_id, one["start_ns"], one["end_ns"], devices)] for one in windows]
    return [summary.devices for summary in summaries(asked, telemetry)]


def read(path: Path) -> dict[str, Any]:
    """A run's record, of a run that was cut off too: of its last line there may be a part.

    Raises SystemExit for one that has no window which was drawn.
    """
    lines = [json.loads(line) for line in text_of(path).splitlines(keepends=True) if line.endswith("\n")]
    if not lines or len(lines) - 1 <= Draws(**lines[0]["draws"]).first:
        raise SystemExit(f"{path}: it ends before the first window in which a device may be slow")
    return {**lines[0], "windows": lines[1:]}


def read_windows(record: Mapping[str, Any]) -> Iterator[Seen]:
    for window in record["windows"]:
        told = zip(record["ranks"], window["ranks"], strict=True)
        ranks = tuple(RankRecord.from_dict({**rank, **of_window}) for rank, of_window in told)
        devices = tuple(DeviceWindow(**{**one, "problems": tuple(one["problems"])}) for one in window["devices"])
        yield Seen(window["number"], window["seconds"], ranks, devices)


def detect(
    windows: Iterable[Seen], layout: Layout, history: int
) -> Iterator[tuple[Straggler | None, Straggler | None]]:
    """What is found in each window, with what was seen before and without. In the first `history` windows nobody looks:
    nothing is wrong in them. Any other joins the history in which no device was found to be slow.
    """
    before: deque[Seen] = deque(maxlen=KEPT)
    for window in windows:
        found = alone = None
        if window.number >= history:
            alone = straggler(window.ranks, window.devices, layout)
            if len(window.ranks) > 1:
                found = straggler(window.ranks, window.devices, layout, [one.ranks for one in before])
            else:
                then = [device for one in before for device in one.devices]
                found = slowed(window.ranks[0], window.devices, [one.ranks[0] for one in before], then, layout)
        if not blames_device(found):
            before.append(window)
        yield found, alone


def judge(record: Mapping[str, Any]) -> list[Judged]:
    """The windows of a record that were drawn, with what was found in them."""
    layout, draws = Layout.from_dict(record["layout"]), Draws(**record["draws"])
    windows = list(read_windows(record))
    ratios = _ratios(windows, draws)
    cause = SlowCause.HOST if record["ranks"][0]["device"] is None else SlowCause.SHARED
    judged = []
    looked = [one for one in windows if draws.calibrated(one.number) is None]
    for window, (found, alone) in zip(looked, detect(looked, layout, draws.first), strict=True):
        if window.number < draws.first:
            continue
        rank, meant = draws.drawn(window.number)
        was = 0.0 if rank is None else meant * ratios[rank]
        judged.append(Judged(window.seconds, rank, meant, was, found, alone, cause))
    return judged


def _ratios(windows: Sequence[Seen], draws: Draws) -> dict[int, float]:
    """What slowing a rank did cost over what it was meant to, by rank: the median of windows that were to cost `SURE`
    or more, of all if there are none."""
    calm = [window for window in windows if window.number and _undisturbed(window.number, draws)]
    usual = [statistics.median(one.ranks[rank].work_s for one in calm) for rank in range(draws.ranks)]
    own = [statistics.median(_own_s(one.ranks[rank]) for one in calm) for rank in range(draws.ranks)]
    costs: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(draws.ranks)}
    for window in windows:
        rank, meant = draws.drawn(window.number)
        if rank is not None and window.number >= draws.first:
            longer = [(one.work_s - usual[one.rank]) / own[one.rank] for one in window.ranks]
            others = [share for other, share in enumerate(longer) if other != rank] or [0.0]
            costs[rank].append((meant, (longer[rank] - statistics.median(others)) / meant))
    return {
        rank: statistics.median([ratio for meant, ratio in of_rank if meant >= SURE] or [ratio for _, ratio in of_rank])
        for rank, of_rank in costs.items()
        if of_rank
    }


def _undisturbed(number: int, draws: Draws) -> bool:
    return draws.calibrated(number) is None and draws.drawn(number)[0] is None


def _own_s(rank: RankRecord) -> float:
    return statistics.fmean(rank.own_s)


def curve(judged: Sequence[Judged], of: Callable[[Judged], Straggler | None]) -> str:
    """A row for windows without a slow rank, and one for each slowness."""

    def share(count: int, rows: Sequence[object]) -> str:
        return f"{count / len(rows):.1%}" if rows else ""

    rows = []
    clean = [one for one in judged if one.rank is None]
    told = [one for one in clean if of(one) is not None]
    blamed = [one for one in clean if blames_device(of(one))]
    rows.append(["none", str(len(clean)), "", share(len(told), clean), share(len(blamed), clean), "", "", "", ""])
    for slowness in SLOW:
        those = [one for one in judged if one.rank is not None and nearest(one.was) == slowness]
        rows.append(_row(f"{slowness:.0%}", those, of, share))
    enough = [one for one in judged if one.rank is not None and one.was >= AIMED[0]]
    rows.append(_row(f"{AIMED[0]:.1%} or more", enough, of, share))
    header = ("slower by", "windows", "measured", "something found", "a device blamed", "the right one")
    return render((*header, "cause right of these", "cost is off by", "found after s"), rows)


def _row(
    name: str,
    those: Sequence[Judged],
    of: Callable[[Judged], Straggler | None],
    share: Callable[[int, Sequence[object]], str],
) -> list[str]:
    found = [one for one in those if one.right(of)]
    causes = [one for one in found if (told := of(one)) is not None and told.cause is one.cause]
    # The cost is a share of the slowed step, what is true one of the rank's own time.
    off = [abs(told.cost * (1 + one.was) - one.was) for one in found if (told := of(one)) is not None]
    return [
        name,
        str(len(those)),
        f"{statistics.median(one.was for one in those):.2%}" if those else "",
        share(sum(of(one) is not None for one in those), those),
        share(sum(blames_device(of(one)) for one in those), those),
        share(len(found), those),
        share(len(causes), found),
        f"{statistics.median(off):.2%}" if off else "",
        f"{statistics.median(one.seconds for one in found):.2f}" if found else "",
    ]


def nearest(slowness: float) -> float | None:
    """Of `SLOW`, by ratio; None of what is less than two thirds of the least."""
    if slowness < SLOW[0] / 1.5:
        return None
    return min(SLOW, key=lambda one: max(one / slowness, slowness / one))


def noise(records: Sequence[Mapping[str, Any]]) -> str:
    """By how much ranks differ in windows in which nobody is slowed."""
    lines = []
    for record in records:
        draws = Draws(**record["draws"])
        calm = [one for one in read_windows(record) if one.number and _undisturbed(one.number, draws)]
        if len(calm) < FEWEST:
            continue
        for rank in range(draws.ranks):
            own = [_own_s(one.ranks[rank]) for one in calm]
            lines.append(f"rank {rank}: {statistics.median(own) * 1e3:.2f} ms of its own in a step, {_repeats(own)}")
        if draws.ranks > 1:
            pairs = [one.ranks[:2] for one in calm]
            owns = [_own_s(one) - _own_s(other) for one, other in pairs]
            apart = owns, [one.work_s - other.work_s for one, other in pairs]
            within = [statistics.stdev(one) / statistics.median(own) for one in apart]
            lines.append(
                f"the first two are apart within {within[0]:.2%} of that, what they compute within {within[1]:.2%}"
            )
    return "\n".join(lines)


def _repeats(values: Sequence[float]) -> str:
    return f"windows repeat within {statistics.stdev(values) / statistics.fmean(values):.2%} (standard deviation)"


def show(records: Sequence[Mapping[str, Any]]) -> None:
    judged = [one for record in records for one in judge(record)]
    windows = [window["seconds"] for record in records for window in record["windows"]]
    print(records[0]["environment"], Layout.from_dict(records[0]["layout"]).label)
    print(f"{len(judged)} windows of {statistics.median(windows):.2f} s were drawn; in clean ones")
    print(noise(records))
    print("\nAgainst what was seen before, as one that watches a run can:")
    print(curve(judged, lambda one: one.found))
    if Draws(**records[0]["draws"]).ranks > 1:
        print("\nFrom a single window, as in a trial; GPUs that differ by nature count as slow ones:")
        print(curve(judged, lambda one: one.alone))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, "slowed_2gpu.yaml", "the file of this run, of a line a window")
    parser.add_argument("--seconds", type=float, default=280.0, help="of windows")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--history", type=int, default=HISTORY, help="windows in which nobody is slowed, at first")
    parser.add_argument("--least", type=float, default=LEAST, help="the least slowness that is drawn")
    parser.add_argument("--most", type=float, default=MOST, help="the most")
    given = parse_run(parser, argv)
    if given.out is None:
        show([read(path) for path in given.paths])
        return
    spec = load_spec(given.paths[0]).located()
    calibrating = 0 if spec.cluster.accelerator == "cpu" else CALIBRATING
    ranks = spec.legal.layouts[0].num_gpus
    draws = Draws(given.seed, ranks, given.least, given.most, given.history, calibrating)
    with given.out.open("w", buffering=1) as file:  # a line at once: what is there stays, however the run ends
        for one in while_training(spec, given.seconds, draws):
            file.write(json.dumps(one, default=float) + "\n")  # NumPy has numbers of its own
    show([read(given.out)])


if __name__ == "__main__":
    main()
