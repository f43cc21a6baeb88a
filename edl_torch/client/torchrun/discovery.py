"""A job under torchrun finds its master, or starts it, through the job's own store.

Workers agree who starts it; it runs beside the agents, so that it survives the workers' restarts. It must not
know what a master does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from edl_torch.client.torchrun.job import Job, join_job
from edl_torch.client.torchrun.sidecar import MasterEntry, Sidecar
from edl_torch.errors import EdlError
from edl_torch.rpc.credentials import AccessToken, Credentials

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

START_S = 60.0  # from a worker's claim to start the master until the others try it
NODES_S = 10.0  # how long a word from each node is waited for
LOOK_S = 0.02


def master_of_job() -> tuple[str, Credentials]:
    """Return the address of this job's master, which is started where there is none, and credentials for it.

    Also ties this process to its torchrun agent: it ends, as the agent would end it, when the agent is gone.
    Raises MasterStartError where no master can be started, InvalidArgument for an environment that is not
    torchrun's.
    """
    job = Job.from_env()
    entry = MasterFinder(job, join_job(job)).find()
    return entry.address, _credentials(entry)


def _credentials(entry: MasterEntry) -> Credentials:
    """The user's own; a token of the job's may go where the job's other words go, without TLS too."""
    given = Credentials.from_env()
    if not entry.token:
        return given
    return replace(given, token=AccessToken(entry.token.encode()), insecure=True)


class MasterFinder:
    """One worker's part in the agreement on the master.

    Masters of a job have numbers, from 1. The first worker to claim a number starts that master and writes
    its entry; the others read it. A master that does not answer is followed by the next number.
    """

    def __init__(self, job: Job, store: Store, sidecar: Sidecar | None = None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self._job = job
        self._store = PrefixStore(f"edl_torch/{job.run_id}/master", store)
        self._sidecar = Sidecar(job) if sidecar is None else sidecar

    def find(self) -> MasterEntry:
        """A master that answers."""
        number, newest = self._seen()
        if newest is not None and newest.answers:
            return newest
        if number == 1:
            kept = self._sidecar.running() or MasterEntry()
            self._store.set(f"node/{self._job.node}", kept.text)
        while True:
            if self._store.add(f"claim/{number}", 1) == 1:
                return self._write(number, self._from_before if number == 1 else self._sidecar.start)
            if self._is_written(number):
                return self._read(number).here()
            number += 1

    def _seen(self) -> tuple[int, MasterEntry | None]:
        """The first number without an entry that may still come, and the newest entry.

        A number whose entry is missing, with later ones claimed, belongs to a worker that died on the way.
        """
        number, newest = 1, None
        while self._store.check([f"claim/{number}"]):
            if self._store.check([f"entry/{number}"]):
                newest = self._read(number)
            elif not self._store.check([f"claim/{number + 1}"]):
                return number, newest
            number += 1
        return number, newest

    def _from_before(self) -> MasterEntry:
        """A master that an agent has kept from before this store, else a new one."""
        keys = [f"node/{node}" for node in range(self._job.nodes)]
        _within(NODES_S, lambda: self._store.check(keys))
        for key in keys:
            if self._store.check([key]):
                kept = MasterEntry.read(self._store.get(key))
                if kept.answers:
                    return kept
        return self._sidecar.start()

    def _write(self, number: int, make: Callable[[], MasterEntry]) -> MasterEntry:
        try:
            entry = make()
        except EdlError as error:  # the others must not wait for it
            self._store.set(f"entry/{number}", MasterEntry(error=str(error)).text)
            raise
        self._store.set(f"entry/{number}", entry.text)
        return entry

    def _is_written(self, number: int) -> bool:
        return _within(START_S, lambda: self._store.check([f"entry/{number}"]))

    def _read(self, number: int) -> MasterEntry:
        return MasterEntry.read(self._store.get(f"entry/{number}"))


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
    return True
