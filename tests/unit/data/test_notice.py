"""What a loop sees of a notice: at once where it trains alone, after a vote where ranks train together."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from loader_kit import UNEVEN, PickingReader, all_records, numbers, trainer
from lockstep_kit import Rank, run_ranks

from edl_torch import ElasticDataLoader
from edl_torch.client.peers import Ballot, Doing
from edl_torch.data.loop.notice import Notice
from edl_torch.system.termination import Termination
from edl_torch.testing import FakeMaster, ThreadPeers

NUMBER = signal.SIGUSR2


@pytest.fixture
def termination() -> Iterator[Termination]:
    """Of a signal that does nothing else here."""
    before = signal.signal(NUMBER, signal.SIG_IGN)
    yield Termination(NUMBER)
    signal.signal(NUMBER, before)


def test_a_signal_counts_from_the_first_look_on(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    signal.raise_signal(NUMBER)
    assert not notice.came
    assert not notice.is_to_end()
    signal.raise_signal(NUMBER)
    assert notice.came
    assert not notice.seen, "the program has not looked yet"
    assert notice.is_to_end()
    assert notice.seen
    notice.close()
    assert notice.is_to_end(), "what came is still known"


def test_who_never_looks_listens_to_nothing(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    assert not notice.came
    notice.close()
    assert signal.getsignal(NUMBER) == signal.SIG_IGN


def test_closed_it_listens_no_more(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    notice.is_to_end()
    assert signal.getsignal(NUMBER) != signal.SIG_IGN
    notice.close()
    assert signal.getsignal(NUMBER) == signal.SIG_IGN
    signal.raise_signal(NUMBER)
    assert not notice.is_to_end()


def test_what_comes_for_another_loader_is_nothing_to_one_that_is_closed(termination: Termination) -> None:
    closed, other = (Notice(together=False, termination=termination) for _ in range(2))
    closed.is_to_end()
    other.is_to_end()
    closed.close()
    signal.raise_signal(NUMBER)
    assert other.is_to_end()
    assert not closed.is_to_end()
    other.close()


def test_a_rank_sees_nothing_before_all_know(termination: Termination) -> None:
    notice = Notice(together=True, termination=termination)
    notice.is_to_end()
    notice.give()
    signal.raise_signal(NUMBER)
    assert notice.came
    assert not notice.is_to_end()
    notice.agree()
    assert notice.is_to_end()


@pytest.mark.parametrize("why", ["SIGTERM", "preempt()", "a notice to another rank"])
def test_it_is_logged_once(termination: Termination, why: str, caplog: pytest.LogCaptureFixture) -> None:
    notice = Notice(together=True, termination=termination)
    notice.is_to_end()
    if why == "SIGTERM":
        signal.raise_signal(NUMBER)
    elif why == "preempt()":
        notice.give()
    notice.agree()
    with caplog.at_level(logging.WARNING):
        assert notice.is_to_end()
        assert notice.is_to_end()
    (message,) = caplog.messages
    assert f"({why})" in message


def look_in_a_thread(notice: Notice) -> list[str]:
    """What it warned of."""
    said: list[str] = []

    def look() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            notice.is_to_end()
            notice.is_to_end()
        said.extend(str(warning.message) for warning in caught)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return said


def test_in_another_thread_it_says_once_what_to_do(termination: Termination) -> None:
    signal.signal(NUMBER, signal.SIG_DFL)
    notice = Notice(together=False, termination=termination)
    (said,) = look_in_a_thread(notice)
    assert "signal.signal(signal.SIGTERM, lambda *_: loader.preempt())" in said
    notice.is_to_end()
    assert signal.getsignal(NUMBER) != signal.SIG_DFL, "the main thread may still begin to listen"
    notice.close()


def test_in_another_thread_it_says_nothing_where_the_program_has_a_handler(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    signal.signal(NUMBER, lambda *_: notice.give())
    assert look_in_a_thread(notice) == []
    signal.raise_signal(NUMBER)
    assert notice.is_to_end()
    notice.close()


# A loop that saves and leaves, and ranks that see the notice at the same batch ------------------------------


pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
    pytest.mark.filterwarnings("ignore:loader.preempted is read outside of the main thread:UserWarning"),
]
LATEST = 2  # batches after the one at which a rank was told


def test_a_loop_that_saves_and_leaves_ends_and_goes_on_from_there() -> None:
    fake = FakeMaster()
    before = signal.getsignal(signal.SIGTERM)
    trained: list[int] = []
    with trainer(fake, num_epochs=2) as (_, dataset), ElasticDataLoader(dataset) as loader:
        for _ in loader.epochs():
            for step, batch in enumerate(loader):
                trained += numbers(batch)
                assert loader.preempted == (step == 3)
                if loader.preempted:
                    token = loader.state_dict()
                    break
                if step == 2:
                    signal.raise_signal(signal.SIGTERM)
        assert len(trained) == 16
        assert not loader.service.finished
    assert signal.getsignal(signal.SIGTERM) == before
    with trainer(FakeMaster(), num_epochs=2) as (_, dataset), ElasticDataLoader(dataset) as loader:
        loader.load_state_dict(token)
        for _ in loader.epochs():
            for batch in loader:
                trained += numbers(batch)
    assert sorted(trained) == sorted(all_records() * 2)


def test_epochs_go_on_until_the_program_has_seen_it() -> None:
    """Else it would take the end of `epochs()` for that of the training."""
    fake = FakeMaster()
    passes = 0
    with trainer(fake, num_epochs=3) as (_, dataset), ElasticDataLoader(dataset) as loader:
        for _ in loader.epochs():
            for _ in loader:
                pass
            passes += 1
            loader.preempt()
            if passes == 2:
                assert loader.preempted
        assert passes == 2
        assert list(loader), "a pass that the program begins all the same is one"


def steps_when_seen(size: int, told: int, at: int, counts: Any = UNEVEN, **arguments: Any) -> set[int]:
    """The step at which each rank saw it, when rank `told` was told in the body of step `at`."""
    seen: dict[int, int] = {}
    tokens: set[str] = set()

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        step = -1
        for _ in rank.loader.epochs():
            for _ in rank.one_pass():
                step += 1
                if step == at and rank.peers.rank == told:
                    rank.loader.preempt()
                    assert not rank.loader.preempted, "before the others know"
                if rank.loader.preempted:
                    seen[rank.peers.rank] = step
                    tokens.add(rank.loader.state_dict()["token"])
                    break

    run_ranks(FakeMaster(), size, work, counts, **arguments)
    assert len(seen) == size
    assert len(tokens) == 1
    return set(seen.values())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_all_ranks_see_it_at_the_same_batch_whoever_was_told(size: int, at: int) -> None:
    for told in {0, size - 1}:
        (step,) = steps_when_seen(size, told, at, num_epochs=9)
        assert at <= step <= at + LATEST


def test_it_travels_over_the_end_of_an_epoch() -> None:
    last = -(-sum(UNEVEN.values()) // 8) - 1
    (step,) = steps_when_seen(2, 1, last, PickingReader(UNEVEN), num_epochs=3, records_per_shard=8)
    assert last < step <= last + LATEST


def test_a_rank_that_stands_in_is_heard_too() -> None:
    (step,) = steps_when_seen(4, 3, 1, {"a": 8}, num_epochs=5, records_per_shard=8)
    assert step <= 1 + LATEST


def test_it_costs_no_vote_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the body of a step its own vote has been cast, and that of the next one: nothing else."""
    cast = ThreadPeers.vote
    ballots: dict[int, list[Doing]] = {0: [], 1: []}

    def counting(peers: ThreadPeers, ballot: Ballot) -> Any:
        ballots[peers.rank].append(ballot.doing)
        return cast(peers, ballot)

    monkeypatch.setattr(ThreadPeers, "vote", counting)

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        mine = ballots[rank.peers.rank]
        for step, _ in enumerate(rank.one_pass()):
            if step == 0:
                before = len(mine) - 2
            rank.loader.preempt()
            assert rank.loader.preempted == (step > 1)
            if step < 4:  # later a rank may have to wait for the master's verdict
                assert len(mine) - before == step + 2
                assert set(mine[before:]) == {Doing.STEP}

    run_ranks(FakeMaster(), 2, work, {"a": 64}, records_per_shard=8)
