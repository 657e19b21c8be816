"""Quotas: the GPU-hours that the searches of one user may take, counted from the record."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from service.errors import InputError
from service.queue.policy import VARIABLE
from service.record import store
from service.record.runs import Runs

DAY_S = 86_400.0


@dataclass(frozen=True)
class Quota:
    """What `user` may have of GPU-hours: `gpu_hours` in `period_days`, of all times if that is None.

    They are those of the searches in the record at `tracking_uri` that `user` began within the period.
    """

    user: str
    gpu_hours: float
    period_days: float | None
    tracking_uri: str

    def used(self) -> float:
        """GPU-hours so far. Raises `InputError` if the record cannot be read."""
        since_ms = 0.0 if self.period_days is None else 1000 * (time.time() - DAY_S * self.period_days)
        runs = Runs(self.tracking_uri).find({store.ROLE: store.SEARCH, store.USER: self.user})
        return sum(run.metrics.get("gpu_hours", 0.0) for run in runs if run.started_ms >= since_ms)

    def exceeded(self) -> str | None:
        """One line that says so once nothing is left; None before, and while the record cannot be read."""
        with contextlib.suppress(InputError):
            if (used := self.used()) >= self.gpu_hours:
                period = "" if self.period_days is None else f" of {self.period_days:g} days"
                return (
                    f"quota: user {self.user} has used {used:.4g} of {self.gpu_hours:g} GPU-hours{period}, "
                    f"all that this cluster's {VARIABLE} allows"
                )
        return None
