"""Synchronous ranks: all step together, each record counts once, and nobody is left waiting.

Each of them has the whole model, or `parts` of them hold one; `test_model_parts` has what is theirs alone.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loader_kit import (
    UNEVEN,
    ColumnReader,
    NumberReader,
    PickingReader,
    all_records,
    numbers,
    take,
    trainer,
)
from lockstep_kit import Failed, Rank, each, run_ranks, trained

from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.client.peers import Ballot, Count, Doing
from edl_torch.data.checkpoint import load_checkpoint, save_checkpoint
from edl_torch.data.loop.lockstep_pass import PATIENCE_S, LockstepPass
from edl_torch.errors import BadRecord, InvalidArgument, PeerFailed, StaleLease
from edl_torch.testing import FakeMaster, ThreadPeers, wait_until

EPOCHS = 2


def same_steps(ranks: list[Rank]) -> list[int]:
    """Steps of each pass, which are the same on every rank."""
    (steps,) = {tuple(rank.seen.steps) for rank in ranks}
    return list(steps)


whole_or_in_parts = pytest.mark.parametrize(("size", "parts"), [(3, 1), (4, 2)])


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    ("size", "parts"), [(1, 1), (2, 1), (3, 1), (5, 1), (30, 1), (2, 2), (4, 2), (6, 3), (8, 2), (4, 4)]
)
def test_all_ranks_take_the_same_steps_and_each_record_counts_once(
    size: int, parts: int, in_process: bool
) -> None:
    fake = FakeMaster()
    options: dict[str, Any] = {"num_epochs": EPOCHS, "in_process": in_process, "shuffle_shards": True}
    ranks = run_ranks(fake, size, Rank.train, UNEVEN, parts=parts, **options)
    assert len(same_steps(ranks)) == EPOCHS
    assert trained(ranks, parts) == each(EPOCHS)
    fake.outcomes["training"].check_complete(EPOCHS)


def test_the_vote_on_a_step_is_cast_before_the_step_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ballots: list[Ballot] = []
    cast = ThreadPeers.vote

    def counting(peers: ThreadPeers, ballot: Ballot) -> Any:
        ballots.append(ballot)
        return cast(peers, ballot)

    monkeypatch.setattr(ThreadPeers, "vote", counting)
    known: list[int] = []

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        known.extend(sum(ballot.batches for ballot in ballots) for _ in rank.one_pass())

    (rank,) = run_ranks(FakeMaster(), 1, work, UNEVEN)
    (steps,) = rank.seen.steps
    assert known == [*range(2, steps + 1), steps]


@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_without_a_batch_get_a_real_one_that_does_not_count(parts: int) -> None:
    ranks = run_ranks(FakeMaster(), 7 * parts, Rank.train, {"a": 9}, parts=parts, num_epochs=EPOCHS)
    assert sum(rank.seen.stand_ins for rank in ranks) > 0
    assert trained(ranks, parts) == Counter(dict.fromkeys(range(9), EPOCHS))
    records = set(range(9))
    for rank in ranks:
        for batches in rank.seen.passes:
            assert batches
            assert all(set(batch) <= records and batch for batch, _ in batches)


@pytest.mark.parametrize("parts", [1, 2])
def test_loader_workers_read_for_ranks(parts: int) -> None:
    # Ranks are threads here, and filelock (torch brings it) refuses that two threads fork at once.
    loader = {"num_workers": 2, "multiprocessing_context": "forkserver"}
    fake = FakeMaster()
    ranks = run_ranks(fake, 2, Rank.train, UNEVEN, parts=parts, in_process=False, loader=loader)
    assert trained(ranks, parts) == each(1)
    assert sum(rank.loader._inner.loader is not None for rank in ranks) == 2 // parts, (
        "others need no workers"
    )
    fake.outcomes["training"].check_complete(1)


@whole_or_in_parts
def test_shuffled_and_columnar_data_too(size: int, parts: int) -> None:
    shuffled = {"shuffle": True, "num_epochs": EPOCHS}
    ranks = run_ranks(FakeMaster(), size, Rank.train, PickingReader(UNEVEN), parts=parts, **shuffled)
    assert trained(ranks, parts) == each(EPOCHS)
    columns = {"batch_size": None}
    ranks = run_ranks(FakeMaster(), size, Rank.train, ColumnReader(UNEVEN), parts=parts, loader=columns)
    assert trained(ranks, parts) == each(1)


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_with_drop_last_every_batch_is_whole_on_every_rank(size: int, parts: int) -> None:
    fake = FakeMaster()
    options: dict[str, Any] = {"loader": {"drop_last": True}, "num_epochs": EPOCHS}
    ranks = run_ranks(fake, size, Rank.train, UNEVEN, parts=parts, **options)
    assert len(same_steps(ranks)) == EPOCHS
    sizes = {len(batch) for rank in ranks for batches in rank.seen.passes for batch, _ in batches}
    assert sizes == {4}
    assert trained(ranks, parts).total() == EPOCHS * (len(all_records()) // 4) * 4
    status = fake.dataset_status("training")
    assert status.finished
    assert status.dropped == EPOCHS * (len(all_records()) % 4)


# What goes wrong ----------------------------------------------------------------------------------------


def trained_on() -> FakeMaster:
    """A master whose data another incarnation has trained on."""
    fake = FakeMaster()
    with trainer(fake) as (_, dataset):
        take(iter(ElasticDataLoader(dataset)), 2)
    return fake


def test_a_fresh_incarnation_says_where_it_begins() -> None:
    with pytest.raises(Failed) as failed:
        run_ranks(trained_on(), 2, lambda rank: list(rank.one_pass()), UNEVEN)
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgument)
        assert "load_state_dict" in str(error)


class BrokenReader(NumberReader):
    """Record 7 cannot be read."""

    def read_records(self, task: Any) -> Iterator[int]:
        for number in super().read_records(task):
            if number == 7:
                raise ValueError("no such record")
            yield number


@whole_or_in_parts
def test_a_rank_that_cannot_go_on_says_so_before_it_is_gone(size: int, parts: int) -> None:
    """Its process may take long to end, and a collective of the model's would wait for it."""
    told: list[int] = []

    def work(rank: Rank) -> None:
        try:
            rank.train()
        except PeerFailed:
            told.append(rank.peers.rank)
            raise
        except BadRecord:
            wait_until(lambda: len(told) == size - 1)
            raise

    with pytest.raises(Failed) as failed:
        run_ranks(FakeMaster(), size, work, BrokenReader(UNEVEN), parts=parts)
    assert Counter(failed.value.kinds.values()) == {BadRecord: 1, PeerFailed: size - 1}


