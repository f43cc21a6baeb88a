"""How what reads asks its trainer for leases: in its own process, or from a loader worker over a link.

For workers there is a picklable address, a link, and who answers. A local authenticated socket carries JSON,
so that fork, spawn and forkserver all work and no worker ever touches grpc. Neither end knows what a record
is, nor decides anything: the host does.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar

from edl_torch import errors
from edl_torch.core.calls import Grant
from edl_torch.core.codec import from_row, row_of
from edl_torch.core.plan import Plan
from edl_torch.errors import EdlError, InvalidArgument, ServiceClosed
from edl_torch.shard import DatasetSpec, MixtureSegment
from edl_torch.trainer.counting import Deliveries
from edl_torch.trainer.foreign_loop import OWN_STREAM, Reading
from edl_torch.trainer.inflight import Mode
from edl_torch.trainer.trainer import Trainer
from edl_torch.trainer.vocabulary import Procedure

T = TypeVar("T")


class PlainIterations:
    """Iterations over plain DataLoaders, numbered in the order in which this process began them: here none.

    A session asks what it cannot see itself. A run names one of them, as its workers do.
    """

    newest = 0  # the number of the one that began last

    def number(self, run: str) -> int:
        """The number of an iteration; 0 where another process began it."""
        return 0

    def is_over(self, run: str) -> bool:
        """Whether this process has given the iteration up, or come to its end."""
        return False

    def deliveries(self, run: str) -> Deliveries | None:
        """What the iteration delivers; None where it cannot be seen."""
        return None

    def check(self, run: str) -> None:
        """Raise ForeignLoop for an iteration of a framework that does not go through it in order."""

    def worker_died(self, run: str) -> None:
        """A worker of the iteration was killed."""


class KeepsWorkers(Protocol):
    """A loader as its session sees it."""

    def end_workers(self) -> None:
        """End the processes that read for it."""


class RunProcedure(Protocol):
    """Runs a procedure of the trainer. Returns, or raises, what it does."""

    def __call__(self, procedure: Procedure[T]) -> T: ...


class Host:
    """What reading processes ask of their trainer, in its own process or over links.

    `run` runs the trainer's procedures, `end_abandoned` ends a pass whose iterator was garbage-collected, and
    `is_over` says whether such a one is still to be ended, or the session is closed.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunProcedure,
        end_abandoned: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._end_abandoned = end_abandoned
        self._is_over = is_over
        self._iterations = PlainIterations()
        self._links: LinkServer | None = None

    def listen(self) -> Handle:
        """Return the address at which loader workers reach this trainer; starts to listen for them."""
        if self._links is None:
            self._links = LinkServer(self)
        return self._links.handle

    def watch(self, iterations: PlainIterations) -> None:
        """Ask `iterations` what iterations over plain DataLoaders deliver, and which are over."""
        self._iterations = iterations

    def begin_stream(
        self,
        stream: str,
        mode: Mode,
        run: str = "",
        begun: int = 0,
        deliveries: Deliveries | None = None,
    ) -> tuple[int, Plan]:
        """Begin a stream of a process that reads. Returns the number of its pass, and the dataset. `run` and
        `begun` are those of `SocketLink`."""
        if mode is Mode.ELASTIC:
            return self._run(self._trainer.begin_stream())
        self._end_abandoned()
        known = self._iterations
        known.check(run)
        reading = Reading(
            stream=stream,
            run=run,
            begun=begun,
            number=known.number(run),
            newest=known.newest,
            is_over=bool(run) and known.is_over(run),
            deliveries=known.deliveries(run) if run else deliveries,
        )
        return self._run(self._trainer.begin_plain(reading))

    def next_grant(self, stream: str, number: int) -> Grant | None:
        return self._run(self._trainer.leasing.next(stream, number))

    def fail_record(self, task: int, position: int, reason: str) -> None:
        self._run(self._trainer.fail_record(task, position, reason))

    def data_changed(self, said: str) -> None:
        """Note what of its copy of the data a reading process finds changed."""
        self._run(self._trainer.data_changed(said))

    def stream_broke(self, stream: str, run: str, ended_by: str) -> None:
        """Note that a reading process ended by an error, or hung up without a word: then `ended_by` is empty.
        It died if its pass is open."""
        try:
            if not self._is_over():  # else torch has ended its workers
                self._run(self._trainer.stream_broke(stream, ended_by))
        finally:
            self._iterations.worker_died(run)

    def close(self) -> None:
        """Listen no more."""
        if self._links is not None:
            self._links.close()


