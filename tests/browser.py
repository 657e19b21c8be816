"""A headless Chromium that a test drives, through the DevTools protocol (https://chromedevtools.github.io)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser of this machine, None if it has none."""

WAIT_S = 120.0
T = TypeVar("T")


class Browser:
    """One page of a browser whose profile is in a folder; a context, at whose end all its processes are gone."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 1000) -> None:
        assert FOUND is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        command = [FOUND, *flags, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._port, self._numbers, self._loop = (
            folder / "DevToolsActivePort",
            itertools.count(),
            asyncio.new_event_loop(),
        )

    def __enter__(self) -> Browser:
        try:
            self._run(self._connect())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._session.close())
        finally:
            self._end()

    def open(self, url: str) -> None:
        self._run(self._ask("Page.navigate", url=url))

    def evaluate(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page, as JSON has it."""
        answer = self._evaluated(expression)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression once that is true. What it raises until then is not there yet."""
        until = time.monotonic() + WAIT_S
        while "exceptionDetails" in (answer := self._evaluated(expression)) or not answer["result"].get("value"):
            assert time.monotonic() < until, f"never true: {expression}: {answer}"
            time.sleep(0.1)
        return answer["result"]["value"]

    def click(self, expression: str) -> None:
        """Click on the element that an expression gives, once it is there, with the mouse as a person does."""
        shown = f"(() => {{ const e = {expression}; if (!e) return null; e.scrollIntoView({{block: 'center'}});"
        place = self.wait_for(
            shown + "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for event in ("mousePressed", "mouseReleased"):
            at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self._run(self._ask("Input.dispatchMouseEvent", type=event, **at))

    def screenshot(self, to: Path) -> None:
        """A picture of what is seen, as PNG."""
        to.write_bytes(base64.b64decode(self._run(self._ask("Page.captureScreenshot"))["data"]))

    def _evaluated(self, expression: str) -> dict[str, Any]:
        return self._run(self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, WAIT_S))

    async def _connect(self) -> None:
        while not (self._port.exists() and self._port.read_text().count("\n")):
            assert self._process.poll() is None, "the browser has ended"
            await asyncio.sleep(0.05)
        port = self._port.read_text().splitlines()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as listed:
            page = next(target for target in await listed.json() if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    async def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.close()
