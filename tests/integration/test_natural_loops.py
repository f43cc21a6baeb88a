"""Loops that people write: they hear of each trap once, with the remedy, and nobody waits in silence."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch
import torch.distributed as dist
from loader_kit import NumberReader, all_records, elastic, flat, run_through, take, trainer
from torch.testing._internal.distributed.fake_pg import FakeStore

from edl_torch import DataShardService, LocalMaster, ShardedDataset
from edl_torch.client.grpc.calling import Caller
from edl_torch.core.calls import LeaseAnswer, LeaseCall, MasterStatus
from edl_torch.errors import InvalidArgument, Unsupported
from edl_torch.testing import FakeClock, FakeMaster
from edl_torch.testing.fake_master import FakeConnection

BOTH = pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@contextmanager
def no_warning() -> Iterator[None]:
    """Every warning is an error, those that other tests may give too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def one_warning(text: str) -> Iterator[None]:
    """Exactly one warning, which matches."""
    with pytest.warns(UserWarning, match=text) as found:
        yield
    assert [warning.category for warning in found] == [UserWarning]


# More passes than epochs ------------------------------------------------------------------------------------


@BOTH
def test_passes_after_the_last_epoch_warn_once(in_process: bool) -> None:
    with trainer(FakeMaster(), num_epochs=2, in_process=in_process) as (_, dataset):
        loader = elastic(dataset)
        seen: list[list[int]] = []
        with no_warning():
            for _ in range(2):
                run_through(loader, seen)
        assert len(flat(seen)) == 2 * len(all_records())
        with one_warning(r"2 epoch\(s\) of 'training' are over.*num_epochs=.*while not service\.finished"):
            for _ in range(3):
                assert list(loader) == []


def test_a_pass_that_finds_nothing_since_others_were_quicker_does_not_warn() -> None:
    fake = FakeMaster()
    with trainer(fake) as (_, quick), trainer(fake) as (service, slow):
        assert not service.finished
        list(elastic(quick))
        with no_warning():
            assert list(elastic(slow)) == []


def test_a_job_that_went_back_to_its_beginning_has_epochs_again() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset)
        list(loader)
        service.load_state_dict(None)
        with no_warning():
            assert len(flat(take(iter(loader), 100))) == len(all_records())


# Loops that are left ----------------------------------------------------------------------------------------

AGAIN = r"batch in hand of 'training'.*read again.*service\.attach\(optimizer\).*report_batch_done\(\) before"


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_left_with_a_batch_in_hand_warns_at_the_first_time(num_workers: int, in_process: bool) -> None:
    with trainer(FakeMaster(), in_process=in_process) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        with one_warning(AGAIN):
            for _ in range(2):
                for _ in loader:
                    break
                assert not service.finished


def test_islice_warns_with_the_call_that_ends_its_pass_and_not_before() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset)
        with no_warning():
            assert len(list(itertools.islice(loader, 2))) == 2
        with one_warning(AGAIN):
            service.state_dict()


def test_an_iterator_that_is_closed_or_superseded_with_a_batch_in_hand_warns() -> None:
    for leave in (lambda loader: loader.close(), iter):
        with trainer(FakeMaster()) as (_, dataset):
            loader = elastic(dataset)
            kept = iter(loader)
            take(kept, 1)
            with one_warning(AGAIN):
                leave(loader)


def test_a_loop_that_is_left_with_nothing_to_lose_does_not_warn() -> None:
    with no_warning(), trainer(FakeMaster(), num_epochs=9, max_bad_records=4) as (service, dataset):
        loader = elastic(dataset)
        list(loader)  # to the end of the pass
        for _ in loader:
            service.report_batch_done()
            break
        for _ in loader:
            service.state_dict()  # counts the batch in hand
            break
        for _ in loader:
            service.report_batch_done(err_msg="blurred")
            break
        sgd = optimizer()
        service.attach(sgd)
        for _ in loader:
            break
        assert not service.finished


def test_the_thread_in_which_another_trainer_asks_does_not_warn() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 4}) as (_, left), trainer(fake, {"a": 4}) as (_, other):
        with no_warning():
            for _ in elastic(left):
                break
            assert flat(take(iter(elastic(other)), 9)) == [0, 1, 2, 3]  # it got what the first has given back
        with one_warning(AGAIN):
            assert list(elastic(left)) == []


# Optimizers that do not step --------------------------------------------------------------------------------


@BOTH
def test_an_attached_optimizer_that_never_steps_warns_after_its_first_epoch(in_process: bool) -> None:
    with trainer(FakeMaster(), num_epochs=4, in_process=in_process) as (service, dataset):
        loader = elastic(dataset)
        sgd = optimizer()
        service.attach(sgd)
        with no_warning():
            assert len(flat(take(iter(loader), 100))) == len(all_records())
        with one_warning(r"SGD, attached for 'training', did not step.*no batch counts.*service\.detach"):
            for _ in range(3):
                assert len(flat(take(iter(loader), 100))) == len(all_records())


