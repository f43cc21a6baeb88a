"""Loops that people write: they hear of each trap once, with the remedy, and nobody waits in silence."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from grpc_errors import CallFailed
from loader_kit import NumberReader, all_records, elastic, flat, numbers, take, trainer
from lockstep_kit import Failed, Rank, run_ranks
from processes import Nowhere
from torch.testing._internal.distributed.fake_pg import FakeStore

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset
from edl_torch.audit.verdict import Outcome, Verdict, audit
from edl_torch.client.grpc.client import Caller
from edl_torch.core.calls import LeaseAnswer, Request, StatusCall
from edl_torch.errors import AccountingError, ConcurrentIteration, InvalidArgument, Unsupported
from edl_torch.testing import FakeClock, FakeMaster
from edl_torch.testing.fake_master import FakeConnection

A = TypeVar("A")

BOTH = pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])


def optimizer() -> torch.optim.Optimizer:
    """One with a gradient, as after a backward pass."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([parameter], lr=0.1)


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
    assert len([warning for warning in found if warning.category is UserWarning]) == 1


def told(caplog: pytest.LogCaptureFixture, about: str) -> list[logging.LogRecord]:
    """What was logged about it; other tests' trainers may still say that they wait for their masters."""
    return [record for record in caplog.records if about in record.getMessage()]


# More passes than epochs ------------------------------------------------------------------------------------


def test_a_pass_that_finds_nothing_since_others_were_quicker_does_not_warn() -> None:
    fake = FakeMaster()
    with trainer(fake) as (_, quick), trainer(fake) as (service, slow):
        assert not service.finished
        list(elastic(quick))
        with no_warning():
            assert list(elastic(slow)) == []


# Loops that are left ----------------------------------------------------------------------------------------

AGAIN = r"batch in hand of 'training'.*read again.*loader\.attach\(optimizer\).*loader\.stepped\(\) before"


def test_islice_warns_with_the_call_that_ends_its_pass_and_not_before() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        loader = elastic(dataset)
        with no_warning():
            assert len(list(itertools.islice(loader, 2))) == 2
        with one_warning(AGAIN):
            service.state_dict()


def test_the_thread_in_which_another_trainer_asks_does_not_warn() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 8}) as (_, left), trainer(fake, {"a": 8}) as (_, other):
        with no_warning():
            for number, _ in enumerate(elastic(left)):
                if number:
                    break
            assert flat(take(iter(elastic(other)), 9)) == [4, 5, 6, 7]  # it got what the first has given back
        with one_warning(AGAIN):
            assert list(elastic(left)) == []


def test_a_loop_whose_batch_others_took_hears_of_it_at_the_latest_when_its_service_is_closed() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 4}) as (service, left), trainer(fake, {"a": 4}) as (_, other):
        for _ in elastic(left):
            break
        assert flat(take(iter(elastic(other)), 9)) == [0, 1, 2, 3]
        with one_warning(AGAIN):
            service.close()


# Optimizers that do not step --------------------------------------------------------------------------------


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


def in_a_thread(loop: Callable[[], object]) -> None:
    """Run the loop of another trainer, which this one's thread does not hold up."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop).result()


WAITED = "this trainer has waited"


class Patient(FakeConnection):
    """A connection on which time passes while a lease call waits; `then` is called at each such wait."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        answer = super().call(request)
        if wait_s and isinstance(answer, LeaseAnswer) and answer.nothing_yet:
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
        in_a_thread(lambda: take(held, 2))  # the second batch is in hand
        client = Patient(fake, fake._local, "patient", in_process=in_process)
        began = fake.clock()
        said: list[float] = []

        def look() -> None:
            said.extend([fake.clock() - began] * (len(told(caplog, WAITED)) - len(said)))
            if fake.clock() - began > 130:
                held.close()  # type: ignore[attr-defined]

        client.then = look
        with DataShardService(4, client, reader=NumberReader({"a": 8}), records_per_shard=6) as service:
            waiting = elastic(ShardedDataset(service, NumberReader({"a": 8})))
            assert flat(take(iter(waiting), 9)) == [4, 5, 6, 7]
    assert [round(at) for at in said] == [6, 66, 126]
    for record, seconds in zip(told(caplog, WAITED), (5, 65, 125), strict=True):
        message = record.getMessage()
        assert message.startswith(f"dataset 'training': this trainer has waited {seconds} s for records")
        assert "'trainer'" in message
        assert f"4 record(s), last heard of {seconds} s ago" in message
        assert "until they are trained on or given back" in message
        assert (record.name, record.levelname) == ("edl_torch.client", "WARNING")


