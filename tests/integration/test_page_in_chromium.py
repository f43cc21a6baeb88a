"""The page in a browser: a kill is seen within two seconds, a name is never markup, a restart is told."""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from chromium import Tab, browsing, needs_chromium
from processes import quiet_port

from edl_torch.core.calls import RegisterCall, Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.status import Histogram, Measures
from edl_torch.master.host import MasterHost
from edl_torch.master.web.app import WebPort
from edl_torch.rpc.credentials import AccessToken, ServerCredentials
from edl_torch.shard import Source

pytestmark = needs_chromium
NASTY = "<img src=x onerror=document.title='owned'>"


def on_loop(test):
    @functools.wraps(test)
    def run(*arguments, **fixtures):
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), 120))

    return run


class Job:
    """A master of one dataset, on a loop, and its page."""

    def __init__(self, *names: str, address: str = "127.0.0.1:0", **options) -> None:
        self.host = MasterHost(Dispatcher(ledger_id="ledger", grace_s=0.1, lease_timeout_s=3600.0))
        self.host.start()
        history = self.host.dispatcher.history
        self.port = WebPort(self.host.status, lambda: history.latest, address, **options)
        self.names = names

    async def __aenter__(self) -> Job:
        for name in self.names:
            registration = Registration(name="training", sources=(Source(name="a", count=100),))
            await self.host.call(
                RegisterCall(session=f"s-{name}", worker_id=name, batch_size=4, registration=registration)
            )
        self.url = f"http://{await self.port.start()}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.port.stop()
        await self.host.close()

    def kill(self, name: str) -> None:
        self.host.apply(lambda d, now: d.members.stream_opened(f"s-{name}", now))
        self.host.apply(lambda d, now: d.members.stream_broke(f"s-{name}", now))
        self.host._reap_within(0.1)


async def live(tab: Tab) -> None:
    await tab.wait_until("document.getElementById('connection').textContent.includes('live')")


@on_loop
async def test_a_kill_is_seen_within_two_seconds_and_a_restart_is_told(tmp_path: Path) -> None:
    async with (
        Job("one", NASTY, address=f"127.0.0.1:{quiet_port()}") as job,
        browsing(tmp_path, job.url) as tab,
    ):
        await live(tab)
        text = await tab.text()
        assert "training" in text
        assert NASTY in text
        assert await tab.run("document.querySelectorAll('img').length") == 0
        measures = Measures(stepped=Histogram(sum_s=1.0), timed=2, read_s=0.24, transform_s=0.08)
        job.host.apply(lambda d, now: d.heartbeat("s-one", 1, now, 0, measures))
        await tab.wait_until("document.getElementById('trainers').textContent.includes('120 ms + 40 ms')")
        assert "a batch is read in 120 ms, transformed in 40 ms" in await tab.text()
        job.kill("one")
        begun, paused_s = time.monotonic(), 0.0
        while not await tab.run("document.body.innerText.includes('trainer one died')"):
            busy_s = time.monotonic() - begun - paused_s  # what the looks themselves take, on a busy machine
            assert paused_s < 2.0 + busy_s, "it is not seen within two seconds"
            await asyncio.sleep(0.05)
            paused_s += 0.05
        assert await tab.run("document.querySelectorAll('#trainers tr').length") == 1
        assert "died: its connection broke" in await tab.run("document.getElementById('gone').innerText")
        assert await tab.run("document.getElementById('log').getAttribute('aria-live')") == "polite"
        assert not tab.complaints
        await job.port.stop()
        await tab.wait_until("document.body.innerText.includes('no connection')")
        address = job.url.removeprefix("http://").rstrip("/")
        await asyncio.sleep(0.05)
        async with Job("two", address=address):
            await tab.wait_until("document.body.innerText.includes('started anew')")
            assert "trainer one died" not in await tab.run("document.getElementById('timeline').innerText")
        assert await tab.run("document.title") != "owned"


@on_loop
async def test_a_token_opens_the_page_and_stays_out_of_the_address(tmp_path: Path) -> None:
    token = "a-token-of-some-length"
    credentials = ServerCredentials(token=AccessToken(token.encode()))
    async with Job("one", credentials=credentials) as job, browsing(tmp_path, job.url) as tab:
        await tab.wait_until("!document.getElementById('door').hidden")
        assert "one" not in await tab.run("document.getElementById('trainers').textContent")
        for given, expected in (("wrong", "!document.getElementById('refused').hidden"), (token, "true")):
            await tab.run(f"document.getElementById('token').value = '{given}'")
            await tab.run("document.getElementById('door').requestSubmit()")
            await tab.wait_until(expected)
        await live(tab)
        assert token not in await tab.run("location.href + document.documentElement.outerHTML")


@pytest.mark.long
@on_loop
async def test_a_thousand_trainers_are_pages_of_fifty(tmp_path: Path) -> None:
    async with Job(*(f"node-{i}" for i in range(1000))) as job, browsing(tmp_path, job.url) as tab:
        await live(tab)
        assert await tab.run("document.querySelectorAll('#trainers tr').length") == 50
        assert "1 of 20" in await tab.text()
        await tab.run("document.getElementById('filter').value = 'node-77'")
        await tab.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert await tab.run("document.querySelectorAll('#trainers tr').length") == 11
        took = await tab.run(
            "(() => { const t = performance.now(); show(); return performance.now() - t; })()"
        )
        assert took < 200
