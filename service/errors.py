"""Exceptions whose text is one line for the person who asked."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from outside: its text is one line that names what to fix. The CLI prints it and exits with code 2."""


class SearchError(RuntimeError):
    """A search that was begun cannot go on: its text is one line that says why. The CLI prints it and exits with 1."""
