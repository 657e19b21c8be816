"""Lines of several processes' files are read as they come, whole, and to the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.measure.following import followed


class Writing:
    """Writes a piece of a file each time it is asked whether it is over."""

    def __init__(self, pieces: list[tuple[Path, str]]) -> None:
        self.pieces = iter(pieces)

    def over(self) -> bool:
        path, text = next(self.pieces, (None, ""))
        if path is None:
            return True
        with path.open("a") as file:
            file.write(text)
        return False


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]


def test_lines_come_once_all_have_them_whole(files: list[Path]) -> None:
    one, other = files
    writing = Writing(
        [(one, '{"n"'), (one, ": 1}\n"), (other, '{"n": 2}\n'), (one, '{"n": 3}\n{"n'), (other, '{"n": 4}\n')]
    )
    lines = followed(files, writing.over)
    assert next(lines) == ({"n": 1}, {"n": 2})
    assert list(lines) == [({"n": 3}, {"n": 4})]


def test_what_was_written_last_is_read_after_the_end(files: list[Path]) -> None:
    def over() -> Iterator[bool]:
        for path in files:
            path.write_text('{"n": 1}\n')
        while True:
            yield True

    assert list(followed(files, over().__next__)) == [({"n": 1}, {"n": 1})]


def test_nobody_who_writes_is_waited_for(files: list[Path]) -> None:
    assert list(followed(files, lambda: True)) == []
