"""Several trainers share one master, and one that others have replaced is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from loader_kit import elastic, flat, numbers, take, trainer
from lockstep_kit import Failed, Rank, run_ranks

from edl_torch import DataShardService, ShardedDataset
from edl_torch.errors import PeerFailed, StaleLease
from edl_torch.testing import FakeMaster, wait_until

COUNTS = {"a": 90, "b": 7, "c": 40}


def together(*trainers: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own; a trainer that hangs or fails fails the test.

    Not in an executor: what its threads fork ends with exit code 1, and torch takes that for a death.
    """
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = trainers[number]()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(trainers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(len(trainers))]


def loop_of(
    fake: FakeMaster,
    batch_size: int,
    pause_s: float,
    *,
    in_process: bool = False,
    num_workers: int = 0,
    meeting: threading.Barrier | None = None,
    **extra: Any,
) -> Callable[[], int]:
    """A whole job of one trainer; returns how many records it trained on.

    At a `meeting` it waits, with its first batch in hand, for those that the others have in theirs.
    """
    loader_arguments = {"drop_last": extra.pop("drop_last", False), "num_workers": num_workers}

    def run() -> int:
        trained = 0
        idle = threading.Event()
        with trainer(fake, COUNTS, batch_size=batch_size, in_process=in_process, **extra) as (
            service,
            dataset,
        ):
            loader = elastic(dataset, **loader_arguments)
            while not service.finished:
                for batch in loader:
                    if meeting is not None and not trained:
                        meeting.wait(30)
                    trained += len(numbers(batch))
                    idle.wait(pause_s)
        return trained

    return run


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("speeds", [(0.001, 0.004), (0.001, 0.001, 0.006, 0.002)])
def test_unequal_trainers_give_each_record_one_outcome(speeds: tuple[float, ...], in_process: bool) -> None:
    fake = FakeMaster()
    arguments = {"num_epochs": 2, "records_per_shard": 12, "shuffle_shards": True}
    sizes = (4, 3, 8, 5)
    meeting = threading.Barrier(len(speeds))  # else the quick ones may be done before a slow one has begun
    shares = together(
        *(
            loop_of(fake, b, s, in_process=in_process, meeting=meeting, **arguments)
            for b, s in zip(sizes, speeds, strict=False)
        )
    )
    assert sum(shares) == 2 * 137
    assert all(shares)
    fake.outcomes["training"].check_complete(2)


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_remainders_of_two_trainers_make_whole_batches(in_process: bool) -> None:
    fake = FakeMaster()
    arguments = {"drop_last": True, "records_per_shard": 10, "in_process": in_process}
    shares = together(*(loop_of(fake, 4, 0.001, **arguments) for _ in range(2)))
    assert sum(shares) == 136
    outcomes = fake.outcomes["training"]
    assert len(outcomes.acknowledged) == sum(outcomes.acknowledged.values()) == 136
    assert fake.dataset_status("training").dropped == 1


def test_a_trainer_that_holds_nothing_is_served_what_another_fetched_ahead() -> None:
    fake = FakeMaster()
    with (
        trainer(fake, {"a": 24}, batch_size=4, in_process=False, records_per_shard=4) as (passive, first),
        trainer(fake, {"a": 24}, batch_size=4, in_process=False, records_per_shard=4) as (_, second),
    ):
        slow = iter(elastic(first))
        seen = take(slow, 2)
        wait_until(lambda: passive.record_count > 4, what="the passive trainer has fetched ahead")
        quick = iter(elastic(second))
        others = take(quick, 3)  # all but what is in the hands of the first, and what it drew
        assert len(others) == 3
        rest = together(lambda: take(slow, 100), lambda: take(quick, 100))
        assert sorted(flat(seen + others + rest[0] + rest[1])) == list(range(24))
    fake.outcomes["training"].check_complete(1)


def test_a_dead_peers_records_come_to_the_one_that_waits() -> None:
    fake = FakeMaster(grace_s=1.0)
    with trainer(fake, COUNTS) as (_, first), trainer(fake, COUNTS, in_process=False) as (_, second):
        dying = iter(elastic(first))
        taken = take(dying, 3)  # two of them acknowledged
        with ThreadPoolExecutor(1) as pool:
            living = pool.submit(lambda: take(iter(elastic(second)), 1000))
            session = first.service.session.id
            wait_until(lambda: fake._dispatcher.wanted("training", session, fake.clock()))
            fake.break_stream(session)
            fake.clock.advance(1.5)
            fake.expire()
            rest = living.result(timeout=60)
        assert len(flat(taken[:2] + rest)) == 137
        dying.close()
    fake.outcomes["training"].check_complete(1)


