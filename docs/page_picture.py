"""Makes docs/page.png anew, from a job that runs meanwhile: `python docs/page_picture.py`. Needs Chromium,
and Pillow.

Three trainers share a master; one of them is slow, one is killed and comes back.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from PIL import Image

HERE = Path(__file__)
PICTURE = HERE.with_name("page.png")
STEP_S = {"node-1": 0.4}  # of the others a tenth
WIDTH = 1180


class Photographs:
    """Records that take some time to read; a few cannot be."""

    def __len__(self) -> int:
        return 40_000

    def __getitem__(self, index: int) -> float:
        time.sleep(0.0005)
        if index % 15_000 == 7_234:
            raise ValueError("image file is truncated")
        return float(index)


def shrunk(record: float) -> float:
    """Take as long as a small augmentation."""
    time.sleep(0.0002)
    return record


def train() -> None:
    """Be one trainer."""
    from edl_torch import ElasticDataLoader

    name = os.environ["EDL_TRAINER"]
    settings = {"on_bad_record": "quarantine", "max_bad_records": 20, "num_epochs": 3, "seed": 1}
    with ElasticDataLoader(Photographs(), 32, shuffle=True, transform=shrunk, **settings) as loader:
        for _epoch in loader.epochs():
            for number, _batch in enumerate(loader):
                time.sleep(STEP_S.get(name, 0.04))
                if name == "node-0" and number == 150:
                    loader.state_dict()


@contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of Python until the block ends."""
    program = subprocess.Popen([sys.executable, *command], env={**os.environ, **environment})
    try:
        yield program
    finally:
        program.kill()
        program.wait()


async def take(url: str) -> bytes:
    """Return the whole page as PNG, once it is live."""
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from chromium import browsing

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browsing(Path(folder), url, width=WIDTH) as tab:
            await tab.wait_until("document.getElementById('connection').textContent.includes('live')", 60)
            await asyncio.sleep(5.0)  # until events are not new any more
            height = await tab.run("document.documentElement.scrollHeight")
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
            found = await tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
            return base64.b64decode(found["data"])


def main(address: str = "127.0.0.1:50091", page: str = "127.0.0.1:50092") -> None:
    """Run the job, and take the picture."""
    here = {"EDL_MASTER_ADDR": address}
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())
        master = ("-m", "edl_torch", "master", "--addr", address, "--http", page, "--state", state)
        stack.enter_context(running(*master))
        time.sleep(5.0)
        first, *_ = [
            stack.enter_context(running(str(HERE), "train", EDL_TRAINER=f"node-{number}", **here))
            for number in (2, 0, 1)
        ]
        time.sleep(40.0)
        first.kill()
        time.sleep(5.0)
        stack.enter_context(running(str(HERE), "train", EDL_TRAINER="node-2", **here))
        time.sleep(30.0)
        whole = Image.open(io.BytesIO(asyncio.run(take(f"http://{page}/"))))
        whole.quantize(128, dither=Image.Dither.NONE).save(PICTURE, optimize=True)  # a third as large


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
