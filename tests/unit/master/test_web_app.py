"""The master's HTTP server: who may see what, what the stream has, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from loop_kit import on_loop

pytest.importorskip("aiohttp")
import aiohttp

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import MasterStartError
from edl_torch.master.host import MasterHost
from edl_torch.master.web import app
from edl_torch.master.web.app import WebPort, page
from edl_torch.rpc.credentials import AccessToken, ServerCredentials

TOKEN = ServerCredentials(token=AccessToken(b"a-token-of-some-length"))
BEARER = {"Authorization": "Bearer a-token-of-some-length"}


class Site:
    """A host on a clock that the test moves, and its page."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.host = MasterHost(Dispatcher(ledger_id="ledger"), clock=lambda: self.now)
        history = self.host.dispatcher.history
        self.port = WebPort(self.host.status, lambda: history.latest, "127.0.0.1:0", **options)

    async def __aenter__(self) -> Site:
        self.url = f"http://{await self.port.start()}"
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self.port.stop()

    async def get(self, path: str, **headers: str) -> tuple[int, Any, str]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, answer.headers, await answer.text()

    @contextlib.asynccontextmanager
    async def stream(self, **headers: str):
        async with self.session.get(self.url + "/api/events", headers=headers) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream"
            yield answer.content


async def frame(content: aiohttp.StreamReader) -> dict[str, Any]:
    line = await content.readuntil(b"\n\n")
    assert line.startswith(b"data: ")
    return json.loads(line[6:])


