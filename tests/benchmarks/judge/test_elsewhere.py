"""What one machine's trials say of another's predictions."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks import DATA
from benchmarks.judge.elsewhere import main, observed
from search_spaces.coefficients import data_sheet


def test_layouts_of_two_machines_are_foretold_by_data_sheet_and_after_six_trials(
    capsys: pytest.CaptureFixture[str],
) -> None:
    archives = [DATA / f"llama3_1b_1x{name}.tar.xz" for name in ("h100", "h200")]
    sheet, rows = observed(archives[0])
    assert sheet == data_sheet("h100")
    assert len(rows) == 15
    main([str(archive) for archive in archives])
    first, second = capsys.readouterr().out.strip().split("\n\n")
    for text, count in ((first, 15), (second, 17)):
        lines = text.splitlines()[2:]
        assert len(lines) == count + 4
        assert sum(line.startswith("*") for line in lines) == 6
        rest = next(line for line in lines if f"mean of the {count - 6} that it did not choose" in line)
        assert all(0 < float(cell[:-1]) < 6 for cell in rest.split()[-4:])
        every = next(line for line in lines if f"mean of {count} " in line)
        assert all(0 < float(cell[:-1]) < 6 for cell in every.split()[-2:])


def test_what_is_no_archive_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["nowhere.tar.xz"])
    assert "nowhere.tar.xz" in capsys.readouterr().err


def test_an_archive_without_a_search_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "empty.tar.xz"
    tarfile.open(archive, "w:xz").close()
    with pytest.raises(SystemExit, match="2"):
        main([str(archive)])
    assert "empty.tar.xz: no search is in it" in capsys.readouterr().err
