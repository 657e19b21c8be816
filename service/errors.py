"""The one exception that means: the person who asked has to change something."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from outside: its text is one line that names what to fix. The CLI prints it and exits with code 2."""
