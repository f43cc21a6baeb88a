"""A master that counts the processor time of its page: `watching_peers.py PATH OPTIONS OF EDL-TORCH MASTER`.

PATH is a file of 8 bytes, the seconds so far as a float64. The page's are all callbacks of the event loop
whose context was copied where the page starts: its connections, its frames, and what they call.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from asyncio import Handle
from contextvars import ContextVar
from pathlib import Path

from edl_torch.cli.main import main
from edl_torch.master.web.app import WebPort

OF_PAGE: ContextVar[bool] = ContextVar("of_page", default=False)
SECONDS = struct.Struct("d")


def page_s(path: Path) -> float:
    """Return the seconds that the page has taken so far."""
    return float(SECONDS.unpack(path.read_bytes())[0])


def count(path: Path) -> None:
    """Count from now on."""
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), SECONDS.size)
    start, run, spent_s = WebPort.start, Handle._run, 0.0

    async def marked(port: WebPort) -> object:
        before = OF_PAGE.set(True)
        try:
            return await start(port)
        finally:
            OF_PAGE.reset(before)

    def timed(handle: Handle) -> None:
        nonlocal spent_s
        if handle._context.get(OF_PAGE):  # type: ignore[attr-defined]
            begun = time.thread_time()
            run(handle)
            spent_s += time.thread_time() - begun
            SECONDS.pack_into(shared, 0, spent_s)
        else:
            run(handle)

    WebPort.start = marked  # type: ignore[method-assign, assignment]
    Handle._run = timed  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    count(Path(sys.argv[1]))
    sys.exit(main(["master", *sys.argv[2:]]))