class DirectLink:
    """The link of a dataset that is read in the trainer's own process."""

    def __init__(self, host: Host, stream: str = OWN_STREAM) -> None:
        self._host = host
        self._stream = stream
        self._pass = 0

    def begin(self, mode: Mode, deliveries: Deliveries | None = None) -> Plan:
        """A stream of records begins; returns the dataset's plan. `deliveries`: what of it reaches the loop,
        where that is seen in the trainer's own process."""
        self._pass, plan = self._host.begin_stream(self._stream, mode, deliveries=deliveries)
        return plan

    def next(self) -> Grant | None:
        """The next lease to read; None when there is nothing more to fetch now."""
        return self._host.next_grant(self._stream, self._pass)

    def fail(self, task: int, position: int, reason: str) -> None:
        """The record at `position` cannot be read: quarantine it."""
        self._host.fail_record(task, position, reason)


class SocketLink:
    """The link of a loader worker: asks as `DirectLink` does. One connection per process, made at first use.

    `run` is the same in all workers of one DataLoader iterator, and empty in a process that is none of them.
    Workers that persist begin once for each iteration, which is counted.
    """

    def __init__(self, handle: Handle, stream: str, run: str = "") -> None:
        self._handle = handle
        self._stream = stream
        self._run = run
        self._begun = 0
        self._pass = 0
        self._plan: Plan | None = None
        self._connection = handle.connect()
        # Run when the process ends in good order, or nobody uses the link any more; not when it is killed.
        self.say_goodbye = Finalize(self, _say_goodbye, args=(self._connection,), exitpriority=1)

    def begin(self, mode: Mode, deliveries: Deliveries | None = None) -> Plan:
        self._begun += bool(self._run)
        answer = self._ask(op="begin", stream=self._stream, mode=mode.value, run=self._run, begun=self._begun)
        self._pass = answer["pass"]
        self._plan = Plan(from_row(DatasetSpec, answer["spec"]))
        return self._plan

    def next(self) -> Grant | None:
        known = 0 if self._plan is None else self._plan.newest_segment
        answer = self._ask(op="next", stream=self._stream, number=self._pass, segment=known)
        if self._plan is not None and "segments" in answer:
            self._plan.learn(from_row(MixtureSegment, row) for row in answer["segments"])
        return None if answer["grant"] is None else from_row(Grant, answer["grant"])

    def fail(self, task: int, position: int, reason: str) -> None:
        self._ask(op="fail", task=task, position=position, reason=reason)

    def tell_changed(self, said: str) -> None:
        """Tell the trainer what of this process's copy of the data was changed in a pass before."""
        self._ask(op="changed", said=said)

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


Link = DirectLink | SocketLink  # what a dataset asks its trainer by while it iterates


def _say_goodbye(connection: Connection[Any, Any]) -> None:
    # An error may be ending the process, as `sys.exit()` in a transform does: torch lets all pass that are no
    # Exception, but for Ctrl-C.
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


log = logging.getLogger("edl_torch.client")

# The trainer's end ------------------------------------------------------------------------------------

ACCEPT_PAUSE_S = 0.05
JOIN_S = 1.0


def _listener() -> Listener:
    """Listen at a socket in TMPDIR. Raises InvalidArgument where its path is too long."""
    try:
        return Listener(backlog=64)
    except OSError as exc:
        if "too long" not in str(exc):
            raise
        raise InvalidArgument(
            f"TMPDIR is '{tempfile.gettempdir()}', too long for the sockets that loader workers "
            "need: set TMPDIR to a folder with a shorter path, as /tmp"
        ) from exc


