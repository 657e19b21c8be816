"""`wattune doctor`: gathers the facts of the machines, keeps their figures, and judges them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from service import history
from service.cluster import joined
from service.doctor.checks import judge
from service.doctor.checks.judged import NOTHING, Finding, Verdict
from service.doctor.facts import Facts
from service.doctor.gather import gather
from service.doctor.nodes import examine_cluster, store_facts
from service.home import Home

MARKS = {Verdict.OK: "ok", Verdict.WRONG: "!!", Verdict.UNKNOWN: "--"}


@dataclass(frozen=True)
class Examination:
    """What was seen, and what is to be said of it."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        """Whether nothing is wrong."""
        return all(one.verdict is not Verdict.WRONG for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"well": self.well, "findings": [asdict(one) for one in self.findings], "facts": self.facts.to_dict()}


def examine(address: str | None, tracking_uri: str) -> Examination:
    """Examine every node of the Ray cluster at `address`, by default that of `RAY_ADDRESS`, else this machine alone.

    Raises `InputError` if no cluster answers there.
    """
    home, address = Home.locate(), address or os.environ.get("RAY_ADDRESS")
    if address:
        with joined(address):
            nodes, lost = examine_cluster(home.path)
    else:
        nodes, lost = (gather(home.path),), {}
    facts = Facts(nodes, store_facts(tracking_uri, home), lost)
    found = facts.figures()
    facts = replace(facts, history=history.load(home, found))
    findings = judge(facts)
    try:
        history.add(home, found)
    except OSError as error:
        findings.append(_not_kept(home, error))
    return Examination(facts, tuple(findings))


def text(examination: Examination) -> str:
    """All that was found, for readers."""
    return "\n".join(lines(examination.findings))


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, one for all checks that had nothing to look at, and how many are wrong."""
    width = max(len(one.check) for one in findings)
    told = [one for one in findings if one.seen != NOTHING]
    empty = [one.check for one in findings if one.seen == NOTHING]
    wrong = sum(one.verdict is Verdict.WRONG for one in findings)
    return [
        *(f"{MARKS[one.verdict]}  {one.check:{width}}  {_told(one)}" for one in told),
        *([f"--  {NOTHING}: {', '.join(empty)}"] if empty else []),
        "",
        "all is well" if not wrong else f"{wrong} finding{'s' * (wrong > 1)}",
    ]


def _told(one: Finding) -> str:
    subject = f"{one.subject}: " if one.subject else ""
    expected = f"; expected: {one.expected}" if one.expected else ""
    advice = f"; {one.advice}" if one.advice else ""
    return f"{subject}{one.seen}{expected}{advice}"


def _not_kept(home: Home, error: OSError) -> Finding:
    seen = f"this examination is not kept: {error.strerror}"
    advice = "free some space, or set WATTUNE_HOME to a folder of yours"
    return Finding("history", Verdict.WRONG, seen, str(home.path), "a line for each device", advice)
