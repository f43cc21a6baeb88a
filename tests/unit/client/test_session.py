"""How a session runs procedures, and what it tells its trainer of iterations over plain DataLoaders."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from edl_torch import DataShardService
from edl_torch.client.session import Session
from edl_torch.client.workers.links import PlainIterations
from edl_torch.errors import ServiceClosed
from edl_torch.testing import FakeMaster
from edl_torch.trainer.foreign_loop import NO_PASS, OWN_STREAM
from edl_torch.trainer.inflight import Mode
from edl_torch.trainer.vocabulary import Procedure, Wait


@pytest.fixture
def session() -> Iterator[Session]:
    with DataShardService(4, FakeMaster(grace_s=1.0), dataset_size=64, records_per_shard=8) as service:
        yield service.session


def begin(session: Session, stream: str, run: str = "", begun: int = 0) -> int:
    return session.readers.begin_stream(stream, Mode.PLAIN, run, begun)[0]


class Numbered(PlainIterations):
    """Iterations of this process: run "i7" is number 7."""

    newest = 9
    over: frozenset[str] = frozenset()

    def number(self, run: str) -> int:
        return int(run[1:]) if run.startswith("i") else 0

    def is_over(self, run: str) -> bool:
        return run in self.over


def test_workers_of_an_older_iteration_get_nothing_though_none_of_them_began_before(session: Session) -> None:
    session.readers.watch(Numbered())
    number = begin(session, "worker 0", "i7", 1)
    assert begin(session, "worker 0", "i6", 1) == NO_PASS
    assert begin(session, "worker 1", "i7", 1) == number
    assert begin(session, "worker 0", "i6", 2) > number  # persistent ones begin again
    own = begin(session, OWN_STREAM)
    assert begin(session, "worker 0", "i9", 1) == NO_PASS
    assert begin(session, "worker 0", "i10", 1) > own


def test_workers_of_an_iteration_that_is_gone_get_nothing(session: Session) -> None:
    iterations = Numbered()
    session.readers.watch(iterations)
    iterations.over = frozenset({"i7"})
    assert begin(session, "worker 0", "i7", 1) == NO_PASS


class GenerousLock:
    """A lock whose holder, each time it lets go, leaves others the time to take it."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        self._lock.release()
        time.sleep(1e-3)

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *exc: object) -> None:
        self.release()


def test_what_a_procedure_waits_for_holds_when_it_goes_on(session: Session) -> None:
    """Two wait for the same, and what the first does with it is seen by the second."""
    session._lock = GenerousLock()  # type: ignore[assignment]  # like one
    session._changed = threading.Condition(session._lock)
    rounds, ready, missed = 20, [0], [0]

    def take() -> Procedure[None]:
        for _ in range(rounds):
            yield Wait(lambda: ready[0])
            missed[0] += not ready[0]
            ready[0] -= 1

    def give() -> Procedure[None]:
        for _ in range(2 * rounds):
            yield Wait(lambda: ready[0] <= 0)
            ready[0] += 1

    takers = [threading.Thread(target=session.run, args=(take(),), daemon=True) for _ in range(2)]
    for taker in takers:
        taker.start()
    session.run(give())
    for taker in takers:
        taker.join(30)
        assert not taker.is_alive()
    assert missed == [0]
    assert ready == [0]


def test_a_trainer_whose_decision_a_handler_broke_off_does_nothing_more() -> None:
    def terminated() -> None:
        raise SystemExit

    master = FakeMaster()
    with DataShardService(4, master, dataset_size=64, records_per_shard=8) as service:
        session = service.session
        number = begin(session, OWN_STREAM)
        assert session.readers.next_grant(OWN_STREAM, number) is not None
        with pytest.raises(SystemExit):
            session.do(terminated)
        for act in (service.state_dict, service.report_batch_done, service.progress):
            with pytest.raises(ServiceClosed, match="a decision about dataset 'training' was cut off"):
                act()
    assert master.dataset_status("training").leased == 0  # what it held, others get
    assert master.dataset_status("training").acknowledged == 0


def test_an_error_that_a_call_led_to_breaks_no_decision_off(session: Session) -> None:
    def asks() -> Procedure[None]:
        yield Wait(lambda: 1 / 0)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            session.run(asks())
    session.trainer.fail(OSError("of a thread beside the loop"))
    with pytest.raises(OSError, match="of a thread"):
        session.flush()
    assert not session.cut
