"""The other side of `recovery.py`: a trainer that holds leases, and a relay between it and its master.

`recovery_peers.py trainer ADDRESS DATASET SHARDS` leases a dataset of that many shards, keeps its stream and
heartbeats, and prints how many records it holds. `recovery_peers.py relay ADDRESS` prints the address that
it forwards from. Both go on until they are killed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import NEW_PASS, LeaseCall, RegisterCall, Registration
from edl_torch.shard import Source
from edl_torch.testing.fake_master import Listening

SHARD = 256
CHUNK = 1 << 16
READY_S = 30.0


def registration(dataset: str, records: int) -> Registration:
    """A dataset of so many records."""
    return Registration(
        name=dataset, sources=(Source(name="records", count=records),), records_per_shard=SHARD, shuffle=True
    )


def hold(address: str, dataset: str, shards: int) -> None:
    """Be a trainer in the middle of a long step."""
    session = uuid.uuid4().hex
    client = MasterClient(address, "victim")
    described = registration(dataset, SHARD * shards)
    answer = client.call(
        RegisterCall(session=session, worker_id="victim", batch_size=32, registration=described)
    )
    listening = Listening(answer.fence.member)
    client.attend(session, answer.fence.member, listening)
    # Near the end leases are short: so many suffice for all records.
    count = SHARD * shards
    call = LeaseCall(
        session=session,
        dataset=dataset,
        fence=answer.fence,
        request=1,
        epoch=NEW_PASS,
        count=count,
    )
    held = sum(grant.slice.limit for grant in client.call(call).grants)
    if not listening.wait_standing(READY_S):
        raise TimeoutError("the stream does not stand")
    print(held, flush=True)
    threading.Event().wait()


async def relay(address: str) -> None:
    """Forward every connection to the master; stopped, it leaves them standing, as a cable that was cut."""
    host, _, port = address.rpartition(":")

    async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(CHUNK):
            sink.write(chunk)
            await sink.drain()
        sink.close()

    async def accept(near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far, far_out = await asyncio.open_connection(host, int(port))
        await asyncio.gather(forward(near, far_out), forward(far, near_out))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main(arguments: list[str]) -> None:
    """One of the two."""
    if arguments[0] == "relay":
        asyncio.run(relay(arguments[1]))
    else:
        hold(arguments[1], arguments[2], int(arguments[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
