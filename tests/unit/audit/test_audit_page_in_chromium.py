"""The page of an audit in a browser: its style is admitted, and it fits a phone in both themes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from audited_job import Job
from chromium import browsing, needs_chromium

from edl_torch.cli.main import main

pytestmark = needs_chromium


@pytest.mark.parametrize(("width", "dark"), [(1240, False), (390, True)])
def test_the_page_fits_and_may_run_nothing(tmp_path: Path, width: int, dark: bool) -> None:
    job = Job(tmp_path / "audit")
    job.train_batches(2)
    job.restore(0, job.checkpoint(0))
    job.train_batches(2)
    page = tmp_path / "audit.html"
    assert main(["audit", str(job.directory), "--html", str(page)]) == 1

    async def look() -> None:
        async with browsing(tmp_path / "browser", page.as_uri(), width=width, dark=dark) as tab:
            assert "✕ REFUTED" in await tab.text()
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
            colour = await tab.run("getComputedStyle(document.body).backgroundColor")
            assert colour == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 248)")
            drawn = "document.querySelector('path.lost').getBoundingClientRect().height"
            assert await tab.run(drawn) == pytest.approx(22, abs=4)
            assert not tab.complaints
            (tmp_path / "audit.png").write_bytes(await tab.picture())

    asyncio.run(asyncio.wait_for(look(), 120))
