"""Exceptions whose text is one line for the person who asked, each with the exit code of the command that it ends."""

from __future__ import annotations

from typing import ClassVar


class InputError(ValueError):
    """Bad input from outside: its text is one line that names what to fix."""

    exit_code: ClassVar[int] = 2


class NoAnswerError(InputError):
    """Nothing is wrong with the question, but there is nothing to answer it with; its text is one line."""

    exit_code: ClassVar[int] = 1


class SearchError(RuntimeError):
    """A search cannot begin, or cannot go on, for its driver or its cluster: its text is one line that says why."""

    exit_code: ClassVar[int] = 3
