"""A master that is called with names of files, code and pickles, while the interpreter's audit hook listens.

    python audited_master.py STATE_FOLDER

Prints JSON: how many calls there were, and what they made the interpreter open, compile, import or start.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import hostile

from edl_torch.elasticdl.adapter import ElasticDLAdapter
from edl_torch.elasticdl.servicer import ElasticDLServicer
from edl_torch.master.durable import DurableState
from edl_torch.master.host import MasterHost
from edl_torch.master.servicer import MasterServicer
from edl_torch.rpc import edl_torch_pb2 as pb

WATCHED = (
    "open",
    "exec",
    "compile",
    "import",
    "marshal.",
    "pickle.",
    "subprocess.",
    "os.",
    "shutil.",
    "glob.",
)
WATCHED += ("socket.", "sqlite3.connect", "ctypes.", "tempfile.", "urllib.", "webbrowser.")
ROUNDS = 1000

events: list[str] = []
listening = False


def listen(event: str, arguments: tuple[object, ...]) -> None:
    if listening and event.startswith(WATCHED):
        events.append(f"{event} {arguments!r:.200}")


class Seeded:
    """Choices of a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, stop: int) -> int:
        return self._random.randrange(stop)

    def raw(self) -> bytes:
        return self._random.randbytes(20)


async def run(folder: Path) -> None:
    global listening
    state = DurableState(folder, now=0.0)
    master = hostile.Master()
    commits = state.group_commit()
    master.dispatcher = state.dispatcher
    hostile.LIKELY["ledger"] = (state.dispatcher.ledger_id,)
    master.host = MasterHost(state.dispatcher, commits=commits)
    master.servicer = MasterServicer(master.host)
    master.elasticdl = ElasticDLServicer(master.host, ElasticDLAdapter(state.dispatcher))
    await hostile.Honest(master).start()
    await rounds(master, Seeded(0), 300)  # whatever is imported late is there now
    await commits.committed()
    listening = True
    await rounds(master, Seeded(1), ROUNDS)
    for text in hostile.TEXTS:  # each text in each place at least once
        raw = pb.RegisterRequest(
            session=text, worker_id=text, batch_size=1, registration=pb.Registration(name=text)
        )
        raw.registration.sources.sources.add(name=text, count=3)
        await hostile.hostile(master, "Register", raw.SerializeToString())
        raw = pb.RestoreRequest(**hostile.fenced(master, hostile.Honest.session, "e"), request=1, token=text)
        await hostile.hostile(master, "Restore", raw.SerializeToString())
    await commits.committed()
    listening = False
    await master.host.close()
    state.close()


async def rounds(master: hostile.Master, choices: Seeded, count: int) -> None:
    tokens = [master.dispatcher.token("training")]
    for _ in range(count):
        method = hostile.pick(choices, sorted(hostile.INPUTS))
        made = hostile.message(hostile.INPUTS[method], choices, tokens)
        await hostile.hostile(master, method, made.SerializeToString())


def main() -> None:
    global listening
    sys.addaudithook(listen)
    listening = True
    Path(sys.argv[0]).read_text("utf-8")
    listening = False
    probe = [event.split()[0] for event in events]
    events.clear()
    asyncio.run(run(Path(sys.argv[1])))
    print(json.dumps({"calls": ROUNDS + 2 * len(hostile.TEXTS), "probe": probe, "events": events}))


if __name__ == "__main__":
    main()
