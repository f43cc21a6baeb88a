"""The other side of `dispatch.py`, in processes of its own: trainers that only ask, and a bare grpc server.

`dispatch_peers.py bare`, or `dispatch_peers.py trainers|echoes ADDRESS SECONDS SESSIONS COUNT RATE`; prints
one line of JSON. Messages are made by hand, so that little of what is measured is the trainers' own work. The
bare server echoes, and answers trainers with bytes that were made before: what is left is grpc and they.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from edl_torch.rpc import edl_torch_pb2 as pb

DATASET = "bench"
HUGE = 10**12
SHARD = 256
ECHO = "/bench.Echo/Echo"
MASTER = "edl_torch.v1.Master"
PAYLOAD = bytes(64)

Call = Callable[[], Awaitable[int]]  # one round trip; returns how many leases or outcomes it carried


class Trainer:
    """A session that leases `count` slices with one call and acknowledges them with the next."""

    def __init__(self, channel: grpc.aio.Channel, count: int) -> None:
        def method(name: str, answer: Any) -> Any:
            return channel.unary_unary(
                f"/{MASTER}/{name}", lambda m: m.SerializeToString(), answer.FromString
            )

        self._register = method("Register", pb.RegisterResponse)
        self._lease = method("Lease", pb.LeaseResponse)
        self._report = method("Report", pb.ReportResponse)
        self._session = uuid.uuid4().hex
        self._fence: dict[str, Any] = {}  # ledger, lineage and member
        self._count = count
        self._request = 0
        self._grants: list[Any] = []

    async def begin(self) -> None:
        """Take part."""
        registration = pb.Registration(
            name=DATASET, records_per_shard=SHARD, shuffle=True, shuffle_shards=True, shuffle_in_shard=False
        )
        registration.sources.sources.add(name="records", count=HUGE)
        call = pb.RegisterRequest(
            session=self._session, worker_id="w", batch_size=32, registration=registration
        )
        await self._join(call)

    async def _join(self, call: pb.RegisterRequest) -> None:
        answer = await self._register(call)
        self._fence = {"ledger": answer.ledger, "lineage": answer.lineage, "member": answer.member}

    async def call(self) -> int:
        """One round trip."""
        if not self._grants:
            self._request += 1
            call = pb.LeaseRequest(
                session=self._session,
                dataset=DATASET,
                **self._fence,
                request=self._request,
                epoch=0,
                count=self._count,
            )
            self._grants = list((await self._lease(call)).grants)
            return len(self._grants)
        report = pb.ReportRequest(
            session=self._session, dataset=DATASET, **self._fence, request=self._request
        )
        for grant in self._grants:
            report.acknowledgements.add(task=grant.task, attempt=grant.attempt, upto=grant.skip + grant.limit)
        done, self._grants = len(self._grants), []
        await self._report(report)
        return done


class Echo:
    """The least that a grpc call can be."""

    def __init__(self, channel: grpc.aio.Channel, _: int) -> None:
        self._call: Any = channel.unary_unary(ECHO, bytes, bytes)

    async def begin(self) -> None:
        """Nothing to take part in."""

    async def call(self) -> int:
        """One round trip."""
        return len(await self._call(PAYLOAD)) // len(PAYLOAD)


async def drive(
    kind: type[Trainer] | type[Echo], address: str, seconds: float, sessions: int, count: int, rate: float
) -> dict[str, object]:
    """All sessions together, each as fast as it is answered, or offering `rate` calls a second in all."""
    async with grpc.aio.insecure_channel(address) as channel:
        peers = [kind(channel, count) for _ in range(sessions)]
        for peer in peers:
            await peer.begin()
        begun, cpu = time.perf_counter(), time.process_time()
        pace = sessions / rate if rate else 0.0
        runs = [
            _run(peer.call, begun + seconds, begun + pace * place / sessions, pace)
            for place, peer in enumerate(peers)
        ]
        done = await asyncio.gather(*runs)
        elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
    latencies = sorted(latency for some, _ in done for latency in some)
    return {
        "answered": len(latencies),
        "cpu_s": cpu,
        "calls": len(latencies) / elapsed,
        "items": sum(items for _, items in done) / elapsed,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[len(latencies) * 99 // 100],
    }


async def _run(call: Call, until: float, due: float, pace: float) -> tuple[list[float], int]:
    """Latencies count from when a call was due, so that a slow answer shows in those behind it as well."""
    latencies: list[float] = []
    items = 0
    while True:
        now = time.perf_counter()
        if now >= until:
            return latencies, items
        if pace and due > now:
            await asyncio.sleep(due - now)
        since = due if pace else now
        items += await call()
        latencies.append(time.perf_counter() - since)
        due += pace


async def serve_bare() -> None:
    """Serve until killed."""
    server = grpc.aio.server()

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    def canned(answer: Any) -> Any:
        raw = answer.SerializeToString()

        async def answering(_: bytes, __: Any) -> Any:
            return raw

        return grpc.unary_unary_rpc_method_handler(answering)

    grant = pb.Grant(task=100_000, attempt=1, shard=2_000_000_000, limit=SHARD)
    answers: dict[str, Any] = {
        "Register": canned(pb.RegisterResponse(lineage=1)),
        "Lease": canned(pb.LeaseResponse(request=1000, grants=[grant])),
        "Report": canned(pb.ReportResponse(request=1000)),
    }
    echoes: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("bench.Echo", echoes),
            grpc.method_handlers_generic_handler(MASTER, answers),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main(arguments: list[str]) -> None:
    """One of the two."""
    if arguments[0] == "bare":
        asyncio.run(serve_bare())
        return
    kind, address, seconds, sessions, count, rate = arguments
    peer = Trainer if kind == "trainers" else Echo
    found = asyncio.run(drive(peer, address, float(seconds), int(sessions), int(count), float(rate)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
