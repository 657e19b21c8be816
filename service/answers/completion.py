"""What a shell completes: answered at once, without a library that takes time to import."""

from __future__ import annotations

from service.home import tracking_uri as store_uri
from service.record import store
from service.record.runs import Runs


def search_ids(tracking_uri: str | None, beginning: str) -> list[str]:
    """Ids of the searches of a store that begin so, the latest first.

    They are those of a store in a file alone, by default the one in the state directory: nobody waits for a server.
    Raises `InputError` if the store cannot be read.
    """
    uri = store_uri(tracking_uri)
    if store.sqlite_file(uri) is None:
        return []
    ids = [run.tags[store.SEARCH_ID] for run in Runs(uri).find({store.ROLE: store.SEARCH})]
    return [one for one in reversed(ids) if one.startswith(beginning)]