@pytest.mark.parametrize(("size", "parts", "victim"), [(3, 1, 1), *((4, 2, victim) for victim in range(4))])
def test_a_rank_that_dies_leaves_nobody_waiting(size: int, parts: int, victim: int) -> None:
    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for step, _ in enumerate(rank.one_pass()):
            if rank.peers.rank == victim and step == 1:
                raise KeyError("the model")

    with pytest.raises(Failed) as failed:
        run_ranks(FakeMaster(), size, work, UNEVEN, parts=parts)
    assert failed.value.kinds == {**dict.fromkeys(range(size), PeerFailed), victim: KeyError}


def test_ranks_that_load_different_tokens_are_stopped() -> None:
    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for _ in islice(rank.one_pass(), 2):
            pass
        rank.loader.close()
        token = rank.service.state_dict()
        rank.service.load_state_dict(token if rank.peers.rank else None)

    with pytest.raises(Failed, match="the token of rank 1 differs") as failed:
        run_ranks(FakeMaster(), 2, work, UNEVEN)
    assert isinstance(failed.value.errors[0], PeerFailed)


@pytest.mark.parametrize(("size", "parts", "victim"), [(2, 1, 1), (4, 2, 2)])
@pytest.mark.parametrize(
    ("in_process", "saves"), [(True, False), (False, False), (True, True)], ids=["", "remote", "saves"]
)
def test_a_rank_whose_trained_batch_goes_to_others_ends_the_job(
    in_process: bool, saves: bool, size: int, parts: int, victim: int
) -> None:
    """Nor is a checkpoint taken of a model that learnt what is not counted."""
    fake = FakeMaster()

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for step, _ in enumerate(rank.one_pass()):
            if step == 1:
                if rank.peers.rank == victim:  # the master loses it for longer than the grace
                    fake.break_stream(rank.service.session.id)
                    fake.clock.advance(2.0)
                    fake.expire()
                if saves:
                    rank.service.state_dict()

    with pytest.raises(Failed) as failed:
        run_ranks(fake, size, work, UNEVEN, parts=parts, in_process=in_process)
    assert failed.value.kinds == {**dict.fromkeys(range(size), PeerFailed), victim: StaleLease}


