"""The thread behind a group commit: what it does, in which order, and who hears of it."""

from __future__ import annotations

import asyncio
import threading

from loop_kit import on_loop

from edl_torch.master.durable import Writer


@on_loop
async def test_work_is_done_in_order_beside_the_loop_which_hears_of_each():
    writer, here = Writer("test-writer"), threading.current_thread()
    done, heard = [], asyncio.Queue()
    for number in range(3):
        writer.do(
            lambda number=number: done.append((number, threading.current_thread() is here)),
            lambda error: heard.put_nowait((error, threading.current_thread() is here)),
        )
    assert [await heard.get() for _ in range(3)] == [(None, True)] * 3
    assert done == [(0, False), (1, False), (2, False)]
    writer.close()


@on_loop
async def test_what_the_work_raises_is_told_and_the_next_work_is_done():
    writer, heard = Writer("test-writer"), asyncio.Queue()
    writer.do(lambda: {}["missing"], heard.put_nowait)
    writer.do(lambda: None, heard.put_nowait)
    assert isinstance(await heard.get(), KeyError)
    assert await heard.get() is None
    writer.close()


@on_loop
async def test_close_does_what_was_asked_for_and_ends_the_thread():
    writer, done = Writer("test-writer-that-ends"), []
    for number in range(100):
        writer.do(lambda number=number: done.append(number), lambda error: None)
    writer.close()
    assert done == list(range(100))
    assert "test-writer-that-ends" not in {thread.name for thread in threading.enumerate()}


def test_a_loop_that_is_closed_meanwhile_is_no_error():
    may_end, writers = threading.Event(), []

    async def begin():
        writers.append(Writer("test-writer"))
        writers[0].do(may_end.wait, lambda error: None)

    asyncio.run(begin())
    may_end.set()
    writers[0].close()
