"""The logs of training programs that tell of steps: what their lines look like, and what is read off one.

Each format is that of the program's own source, which is named. A program must log every step, see docs/trainers.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainables.command import LogPatterns

_NUMBER = r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)"
"""What a group must match to be read by `float`."""

LOGS = {
    # training_log of megatron/training/training.py. A loss that is not finite is left out and counted.
    "megatron-lm": LogPatterns(
        step=(
            r"\biteration +(?P<step>\d+)/ *\d+ \|.*? elapsed time per iteration \(ms\): (?P<milliseconds>[\d.]+)"
            rf"(?:.*?\| (?:lm )?loss: (?P<loss>{_NUMBER}))?"
            rf"(?:.*?\| grad norm: (?P<grad_norm>{_NUMBER}))?"
            r"(?:.*?\| number of nan iterations: +(?P<nan>[1-9]\d*))?"
        ),
        memory=r"\(after \d+ iterations\) memory \(MB\).*\| max reserved: (?P<memory_mib>[\d.]+)",
    ),
    # log of torchtitan/components/metrics.py. Ranks that have no loss, of all pipeline stages but the last, tell -1.
    "torchtitan": LogPatterns(
        step=(
            rf"(?<!validate )\bstep: +(?P<step>\d+)  +loss: +(?:-1\.0+\b|(?P<loss>{_NUMBER}))"
            rf"(?:  +grad_norm: +(?P<grad_norm>{_NUMBER}))?(?:  +memory: +(?P<memory_gib>[\d.]+)GiB)?"
        )
    ),
    # train_batch of deepspeed/runtime/pipe/engine.py
    "deepspeed-pipeline": LogPatterns(
        step=rf"\bsteps: (?P<step>\d+) loss: (?P<loss>{_NUMBER}) iter time \(s\): (?P<seconds>[\d.]+)"
    ),
    # ThroughputTimer of deepspeed/utils/timer.py, with steps_per_print: 1. It tells neither times nor losses.
    "deepspeed": LogPatterns(step=r"\bepoch=\d+/micro_step=\d+/global_step=(?P<step>\d+), RunningAvgSamplesPerSec="),
    # ProgressPrinter of nemo/lightning/pytorch/callbacks/progress_printer.py
    "nemo": LogPatterns(
        step=(
            r"\bTraining epoch \d+, iteration \d+/\d+ \|.*?\bglobal_step: (?P<step>\d+)"
            rf"(?:.*?\breduced_train_loss: (?P<loss>{_NUMBER}))?"
            r"(?:.*?\btrain_step_timing in s: (?P<seconds>[\d.]+))?"
        )
    ),
}
"""By the names of specs."""

LAST_RANK_LOGS = ("megatron-lm",)
"""Those that the last rank writes, even where all ranks have the loss."""


@dataclass(frozen=True)
class LogLine:
    """What one line tells: the number of the step that ended, None for a line on memory alone, and what it says of it.

    `seconds` is the step's time. A loss may be one that is not finite. What is not told is None.
    """

    step: int | None
    loss: float | None = None
    seconds: float | None = None
    grad_norm: float | None = None
    memory_gib: float | None = None


class LogReader:
    """Reads lines by `patterns`. Raises `re.error` if one of them is no regular expression."""

    def __init__(self, patterns: LogPatterns) -> None:
        self._step = re.compile(patterns.step)
        self._memory = re.compile(patterns.memory) if patterns.memory else None

    def read(self, line: str) -> LogLine | None:
        """What a line without colours tells; None if it is another. Raises `ValueError` for what is no number."""
        if match := self._step.search(line):
            groups = match.groupdict()
            step, told = int(groups["step"]), {name: float(text) for name, text in groups.items() if text is not None}
        elif self._memory is not None and (match := self._memory.search(line)):
            step, told = None, {name: float(text) for name, text in match.groupdict().items() if text is not None}
        else:
            return None
        return LogLine(
            step,
            float("nan") if "nan" in told else told.get("loss"),
            told["milliseconds"] / 1e3 if "milliseconds" in told else told.get("seconds"),
            told.get("grad_norm"),
            told["memory_mib"] / 1024 if "memory_mib" in told else told.get("memory_gib"),
        )