def test_one_service_serves_one_synchronous_loader() -> None:
    def work(rank: Rank) -> None:
        other = ThreadPeers.group(1)[0]
        ElasticDataLoader(rank.loader.dataset, synchronous=other)  # type: ignore[arg-type]

    with pytest.raises(Failed, match="one synchronous loader"):
        run_ranks(FakeMaster(), 1, work, UNEVEN)


# What one rank does alone --------------------------------------------------------------------------------


def save(rank: Rank, folder: Path) -> None:
    model = torch.nn.Linear(1, 1)
    save_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), rank.service)


def load(rank: Rank, folder: Path) -> None:
    model = torch.nn.Linear(1, 1)
    load_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), rank.service)


def scale(rank: Rank, folder: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    rank.loader.weigh(weight * 1.0).backward()
    rank.loader.scale_gradients(torch.optim.SGD([weight], lr=0.1))


def end(rank: Rank, folder: Path) -> None:
    """Find the service finished, in a loop of its own."""
    rank.service.position.agree_on_end(rank.service.session.lockstep)  # type: ignore[arg-type]


ALONE = {
    "the end": (end, "is at the end of an epoch"),
    "state_dict": (lambda rank, folder: rank.service.state_dict(), r"state_dict\(\)"),
    "load_state_dict": (lambda rank, folder: rank.service.load_state_dict(None), r"load_state_dict\(\)"),
    "save_checkpoint": (save, r"(state_dict|save_checkpoint)\(\)"),
    "load_checkpoint": (load, r"load_checkpoint\(\)"),
    "scale_gradients": (scale, r"scale_gradients\(\)"),
    "break": (None, "begins a pass over the loader"),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_one_rank_does_alone_is_an_error_on_all_that_names_it(what: str, tmp_path: Path) -> None:
    act, words = ALONE[what]

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        while not rank.service.finished:
            for step, _ in enumerate(rank.one_pass()):
                if rank.peers.rank == 1 and step == 1:
                    if act is None:
                        break
                    act(rank, tmp_path)

    began = time.monotonic()
    with pytest.raises(Failed) as failed:
        run_ranks(FakeMaster(), 3, work, UNEVEN)
    assert time.monotonic() - began < 10  # of the 30 s that a vote may take
    assert sorted(failed.value.errors) == [0, 1, 2]
    for error in failed.value.errors.values():
        assert isinstance(error, PeerFailed)
        assert re.search(rf"each of ranks 0, 2 asks for the next batch, rank 1 (calls )?{words}", str(error))


def test_a_batch_that_one_rank_reports_as_failed_counts_on_none() -> None:
    """Its record has no say in the gradients of the others, which are told how many are left."""
    means: list[float] = []

    def work(rank: Rank) -> None:
        weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        rank.service.attach(optimizer)
        rank.service.load_state_dict(None)
        while not rank.service.finished:
            for step, batch in enumerate(rank.one_pass()):
                optimizer.zero_grad()
                failed = rank.peers.rank == 1 and step == 1
                if failed:
                    rank.service.report_batch_done(err_msg="NaN loss")
                mean = torch.tensor(torch.nan if failed else 2.5, dtype=torch.float64)
                rank.loader.weigh(weight * mean).backward()
                rank.loader.scale_gradients(optimizer)
                assert weight.grad is not None
                means.append(float(weight.grad))
                optimizer.step()
                if rank.loader.weight == 0:
                    assert weight.grad == 0
                assert len(batch) > 0

    ranks = run_ranks(FakeMaster(), 2, work, {"a": 32}, max_bad_records=4)
    (steps,) = same_steps(ranks)
    assert sum(means) / 2 == pytest.approx(2.5 * steps, rel=1e-15)


def test_what_ends_a_padding_batch_leaves_the_batch_before_it_alone() -> None:
    """That one is not in hand any more: its gradients wait for a step."""
    fake = FakeMaster()

    def work(rank: Rank) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
        rank.service.attach(optimizer)
        rank.service.load_state_dict(None)
        for _ in rank.one_pass():
            if len(rank.seen.passes[0]) == 2:
                if not rank.loader.weight:
                    rank.service.report_batch_done(err_msg="a padding batch's loss is no record's")
                break
        optimizer.step()
        rank.service.state_dict()

    ranks = run_ranks(fake, 2, work, {"a": 12}, records_per_shard=4, max_bad_records=4)
    assert sum(rank.seen.stand_ins for rank in ranks) == 1
    status = fake.dataset_status("training")
    assert (status.acknowledged, status.quarantined) == (8, 0)


# Breaks and checkpoints ---------------------------------------------------------------------------------


def test_a_break_at_the_last_batch_gives_it_back_too() -> None:
    """Ranks know that it is the last one while they are at it."""
    fake = FakeMaster()

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for _ in rank.one_pass():
            break
        assert fake.dataset_status("training").acknowledged == 0
        while not rank.service.finished:
            list(rank.one_pass())

    (rank,) = run_ranks(fake, 1, work, {"a": 4})
    assert [len(batches) for batches in rank.seen.passes] == [1, 1]
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(((4, 1), (1, 1)), ((4, 1), (2, 1)), ((1, 1), (3, 1)), ((2, 1), (2, 1)), ((3, 1), (7, 1))),
        *(((4, 2), (2, 2)), ((4, 2), (6, 3)), ((4, 2), (2, 1))),
    ],
)
def test_a_token_continues_exactly_on_jobs_of_other_shapes(
    before: tuple[int, int], after: tuple[int, int], step: int
) -> None:
    """Of so many ranks, of which so many hold one model."""
    fake, tokens = FakeMaster(), list[dict[str, str]]()

    def stop(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        done = 0
        while not rank.service.finished:
            for _ in rank.one_pass():
                done += 1
                if done == step:
                    tokens.append(rank.service.state_dict())
                    return

    def resume(rank: Rank) -> None:
        rank.service.load_state_dict(tokens[0])
        while not rank.service.finished:
            list(rank.one_pass())

    (size, parts), (other_size, other_parts) = before, after
    ranks = run_ranks(fake, size, stop, UNEVEN, parts=parts, num_epochs=EPOCHS)
    assert tokens == [tokens[0]] * size
    others = run_ranks(fake, other_size, resume, UNEVEN, parts=other_parts, num_epochs=EPOCHS)
    assert trained(ranks, parts) + trained(others, other_parts) == each(EPOCHS)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_leave_the_shard_size_open_follow_the_token(size: int) -> None:
    """DCP asks every rank for its state before it loads one: that must not settle what the token says."""
    with DataShardService(4, FakeMaster(), reader=NumberReader(UNEVEN), num_epochs=EPOCHS) as service:
        saved = service.state_dict()
    states: list[dict[str, str]] = []
    sizes: list[int] = []

    def load_and_train(rank: Rank) -> None:
        states.append(rank.service.state_dict())
        rank.service.load_state_dict(saved)
        sizes.append(rank.service.session.plan().spec.records_per_shard)
        while not rank.service.finished:
            for _ in rank.one_pass():
                pass

    fake = FakeMaster()
    ranks = run_ranks(
        fake, size, load_and_train, UNEVEN, batch_size=6, records_per_shard=None, num_epochs=EPOCHS
    )
    assert all(state == states[0] for state in states)
    assert sizes == [32] * size
    assert trained(ranks) == each(EPOCHS)
    fake.outcomes["training"].check_complete(EPOCHS)


def test_batches_that_no_step_comes_for_are_an_error_on_all() -> None:
    def work(rank: Rank) -> None:
        rank.service.attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1))
        rank.train()

    with pytest.raises(Failed) as failed:
        run_ranks(FakeMaster(), 2, work, {"a": 16})
    for error in failed.value.errors.values():
        assert re.search("record.s. of 'training' were handed out after the last", str(error))
    assert len(failed.value.errors) == 2


