"""Chromium without a window, driven over its DevTools protocol; it must not know what it shows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 60.0
needs_chromium = pytest.mark.skipif(
    PROGRAM is None or find_spec("aiohttp") is None, reason="chromium or aiohttp is not installed"
)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--lang=en-GB"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
)


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of DevTools, and wait for its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=START_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_until(self, script: str, timeout_s: float = START_S) -> float:
        """Wait until an expression is true; returns how long that took."""
        begun = time.monotonic()
        while not await self.run(script):
            if time.monotonic() - begun > timeout_s:
                raise AssertionError(f"{script} was never true; the page says: {await self.text()}")
            await asyncio.sleep(0.05)
        return time.monotonic() - begun

    async def text(self) -> str:
        """What there is to read."""
        return str(await self.run("document.body.innerText"))

    async def picture(self) -> bytes:
        """The page as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    @property
    def complaints(self) -> list[str]:
        """Errors that the browser logged, and exceptions."""
        told = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                told.append(str(event["params"]["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                told.append(event["params"]["entry"]["text"])
        return told


@contextlib.asynccontextmanager
async def browsing(
    folder: Path, url: str, *, width: int = 1240, height: int = 900, dark: bool = False
) -> AsyncIterator[Tab]:
    """A browser that shows a page."""
    import aiohttp

    assert PROGRAM is not None
    process = await asyncio.create_subprocess_exec(
        *(PROGRAM, *OPTIONS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        file, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
        while not (file.exists() and "\n" in file.read_text()):
            assert process.returncode is None
            assert time.monotonic() < deadline, "chromium does not start"
            await asyncio.sleep(0.05)
        port = file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (target, *_) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                await tab.call("Emulation.setEmulatedMedia", features=[scheme])
                await tab.call("Page.navigate", url=url)
                await tab.wait_until(f"location.href === {url!r} && document.readyState === 'complete'")
                yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
