"""Asks whether versions that constraints.txt pins have known vulnerabilities that others fix: `make audit`.

    python tests/audit.py PIP_AUDIT

PIP_AUDIT is the command of pip-audit. The first service that answers counts. Where none does, or that command is not
there, one line says so, and the exit code is 0, as where nothing is found. It is 1 for a vulnerability with a fix, each
of which is named, and for pins that cannot be read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PINS = Path(__file__).parents[1] / "constraints.txt"
SERVICES = {"PyPI": ["--vulnerability-service=pypi"], "OSV": ["--vulnerability-service=osv"]}
LIMIT_S, SILENCE_S = 30, 5
"""How long a service may take for all pins, and without a word."""

Known = list[dict[str, Any]]
"""What pip-audit writes of each pin: its `vulns`, or a `skip_reason` where the service does not know it."""


def audit(command: str, pins: Path = PINS, services: Mapping[str, Sequence[str]] = SERVICES) -> int:
    """The exit code, once what was found is printed."""
    run = [command, "--no-deps", "--disable-pip", "--progress-spinner=off"]
    try:
        dry = subprocess.run([*run, f"--requirement={pins}", "--dry-run"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        print("audit: skipped, as pip-audit could not be installed")
        return 0
    if dry.returncode:
        print(f"audit: {pins} cannot be read: {last_line(dry.stderr)}")
        return 1
    reasons = []
    for name, options in services.items():
        answer = asked([*run, *options], pins)
        if not isinstance(answer, str):
            return told(name, answer)
        reasons.append(f"{name}: {answer}")
    print(f"audit: skipped, as no service answers: {'; '.join(reasons)}")
    return 0


def asked(run: Sequence[str], pins: Path) -> Known | str:
    """What a service knows of the pins, or why it does not tell. It is asked of the first alone before."""
    with tempfile.TemporaryDirectory() as folder:
        (sample := Path(folder, "sample.txt")).write_text(next(x for x in pins.read_text().splitlines() if "==" in x))
        first = report(run, sample)
    if isinstance(first, str):
        return first
    if "vulns" not in first[0]:  # as a mirror of PyPI without such pages, of which pip-audit makes nothing found
        return f"it does not know {first[0]['name']}"
    return report(run, pins)


def report(run: Sequence[str], pins: Path) -> Known | str:
    """What a service knows of each pin, or why it does not tell."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        options = [f"--requirement={pins}", f"--timeout={SILENCE_S}", "--format=json", "--desc=off", "--aliases=on"]
        command = [*run, *options, f"--output={file}"]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it takes longer than {LIMIT_S} s"
        if not file.is_file():  # pip-audit ends with 1 for a vulnerability too, but reports it
            return last_line(ended.stderr)
        known: Known = json.loads(file.read_text())["dependencies"]
        return known


def last_line(text: str) -> str:
    """What a failed program said last, shortened."""
    return textwrap.shorten((text.strip().splitlines() or ["it says nothing"])[-1], 150)


def told(service: str, known: Known) -> int:
    """The exit code of what a service knows of the pins, once it is printed."""
    looked_at = [one for one in known if "vulns" in one]
    found = [(one, vulnerability) for one in looked_at for vulnerability in one["vulns"]]
    for one, vulnerability in found:
        names = ", ".join([vulnerability["id"], *vulnerability["aliases"]])
        fixed = " or ".join(vulnerability["fix_versions"])
        print(f"audit: {one['name']} {one['version']}: {names}: {f'fixed in {fixed}' if fixed else 'no fix is known'}")
    fixable = sum(bool(vulnerability["fix_versions"]) for _, vulnerability in found)
    all_of = f"{len(looked_at)} of {len(known)} pins"
    print(f"audit: known vulnerabilities that have a fix: {fixable}, by {service}, which knows {all_of}")
    return 1 if fixable else 0


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1]))
