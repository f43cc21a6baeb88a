"""The link between a trainer and its loader workers: whoever has the handle, and nobody else."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from edl_torch.client.workers.links import DirectLink, Handle, LinkServer, SocketLink
from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.errors import BadRecord, EdlError, MasterUnavailable, ServiceClosed
from edl_torch.shard import DatasetSpec, Slice, Source, TaskType
from edl_torch.testing import wait_until
from edl_torch.trainer.counting import Deliveries
from edl_torch.trainer.inflight import Mode

SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="é", start=3, count=40), Source(name="b", count=1)),
    records_per_shard=8,
    seed=5,
    shuffle_shards=True,
    task_type=TaskType.EVALUATION,
)
GRANT = Grant(task=7, attempt=2, slice=Slice(epoch=1, shard=2, skip=3, limit=4), bundle=5)

OwnThreads = Callable[[], list[threading.Thread]]


class Trainer:
    """Answers links as a session does, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.grants: list[Grant | None] = [GRANT, None]
        self.error: Exception | None = None
        self.broken: list[tuple[str, str]] = []
        self.waiting = threading.Event()
        self.release = threading.Event()

    def begin_stream(
        self,
        stream: str,
        mode: Mode,
        run: str = "",
        begun: int = 0,
        deliveries: Deliveries | None = None,
    ) -> tuple[int, Plan]:
        self.asked.append(("begin", stream, mode, run, begun))
        return 9, Plan(SPEC)

    def next_grant(self, stream: str, number: int) -> Grant | None:
        self.asked.append(("next", stream, number))
        if self.error is not None:
            raise self.error
        return self.grants.pop(0)

    def fail_record(self, task: int, position: int, reason: str) -> None:
        self.asked.append(("fail", task, position, reason))

    def stream_broke(self, stream: str, run: str, ended_by: str) -> None:
        self.broken.append((stream, ended_by))


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def server(trainer: Trainer) -> Iterator[LinkServer]:
    server = LinkServer(trainer)
    yield server
    server.close()


@pytest.fixture(params=["direct", "socket"])
def link(request: pytest.FixtureRequest, trainer: Trainer, server: LinkServer) -> Any:
    if request.param == "direct":
        return DirectLink(trainer, "worker 1")
    return SocketLink(pickle.loads(pickle.dumps(server.handle)), "worker 1")


def test_plans_leases_and_failures_cross_the_link_unchanged(link: Any, trainer: Trainer) -> None:
    assert link.begin(Mode.ELASTIC).spec == SPEC
    assert link.next() == GRANT
    assert link.next() is None
    link.fail(7, 4, "törn")
    assert [asked[:3] for asked in trainer.asked] == [
        ("begin", "worker 1", Mode.ELASTIC),
        ("next", "worker 1", 9),
        ("next", "worker 1", 9),
        ("fail", 7, 4),
    ]


def test_a_persistent_worker_names_each_of_its_iterations(server: LinkServer, trainer: Trainer) -> None:
    link = SocketLink(server.handle, "worker 0", "42")
    link.begin(Mode.PLAIN)
    link.begin(Mode.PLAIN)
    other = SocketLink(server.handle, "process 1")
    other.begin(Mode.PLAIN)
    assert [asked[3:] for asked in trainer.asked] == [("42", 1), ("42", 2), ("", 0)]


@pytest.mark.parametrize("error", [MasterUnavailable("away"), BadRecord("torn"), UserWarning("forgot")])
def test_errors_of_the_trainer_are_raised_in_the_worker(
    error: Exception, server: LinkServer, trainer: Trainer
) -> None:
    link = SocketLink(server.handle, "worker 0")
    link.begin(Mode.PLAIN)
    trainer.error = error
    with pytest.raises(Exception, match=str(error)) as raised:
        link.next()
    if not isinstance(error, UserWarning):
        assert type(raised.value) is type(error)
    trainer.error = None
    assert link.next() == GRANT  # the link stands


