"""Ranks that hold one model in parts: all parts get the same batches, and one of them has leases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_kit import UNEVEN, NumberReader, PickingReader, all_records, numbers, trainer
from lockstep_kit import Failed, Rank, each, run_ranks, trained

from edl_torch.errors import InvalidArgument
from edl_torch.testing import FakeMaster


def test_a_new_job_begins_at_the_beginning_without_a_call() -> None:
    ranks = run_ranks(FakeMaster(), 4, lambda rank: list(rank.one_pass()), UNEVEN, parts=2)
    assert trained(ranks, 2) == each(1)


def test_only_holders_take_part_at_the_master() -> None:
    fake = FakeMaster()
    counts: list[tuple[int, int]] = []

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for _ in rank.one_pass():
            counts.append((rank.service.progress().trainers, len(fake.status().trainers)))

    run_ranks(fake, 4, work, UNEVEN, parts=2)
    assert set(counts) == {(2, 2)}


def test_a_part_that_took_part_before_says_goodbye() -> None:
    """Its loop asked the service for the number of records, before the loader was made."""
    fake = FakeMaster()

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        assert fake.dataset_status("training").trainers == 1
        list(rank.one_pass())

    ranks = run_ranks(fake, 2, work, UNEVEN, parts=2, joins_first=True)
    assert trained(ranks, 2) == each(1)


def test_a_part_knows_the_dataset_as_it_is_registered() -> None:
    fake = FakeMaster()
    found: dict[int, Any] = {}

    def work(rank: Rank) -> None:
        assert len(rank.loader) == -(-len(all_records()) // (4 * 2))
        rank.service.load_state_dict(None)
        for epoch in rank.loader.epochs():
            assert epoch == 0
            list(rank.one_pass())
        progress = rank.service.progress()
        found[rank.peers.rank] = rank.service.session.plan().spec, progress.acknowledged

    with trainer(fake, records_per_shard=5) as (service, _):
        assert service.size == len(all_records())
    run_ranks(fake, 4, work, UNEVEN, parts=2, records_per_shard=None)
    assert found == dict.fromkeys(range(4), found[0])
    assert found[3][0].records_per_shard == 5


def test_records_are_known_on_every_part() -> None:
    found: dict[int, list[list[tuple[str, int]]]] = {}

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        mine = found.setdefault(rank.peers.rank, [])
        for batch in rank.one_pass():
            mine.append(list(rank.loader.records) if rank.loader.weight else [])
            reader = NumberReader(UNEVEN)
            if rank.loader.weight:
                assert [reader.number(*record) for record in rank.loader.records] == batch

    run_ranks(FakeMaster(), 4, work, PickingReader(UNEVEN), parts=2, shuffle=True)
    assert found[0] == found[1]
    assert found[2] == found[3]


def test_a_loop_may_change_its_batches() -> None:
    seen: dict[int, list[list[int]]] = {}

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for batch in rank.loader:
            seen.setdefault(rank.peers.rank, []).append(numbers(batch))
            batch.fill_(-1)

    run_ranks(FakeMaster(), 2, work, UNEVEN, parts=2)
    assert seen[0] == seen[1]
    assert sorted(number for batch in seen[1] for number in batch) == sorted(all_records())


def test_parts_write_no_audit_log(tmp_path: Path) -> None:
    run_ranks(FakeMaster(), 4, Rank.train, UNEVEN, parts=2, audit_dir=tmp_path)
    assert len(list(tmp_path.glob("*.audit"))) == 2


# Gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [False, True])
def test_gradients_are_divided_by_the_records_of_models_not_of_parts(count: bool) -> None:
    """Batches of 4 and 2 records; by count, each part has a share of its model's tokens."""
    gradients: dict[int, float] = {}

    def work(rank: Rank) -> None:
        weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        rank.service.load_state_dict(None)
        for batch in rank.one_pass():
            value = float(sum(batch))
            tokens = 1 + rank.peers.rank
            loss = weight * (value / tokens if count else value / len(batch))
            rank.loader.weigh(loss, count=tokens if count else None).backward()
            rank.loader.scale_gradients(optimizer)
            assert weight.grad is not None
            gradients[rank.peers.rank] = float(weight.grad)

    ranks = run_ranks(FakeMaster(), 4, work, {"a": 6}, parts=2, records_per_shard=4)
    assert [rank.seen.steps for rank in ranks] == [[1]] * 4
    wanted = 2 * sum(range(6)) / (1 + 2 + 3 + 4) if count else sum(range(6)) / 6
    assert sum(gradients.values()) / 4 == pytest.approx(wanted, rel=1e-15)


