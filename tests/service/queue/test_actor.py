"""The queue of a real Ray cluster: what it grants, and that it is nothing to lose."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from service.errors import InputError
from service.home import Home
from service.queue.actor import Member, Queue
from service.queue.admission import admit
from service.queue.claims import Claim
from service.queue.policy import Policy
from telemetry.actor import start_telemetry, stop_telemetry

ONE, TWO = (Claim(name, 0, number, {"CPU": 1.0}, size=4, gangs=1) for number, name in enumerate(("one", "two")))


@pytest.fixture
def members(ray_session: Any) -> tuple[Member, Member]:
    """Two processes' ways to one queue, though they are one here."""
    return Member(), Member()


def test_one_has_the_node_and_the_other_waits_whatever_becomes_of_the_queue(members: tuple[Member, Member]) -> None:
    mine, theirs = members
    first = mine.ask(Queue.check_in, ONE)
    ((node, workers),) = first.grants[0].workers.items()
    assert (workers, first.standing, first.nodes) == (4, None, frozenset())
    assert node == ray.nodes()[0]["NodeID"]
    second = theirs.ask(Queue.check_in, TWO)
    assert second.grants == ()
    assert second.standing is not None
    assert (second.standing.place, second.standing.of) == (1, 1)
    assert second.standing.starts == pytest.approx(first.grants[0].since + Policy.slice_s)
    assert (second.nodes, second.beside) == ({node}, {node})

    up = replace(first.grants[0], up=True)
    (timed,) = mine.ask(Queue.check_in, replace(ONE, grants=(up,))).grants
    assert timed == replace(up, since=timed.since)
    assert timed.since > up.since, "its slice begins"
    first = replace(first, grants=(timed,))

    telemetry = start_telemetry("one")  # by which a new queue knows whom to wait for
    try:
        actor: Any = mine._actor
        ray.kill(actor)
        assert theirs.ask(Queue.check_in, TWO).grants == (), "it is another queue, and knows of nobody yet"
        again = mine.ask(Queue.check_in, replace(ONE, grants=first.grants, received=7.0))
        assert (again.grants, again.received) == (first.grants, 7.0)
        assert theirs.ask(Queue.check_in, TWO).grants == ()
    finally:
        stop_telemetry(telemetry)
    mine.ask(Queue.check_out, "one")
    assert [dict(grant.workers) for grant in theirs.ask(Queue.check_in, TWO).grants] == [{node: 4}]


def test_the_operators_policy_holds_as_its_file_is_where_the_queue_runs(
    members: tuple[Member, Member], home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, mine = tmp_path / "policy.yaml", members[0]
    mine.ask(Queue.policy)
    actor: Any = mine._actor
    ray.get(actor.__ray_call__.remote(set_policy, str(policy)))
    with pytest.raises(InputError, match=r"^WATTUNE_POLICY: .* cannot be read"):
        admit(mine, home.tracking_uri, None)
    policy.write_text("quota: {gpu_hours: {ada: 0, eve: 2}}\n")
    monkeypatch.setenv("WATTUNE_USER", "ada")
    with pytest.raises(InputError, match=r"^quota: user ada has used 0 of 0 GPU-hours"):
        admit(mine, home.tracking_uri, None)
    monkeypatch.setenv("WATTUNE_USER", "eve")
    quota = admit(mine, home.tracking_uri, None).quota
    assert quota is not None
    assert (quota.user, quota.gpu_hours) == ("eve", 2)
    monkeypatch.setenv("WATTUNE_USER", "bob")
    assert admit(mine, home.tracking_uri, None).quota is None
    policy.write_text(f"data: [{tmp_path}/team]\n")
    assert admit(mine, home.tracking_uri, f"{tmp_path}/team/corpus").places == (f"{tmp_path}/team",)
    (tmp_path / "team").symlink_to("/srv")  # the folder itself may be a link
    assert admit(mine, home.tracking_uri, f"{tmp_path}/team/corpus").places == (f"{tmp_path}/team",)
    with pytest.raises(
        InputError, match=r"^data: /teams/corpus lies outside of what WATTUNE_POLICY allows: synthetic, "
    ):
        admit(mine, home.tracking_uri, "/teams/corpus")


def set_policy(actor: Queue, name: str) -> None:
    """As `ray start` with this environment would have."""
    os.environ["WATTUNE_POLICY"] = name