def test_a_finished_training_pass_and_an_evaluation_inside_it() -> None:
    fake = FakeMaster()
    with (
        trainer(fake, {"a": 20}, num_epochs=2) as (training, train_set),
        trainer(fake, {"v": 9}, dataset_name="evaluation", num_epochs=4) as (evaluation, held_out),
    ):
        train_loader, evaluation_loader = elastic(train_set, num_workers=1), elastic(held_out)
        while not training.finished:
            for step, _ in enumerate(train_loader):
                if step in (1, 3):
                    assert sorted(flat(take(iter(evaluation_loader), 100))) == list(range(9))
        assert evaluation.finished
    fake.outcomes["training"].check_complete(2)
    fake.outcomes["evaluation"].check_complete(4)


# A trainer that others have replaced: whatever it asks from then on is refused, and the job goes on ---------


FORTY = {"a": 40}
Loop = tuple[DataShardService, ShardedDataset]

ASKS: dict[str, Callable[[DataShardService], Any]] = {
    "finished": lambda service: service.finished,
    "epoch": lambda service: service.epoch,
    "progress": lambda service: service.progress(),
    "state_dict": lambda service: service.state_dict(),
    "load_state_dict": lambda service: service.load_state_dict(None),
}


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(lease_timeout_s=30.0)


@pytest.fixture(params=[True, False], ids=["embedded", "remote"])
def zombie(fake: FakeMaster, request: pytest.FixtureRequest) -> Iterator[Loop]:
    """It has trained on two batches, and its loop stands in the second one."""
    with trainer(fake, FORTY, in_process=request.param) as (service, dataset):
        loop = iter(elastic(dataset))
        take(loop, 2)
        service.session.flush()
        yield service, dataset


def replaced(fake: FakeMaster, *, given_up: bool) -> Iterator[Loop]:
    """Its replacement went back to the beginning."""
    if given_up:
        fake.clock.advance(31.0)
        assert fake.expire()
    with trainer(fake, FORTY) as (service, dataset):
        service.load_state_dict(None)
        yield service, dataset


@pytest.mark.parametrize("given_up", [False, True], ids=["still known", "given up"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_whatever_a_superseded_trainer_asks_is_refused_and_its_replacement_goes_on(
    fake: FakeMaster, zombie: Loop, ask: Callable[[DataShardService], Any], given_up: bool
) -> None:
    replacements = replaced(fake, given_up=given_up)
    service, dataset = next(replacements)
    loop = iter(elastic(dataset))
    seen = flat(take(loop, 1))
    for _ in range(2):  # it stays refused
        with pytest.raises(StaleLease, match="checkpoint"):
            ask(zombie[0])
    seen += flat(take(loop, 100))
    assert sorted(seen) == list(range(40))
    assert service.finished
    next(replacements, None)


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_a_trainer_of_another_ledger_is_refused(
    fake: FakeMaster, zombie: Loop, ask: Callable[[DataShardService], Any]
) -> None:
    """The master was started again without a journal, and another trainer has registered the dataset."""
    other = FakeMaster()
    other._dispatcher.ledger_id = "other"
    zombie[0].session.master._local = other._local  # type: ignore[attr-defined]
    with trainer(other, FORTY) as (service, _):
        assert not service.finished
        # The thread that fetches leases may find it out first, and throw away what the model has learnt.
        with pytest.raises(StaleLease, match=r"keeps ledger other, not fake|come again"):
            ask(zombie[0])


# Synchronous ranks whose data another incarnation of their job has taken back to a checkpoint ---------------


RANK_ASKS: dict[str, Callable[[Rank], Any]] = {
    "state_dict": lambda rank: rank.service.state_dict(),
    "load_state_dict": lambda rank: rank.service.load_state_dict(None),
    "another pass": lambda rank: rank.train(),
}


@pytest.mark.parametrize("ask", RANK_ASKS.values(), ids=list(RANK_ASKS))
def test_superseded_ranks_are_refused_together(ask: Callable[[Rank], Any]) -> None:
    """Between two steps: the model has what the ranks trained on, the position is the replacement's."""
    fake = FakeMaster()

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for _ in zip(range(2), rank.one_pass(), strict=False):
            pass
        rank.peers.share("")  # all have stepped
        if rank.peers.rank == 0:
            assert fake.go_back("training", None) == 3
        rank.peers.share("")
        ask(rank)

    with pytest.raises(Failed) as caught:
        run_ranks(fake, 2, work, {"n": 40})
    errors = caught.value.errors
    assert isinstance(errors[0], StaleLease)
    assert isinstance(errors[1], (StaleLease, PeerFailed))
    assert fake.dataset_status("training").acknowledged == 0
