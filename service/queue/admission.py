"""Leave to begin a search on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from service.errors import InputError
from service.home import user
from service.queue.actor import Member, Queue
from service.queue.quota import Quota


@dataclass(frozen=True)
class Admission:
    """What a search that may begin has of its cluster: the way to its queue, and the user's quota, None without one."""

    queue: Member
    quota: Quota | None


def admit(queue: Member, tracking_uri: str) -> Admission:
    """Leave for whoever begins a search on the Ray cluster of `queue`, to be recorded at `tracking_uri`.

    Raises `InputError` if nothing is left of the user's quota, or for a policy that cannot be read.
    """
    policy = queue.ask(Queue.policy)
    if isinstance(policy, str):
        raise InputError(policy)
    me = user()
    if (hours := policy.quota(me)) is None:
        return Admission(queue, None)
    quota = Quota(me, hours, policy.period_days, tracking_uri)
    if (reason := quota.exceeded()) is not None:
        raise InputError(reason)
    return Admission(queue, quota)
