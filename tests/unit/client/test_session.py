"""How a session runs procedures, what it tells its trainer, and what its environment and progress say."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from statuses import dataset_status

from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.client.environment import (
    default_worker_id,
    master_address_from_env,
    master_timeout_from_env,
)
from edl_torch.client.service import Progress, default_master
from edl_torch.client.session import Session, _sessions
from edl_torch.client.workers.links import PlainIterations
from edl_torch.core.status import Histogram, Measures
from edl_torch.errors import EdlError, InvalidArgument, ServiceClosed
from edl_torch.testing import FakeMaster, wait_until
from edl_torch.trainer.foreign_loop import NO_PASS, OWN_STREAM
from edl_torch.trainer.inflight import Mode
from edl_torch.trainer.vocabulary import Procedure, SiblingSession, Wait


@pytest.fixture
def session() -> Iterator[Session]:
    with DataShardService(4, FakeMaster(grace_s=1.0), dataset_size=64, records_per_shard=8) as service:
        yield service.session


def begin(session: Session, stream: str, run: str = "", begun: int = 0) -> int:
    return session.readers.begin_stream(stream, Mode.PLAIN, run, begun)[0]


class Numbered(PlainIterations):
    """Iterations of this process: run "i7" is number 7. The tenth is over."""

    newest = 9

    def number(self, run: str) -> int:
        return int(run[1:]) if run.startswith("i") else 0

    def is_over(self, run: str) -> bool:
        return run == "i10"


def test_the_trainer_hears_which_iterations_of_plain_loaders_are_older_or_over(session: Session) -> None:
    session.readers.watch(Numbered())
    own = begin(session, OWN_STREAM)
    assert begin(session, "worker 0", "i9", 1) == NO_PASS
    assert begin(session, "worker 0", "i10", 1) == NO_PASS
    assert begin(session, "worker 0", "i11", 1) > own


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


def test_who_waits_for_a_decision_hears_that_one_was_broken_off(session: Session) -> None:
    waits, heard = threading.Event(), list[str]()

    def never() -> bool:
        waits.set()
        return False

    def wait() -> Procedure[None]:
        yield Wait(never)

    def terminated() -> None:
        raise SystemExit

    def waiting() -> None:
        try:
            session.run(wait())
        except ServiceClosed as exc:
            heard.append(str(exc))

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    assert waits.wait(30)
    with pytest.raises(SystemExit):
        session.do(terminated)
    with pytest.raises(ServiceClosed):
        session.flush()
    thread.join(30)
    assert "was cut off" in "".join(heard)


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


# Which other sessions of the process may hold what one waits for --------------------------------------------


def loader(fake: FakeMaster, name: str = "training") -> ElasticDataLoader:
    client = fake.connect()
    return ElasticDataLoader(range(12), 2, records_per_shard=4, dataset_name=name, master_client=client)


def seen_by(one: ElasticDataLoader) -> tuple[SiblingSession, ...]:
    return one.service.session.siblings()


def test_a_neighbour_has_the_records_that_its_loop_has_begun_to_read() -> None:
    fake = FakeMaster()
    with loader(fake) as one, loader(fake) as two:
        assert len(one) == len(two) == 6  # both take part
        assert seen_by(one) == ()
        batches = iter(two)
        next(batches)
        ((sibling),) = seen_by(one)
        assert sibling.session == two.service.session.id
        assert (sibling.records, sibling.same_thread) == (two.service.record_count, True)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(next, batches).result()
        assert [(found.records, found.same_thread) for found in seen_by(one)] == [
            (two.service.record_count, False)
        ]
        assert seen_by(two) == ()


def test_a_loop_that_was_left_and_a_service_that_is_closed_hold_nothing() -> None:
    fake = FakeMaster()
    with loader(fake) as one, loader(fake) as left, loader(fake) as closed:
        assert len(one) == 6
        for _ in left:
            break
        batches = iter(closed)
        next(batches)
        closed.service.close()
        assert seen_by(one) == ()


def test_who_reads_other_data_or_of_another_master_is_no_neighbour() -> None:
    fake = FakeMaster()
    with (
        loader(fake) as one,
        loader(fake, "validation") as other,
        ElasticDataLoader(range(12), 2) as elsewhere,
    ):
        assert len(one) == 6
        batches = iter(other), iter(elsewhere)
        for iterator in batches:
            next(iterator)
        assert len(seen_by(one)) == 0


def test_sessions_that_are_gone_are_forgotten() -> None:
    made = loader(FakeMaster())
    session = made.service.session
    noted = weakref.ref(session, _sessions._references.discard)
    assert noted in _sessions._references
    alive = [reference for reference in _sessions._references if reference() is session]
    made.close()
    del made, session
    gc.collect()
    assert noted() is None
    assert not _sessions._references & set(alive)


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_service_whose_reports_are_refused_closes_all_the_same(
    own_threads: Callable[[], list[threading.Thread]], in_process: bool
) -> None:
    fake = FakeMaster()
    service = DataShardService(4, fake.connect(in_process=in_process), dataset_size=64, records_per_shard=4)
    assert service.fetch_shard() is not None
    fake.go_back("training", None)  # by another trainer
    with suppress(EdlError):
        service.report_batch_done()
    service.close()
    wait_until(lambda: not own_threads())


# How far a dataset is, and what its trainer has measured, for people and loggers ----------------------------


STATUS = dataset_status("d", size=500, shards=10, trainers=3)
MEASURES = Measures(batches=5, waited=Histogram(sum_s=1.0), stepped=Histogram(sum_s=3.0))


def test_progress_counts_all_outcomes_of_all_epochs() -> None:
    status = replace(STATUS, acknowledged=200, quarantined=30, dropped=20, rate=50.0)
    progress = Progress.of(status, MEASURES)
    assert (progress.n, progress.total, progress.percent) == (250, 1000, 25.0)
    assert (progress.rate, progress.eta_s) == (50.0, 15.0)
    assert progress.waiting_share == 0.25
    assert progress.acknowledged == 200


def test_printed_it_says_how_far_the_job_is() -> None:
    progress = Progress.of(replace(STATUS, acknowledged=240, quarantined=10, rate=50.0), MEASURES)
    assert str(progress) == (
        "<Progress 'd' epoch=0 records=250/1000 quarantined=10 percent=25.0 rate=50.0/s trainers=3>"
    )


def test_endless_epochs_have_no_end() -> None:
    progress = Progress.of(replace(STATUS, num_epochs=0, acknowledged=5, rate=5.0), Measures())
    assert (progress.n, progress.total, progress.eta_s) == (5, None, None)
    assert "records=5/endless" in str(progress)


def test_a_dict_for_loggers_has_numbers_alone_and_no_unknown_ones() -> None:
    still = Progress.of(replace(STATUS, acknowledged=200), MEASURES).as_dict()
    moving = Progress.of(replace(STATUS, acknowledged=200, rate=20.0), MEASURES).as_dict()
    assert moving.keys() - still.keys() == {"data/eta_s"}
    assert moving["data/percent"] == 20.0
    assert moving["data/waiting_share"] == 0.25
    timed = Progress.of(STATUS, replace(MEASURES, timed=2, read_s=3.0, transform_s=1.0)).as_dict()
    assert (timed["data/mean_read_s"], timed["data/mean_transform_s"]) == (1.5, 0.5)
    assert all(type(value) is float for value in moving.values())


# Which master the environment names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": ""}, None),
        ({"EDL_MASTER_ADDR": "m:1"}, "m:1"),
        ({"EDL_MASTER_ADDR": " "}, None),
        ({"EDL_MASTER_ADDR": "m:1", "MASTER_ADDR": "other:2", "WORLD_SIZE": "4"}, "m:1"),
        ({"MASTER_ADDR": "m:1", "WORLD_SIZE": "4"}, "m:1"),
        ({"MASTER_ADDR": "node-0"}, None),
        ({"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}, None),
    ],
)
def test_address(environ, address):
    assert master_address_from_env(environ) == address


TORCHRUN = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "remedy"),
    [
        ({"WORLD_SIZE": "2"}, r"edl-torch master.*EDL_MASTER_ADDR"),
        ({"WORLD_SIZE": "2"} | TORCHRUN, r"edl-torch master.*EDL_MASTER_ADDR"),
        *(({"EDL_MASTER_ADDR": address}, "EDL_MASTER_ADDR") for address in ("m", "m:", "m:0", "m:x", "::1")),
        ({"WORLD_SIZE": "two"}, "'two'"),
    ],
)
def test_an_environment_that_names_no_master_is_told_what_to_do(environ, remedy):
    with pytest.raises(InvalidArgument, match=remedy):
        master_address_from_env(environ)


def test_worker_id():
    assert default_worker_id({"EDL_TRAINER": " left ", "WORKER_ID": "w7"}) == "left"
    assert default_worker_id({"EDL_TRAINER": "", "WORKER_ID": "w7", "RANK": "3"}) == "w7"
    host, rank, process = default_worker_id({"RANK": "3"}).rsplit("-", 2)
    assert host
    assert rank == "3"
    assert process.isdigit()
    assert default_worker_id({}).rsplit("-", 2)[1] == "0"


def test_a_master_in_the_process_knows_the_trainer_by_its_name(monkeypatch):
    for name in ("EDL_MASTER_ADDR", "WORKER_ID", "EDL_TRAINER"):
        monkeypatch.delenv(name, raising=False)
    assert default_master().worker_id == "local"
    monkeypatch.setenv("EDL_TRAINER", "left")
    assert default_master().worker_id == "left"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 600),
        ({"TORCHELASTIC_RUN_ID": "run"}, 30),
        ({"EDL_MASTER_TIMEOUT_S": " 2.5 "}, 2.5),
        ({"EDL_MASTER_TIMEOUT_S": "0"}, 0),
        ({"TORCHELASTIC_RUN_ID": "run", "EDL_MASTER_ADDR": "m:1"}, 600),
    ],
)
def test_how_long_a_master_may_be_away(environ, seconds):
    assert master_timeout_from_env(environ) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgument, match="EDL_MASTER_TIMEOUT_S is"):
        master_timeout_from_env({"EDL_MASTER_TIMEOUT_S": text})