def test_an_optimizer_that_steps_late_or_has_nothing_to_step_on_does_not_warn() -> None:
    with no_warning(), trainer(FakeMaster(), num_epochs=3) as (service, dataset):
        loader = elastic(dataset)
        sgd = optimizer()
        service.attach(sgd)
        iter(loader).close()  # an empty pass
        for _ in range(3):
            list(loader)
            sgd.step()  # between the epochs
        assert service.finished


# Ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[Callable[[int], None]]:
    """Makes a process group of so many ranks, of which the others are not there."""

    def make(size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_ranks_of_a_process_group_must_choose(process_group: Callable[[int], None]) -> None:
    with trainer(FakeMaster()) as (service, dataset):
        undecided, alone = elastic(dataset), elastic(dataset, synchronous=False)
        process_group(2)  # after the loader was made, before the first pass
        with pytest.raises(InvalidArgument, match=r"2 ranks.*synchronous=True.*synchronous=False"):
            iter(undecided)
        assert not service.session.joined
        assert len(flat(take(iter(alone), 100))) == len(all_records())


def test_the_only_rank_need_not_choose(process_group: Callable[[int], None]) -> None:
    process_group(1)
    with trainer(FakeMaster()) as (_, dataset):
        assert len(flat(take(iter(elastic(dataset)), 100))) == len(all_records())


# Waiting ----------------------------------------------------------------------------------------------------


class Patient(FakeConnection):
    """A connection on which time passes while a lease call waits; `then` is called at each such wait."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        answer = super().lease(call, 0.0)
        if wait_s and answer.nothing_yet:
            self._fake.clock.advance(wait_s)
            self.then()
        return answer


@BOTH
def test_a_trainer_that_waits_for_records_of_others_says_whose(
    in_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 8}) as (_, other):
        held = iter(elastic(other))
        take(held, 2)  # the second batch is in hand
        client = Patient(fake, fake._local, "patient", in_process=in_process)
        began = fake.clock()
        said: list[float] = []

        def look() -> None:
            said.extend([fake.clock() - began] * (len(caplog.messages) - len(said)))
            if fake.clock() - began > 130:
                held.close()  # type: ignore[attr-defined]

        client.then = look
        with DataShardService(4, client, reader=NumberReader({"a": 8}), records_per_shard=6) as service:
            waiting = elastic(ShardedDataset(service, NumberReader({"a": 8})))
            assert flat(take(iter(waiting), 9)) == [4, 5, 6, 7]
    assert [round(at) for at in said] == [6, 66, 126]
    for message, seconds in zip(caplog.messages, (5, 65, 125), strict=True):
        assert message.startswith(f"dataset 'training': this trainer has waited {seconds} s for records")
        assert "'trainer'" in message
        assert f"4 record(s), last heard of {seconds} s ago" in message
        assert "until they are trained on or given back" in message
    assert {record.name for record in caplog.records} == {"edl_torch.client"}
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_trainer_that_waits_for_a_master_which_tells_nothing_says_so_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Reticent(Patient):
        def status(self) -> MasterStatus:
            held.close()  # type: ignore[attr-defined]
            raise Unsupported("no status")

    fake = FakeMaster()
    with trainer(fake, {"a": 8}) as (_, other):
        held = iter(elastic(other))
        take(held, 2)
        client = Reticent(fake, fake._local, "patient", in_process=True)
        with DataShardService(4, client, reader=NumberReader({"a": 8}), records_per_shard=6) as service:
            waiting = elastic(ShardedDataset(service, NumberReader({"a": 8})))
            assert flat(take(iter(waiting), 9)) == [4, 5, 6, 7]
    assert len(caplog.messages) == 1


def test_a_trainer_in_one_process_with_its_master_knows_the_time() -> None:
    with DataShardService(4, LocalMaster(), reader=NumberReader({"a": 8})) as service:
        assert service.size == 8
        assert service.session.trainer.state.now > 0


class Away(grpc.RpcError):
    """The call did not reach the master."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Unhurried(Caller):
    """Its pauses pass on a clock of its own."""

    def __init__(self, clock: FakeClock, master_timeout_s: float) -> None:
        super().__init__("m:1", master_timeout_s, clock=clock)
        self.pause = clock.advance  # type: ignore[method-assign]


def test_who_waits_for_a_master_that_is_away_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    began = clock()
    said: list[float] = []

    def rpc(request: str, *, timeout: float, wait_for_ready: bool) -> str:
        said.extend([clock() - began] * (len(caplog.messages) - len(said)))
        left_s = began + 100 - clock()
        if wait_for_ready:
            clock.advance(max(0.0, min(timeout, left_s)))
        if left_s <= timeout:
            return "answer"
        raise Away

    caller = Unhurried(clock, 600.0)
    assert caller.call(rpc, "request") == "answer"
    assert 5 <= said[0] < 7
    assert 65 <= said[1] < 80
    assert len(said) == len(caplog.messages) == 2
    assert "no answer from the master at m:1 for 5 s" in caplog.messages[0]
    assert "connection refused" in caplog.messages[0]
    assert "master_timeout_s" in caplog.messages[0]
    assert "up to 600 s" in caplog.messages[0]
    began = clock() - 88.0
    assert caller.call(rpc, "request") == "answer"
    assert len(caplog.messages) == 3  # another wait has its own
    assert {record.levelname for record in caplog.records} == {"WARNING"}
