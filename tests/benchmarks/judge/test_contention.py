"""What passes of committed pipelines took longer in gangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.judge.contention import main, points, table
from benchmarks.measure.blind import read

DATA = Path("benchmarks/data")
FILES = DATA / "blind17_2xh200.jsonl.xz", DATA / "blind17_2xh200.measured.jsonl.xz"


def test_products_of_experts_feel_messages_and_large_ones_hardly() -> None:
    found = list(points(*map(read, FILES)))
    assert len(found) == 9
    for spec, layout, experts, millions, seen, taken in found:
        assert "vpp2" in layout, "only ranks with several stages compute while messages are under way"
        assert experts == ("moe" in spec)
        assert 30 < millions < 100
        assert seen == pytest.approx(taken, abs=0.13)
        assert (seen > 0.4) == experts
    *_, plain, mixture = table(found).splitlines()
    assert plain.split()[-1] == "+0.09"
    assert mixture.split()[-1] == "+0.45"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (FILES[:1], "files come in pairs"),
        ((DATA / "blind3_2xh100.jsonl.xz", DATA / "blind3_2xh100.measured.jsonl.xz"), "there is no pipeline of both"),
    ],
)
def test_files_that_tell_nothing_are_refused(
    files: tuple[Path, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(file) for file in files])
    assert said in capsys.readouterr().err
