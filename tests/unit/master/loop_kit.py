"""What tests of things that live on an event loop share."""

from __future__ import annotations

import asyncio
import functools


def on_loop(test):
    """Run an async test; nothing in these takes long."""

    @functools.wraps(test)
    def run(*arguments, **fixtures):
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), 10))

    return run


async def settle():
    """Let every task that can run do so."""
    for _ in range(8):
        await asyncio.sleep(0)
