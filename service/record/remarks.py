"""What people add to the record of a search: tags, a note, and that a trial is to end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from service.errors import InputError
from service.home import user
from service.record import store
from service.record.results import SearchRecord, TrialRecord

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LONGEST = 5000
"""Characters of a value or a note, which every store of MLflow's takes."""


def tag(tracking_uri: str, search: SearchRecord, tags: Mapping[str, str]) -> None:
    """Give a search tags, each a tag of its run in MLflow; one whose value is empty is taken away.

    Raises `InputError` for a key or a value that cannot be one, with nothing changed.
    """
    for key, value in tags.items():
        if not _KEY.fullmatch(key):
            raise InputError(f"tag {key!r}: give letters, digits, '_', '.' and '-', at most 100")
        if key.startswith(store.RESERVED):
            raise InputError(
                f"tag {key!r}: what begins with {' or '.join(map(repr, store.RESERVED))} is not for people"
            )
        _check_length(f"tag {key!r}", value)
    client = store.open_client(tracking_uri)
    for key, value in tags.items():
        if value:
            client.set_tag(search.run_id, key, value)
        elif key in search.tags:
            client.delete_tag(search.run_id, key)


def note(tracking_uri: str, search: SearchRecord, text: str) -> None:
    """Have a note head a search's description in MLflow, in place of the one before; an empty one takes that away."""
    _check_length("note", text)
    client = store.open_client(tracking_uri)
    before = client.get_run(search.run_id).data.tags
    rest = before.get(store.DESCRIPTION, "").removeprefix(before.get(store.NOTE, ""))
    client.set_tag(search.run_id, store.NOTE, text)
    client.set_tag(search.run_id, store.DESCRIPTION, store.described(text, rest))


def cancel(tracking_uri: str, search: SearchRecord, trial: str) -> TrialRecord:
    """Ask the driver of a search to end a trial that is under way, which it does at its next heartbeat.

    `trial` is its id, the only beginning of one, or the label of its layout. Raises `InputError` if no such trial is
    under way.
    """
    running = [one for one in search.trials if one.status == "running"]
    if not running:
        raise InputError(f"search {search.id}: no trial is under way")
    matches = [one for one in running if trial in (one.trial_id, one.label)]
    matches = matches or [one for one in running if one.trial_id.startswith(trial)]
    if len(matches) != 1:
        there = ", ".join(f"{one.trial_id} ({one.label})" for one in running)
        what = "is not under way" if not matches else "is ambiguous"
        raise InputError(f"search {search.id}: trial {trial!r} {what}; under way: {there}")
    store.open_client(tracking_uri).set_tag(matches[0].run_id, store.CANCELLED, f"cancelled by {user()}")
    return matches[0]


def _check_length(what: str, text: str) -> None:
    if len(text) > _LONGEST:
        raise InputError(f"{what}: {len(text)} characters are more than {_LONGEST}")
