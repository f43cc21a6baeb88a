"""The other side of `scale.py`: many trainers in one process, each with a connection, a stream and a session.

`scale_peers.py ADDRESS COUNT` reads commands from standard input, `NAME RATE SECONDS` a line, and answers
with a line of JSON. `RATE` is that of all its trainers together, spread evenly over them. Trainers ask as
those of `dispatch_peers.py` do: with messages made by hand, so that they cost little.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
from dispatch_peers import MASTER, SHARD, Trainer

from edl_torch.rpc import edl_torch_pb2 as pb

ONE_AT_A_TIME = 1
TAIL = f"tail-{os.getpid()}"
STARTING = 16  # at the same time
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class Attending(Trainer):
    """A trainer that is there: its stream stands."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OWN_CONNECTION)
        super().__init__(self._channel, ONE_AT_A_TIME)
        self._heartbeat: Any = self._channel.unary_unary(
            f"/{MASTER}/Heartbeat", lambda m: m.SerializeToString(), pb.HeartbeatResponse.FromString
        )
        self._attend: Any = self._channel.unary_stream(
            f"/{MASTER}/Attend", lambda m: m.SerializeToString(), pb.AttendEvent.FromString
        )
        self._stream: Any = None
        self._answering: asyncio.Task[None] | None = None
        self.beats = 0

    async def begin(self) -> None:
        """Register, open the stream and hold one lease."""
        await super().begin()
        self._stream = self._attend(pb.AttendRequest(session=self._session))
        await self._stream.read()
        self._answering = asyncio.create_task(self._answer())
        await self.call()

    async def _answer(self) -> None:
        """Send a heartbeat each time that the master asks for one."""
        with contextlib.suppress(asyncio.CancelledError):
            while await self._stream.read() is not grpc.aio.EOF:
                await self.beat()

    async def beat(self) -> None:
        """Send a heartbeat of a loop that moves on."""
        self.beats += 1
        await self._heartbeat(
            pb.HeartbeatRequest(session=self._session, member=self._fence["member"], progress=self.beats)
        )

    async def join(self, dataset: str) -> None:
        """Take part in another dataset, of one shard."""
        registration = pb.Registration(name=dataset, records_per_shard=SHARD)
        registration.sources.sources.add(name="records", count=SHARD)
        await self._join(
            pb.RegisterRequest(
                session=self._session, worker_id="w", batch_size=SHARD, registration=registration
            )
        )

    async def take(self, dataset: str, wait_s: float) -> int:
        """Lease a shard of it, or wait for one in vain."""
        self._request += 1
        call = pb.LeaseRequest(
            session=self._session,
            dataset=dataset,
            **self._fence,
            request=self._request,
            epoch=0,
            count=1,
            wait_s=wait_s,
        )
        return len((await self._lease(call)).grants)

    async def close(self) -> None:
        """As a trainer that dies."""
        self._stream.cancel()
        if self._answering is not None:
            await self._answering
        await self._channel.close()


async def spread(
    calls: Sequence[Callable[[], Awaitable[int]]], rate: float, seconds: float
) -> dict[str, float]:
    """Make calls at an even pace, in turn. A latency counts from when the call was due."""
    began = time.perf_counter()
    latencies: list[float] = []
    running: set[asyncio.Task[None]] = set()

    async def one(call: Callable[[], Awaitable[int]], due: float) -> None:
        await call()
        latencies.append(time.perf_counter() - due)

    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        task = asyncio.create_task(one(calls[number % len(calls)], due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    latencies.sort()
    middle, late = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
    return {"calls": len(latencies), "p50_ms": 1e3 * middle, "p99_ms": 1e3 * late}


async def wait_for_beats(trainers: Sequence[Attending], seconds: float) -> dict[str, float]:
    """Do nothing but what the master asks for."""
    before = sum(trainer.beats for trainer in trainers)
    await asyncio.sleep(seconds)
    calls = sum(trainer.beats for trainer in trainers) - before
    return {"calls": calls, "p50_ms": 0.0, "p99_ms": 0.0}


async def wait_for_one(trainers: list[Attending], seconds: float) -> dict[str, float]:
    """One trainer holds the last shard of a dataset, the others wait for it."""
    holder, *others = trainers
    await asyncio.gather(*(trainer.join(TAIL) for trainer in trainers))
    if not await holder.take(TAIL, 0.0):
        raise RuntimeError(f"dataset {TAIL!r} has no shard left to hold")
    print(json.dumps({"ready": len(others)}), flush=True)
    got = await asyncio.gather(*(trainer.take(TAIL, seconds) for trainer in others))
    return {"calls": len(got), "p50_ms": 0.0, "p99_ms": 0.0}


async def main(address: str, count: int) -> None:
    """Start all trainers, then obey."""
    trainers = [Attending(address) for _ in range(count)]
    for at in range(0, count, STARTING):
        await asyncio.gather(*(trainer.begin() for trainer in trainers[at : at + STARTING]))
    print(json.dumps({"ready": count}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, rate, seconds = line.split()
        if name == "waits":
            print(json.dumps(await wait_for_one(trainers, float(seconds))), flush=True)
            continue
        if name == "beats":
            print(json.dumps(await wait_for_beats(trainers, float(seconds))), flush=True)
            continue
        calls = [trainer.call for trainer in trainers]
        print(json.dumps(await spread(calls, float(rate), float(seconds))), flush=True)
    await asyncio.gather(*(trainer.close() for trainer in trainers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
