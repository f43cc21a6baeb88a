"""A TCP proxy in a thread that mistreats connections on command.

Bytes are late or their connection is cut; none is dropped from its middle, because TCP would not either.

    with Proxy("127.0.0.1:50001", seed=7) as proxy:
        client = MasterClient(proxy.address)
        proxy.hold()      # a black hole: nothing passes, nothing breaks
        proxy.release()   # what was held arrives
        proxy.cut()       # every connection is reset
        proxy.forget()    # nothing passes on those that stand; new ones are as ever
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from loop_thread import LoopThread

T = TypeVar("T")

CHUNK = 1 << 16


class Proxy:
    """Forwards to `target` (`host:port`). Everything random is drawn from `seed`."""

    def __init__(self, target: str, *, seed: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._delays_s = (0.0, 0.0)
        self._cut_rate = 0.0
        self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = LoopThread()
        self._open = self._loop.call(asyncio.Event)
        self._now(self._open.set)
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.accepted = 0
        self.broken = 0  # connections that `cut_at_random` cut

    # Commands -------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Nothing passes any more, in either direction; connections stay."""
        self._now(self._open.clear)

    def release(self) -> None:
        """What was held arrives, and later bytes pass."""
        self._now(self._open.set)

    def forget(self) -> None:
        """Nothing passes any more on the connections that stand; they are not reset. New ones are as ever."""

        def leave_behind() -> None:
            self._open.clear()
            self._open = asyncio.Event()
            self._open.set()

        self._now(leave_behind)

    def cut(self) -> None:
        """Reset every connection. New ones are taken."""
        self._now(self._cut_all)

    def refuse(self, refusing: bool = True) -> None:
        """Reset every new connection at once."""
        self._now(lambda: setattr(self, "_refusing", refusing))

    def delay(self, least_s: float, most_s: float) -> None:
        """Each chunk of bytes is late by so much."""
        self._now(lambda: setattr(self, "_delays_s", (least_s, most_s)))

    def cut_at_random(self, rate: float) -> None:
        """Each chunk of bytes is the last one of its connection with this probability."""
        self._now(lambda: setattr(self, "_cut_rate", rate))

    def close(self) -> None:
        """Reset all connections and end the thread."""
        self._do(self._end())
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the loop ----------------------------------------------------------------------------------------

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)

    def _now(self, action: Callable[[], None]) -> None:
        self._loop.call(action)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refusing:
            _reset(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, far_writer)
        self._writers.update(pair)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink, pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        passes = self._open  # of this connection
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK):
                if self._delays_s[1]:
                    await asyncio.sleep(self._random.uniform(*self._delays_s))
                await passes.wait()
                if self._cut_rate and self._random.random() < self._cut_rate:
                    self.broken += 1
                    break
                sink.write(chunk)
                await sink.drain()
        for writer in pair:
            self._writers.discard(writer)
            _reset(writer)

    def _cut_all(self) -> None:
        for writer in self._writers:
            _reset(writer)
        self._writers.clear()

    async def _end(self) -> None:
        self._server.close()
        self._cut_all()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Proxy {self.address} connections={len(self._writers) // 2}>"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a machine that has forgotten the connection."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if writer.transport is not None:
        writer.transport.abort()
