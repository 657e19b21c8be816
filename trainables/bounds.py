"""Where the data may lie that a spec names, on a cluster whose operator bounds that."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainables.data import SYNTHETIC, located
from trainables.objects import holds_secret, is_uri, pair

ON_DISK = ("file", "local")
"""Schemes of URIs that are paths on this machine."""


def refusal(source: str | None, allowed: Sequence[str] | None) -> str | None:
    """Why data are not to be read from `source`, in a line; None if they may be, as `synthetic` ones always.

    `allowed`: places below which data may lie; None without a bound. Paths are compared as this machine resolves them,
    with symbolic links, those of each file that a source may consist of. URIs are compared by whole segments of their
    paths, and have to be the same in all else; one whose path has an empty segment, `.` or `..` lies nowhere.
    """
    if source is None or source == SYNTHETIC or allowed is None or _lies_below(source, allowed, os.path.realpath):
        return None
    fault = "leads by a symbolic link" if _lies_below(source, allowed, os.path.normpath) else "lies"
    return f"data: {source} {fault} outside of what WATTUNE_POLICY allows: {', '.join([SYNTHETIC, *allowed])}"


def is_place(text: str) -> bool:
    """Whether data can lie below it: an absolute folder, or the beginning of a URI, without a password."""
    if is_uri(text):
        return bool(_way(text, os.path.normpath)) and not holds_secret(text)
    return os.path.isabs(text)


def _lies_below(source: str, allowed: Sequence[str], resolve: Callable[[str], str]) -> bool:
    """Whether all that is read of `source` lies below one of the allowed places."""
    places = [_way(place, resolve) for place in allowed]
    ways = [_way(file, resolve) for file in _files(located(source))]
    return all(any(place and way[: len(place)] == place != way for place in places) for way in ways)


def _files(source: str) -> tuple[str, ...]:
    """What a source may consist of, as far as that is not all in one place."""
    if is_uri(source):
        split = urlsplit(source)
        return tuple(split._replace(path=path).geturl() for path in (split.path, *pair(split.path)))
    return source, *pair(source)


def _way(place: str, resolve: Callable[[str], str]) -> tuple[str, ...]:
    """The segments of a path, by `resolve`, or of a URI, its server first; none of a URI that is not clear."""
    if not is_uri(place):
        return Path(resolve(place)).parts
    split = urlsplit(place)
    path = unquote(split.path)
    if split.scheme in ON_DISK:
        return () if split.netloc or split.query or split.fragment else Path(resolve(path)).parts
    segments = path.removeprefix("/").removesuffix("/").split("/") if path.strip("/") else []
    if not (split.scheme and split.netloc) or any(segment in ("", ".", "..") for segment in segments):
        return ()
    return f"{split.scheme}://{split.netloc}?{split.query}#{split.fragment}", *segments
