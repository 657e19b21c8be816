"""The audit of pins, by the very pip-audit that `make audit` installs, of a service of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.audit import audit

PIP_AUDIT = Path(__file__).parents[1] / ".venv-audit/bin/pip-audit"

pytestmark = pytest.mark.skipif(not PIP_AUDIT.exists(), reason="`make audit` has not been run")


class Osv(BaseHTTPRequestHandler):
    """Answers as OSV does, of vulnerabilities in `jinja2`, which has a fix, and in `ray`, which has none."""

    status = 200
    events: Mapping[str, list[dict[str, str]]] = {"jinja2": [{"introduced": "0"}, {"fixed": "2.10.1"}], "ray": []}

    def do_POST(self) -> None:
        package = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]
        answer: dict[str, Any] = {}
        if (events := self.events.get(package["name"])) is not None:
            affected = [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}]
            answer = {"vulns": [{"id": "GHSA-1", "aliases": ["CVE-1"], "affected": affected}]}
        body = json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def osv(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The options by which pip-audit asks it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ["--vulnerability-service=osv", f"--osv-url=http://127.0.0.1:{server.server_port}/v1/query"]
        server.shutdown()


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    (file := tmp_path / "constraints.txt").write_text("# Pinned.\nclick==8.5.1\njinja2==2.10\nray==2.60.0\n")
    return file


def test_a_vulnerability_with_a_fix_is_named_and_fails(
    pins: Path, osv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(str(PIP_AUDIT), pins, {"OSV": osv}) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "audit: jinja2 2.10: CVE-1, GHSA-1: fixed in 2.10.1",
        "audit: known vulnerabilities that have a fix: 1, by OSV, which knows 3 of 3 pins",
        "audit: ray 2.60.0: CVE-1, GHSA-1: no fix is known",
    ]


def test_where_no_service_answers_one_line_says_so(
    pins: Path, osv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Osv, "status", 403)
    nobody = [osv[0], "--osv-url=http://127.0.0.1:9/v1/query"]
    assert audit(str(PIP_AUDIT), pins, {"nobody": nobody, "OSV": osv}) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("audit: skipped, as no service answers: nobody: requests.exceptions.ConnectionError: ")
    assert "; OSV: " in line


def test_pins_that_cannot_be_read_are_not_taken_for_a_service_that_does_not_answer(
    pins: Path, osv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pins.write_text("jinja2>=2.10\n")
    assert audit(str(PIP_AUDIT), pins, {"OSV": osv}) == 1
    assert f"audit: {pins} cannot be read: " in capsys.readouterr().out