def test_a_trainer_that_waits_for_a_master_which_tells_nothing_says_so_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Reticent(Patient):
        def call(self, request: Request[A], wait_s: float = 0.0) -> A:
            if request != StatusCall():
                return super().call(request, wait_s)
            held.close()  # type: ignore[attr-defined]
            raise Unsupported("no status")

    fake = FakeMaster()
    with trainer(fake, {"a": 8}) as (_, other):
        held = iter(elastic(other))
        in_a_thread(lambda: take(held, 2))
        client = Reticent(fake, fake._local, "patient", in_process=True)
        with DataShardService(4, client, reader=NumberReader({"a": 8}), records_per_shard=6) as service:
            waiting = elastic(ShardedDataset(service, NumberReader({"a": 8})))
            assert flat(take(iter(waiting), 9)) == [4, 5, 6, 7]
    assert len(told(caplog, WAITED)) == 1


def test_a_trainer_in_one_process_with_its_master_knows_the_time() -> None:
    with DataShardService(4, LocalMaster(), reader=NumberReader({"a": 8})) as service:
        assert service.size == 8
        assert service.session.trainer.state.now > 0


class Unhurried(Caller):
    """Its pauses pass on a clock of its own."""

    def __init__(self, clock: FakeClock, master_timeout_s: float) -> None:
        super().__init__(Nowhere(), master_timeout_s, clock=clock)
        self.pause = clock.advance  # type: ignore[method-assign]


def test_who_waits_for_a_master_that_is_away_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    began = clock()
    said: list[float] = []

    def rpc(request: str, *, timeout: float, wait_for_ready: bool) -> str:
        said.extend([clock() - began] * (len(told(caplog, " m:1 ")) - len(said)))
        left_s = began + 100 - clock()
        if wait_for_ready:
            clock.advance(max(0.0, min(timeout, left_s)))
        if left_s <= timeout:
            return "answer"
        raise CallFailed

    caller = Unhurried(clock, 600.0)
    assert caller.call(rpc, "request") == "answer"
    assert 5 <= said[0] < 7
    assert 65 <= said[1] < 80
    assert len(said) == len(told(caplog, " m:1 ")) == 2
    message = told(caplog, " m:1 ")[0].getMessage()
    assert "no answer from the master at m:1 for 5 s" in message
    assert "No master has answered there so far: is the address right?" in message
    assert "connection refused" in message
    assert "master_timeout_s" in message
    assert "up to 600 s" in message
    began = clock() - 88.0
    assert caller.call(rpc, "request") == "answer"
    assert len(told(caplog, " m:1 ")) == 3  # another wait has its own
    assert {record.levelname for record in told(caplog, " m:1 ")} == {"WARNING"}