def _started(thread: threading.Thread) -> bool:
    """Start a thread. False where the interpreter ends: from Python 3.12 on none begins any more."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


KNOCK_S = 30.0  # for a caller to show the key; a loader worker on a machine that swaps may be slow
MOST_KNOCKING = 128  # callers without a key so far, each with a thread of its own


class LinkServer:
    """Serves the links of one trainer's loader workers; one thread per connection.

    A caller that does not show the key within `knock_s` is hung up on, and at once where `most_knocking`
    came after it: none can keep another one out.
    """

    def __init__(self, host: Host, *, knock_s: float = KNOCK_S, most_knocking: int = MOST_KNOCKING) -> None:
        self._host = host
        self._knock_s = knock_s
        self._most_knocking = most_knocking
        self._key = secrets.token_bytes(32)
        self._listener = _listener()
        self._address = self._listener.address
        self._connections: dict[Connection[Any, Any], threading.Thread] = {}
        self._knocking: list[Connection[Any, Any]] = []  # of those, the ones without a key so far, in order
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._plan: Plan | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._accept, name="edl-links", daemon=True)
        self._thread.start()
        _servers.add(self)

    @property
    def handle(self) -> Handle:
        """What loader workers need to connect."""
        return Handle(self._address, self._key)

    def let_go(self) -> None:
        """In a forked child: close its copies. A worker that kept its trainer's listener open would wait for
        ever to be let in, should the trainer be killed before it could answer."""
        listening = getattr(getattr(self._listener, "_listener", None), "_socket", None)
        for inherited in (listening, *self._connections):
            if inherited is not None:
                inherited.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                self._closing.wait(ACCEPT_PAUSE_S)  # gone already, no descriptor left, or the end
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="edl-link", daemon=True)
            with self._lock:
                if self._closing.is_set():  # it came while we hung up on the others
                    connection.close()
                    return
                self._connections[connection] = thread
                self._knocking.append(connection)
                if len(self._knocking) > self._most_knocking:
                    _hang_up(self._knocking.pop(0))
            if not _started(thread):
                with self._lock:
                    del self._connections[connection]
                    connection.close()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        stream = run = ended_by = ""
        try:
            if self._has_key(connection):
                while (question := json.loads(connection.recv_bytes()))["op"] != "goodbye":
                    stream, run = question.get("stream", stream), question.get("run", run)
                    connection.send_bytes(json.dumps(self._reply(question)).encode())
                ended_by = question["ended_by"]
            stream = stream if ended_by else ""
        except (EOFError, OSError):
            pass  # the worker ended
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                connection.close()  # under the lock: whoever hangs up on it must not hit another one's socket
            if stream and not self._closing.is_set():
                self._host.stream_broke(stream, run, ended_by)

    def _has_key(self, connection: Connection[Any, Any]) -> bool:
        """Whether the caller has the key, and is told in turn that we do."""
        too_late = threading.Timer(self._knock_s, self._give_up, (connection,))
        too_late.name, too_late.daemon = "edl-knock", True
        if not _started(too_late):
            return False
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except AuthenticationError:
            return False  # a stranger
        finally:
            too_late.cancel()
            with self._lock:
                known = connection in self._knocking
                if known:
                    self._knocking.remove(connection)
        return known

    def _give_up(self, connection: Connection[Any, Any]) -> None:
        with self._lock:
            if connection in self._knocking:
                self._knocking.remove(connection)
                _hang_up(connection)

    def _reply(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": self._answer(question)}
        except (EdlError, UserWarning) as exc:  # warnings may be errors
            return {"error": type(exc).__name__, "message": str(exc)}
        except Exception as exc:  # the top of a thread: the worker must not take it for the service's end
            log.exception("a loader worker's question could not be answered: %s", question["op"])
            return {"error": "EdlError", "message": f"the trainer failed: {type(exc).__name__}: {exc}"}

    def _answer(self, question: dict[str, Any]) -> Any:
        match question["op"]:
            case "begin":
                mode = Mode(question["mode"])
                number, plan = self._host.begin_stream(
                    question["stream"], mode, question["run"], question["begun"]
                )
                self._plan = plan  # the trainer's own, which learns
                return {"pass": number, "spec": row_of(plan.known_spec)}
            case "changed":
                return self._host.data_changed(question["said"])
            case "next":
                grant = self._host.next_grant(question["stream"], question["number"])
                answer: dict[str, Any] = {"grant": None if grant is None else row_of(grant)}
                if self._plan and (news := self._plan.segments_after(question["segment"])):
                    answer["segments"] = list(map(row_of, news))
                return answer
            case "fail":
                self._host.fail_record(question["task"], question["position"], question["reason"])
        return None

    def close(self) -> None:
        """Stop listening and hang up; workers that still read get ServiceClosed."""
        if self._pid != os.getpid():
            return  # a forked child must not tear down its parent's server
        self._closing.set()
        with self._lock:
            connections = dict(self._connections)
            for connection in connections:
                _hang_up(connection)
        _wake(self._address)
        for thread in (self._thread, *connections.values()):
            thread.join(JOIN_S)
        self._listener.close()


# Of the process, as fork handlers are: they can be registered once and never taken back.
_servers: weakref.WeakSet[LinkServer] = weakref.WeakSet()


def let_go_of_inherited_servers() -> None:
    """In a forked child: close its copies of what its trainer's link servers hold open."""
    for server in tuple(_servers):
        server.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=let_go_of_inherited_servers)


def _hang_up(connection: Connection[Any, Any]) -> None:
    """Make a blocked `recv_bytes` return; to close the descriptor under it would not."""
    with suppress(OSError):  # it has hung up already
        borrowed = socket.socket(fileno=os.dup(connection.fileno()))
        with borrowed:
            borrowed.shutdown(socket.SHUT_RDWR)


def _wake(address: str | tuple[str, int]) -> None:
    """Make a blocked `accept` return: a caller without a key, who does not wait to be asked for it."""
    with suppress(OSError):  # nobody listens any more
        Client(address).close()
