"""The worked examples of docs/extending.md, read as changes of the tree."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("search_spaces", "telemetry", "trainables", "service")
CHANGE = re.compile(
    r"^(?:New file|In) `(?P<path>[^`]+)`(?:, (?P<where>after|before|in place of) `(?P<line>[^`]+)`)?:\n\n"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Change:
    """`code` as a new file, or in a file that there is: `after`, `before` or `in place of` the one line that reads
    `line`, and indented like it."""

    path: str
    code: str
    where: str | None
    line: str | None

    def carry_out(self, tree: Path) -> None:
        """Raises `AssertionError` where the file is there already, or the line is not, or not just once."""
        file = tree / self.path
        if self.line is None:
            assert not file.exists(), f"{self.path} is there already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.code)
            return
        lines = file.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.line]
        assert len(places) == 1, f"{self.path} has {len(places)} lines `{self.line}`"
        at = places[0]
        indent = lines[at][: -len(lines[at].lstrip())]
        added = [indent + line if line.strip() else line for line in self.code.splitlines(keepends=True)]
        start, end = {"after": (at + 1, at + 1), "before": (at, at), "in place of": (at, at + 1)}[self.where or ""]
        lines[start:end] = added
        file.write_text("".join(lines))


def example(title: str) -> list[Change]:
    """The changes of a section of docs/extending.md, in their order."""
    sections = re.split(r"^## ", (ROOT / "docs" / "extending.md").read_text(), flags=re.MULTILINE)
    (section,) = [section for section in sections if section.startswith(f"{title}\n")]
    return [Change(m["path"], m["code"], m["where"], m["line"]) for m in CHANGE.finditer(section)]


def copy_of_the_tree(folder: Path) -> Path:
    """The four packages and the documentation, in `folder`."""
    for name in (*PACKAGES, "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
