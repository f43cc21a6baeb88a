"""How loader workers reach their trainer: a picklable address, and a link that asks for slices.

A local authenticated socket carries JSON, so that fork, spawn and forkserver all work and no worker ever
touches grpc. Neither end knows what a record is.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from multiprocessing.util import Finalize
from typing import Any, Protocol

from edl_torch import errors
from edl_torch.core.calls import Grant
from edl_torch.core.codec import from_row
from edl_torch.core.plan import Plan
from edl_torch.errors import EdlError, ServiceClosed
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.deliveries import Deliveries
from edl_torch.trainer.plain import OWN_STREAM
from edl_torch.trainer.supply import Mode


class Link(Protocol):
    """What a dataset asks of its trainer while it iterates."""

    def begin(self, mode: Mode, deliveries: Deliveries | None = None) -> Plan:
        """A stream of records begins; returns the dataset's plan. `deliveries`: what of it reaches the loop,
        where that is seen in the trainer's own process."""

    def next(self) -> Grant | None:
        """The next lease to read; None when there is nothing more to fetch now."""

    def fail(self, task: int, position: int, reason: str) -> None:
        """The record at `position` cannot be read: quarantine it."""


class Host(Protocol):
    """What the trainer's side of the links asks of its session."""

    def begin_stream(
        self,
        stream: str,
        mode: Mode,
        run: str = "",
        begun: int = 0,
        deliveries: Deliveries | None = None,
    ) -> tuple[int, Plan]:
        """A worker begins to iterate; returns the pass's number and the dataset. `run` and `begun` are those
        of `SocketLink`."""

    def stream_broke(self, stream: str, run: str, ended_by: str) -> None:
        """A worker ended by an error, or hung up without a word: then `ended_by` is empty."""

    def next_grant(self, stream: str, number: int) -> Grant | None:
        """A worker asks for its next lease."""

    def fail_record(self, task: int, position: int, reason: str) -> None:
        """A worker could not read a record."""


class DirectLink:
    """The link of a dataset that is read in the trainer's own process."""

    def __init__(self, host: Host, stream: str = OWN_STREAM) -> None:
        self._host = host
        self._stream = stream
        self._pass = 0

    def begin(self, mode: Mode, deliveries: Deliveries | None = None) -> Plan:
        self._pass, plan = self._host.begin_stream(self._stream, mode, deliveries=deliveries)
        return plan

    def next(self) -> Grant | None:
        return self._host.next_grant(self._stream, self._pass)

    def fail(self, task: int, position: int, reason: str) -> None:
        self._host.fail_record(task, position, reason)


class SocketLink:
    """The link of a loader worker. One connection per process, made at first use.

    `run` is the same in all workers of one DataLoader iterator, and empty in a process that is none of them.
    Workers that persist begin once for each iteration, which is counted.
    """

    def __init__(self, handle: Handle, stream: str, run: str = "") -> None:
        self._handle = handle
        self._stream = stream
        self._run = run
        self._begun = 0
        self._pass = 0
        self._connection = handle.connect()
        # Run when the process ends in good order, or nobody uses the link any more; not when it is killed.
        Finalize(self, _say_goodbye, args=(self._connection,), exitpriority=1)

    def begin(self, mode: Mode, deliveries: Deliveries | None = None) -> Plan:
        self._begun += bool(self._run)
        answer = self._ask(op="begin", stream=self._stream, mode=mode.value, run=self._run, begun=self._begun)
        self._pass = answer["pass"]
        return Plan(from_row(DatasetSpec, answer["spec"]))

    def next(self) -> Grant | None:
        row = self._ask(op="next", stream=self._stream, number=self._pass)
        return None if row is None else from_row(Grant, row)

    def fail(self, task: int, position: int, reason: str) -> None:
        self._ask(op="fail", task=task, position=position, reason=reason)

    def _ask(self, **question: Any) -> Any:
        try:
            self._connection.send_bytes(json.dumps(question).encode())
            reply = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as exc:
            raise ServiceClosed(
                "the trainer closed its DataShardService while a loader worker was reading"
            ) from exc
        if "error" in reply:
            raise getattr(errors, reply["error"], EdlError)(reply["message"])
        return reply["answer"]


def _say_goodbye(connection: Connection[Any, Any]) -> None:
    # multiprocessing calls this also while an error ends the process, as `sys.exit()` in a transform does:
    # torch lets all pass that are no Exception, but for Ctrl-C.
    error = sys.exc_info()[1]
    ended_by = "" if error is None or isinstance(error, Exception) else repr(error)
    with suppress(OSError):  # the trainer hung up first
        connection.send_bytes(json.dumps({"op": "goodbye", "ended_by": ended_by}).encode())
        connection.close()


@dataclass(frozen=True, slots=True)
class Handle:
    """Where a trainer's link server listens. Picklable; the key stays inside the trainer and its workers."""

    address: str | tuple[str, int]
    key: bytes

    def __repr__(self) -> str:
        return f"<Handle {self.address}>"

    def connect(self) -> Connection[Any, Any]:
        """Open a connection. Raises ServiceClosed when nobody listens any more."""
        try:
            return Client(self.address, authkey=self.key)
        except (OSError, EOFError, AuthenticationError) as exc:
            raise ServiceClosed(
                "a loader worker cannot reach its trainer's DataShardService: it was closed, or that ended"
            ) from exc
