"""Leave to begin a search on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray.exceptions import GetTimeoutError

from service.errors import InputError, SearchError
from service.home import user
from service.queue.actor import Member, Queue
from service.queue.policy import Policy
from service.queue.quota import Quota

START_S = 120.0
"""How long the queue may take to answer first: a busy head takes its time to start its process."""


@dataclass(frozen=True)
class Admission:
    """What a search that may begin has of its cluster: the way to its queue, the user's quota, None without one, and
    the places below which its data may lie, None without a bound."""

    queue: Member
    quota: Quota | None
    places: Sequence[str] | None


def admit(queue: Member, tracking_uri: str, data: str | None) -> Admission:
    """Leave for whoever begins a search on the Ray cluster of `queue`, to be recorded at `tracking_uri`.

    Raises `InputError` if nothing is left of the user's quota, and for whatever `policy_for` does.
    """
    policy, me = policy_for(queue, data), user()
    if (hours := policy.quota(me)) is None:
        return Admission(queue, None, policy.data)
    quota = Quota(me, hours, policy.period_days, tracking_uri)
    if (reason := quota.exceeded()) is not None:
        raise InputError(reason)
    return Admission(queue, quota, policy.data)


def policy_for(queue: Member, data: str | None) -> Policy:
    """The policy of the cluster of `queue`, for trials that read `data`.

    Raises `InputError` for a policy that cannot be read and for data that it does not allow, `SearchError` if the queue
    does not answer.
    """
    until = time.monotonic() + START_S
    while True:
        try:
            policy = queue.ask(Queue.policy, data)
            if isinstance(policy, str):
                raise InputError(policy)
            return policy
        except GetTimeoutError:
            if time.monotonic() > until:
                reason = f"the process that shares the cluster between searches does not answer in {START_S:.0f} s"
                raise SearchError(f"Ray: {reason}: try again, or look at the cluster's head") from None
