"""The lowest version that pyproject.toml allows of each requirement, as constraints for pip.

    python tests/lowest.py [NAME==VERSION ...]

Versions given as arguments stand in place of the lowest.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(pyproject: str) -> dict[str, str]:
    """By the names of what is required to run and to develop. Raises KeyError if a requirement has no lower bound."""
    project = tomllib.loads(pyproject)["project"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    return {one.name: {bound.operator: bound.version for bound in one.specifier}[">="] for one in wanted}


if __name__ == "__main__":
    chosen = dict(argument.split("==") for argument in sys.argv[1:])
    for name, version in (lowest(PYPROJECT.read_text()) | chosen).items():
        print(f"{name}=={version}")