def one_ahead(loader: ElasticDataLoader) -> Iterator[Any]:
    """Hand on each batch when the next one is there, as wrappers do that look for the last one."""
    waiting: list[Any] = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > 1:
            loader.passed_on()
            yield waiting.pop(0)
    for batch in waiting:
        loader.passed_on()
        yield batch
    loader.passed_on()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(("size", "counts"), [(2, UNEVEN), (3, UNEVEN), (7, {"a": 9})])
def test_a_wrapper_that_reads_ahead_weighs_the_batch_that_it_has_passed_on(
    size: int, counts: dict[str, int], attached: bool
) -> None:
    fake = FakeMaster()
    reader = NumberReader(counts)

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        parameter = torch.nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([parameter], lr=0.1)
        if attached:
            rank.loader.attach(sgd)
        while not rank.service.finished:
            rank.seen.passes.append([])
            for batch in one_ahead(rank.loader):
                weight = rank.loader.weight
                assert weight in (0, len(batch))
                rank.seen.passes[-1].append((numbers(batch), weight))
                sgd.zero_grad()
                parameter.sum().backward()
                sgd.step()

    ranks = run_ranks(fake, size, work, reader, num_epochs=EPOCHS, lookahead="manual")
    assert [len(rank.seen.passes) for rank in ranks] == [EPOCHS] * size, "no pass reads nothing at the end"
    records = [number for rank in ranks for number in rank.seen.trained]
    assert Counter(records) == Counter(dict.fromkeys(records, EPOCHS))
    assert len(records) == EPOCHS * sum(counts.values())
    same_steps(ranks)
    fake.outcomes["training"].check_complete(EPOCHS)