def test_only_the_last_stage_of_a_pipeline_weighs() -> None:
    gradients: dict[int, float] = {}

    def work(rank: Rank) -> None:
        weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        rank.service.load_state_dict(None)
        for batch in rank.one_pass():
            if rank.peers.rank % 2:
                rank.loader.weigh(weight * (sum(batch) / len(batch))).backward()
            else:  # what the stage after it sends back
                (weight * sum(batch)).backward()
            rank.loader.scale_gradients(optimizer)
            assert weight.grad is not None
            gradients[rank.peers.rank] = float(weight.grad)

    run_ranks(FakeMaster(), 4, work, {"a": 6}, parts=2, records_per_shard=4)
    for stage in (0, 1):
        mean = (gradients[stage] + gradients[2 + stage]) / 2
        assert mean == pytest.approx(sum(range(6)) / 6, rel=1e-15)


# What goes wrong ----------------------------------------------------------------------------------------


def failing(ranks: set[int]) -> Any:
    """Work that reports the second batch as failed on these ranks."""

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for step, _ in enumerate(rank.one_pass()):
            if rank.peers.rank in ranks and step == 1:
                rank.service.report_batch_done(err_msg="NaN loss")
                assert rank.loader.weight == 0

    return work


def test_a_batch_that_all_parts_report_as_failed_is_quarantined_once() -> None:
    fake = FakeMaster()
    run_ranks(fake, 4, failing({0, 1}), UNEVEN, parts=2, max_bad_records=9)
    status = fake.dataset_status("training")
    assert status.quarantined == 4
    assert status.acknowledged == len(all_records()) - 4


@pytest.mark.parametrize("alone", range(2))
def test_a_batch_that_one_part_alone_reports_as_failed_ends_the_job(alone: int) -> None:
    with pytest.raises(Failed) as failed:
        run_ranks(FakeMaster(), 4, failing({alone}), UNEVEN, parts=2, max_bad_records=9)
    assert len(failed.value.errors) == 4
    assert "reported the batch in hand as failed, or gave it back" in str(failed.value.errors[1])


def test_a_batch_that_all_parts_give_back_is_read_again() -> None:
    fake = FakeMaster()
    given: list[list[int]] = []

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        while not rank.service.finished:
            for step, batch in enumerate(rank.one_pass()):
                if step == 0 and len(rank.seen.passes) == 1 and rank.peers.rank < 2:
                    rank.loader.give_back()
                    given.append(batch)

    # Each batch is a lease: giving one back takes along what follows it in its lease.
    ranks = run_ranks(fake, 4, work, {"a": 32}, parts=2, records_per_shard=4)
    assert given[0] == given[1]
    assert trained(ranks, 2) == Counter(range(32)) + Counter(given[0])
    fake.outcomes["training"].check_complete(1)


def test_a_part_has_no_shards_to_fetch() -> None:
    def work(rank: Rank) -> None:
        if rank.peers.rank:
            rank.service.fetch_shard()

    with pytest.raises(Failed, match="this rank holds no leases") as failed:
        run_ranks(FakeMaster(), 2, work, UNEVEN, parts=2)
    assert isinstance(failed.value.errors[1], InvalidArgument)


@pytest.mark.filterwarnings("ignore:loader.preempted is read outside of the main thread:UserWarning")
@pytest.mark.parametrize("told", range(4))
def test_a_notice_to_one_part_is_seen_by_all_at_the_same_batch(told: int) -> None:
    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for step, _ in enumerate(rank.one_pass()):
            if step == 1 and rank.peers.rank == told:
                rank.loader.preempt()
            if rank.loader.preempted:
                break

    ranks = run_ranks(FakeMaster(), 4, work, {"a": 64}, parts=2)
    assert len({tuple(rank.seen.steps) for rank in ranks}) == 1
    assert 2 <= ranks[0].seen.steps[0] <= 4