def test_who_waits_is_told_who_answers_in_place_of_the_master(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Attempts that wait inside grpc say only that they took too long."""
    clock = FakeClock()
    began = clock()
    waited: list[bool] = []

    def rpc(request: str, *, timeout: float, wait_for_ready: bool) -> str:
        waited.append(wait_for_ready)
        if wait_for_ready:
            clock.advance(timeout)
        if clock() - began > 60:
            return "answer"
        if len(waited) == 1 or wait_for_ready:
            raise CallFailed
        raise CallFailed(details="Failed parsing HTTP/2")  # a web server has the port

    assert Unhurried(clock, 600.0).call(rpc, "request") == "answer"
    assert waited[:4] == [False, True, False, True]
    assert any("does not speak gRPC" in message for message in caplog.messages)


# Windows that the loop drops at the very end ----------------------------------------------------------------

UNSTEPPED = (
    r"{} record\(s\) of 'training' were handed out after the last optimizer\.step\(\) \(SGD\).*at their end"
)


def accumulate(
    service: DataShardService, loader: ElasticDataLoader, every: int, seen: list[list[int]]
) -> None:
    """A loop that steps on every few batches, and forgets those that are left at the end."""
    sgd = optimizer()
    service.attach(sgd)
    while not service.finished:
        for batch in loader:
            seen.append(numbers(batch))
            if len(seen) % every == 0:
                sgd.step()


def verdict_of(folder: Path) -> Verdict:
    (verdict,) = audit([folder])
    return verdict


@pytest.mark.usefixtures("quick_questions")
@BOTH
@pytest.mark.parametrize("barrier", [True, False])
def test_a_window_dropped_at_the_end_of_the_job_counts_and_the_audit_tells(
    barrier: bool, in_process: bool, tmp_path: Path
) -> None:
    fake = FakeMaster()
    seen: list[list[int]] = []
    arguments = {"num_epochs": 2, "epoch_barrier": barrier, "audit_dir": tmp_path, "in_process": in_process}
    with trainer(fake, {"a": 20}, **arguments) as (service, dataset):  # type: ignore[arg-type]
        with one_warning(UNSTEPPED.format(8)):
            accumulate(service, elastic(dataset), 4, seen)
        assert service.record_count == 0
    fake.outcomes["training"].check_complete(2)
    assert len(seen) == 10
    verdict = verdict_of(tmp_path)
    assert verdict.outcome is Outcome.INEXACT
    assert verdict.unstepped == 8
    assert verdict.rests_on == {"unseen": 32, "unstepped": 8}  # it steps without gradients


@pytest.mark.usefixtures("quick_questions")
@pytest.mark.timeout(60)
def test_several_trainers_drop_their_own_windows(tmp_path: Path) -> None:
    fake = FakeMaster()
    together = threading.Barrier(2, timeout=20)

    def train(pair: tuple[DataShardService, ShardedDataset]) -> int:
        service, dataset = pair
        sgd = optimizer()
        service.attach(sgd)
        for number, _ in enumerate(elastic(dataset)):
            if number == 0:
                sgd.step()
            if number < 2:
                together.wait()  # so that each has a batch more than it steps on
        return service.record_count

    with ExitStack() as stack:
        made = [stack.enter_context(trainer(fake, {"a": 48}, audit_dir=tmp_path)) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            left = list(pool.map(train, made))
        assert sum(left) == 40
        for (service, dataset), records in zip(made, left, strict=True):
            assert not service.finished
            with one_warning(UNSTEPPED.format(records)):
                assert take(iter(elastic(dataset)), 9) == []
        assert [service.finished for service, _ in made] == [True, True]
    fake.outcomes["training"].check_complete(1)
    assert verdict_of(tmp_path).unstepped == 40


def test_synchronous_ranks_drop_their_windows_together(tmp_path: Path) -> None:
    fake = FakeMaster()

    def train(rank: Rank) -> None:
        sgd = optimizer()
        rank.service.attach(sgd)
        rank.service.load_state_dict(None)
        while not rank.service.finished:
            for number, _ in enumerate(rank.one_pass()):
                rank.loader.weigh(torch.zeros(()))
                if number == 0:
                    sgd.step()

    with pytest.warns(UserWarning, match=r"handed out after the last optimizer\.step\(\)"):
        run_ranks(fake, 2, train, {"a": 40}, audit_dir=tmp_path)
    fake.outcomes["training"].check_complete(1)
    assert verdict_of(tmp_path).unstepped == 32


# Synchronous ranks ------------------------------------------------------------------------------------------

UNWEIGHED = r"a padding batch.*loader\.weigh\(loss\).*scale_gradients"


@pytest.mark.parametrize("knows", ["", "weigh", "weight"])
def test_a_synchronous_loop_that_does_not_weigh_hears_of_it_at_a_padding_batch(knows: str) -> None:
    def train(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for _ in rank.loader:
            if knows == "weigh":
                rank.loader.weigh(torch.zeros(()))
            elif knows:
                assert rank.loader.weight >= 0

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(FakeMaster(), 2, train, {"a": 4, "b": 4, "c": 4}, records_per_shard=4)
    said = [str(warning.message) for warning in found]
    assert len(said) == (0 if knows else 1)
    assert all(re.search(UNWEIGHED, text) for text in said)


def train_fresh(rank: Rank) -> None:
    """A loop that loads nothing."""
    while not rank.service.finished:
        for _ in rank.one_pass():
            rank.loader.weigh(torch.zeros(()))


@BOTH
@pytest.mark.parametrize("asks", [True, False], ids=["finished", "pass"])
def test_a_fresh_synchronous_job_begins_at_the_beginning(asks: bool, in_process: bool) -> None:
    fake = FakeMaster()

    def train(rank: Rank) -> None:
        if not asks:
            assert list(rank.one_pass())
            rank.loader.weigh(torch.zeros(()))
        train_fresh(rank)

    run_ranks(fake, 2, train, {"a": 40}, in_process=in_process, num_epochs=2)
    assert fake.dataset_status("training").lineage == 1
    fake.outcomes["training"].check_complete(2)


def test_a_synchronous_job_that_finds_another_trainer_must_load_a_position() -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 40}) as (service, _):
        assert service.size == 40
        with pytest.raises(Failed, match="call load_state_dict"):
            run_ranks(fake, 2, train_fresh, {"a": 40})


@pytest.mark.timeout(60)
def test_two_services_of_one_dataset_in_one_thread_hear_at_once_that_they_wait_for_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeMaster()
    with ExitStack() as stack:
        loaders = []
        for name in ("one", "two"):
            client = Patient(fake, fake._local, name, in_process=True)
            reader = NumberReader({"a": 39})
            service = stack.enter_context(DataShardService(4, client, reader=reader))
            loaders.append(elastic(ShardedDataset(service, reader)))
        with pytest.raises(ConcurrentIteration, match=r"waits for \d+ record\(s\).*same thread"):
            list(zip(*loaders, strict=False))
    assert not told(caplog, WAITED)


def test_a_loop_that_goes_round_for_ever_after_the_last_epoch_is_an_error() -> None:
    def cycle(loader: ElasticDataLoader) -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    with ElasticDataLoader(range(4), 2) as loader:
        batches = cycle(loader)
        assert sorted(flat([next(batches), next(batches)])) == [0, 1, 2, 3]
        with pytest.raises(AccountingError, match=r"1000 passes in a row .*num_epochs="):
            next(batches)


def test_a_last_batch_that_one_of_two_optimizers_has_not_stepped_on_is_told_of() -> None:
    """As of a GAN whose generator steps on each second batch, where their number is odd."""
    loader = ElasticDataLoader(range(6), 2)
    often, seldom = optimizer(), torch.optim.Adam(optimizer().param_groups[0]["params"])
    loader.attach(often)
    loader.attach(seldom)
    for number, _ in enumerate(loader):
        often.step()
        if number % 2:
            seldom.step()
    with pytest.warns(UserWarning, match=r"2 record\(s\) .* after the last optimizer\.step\(\) \(Adam\)"):
        loader.close()


def test_a_step_of_an_optimizer_that_trains_nothing_is_on_the_batch_in_hand() -> None:
    """As of the one that Lightning takes where a model has none."""
    with ElasticDataLoader(range(8), 2, num_epochs=2) as loader:
        stand_in, given = torch.optim.SGD([torch.empty(0)], lr=0.1), 0
        loader.attach(stand_in)
        for _ in loader.epochs():
            for batch in loader:
                assert loader.progress().acknowledged == given
                given += len(batch)
                stand_in.step()


class Commits:
    """Tells of steps, and has no parameters: as torchft's, which another optimizer takes."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, object]] = []

    def register_step_post_hook(self, hook: Callable[..., None]) -> Commits:
        self.tell = lambda: hook(self, (), {})
        return self

    def remove(self) -> None:
        self.tell = lambda: None


def test_steps_of_what_has_no_parameters_count_as_it_says(tmp_path: Path) -> None:
    commits, mean = Commits(), torch.nn.Parameter(torch.zeros(16))
    sgd = torch.optim.SGD([mean], lr=0.1)
    with ElasticDataLoader(range(8), 2, num_epochs=2, audit_dir=tmp_path) as loader:
        loader.attach(commits, one_model="they commit together")
        for _ in loader.epochs():
            for batch in loader:
                sgd.zero_grad()
                (mean - batch.sum()).square().mean().backward()
                commits.tell()
                sgd.step()
    (verdict,) = audit([tmp_path])
    assert verdict.rests_on == {"step": 16}
    assert verdict.outcome is Outcome.PROVEN


def test_a_sparse_gradient_of_a_batch_that_went_back_is_looked_at() -> None:
    table = torch.nn.Embedding(8, 1, sparse=True)
    with ElasticDataLoader(range(8), 2) as loader:
        sgd = torch.optim.SGD(table.parameters(), lr=0.1)
        loader.attach(sgd)
        batches = iter(loader)
        first = next(batches)
        loader.give_back()
        table(first).sum().backward()
        sgd.zero_grad()
        assert table.weight.grad is None
