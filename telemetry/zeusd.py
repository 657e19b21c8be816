"""Zeus' daemon, which may set what this process may not: https://ml.energy/zeus/zeusd/, of version 0.3 or later.

It answers HTTP on a Unix socket, `POST /gpu/set_power_limit` with the parameters `gpu_ids` (NVML's numbers),
`power_limit_mw` and `block`; where it asks for a token, as a bearer's.
"""

from __future__ import annotations

import os
import socket
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlencode

SOCKET, TOKEN = "ZEUSD_SOCK_PATH", "ZEUSD_TOKEN"
"""The environment variables by which Zeus' own clients find it."""

ANSWER_S = 5.0


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def socket_path() -> str | None:
    """Where the environment says that it listens; None if it names no place."""
    return os.environ.get(SOCKET) or None


def set_power_limit(path: str, index: int, limit_mw: int) -> None:
    """Set the power limit of the GPU with NVML's number `index`; returns once it is set. Raises OSError, in a line."""
    asked = urlencode({"gpu_ids": index, "power_limit_mw": limit_mw, "block": "true"})
    headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get(TOKEN)) else {}
    connection = _UnixConnection(path)
    try:
        connection.request("POST", f"/gpu/set_power_limit?{asked}", headers=headers)
        answer = connection.getresponse()
        said = answer.read(4096).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        raise OSError(f"zeusd at {path}: {error}") from None
    finally:
        connection.close()
    if answer.status != 200:
        reason = " ".join(said.split()) or answer.reason
        raise OSError(f"zeusd at {path}: {answer.status}: {reason}")
