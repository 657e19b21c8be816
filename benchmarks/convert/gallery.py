r"""A page of the documentation on searches that are held together: their reports, every figure, and the comparison.

    python -m benchmarks.convert.gallery benchmarks/data/llama3_1b_1xh100.tar.xz \
        benchmarks/data/llama3_1b_1xh200.tar.xz --out docs/h100_and_h200 \
        --price-per-gpu-hour 2.5 --price-per-gpu-hour 3.5 --co2-per-kwh 0.35

The files are those of `benchmarks.convert.archive`, the first one that which the others are held against. All is made
of an MLflow store with them, by what `wattune report` and `wattune compare` do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.convert.archive import unpack
from service.answers.compare import comparing
from service.answers.compare.comparing import Compared, in_words
from service.answers.page import comparison
from service.answers.page.sections import SECTIONS, Section
from service.answers.report import text
from service.client import Wattune
from service.home import Home
from service.record.results import SearchRecord

COMPARISON = "comparison"


def write(files: Sequence[Path], out: Path, rates: Mapping[str, Sequence[float]]) -> None:
    """Everything, into a folder, in place of what is there. `rates` are those of `Wattune.compare`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder, "home")).create()
        client = Wattune(home.tracking_uri)
        ids = [unpack(file, home.tracking_uri, home, Path(folder, str(place))) for place, file in enumerate(files)]
        searches = [client.search(one).record for one in ids]
        for search in searches:
            its = out / search.name
            client.figures(search.id, its)
            (its / "report.html").write_text(client.page(search.id), encoding="utf-8")
            (its / "report.txt").write_text(text(client.report(search.id)) + "\n", encoding="utf-8")
        compared = client.compare(ids, **rates)
        its = out / COMPARISON
        client.comparison_figures(compared, its)
        (its / "comparison.html").write_text(client.comparison_page(compared), encoding="utf-8")
        (its / "comparison.txt").write_text(comparing.text(compared) + "\n", encoding="utf-8")
        (its / "comparison.json").write_text(json.dumps(compared.to_dict(), indent=1) + "\n", encoding="utf-8")
        told = {search.name: client.report(search.id).findings for search in searches}
    for pixels in out.rglob("*.png"):
        pixels.unlink()
    lines = _lines(searches, compared, told, files, out, rates)
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(
    searches: Sequence[SearchRecord],
    compared: Compared,
    told: Mapping[str, Sequence[str]],
    files: Sequence[Path],
    out: Path,
    rates: Mapping[str, Sequence[float]],
) -> Iterator[str]:
    names = [search.name for search in searches]
    yield f"# {' against '.join(names)}\n"
    for search in searches:
        explored = sum(trial.purpose == "search" for trial in search.trials)
        yield (
            f"- **{search.name}**: {search.environment.get('devices', '')}, {explored} explored trials, "
            f"{len(search.trials)} in all, begun {search.started:%Y-%m-%d %H:%M} UTC: the report "
            f"[as a page]({search.name}/report.html) and [as text]({search.name}/report.txt)"
        )
    yield (
        f"- the comparison [as a page]({COMPARISON}/comparison.html), [as text]({COMPARISON}/comparison.txt) and [for "
        f"programs]({COMPARISON}/comparison.json)\n"
    )
    places = " ".join(map(_place, files))
    given = [f"--{rate.replace('_', '-')} {value:g}" for rate, values in rates.items() for value in values]
    yield from ["All of this was made of what MLflow keeps of the searches, by one command:", "", "```sh"]
    yield " \\\n    ".join([f"python -m benchmarks.convert.gallery {places}", f"--out {_place(out)}", *given])
    yield from ["```", "", "which does what these do one by one:", "", "```sh", "export WATTUNE_HOME=build/records"]
    yield f"python -m benchmarks.convert.archive unpack {places}"
    for name in names:
        yield f"wattune report {name} --html {name}.html --figures {name}"
    drawn = f"--html {COMPARISON}.html --figures {COMPARISON}"
    yield " \\\n    ".join([f"wattune compare {' '.join(names)}", *given, drawn])
    yield "```\n"
    yield from _listed("In short", [*in_words(compared), *(one.answer for one in compared.scalings)])
    yield from _pictures("How they compare", [COMPARISON], comparison.SECTIONS, out)
    for name, sentences in told.items():
        yield from _listed(f"Findings: {name}", sentences)
    yield from _pictures("Each by itself", names, SECTIONS, out)


def _listed(title: str, sentences: Sequence[str]) -> Iterator[str]:
    if sentences:
        yield from [f"## {title}", "", *(f"- {sentence}" for sentence in sentences), ""]


def _pictures(title: str, folders: Sequence[str], sections: Sequence[Section[Any]], out: Path) -> Iterator[str]:
    """The figures that there are, a heading each."""
    yield f"## {title}\n"
    for section in sections:
        drawn = [folder for folder in folders if (out / folder / f"{section.key}.svg").exists()]
        if drawn:
            yield from [f"### {section.title}", "", section.lead, ""]
        for folder in drawn:
            if len(folders) > 1:
                yield from [f"{folder}:", ""]
            yield from [f"![{section.title}: {folder}]({folder}/{section.key}.svg)", ""]


def _place(path: Path) -> str:
    """A path as it is from the folder of the repository."""
    absolute = path.absolute()
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    for rate in ("price-per-gpu-hour", "price-per-kwh", "co2-per-kwh"):
        parser.add_argument(f"--{rate}", type=float, action="append", default=[])
    given = vars(parser.parse_args(argv))
    write(given.pop("files"), given.pop("out"), given)


if __name__ == "__main__":
    main()
