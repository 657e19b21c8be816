"""The page on searches held together: of some made here, and the committed one, which its own command makes again."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ROOT
from benchmarks.convert.archive import pack
from benchmarks.convert.gallery import main
from service import Wattune
from service.home import Home
from service.record.tracking import Tracker
from tests.service.record.test_tracking import CONFIG, PROBLEM, measured, samples

COMMITTED = ROOT / "docs" / "h100_and_h200"


@pytest.mark.slow
def test_a_gallery_holds_what_its_page_shows_and_says_how_it_is_made(home: Home, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    for name, factor in (("one", 1.0), ("two", 1.25)):
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(f"{name}-1", replace(PROBLEM, name=name), {"devices": name})
        result = measured()
        metrics = result.metrics | {"tokens_per_s": 1e5 * factor, "tokens_per_s_per_gpu": 2.5e4 * factor}
        tracker.start_trial(result.trial_id, CONFIG)
        tracker.finish_trial(replace(result, metrics=metrics), samples())
        tracker.finish_search("finished", {})
        (tmp_path / name).mkdir()
        pack(name, home.tracking_uri, tmp_path / f"{name}.tar.xz", tmp_path / name)
    out = tmp_path / "gallery"
    files = [str(tmp_path / f"{name}.tar.xz") for name in ("one", "two")]
    main([*files, "--out", str(out), "--price-per-gpu-hour", "2.5"])
    page = (out / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)]+)\)", page))
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert linked == written - {"README.md"}
    assert {"one/layouts.svg", "two/breakdown.svg", "comparison/best.svg", "one/report.html"} <= linked
    compared = json.loads((out / "comparison" / "comparison.json").read_text())
    assert compared == json.loads(json.dumps(Wattune().compare(["one", "two"], [2.5]).to_dict()))
    assert "Throughput per GPU: 31,250 tokens/s in two against 25,000 in one, +25.0%." in page
    assert "wattune compare one two" in page


@pytest.mark.slow
def test_the_committed_gallery_is_what_its_command_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vl_convert")
    monkeypatch.chdir(ROOT)
    page = (COMMITTED / "README.md").read_text()
    command = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)[0].replace("\\\n", " ")
    arguments = shlex.split(command)[3:]
    place = arguments.index("--out") + 1
    assert ROOT / arguments[place] == COMMITTED
    main([*arguments[:place], str(tmp_path), *arguments[place + 1 :]])
    kept, made = ({path.relative_to(folder) for path in folder.rglob("*.*")} for folder in (COMMITTED, tmp_path))
    assert kept == made
    for name in made:
        if name.suffix in (".txt", ".json"):
            assert (tmp_path / name).read_text() == (COMMITTED / name).read_text(), name
