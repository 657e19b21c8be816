"""A run in training, watched from beside it: by the stamps of its ranks, where its program has the hook, and by the
telemetry of this machine. Nothing is changed, and nothing is asked of the run.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from service.watch.against import Against, Attained
from service.watch.event import Event
from service.watch.findings import Confirmed, Devices, Finding, Steps, errors
from service.watch.stamps import Listener, Pace, Ranks
from telemetry.actor import Telemetry
from telemetry.devices import DeviceInfo
from telemetry.windows.trial import WindowSummary

WINDOW_S = 10.0
LEAST_STEPS = 5
"""Steps of each rank in a window of steps; where they are long, it lasts as many windows as it takes."""

BUSY = 0.5
"""Share of the time from which on a GPU is taken to be in use, where no rank tells which ones are."""

SILENT_S, SILENT_STEPS = 60.0, 10
"""Time without a stamp, and as many usual steps, after which a run is silent."""

SPEEDS = 6
"""Windows of steps of which the run's speed now is the mean."""


def watching(listen: str, against: Against | None = None) -> Generator[Event, None, None]:
    """`run_events` of who tells an address and of this machine's devices, until it is closed.

    Raises `InputError` if nothing can be listened to there.
    """
    listener = Listener(listen)
    try:
        telemetry = Telemetry(socket.gethostname(), "watch")
        try:
            yield from run_events(listener, telemetry, against, WINDOW_S)
        finally:
            telemetry.stop()
    finally:
        listener.close()


def run_events(listener: Listener, telemetry: Telemetry, against: Against | None, window_s: float) -> Iterator[Event]:
    """What is found, in windows of so many seconds, of the run whose ranks tell `listener` and of its GPUs here."""
    run = _Run(telemetry, against)
    while True:
        start_ns = time.monotonic_ns()
        began = [stamp for stamp in listener.until(time.monotonic() + window_s) if run.ranks.hear(stamp)]
        yield from run.look(start_ns, time.monotonic_ns(), bool(began))


class _Run:
    def __init__(self, telemetry: Telemetry, against: Against | None) -> None:
        self.telemetry, self.against = telemetry, against
        self.ranks = Ranks()
        self.latest = dict[str, dict[str, Any]]()
        self.begin()

    def begin(self) -> None:
        """Forget what is known of a run that went before."""
        self.steps, self.devices = Steps(), Devices()
        self.of_steps, self.of_devices, self.of_record = Confirmed(), Confirmed(), Confirmed()
        self.speeds = deque[float](maxlen=SPEEDS)
        self.pace: Pace | None = None
        self.silent = False

    def look(self, start_ns: int, end_ns: int, begins: bool) -> Iterator[Event]:
        """What is to be told after a window."""
        if begins:
            self.begin()
            yield self.event("run", self.described(), {"ranks": len(self.ranks.stamps)})
        yield from self.silence()
        pace = self.ranks.pace(LEAST_STEPS)
        summary = self.seen(start_ns, end_ns)
        ranks = {stamp.device: stamp.rank for stamp in self.ranks.stamps if stamp.device is not None}
        if summary.devices:
            found = self.devices.judge(summary.devices, ranks, self.stages())
            yield from self.told(self.of_devices.update(found))
        yield from self.failed(device.device for device in summary.devices)
        if pace is not None:
            self.pace = pace
            yield from self.told(self.of_steps.update(self.steps.judge(pace, summary.devices)))
            yield from self.compared(pace, summary)

    def stages(self) -> dict[int, int]:
        """The pipeline stage of each rank, where the layout is known."""
        if self.against is None:
            return {}
        layout = self.against.used.layout
        return {
            stamp.rank: layout.coordinates(stamp.rank)["pp"]
            for stamp in self.ranks.stamps
            if stamp.world == layout.num_gpus
        }

    def described(self) -> str:
        stamps = self.ranks.stamps
        hosts = dict.fromkeys(stamp.host for stamp in stamps)
        of = "" if len(stamps) == stamps[0].world else f" of {stamps[0].world}"
        return f"{len(stamps)}{of} ranks tell of their steps, on {', '.join(hosts)}"

    def silence(self) -> Iterator[Event]:
        """A run that tells of no step any more, which may have ended, and one that does so again."""
        if not self.ranks.stamps:
            return
        usual = self.pace.step_s if self.pace is not None else 0.0
        quiet_s = time.monotonic() - self.ranks.heard_s
        silent = quiet_s > max(SILENT_S, SILENT_STEPS * usual)
        if silent != self.silent:
            self.silent = silent
            last = max(stamp.step for stamp in self.ranks.stamps)
            text = f"no step for {quiet_s:.0f} s, the last was {last}" if silent else "steps go on"
            yield self.event("run", text, {"silent": silent, "step": last})

    def seen(self, start_ns: int, end_ns: int) -> WindowSummary:
        """What telemetry saw of the GPUs that the run has here."""
        return self.telemetry.window(start_ns, end_ns, [info.uuid for info in self.used()])

    def used(self) -> Sequence[DeviceInfo]:
        """This machine's devices that ranks of the run name; those in use where none does."""
        state = self.telemetry.state()
        named = {stamp.device for stamp in self.ranks.stamps if stamp.host == socket.gethostname()}
        mine = [info for info in state.devices if info.uuid in named]
        if mine:
            return mine
        shares = {info.uuid: state.latest.get(info.uuid, {}).get("gpu_utilisation") for info in state.devices}
        return [info for info in state.devices if (share := shares[info.uuid]) is None or share >= BUSY]

    def failed(self, devices: Iterable[str]) -> Iterator[Event]:
        """Errors that GPUs had since the last window, each time."""
        now = self.telemetry.state().latest
        for device in devices:
            if told := errors(self.latest.get(device, {}), now.get(device, {})):
                yield self.event("error", f"{device}: {told}", {"device": device})
        self.latest = {device: self.latest.get(device, {}) | _known(sample) for device, sample in now.items()}

    def compared(self, pace: Pace, summary: WindowSummary) -> Iterator[Event]:
        """The run against its search."""
        if self.against is None:
            return
        tokens = pace.tokens or self.against.tokens
        if tokens is None:
            return
        self.speeds.append(tokens / pace.step_s)
        whole = len(summary.devices) == self.against.used.layout.num_gpus
        power_w = summary.mean_power_w if whole else None
        clocks = [one.mean_sm_clock_mhz for one in summary.devices if one.mean_sm_clock_mhz is not None]
        attained = Attained(
            list(self.speeds),
            None if power_w is None else power_w * pace.step_s / tokens,
            min(clocks, default=None),
            self.against.used.layout.num_gpus - len(self.of_devices.of("slow")),
        )
        yield from self.told(self.of_record.update(self.against.judge(attained)))

    def told(self, findings: Iterable[tuple[Finding, bool]]) -> Iterator[Event]:
        for finding, over in findings:
            text = f"over: {finding.text}" if over else finding.text
            yield self.event(finding.kind, text, finding.details | {"of": finding.of, "over": over})

    def event(self, kind: str, text: str, details: dict[str, Any]) -> Event:
        search_id = None if self.against is None else self.against.record.id
        return Event(search_id, kind, datetime.now(UTC), text, details)


def _known(sample: dict[str, Any]) -> dict[str, Any]:
    return {column: value for column, value in sample.items() if value is not None}