@on_loop
async def test_the_page_runs_its_own_script_alone() -> None:
    async with Site() as site:
        status, headers, text = await site.get("/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert text.encode() == page()[0]


def test_the_page_has_nothing_of_another_host_and_no_markup_from_names() -> None:
    text = page()[0].decode()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in text
    for attribute in (" style=", " onclick", " onload", " src="):
        assert attribute not in text


@on_loop
async def test_the_status_is_that_of_the_master(calls) -> None:
    async with Site() as site:
        await site.host.call(calls.register("<script>"))
        status, _, text = await site.get("/api/status")
    assert status == 200
    value = json.loads(text)
    assert value["datasets"][0]["dataset"] == "d"
    assert value["trainers"][0]["worker_id"] == "w-<script>"
    assert value["events"][-1]["line"] == "trainer w-<script> joined d"


@on_loop
async def test_without_its_token_a_caller_sees_the_page_and_no_data() -> None:
    async with Site(credentials=TOKEN) as site:
        assert (await site.get("/"))[0] == 200
        for path in ("/api/status", "/api/events", "/metrics", "/nothing"):
            status, headers, text = await site.get(path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "a-token-of" not in text
            assert (await site.get(path, Authorization="Bearer another-token-of-12"))[0] == 401
            assert (await site.get(f"{path}?token=a-token-of-some-length"))[0] == 401
        assert (await site.get("/metrics", **BEARER))[0] == 200
        assert "a-token-of" not in (await site.get("/api/status", **BEARER))[2]


@on_loop
async def test_another_sites_name_does_not_lead_to_a_page_without_a_token() -> None:
    async with Site() as site:
        for name in ("evil.example", "evil.example:9000", "127.0.0.1.evil.example"):
            assert (await site.get("/api/status", Host=name))[0] == 403
        for name in ("localhost:9000", "127.0.0.1:1", "[::1]:1", "10.0.0.7"):
            assert (await site.get("/api/status", Host=name))[0] == 200
    async with Site(credentials=TOKEN) as site:
        assert (await site.get("/api/status", Host="page.example", **BEARER))[0] == 200


@on_loop
async def test_a_death_is_in_the_stream_at_once(calls, monkeypatch) -> None:
    monkeypatch.setattr(app, "REFRESH_S", 60.0)
    async with Site() as site, site.stream() as content:
        first = await frame(content)
        await site.host.call(calls.register("a"))
        joined = await frame(content)
        site.host.apply(lambda d, now: d.members.stream_broke("a", now))
        site.now += 2.0
        site.host.apply(lambda d, now: d.expire(now))
        died = await frame(content)
    assert (first["trainers"], len(joined["trainers"]), died["trainers"]) == ([], 1, [])
    assert died["events"][-1]["kind"] == "died"
    assert died["departed"][0]["worker_id"] == "w-a"


@on_loop
async def test_a_frame_has_a_short_row_for_each_trainer_that_says_what_the_status_says(calls) -> None:
    async with Site() as site, site.stream() as content:
        await frame(content)
        await site.host.call(calls.register("a"))
        value = await frame(content)
        status = json.loads((await site.get("/api/status"))[2])
    (row,) = value["trainers"]
    found, (said,) = dict(zip(value["trainer_columns"], row, strict=True)), status["trainers"]
    for name in ("waiting_share", "mean_read_s", "mean_transform_s"):
        assert found.pop(name) is said.pop(name) is None  # nothing was measured yet
    assert set(found) == set(said) - {"datasets", "leased", "measures"}
    for name in ("session", "worker_id", "state", "slow", "trained", "leases"):
        assert found[name] == said[name]
    assert len(json.dumps(row)) < 120 + len(found["session"]) + len(found["worker_id"])


@pytest.mark.parametrize("took_ms", [0.1, 1, 4, 11])
def test_frames_take_their_share_of_the_time_though_events_come_all_the_time(took_ms: float) -> None:
    least_s, most_s = app.pauses(took_ms / 1000)
    assert took_ms / 1000 / least_s <= 0.0071
    assert most_s >= max(1.0, least_s)


def test_an_event_is_seen_within_two_seconds_however_long_frames_take() -> None:
    least_s, most_s = app.pauses(0.1)
    assert least_s + app.LOOK_S + 0.1 < 2.0
    assert 0.1 / most_s == pytest.approx(0.007)


@on_loop
async def test_all_viewers_share_one_status(calls, monkeypatch) -> None:
    monkeypatch.setattr(app, "REFRESH_S", 60.0)
    monkeypatch.setattr(app, "SHARE", 1.0)  # a status that a busy machine holds up would be the last for long
    made, status = [], MasterHost.status
    monkeypatch.setattr(MasterHost, "status", lambda host: made.append(1) or status(host))
    async with Site() as site:
        async with contextlib.AsyncExitStack() as stack:
            contents = [await stack.enter_async_context(site.stream()) for _ in range(5)]
            for number in range(1, 4):
                assert len({json.dumps(await frame(content)) for content in contents}) == 1
                assert len(made) == number
                await site.host.call(calls.register(f"session-{number}"))
            monkeypatch.setattr(app, "REFRESH_S", 0.05)  # of the next one, which the event brings
            await frame(contents[0])
            await frame(contents[0])
        for _ in range(20):  # until the server has seen that they are gone
            seen = len(made)
            await asyncio.sleep(0.25)
            if len(made) == seen:
                break
        assert len(made) == seen  # nobody looks


@on_loop
async def test_a_master_that_stops_ends_the_streams() -> None:
    site = Site()
    async with site, site.stream() as content:
        await frame(content)
        await site.port.stop()
        await content.read()  # to the end, which comes


@on_loop
async def test_too_many_viewers_are_told_so(monkeypatch) -> None:
    monkeypatch.setattr(app, "MOST_VIEWERS", 1)
    async with Site() as site, site.stream() as content:
        await frame(content)
        status, _, text = await site.get("/api/events")
        assert (status, "close a page" in text) == (503, True)


@on_loop
async def test_the_page_is_for_reading_alone() -> None:
    async with Site() as site:
        async with site.session.post(site.url + "/api/status") as answer:
            assert answer.status == 405
        assert (await site.get("/../etc/passwd"))[0] == 404


def test_without_its_packages_the_page_says_what_to_install(monkeypatch) -> None:
    import sys

    from edl_torch.master.web import web_port

    monkeypatch.delitem(sys.modules, "edl_torch.master.web.app")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MasterStartError, match=r"pip install 'edl-torch\[web\]'"):
        web_port(lambda: None, lambda: 0, "127.0.0.1:0")  # type: ignore[arg-type, return-value]
