"""`loader.preempted`: a loop that saves and leaves loses nothing, and ranks see it at the same batch."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest
from loader_kit import UNEVEN, PickingReader, all_records, numbers, trainer
from lockstep_kit import Rank, run_ranks

from edl_torch import ElasticDataLoader
from edl_torch.client.peers import Ballot, Doing
from edl_torch.testing import FakeMaster, ThreadPeers

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
