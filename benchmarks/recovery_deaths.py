"""Kills trainers and masters, and measures until others have what the dead had.

Rounds and processes; what the numbers should be is not known here.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from contenders import loopback_master
from recovery_peers import registration
from serving import environment_of_children

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import NEW_PASS, ConfirmCall, Fence, Grant, LeaseCall, RegisterCall
from edl_torch.testing.fake_master import Listening

PEERS = Path(__file__).with_name("recovery_peers.py")
SHARDS = 8  # that a trainer holds when it dies
A_CALL = 100
SESSIONS = 10
WAIT_S = 5.0  # of one call for leases
LONGEST_S = 120.0


class Death(Enum):
    """How a trainer goes."""

    KILLED = "killed"  # its stream breaks
    STOPPED = "stopped"  # SIGSTOP: the stream stands, and nobody speaks
    VANISHED = "gone with its machine"  # killed behind a relay that forwards nothing more, not even the end


def killed_trainers(rounds: int, death: Death, *, lease_timeout_s: float = 30.0) -> tuple[float, ...]:
    """Seconds until another trainer, which waits, has all records of the dead one, in every round.

    Silent deaths are measured side by side: what they take is waiting.
    """
    with loopback_master("--lease-timeout-s", str(lease_timeout_s)) as client:
        measure = partial(_one_death, client.address, death)
        if death is Death.KILLED:
            return tuple(measure(0.0) for _ in range(rounds))
        beat_s = lease_timeout_s / 3
        phases = [beat_s * (place + random.random()) / rounds for place in range(rounds)]
        with ThreadPoolExecutor(rounds) as pool:
            return tuple(pool.map(measure, phases))


def _one_death(address: str, death: Death, phase_s: float) -> float:
    """One trainer dies, `phase_s` after it was settled: deaths come at any moment between two heartbeats."""
    dataset = uuid.uuid4().hex
    with ExitStack() as stack:
        near, silence = address, None
        if death is Death.VANISHED:
            silence, near = stack.enter_context(_peer("relay", address))
        trainer, said = stack.enter_context(_peer("trainer", near, dataset, str(SHARDS)))
        heir = Heir(stack.enter_context(MasterClient(address, "heir")), dataset, int(said))
        time.sleep(phase_s)
        began = time.perf_counter()
        if silence is not None:
            silence.send_signal(signal.SIGSTOP)
        trainer.send_signal(signal.SIGSTOP if death is Death.STOPPED else signal.SIGKILL)
        return heir.has_all() - began


@contextmanager
def _peer(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the line that it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, str(PEERS), *arguments],
        env=environment_of_children(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


class Heir:
    """A trainer that waits for records while another one holds them all."""

    def __init__(self, client: MasterClient, dataset: str, records: int) -> None:
        self._client = client
        self._dataset = dataset
        self._session = uuid.uuid4().hex
        self._missing = records
        self._fence = client.call(_register(self._session, dataset, records)).fence
        client.attend(self._session, self._fence.member, Listening(self._fence.member))
        self._done_at = 0.0
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        request = 0
        while self._missing:
            request += 1
            call = LeaseCall(
                session=self._session,
                dataset=self._dataset,
                fence=self._fence,
                request=request,
                epoch=0,
                count=A_CALL,
            )
            self._missing -= sum(grant.slice.limit for grant in self._client.call(call, WAIT_S).grants)
        self._done_at = time.perf_counter()

    def has_all(self) -> float:
        """When it had the last of them."""
        self._thread.join(LONGEST_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._missing} records were not lent again within {LONGEST_S:g} s")
        return self._done_at


def _register(session: str, dataset: str, records: int) -> RegisterCall:
    described = registration(dataset, records)
    return RegisterCall(session=session, worker_id="w", batch_size=32, registration=described)


# Masters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Seconds since the process was started."""

    ready_s: float
    answered_s: float
    confirmed_s: float
    waited_s: float


class Master:
    """A master with a journal in `folder`, started again and again on one port."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state"
        self.address = "127.0.0.1:0"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns once it says that it serves."""
        command = [sys.executable, "-m", "edl_torch", "master", "--addr", self.address]
        self._process = subprocess.Popen(
            [*command, "--state", str(self._state)],
            env=environment_of_children(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]

    def kill(self) -> None:
        """As `kill -9` does."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.communicate()


def restarted_masters(folder: Path, rounds: int, leases: int) -> list[Restart]:
    """Kill a master with so many leases on its journal, and start it again, `rounds` times."""
    master = Master(folder)
    try:
        master.start()
        with MasterClient(master.address, "w") as client:
            held = _hold(client, leases)
            return [_restart(master, client, held) for _ in range(rounds)]
    finally:
        master.kill()


Held = dict[str, tuple[Fence, list[Grant]]]  # by session its fence and its leases


def _hold(client: MasterClient, leases: int) -> Held:
    """Let sessions hold so many leases together."""
    held: Held = {}
    share = leases // SESSIONS
    for session in (f"s{number}" for number in range(SESSIONS)):
        fence, grants = client.call(_register(session, "held", 10**9)).fence, list[Grant]()
        held[session] = fence, grants
        for request in range(1, -(-share // A_CALL) + 1):
            count = min(A_CALL, share - len(grants))
            call = LeaseCall(
                session=session, dataset="held", fence=fence, request=request, epoch=NEW_PASS, count=count
            )
            grants += client.call(call).grants
    return held


def _restart(master: Master, waiting: MasterClient, held: Held) -> Restart:
    master.kill()
    answered: list[float] = []

    def wait() -> None:
        waiting.status()
        answered.append(time.perf_counter())

    thread = threading.Thread(target=wait)
    thread.start()
    began = time.perf_counter()
    master.start()
    ready = time.perf_counter()
    with MasterClient(master.address, "fresh") as client:
        leases = client.dataset_status("held").leases
        first = time.perf_counter()
        for session, (fence, grants) in held.items():
            own = tuple((grant.task, grant.attempt) for grant in grants)
            void = client.call(ConfirmCall(session=session, dataset="held", fence=fence, leases=own)).void
            leases -= len(own) - len(void)
        confirmed = time.perf_counter()
    if leases or not all(grants for _, grants in held.values()):
        raise RuntimeError(f"{leases} lease(s) of the journal are not confirmed to their sessions")
    thread.join(LONGEST_S)
    return Restart(
        ready_s=ready - began,
        answered_s=first - began,
        confirmed_s=confirmed - began,
        waited_s=answered[0] - began,
    )