@pytest.mark.parametrize(("rank", "wait_s"), [(0, PATIENCE_S), (1, 0.0)])
def test_the_first_rank_waits_for_the_master_where_no_rank_has_a_batch(rank: int, wait_s: float) -> None:
    """Else all would vote as fast as they can; and a report may be unanswered while a step is computed."""
    nothing = dict.fromkeys(("verdict", "bare", "failed", "preempted"), 0)
    counts = [Count(doing=(Doing.STEP,), batches=n, **nothing) for n in (1, 0, 0)]  # type: ignore[arg-type]
    waits, promised = list[float](), list[int]()

    class Voting(LockstepPass):
        def __init__(self) -> None:
            self._peers: Any = SimpleNamespace(rank=rank)
            self._stopwatch: Any = SimpleNamespace(wait_for_ranks=lambda wait: wait())
            self._passes: Any = SimpleNamespace(promise=lambda _, unanswered: promised.append(unanswered))
            self._error, self._vote = None, SimpleNamespace(wait=counts.pop)  # type: ignore[assignment]

        def _cast(self, wait_s: float = 0.0) -> None:
            waits.append(wait_s)
            self._vote = SimpleNamespace(wait=counts.pop)  # type: ignore[assignment]

        def __del__(self) -> None: ...

    voting = Voting()
    voting._promise(())
    count = voting._agree()
    assert count is not None
    assert (count.batches, waits, promised) == (1, [wait_s] * 2, [1])