def test_a_failure_of_the_trainer_is_not_taken_for_its_end(
    server: LinkServer, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    link = SocketLink(server.handle, "worker 0")
    link.begin(Mode.PLAIN)
    trainer.error = KeyError("bug")
    with pytest.raises(EdlError, match="the trainer failed: KeyError: 'bug'"):
        link.next()
    assert any(record.exc_info for record in caplog.records)
    trainer.error = None
    assert link.next() == GRANT


def test_a_stranger_without_the_key_is_refused_and_disturbs_nobody(server: LinkServer) -> None:
    with pytest.raises(ServiceClosed):
        Handle(server.handle.address, b"guess").connect()
    assert SocketLink(server.handle, "worker 0").begin(Mode.PLAIN).spec == SPEC


def test_the_key_is_not_shown(server: LinkServer) -> None:
    assert repr(server.handle.key) not in repr(server.handle)


def test_a_worker_that_just_vanishes_is_noticed(server: LinkServer, trainer: Trainer) -> None:
    link = SocketLink(server.handle, "worker 3")
    link.begin(Mode.PLAIN)
    link._connection.close()  # as the kernel does when a process is killed
    wait_until(lambda: trainer.broken == [("worker 3", "")])


@pytest.mark.parametrize(
    ("error", "told"), [(None, []), (SystemExit(3), ["SystemExit(3)"]), (ValueError(), [])], ids=repr
)
def test_a_worker_that_ends_says_goodbye_and_which_error_ends_it(
    error: BaseException | None, told: list[str], server: LinkServer, trainer: Trainer
) -> None:
    """One that is handled has broken nothing."""
    link = SocketLink(server.handle, "worker 3")
    link.begin(Mode.PLAIN)
    with suppress(SystemExit, ValueError):
        try:
            if error is not None:
                raise error
        finally:
            del link  # as multiprocessing cleans up
    wait_until(lambda: not server._connections)
    wait_until(lambda: [ended_by for _, ended_by in trainer.broken] == told)


def test_after_close_workers_are_told_so_and_no_thread_is_left(
    own_threads: OwnThreads, server: LinkServer
) -> None:
    links = [SocketLink(server.handle, f"worker {n}") for n in range(3)]
    for link in links:
        link.begin(Mode.PLAIN)
    server.close()
    for link in links:
        with pytest.raises(ServiceClosed, match="closed its DataShardService"):
            link.next()
    with pytest.raises(ServiceClosed, match="cannot reach its trainer"):
        SocketLink(server.handle, "worker 9")
    wait_until(lambda: not own_threads())
    server.close()


ORPHAN = """
import os, select, signal, sys
from edl_torch.client.workers.links import LinkServer
from edl_torch.errors import ServiceClosed
LinkServer._accept = lambda self: None  # a trainer that never comes to answer
server = LinkServer(object())
if os.fork() == 0:
    try:
        server.handle.connect()
    except ServiceClosed:
        with open(sys.argv[1], "w") as out:
            out.write("let go")
    os._exit(0)
select.select([server._listener._listener._socket], [], [], 30)  # the worker stands at the door
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_whose_trainer_is_killed_before_it_answers_does_not_wait_for_ever(tmp_path: Path) -> None:
    out = tmp_path / "out"
    root = Path(__file__).parents[3]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORPHAN, str(out)], cwd=root, timeout=60, check=False
    )
    wait_until(lambda: out.exists() and out.read_text() == "let go")


# Callers that say nothing -----------------------------------------------------------------------------------


def knock(server: LinkServer) -> Any:
    """Somebody connects, and says nothing."""
    return Client(server.handle.address)


def test_a_caller_that_does_not_show_the_key_in_time_is_hung_up_on(trainer: Trainer) -> None:
    server = LinkServer(trainer)
    link = SocketLink(server.handle, "worker 0")  # it has all the time that a busy machine takes for its key
    server._knock_s = 0.05
    silent, slow = knock(server), knock(server)
    os.write(slow.fileno(), b"\0\0")  # half the length of an answer, and no more
    for caller in (silent, slow):
        caller.recv_bytes()  # the challenge
        with pytest.raises((EOFError, ConnectionError)):
            caller.recv_bytes()
    assert link.begin(Mode.PLAIN).spec == SPEC
    wait_until(lambda: len(server._connections) == 1)
    assert trainer.broken == []
    server.close()


def test_silent_callers_have_a_bounded_number_of_threads(own_threads: OwnThreads, trainer: Trainer) -> None:
    server = LinkServer(trainer, most_knocking=3)
    silent = [knock(server) for _ in range(10)]
    wait_until(lambda: len(server._connections) == 3)
    assert SocketLink(server.handle, "worker 0").begin(Mode.PLAIN).spec == SPEC
    for caller in silent:
        caller.close()
    server.close()
    wait_until(lambda: not own_threads())


@pytest.mark.parametrize("name", ["edl-link", "edl-knock"])
def test_a_caller_that_comes_as_the_interpreter_ends_is_hung_up_on(
    trainer: Trainer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 begins no thread then; an error in ours would be printed at the end of the program."""
    start = threading.Thread.start

    def start_none(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    server = LinkServer(trainer)
    monkeypatch.setattr(threading.Thread, "start", start_none)
    with pytest.raises(ServiceClosed, match="cannot reach its trainer"):
        SocketLink(server.handle, "worker 0")
    monkeypatch.undo()
    assert SocketLink(server.handle, "worker 0").begin(Mode.PLAIN).spec == SPEC
    server.close()


def test_a_folder_for_sockets_whose_path_is_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: multiprocessing keeps the folder that it has once made."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    program = "from edl_torch.client.workers.links import LinkServer; LinkServer(object())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"TMPDIR is '{folder}', too long for the sockets" in done.stderr
