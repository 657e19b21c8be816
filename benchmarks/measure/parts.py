"""A measurement in parts: programs run one after the other, of which none that fails or takes too long stops the next.

All that a program prints is in a file of its own as it prints it, and `programs.jsonl` has a line for each that ended:
whoever loses the machine on the way has what was measured until then. The same call again goes on where it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import import_path

ENDED = "programs.jsonl"
GRACE_S = 20.0
"""How long a program that is to end may take for it, before it is killed with all that it started."""

LEAST_S = 10.0
"""What is left of the time, below which no part begins."""

TOLD_S = 60.0
"""The limit of a program that tells of the others."""

LEFT_OUT = ("home/compiled", "home/telemetry", "home/spool", "data")
"""What an archive does without: caches, and what can be made again."""


@dataclass(frozen=True)
class Program:
    """One program: `arguments` of Python, which runs in the folder of all parts; its output goes to `PART/name.txt`.

    `soft_s`: it takes `--seconds`, which end so long before its limit; None if it takes none. `again`: it goes on with
    what it has left, so it is run again though it had ended well. `tells`: it tells of what the programs before it
    measured, so it is run whatever became of them, unless none of them was.
    """

    name: str
    arguments: tuple[str, ...]
    soft_s: float | None = None
    again: bool = False
    tells: bool = False


@dataclass(frozen=True)
class Part:
    """Programs that follow from one another, which have `limit_s` seconds together."""

    name: str
    limit_s: float
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class Ended:
    """How a program ended: `code` is negative after a signal, `cut` whether its time was over or someone ended it."""

    part: str
    program: str
    code: int
    cut: bool
    seconds: float

    @property
    def well(self) -> bool:
        return self.code == 0 and not self.cut

    def __str__(self) -> str:
        how = "cut off" if self.cut else "ok" if self.well else f"exit code {self.code}"
        return f"{self.part}: {self.program}: {how} after {self.seconds:.0f} s"


def ended(folder: Path) -> list[Ended]:
    """What has ended in a folder so far, in that order."""
    file = folder / ENDED
    return [Ended(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def run_parts(
    parts: Sequence[Part], folder: Path, seconds: float, environment: Mapping[str, str], archive: Path | None = None
) -> list[Ended]:
    """Run them in their order for so many seconds at most, and return how those programs ended that were run.

    `archive`: a file that has all of the folder after each part, for the way home. SIGTERM and SIGINT end what is under
    way, and then raise SystemExit.
    """
    until = time.monotonic() + seconds - GRACE_S
    done: list[Ended] = []
    with _ending_by_signal():
        for part in parts:
            if (left := until - time.monotonic()) < LEAST_S:
                _say(f"{part.name}: not begun: {max(left, 0):.0f} s are left")
                continue
            try:
                for one in _run(part, folder, until, environment):
                    done.append(one)
                    _say(str(one))
            finally:
                if archive is not None:
                    pack(folder, archive)
    return done


def _run(part: Part, folder: Path, until: float, environment: Mapping[str, str]) -> Iterator[Ended]:
    (folder / part.name).mkdir(parents=True, exist_ok=True)
    before = {one.program for one in ended(folder) if one.part == part.name and one.well}
    part_until = min(until, time.monotonic() + part.limit_s)
    failed = ran = False
    for program in part.programs:
        if program.tells:
            if not ran:
                continue
            limit_s = min(TOLD_S, until - time.monotonic())
        elif failed or (program.name in before and not program.again):
            continue
        else:
            limit_s = part_until - time.monotonic()
        one = _run_one(part.name, program, folder, max(limit_s, 0.0), environment)
        ran, failed = True, failed or not (one.well or program.tells)
        yield one


def _run_one(part: str, program: Program, folder: Path, limit_s: float, environment: Mapping[str, str]) -> Ended:
    output, began = folder / part / f"{program.name}.txt", time.monotonic()
    soft = () if program.soft_s is None else ("--seconds", f"{max(limit_s - program.soft_s, 0.0):.0f}")
    _say(f"{part}: {program.name}: at most {limit_s:.0f} s")
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *program.arguments, *soft],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        cut = True
        try:
            process.wait(limit_s)
            cut = False
        except subprocess.TimeoutExpired:
            _end(process)
        except SystemExit:
            _end(process)
            raise
        finally:
            one = Ended(part, program.name, process.returncode, cut, round(time.monotonic() - began, 1))
            with (folder / ENDED).open("a") as lines:
                lines.write(json.dumps(asdict(one)) + "\n")
    if not one.well:
        for line in output.read_text(errors="replace").splitlines()[-3:]:
            _say(f"    {line[:200]}")
    return one


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a program end, and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


@contextlib.contextmanager
def _ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGINT raise SystemExit, once."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pack(folder: Path, archive: Path) -> None:
    """Write a folder into a `.tar.gz`, whole or not at all, without `LEFT_OUT`."""

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.startswith(LEFT_OUT) else entry

    partial = archive.with_name(archive.name + ".partial")
    with tarfile.open(partial, "w:gz") as file:
        for path in sorted(folder.iterdir()):
            if path not in (archive, partial):
                file.add(path, path.name, filter=kept)
    os.replace(partial, archive)


def environment_of(folder: Path) -> dict[str, str]:
    """What programs in a folder run with: a state directory of its own, a Ray of their own, and NCCL without multicast
    over NVLink, which not every host lets its guests use."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    chosen = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    return chosen | kept | {"PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1", "WATTUNE_HOME": str(folder / "home")}


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
