"""What the audit says of trainers that were cut off, and of ranks that left a step.

Of all other loops the generated ones tell.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_kit import by_command
from loader_kit import AWAY, NumberReader, cut_off, stalled, stopped
from lockstep_kit import Rank, run_ranks
from torch.utils.data import DataLoader

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.testing import FakeMaster, wait_until

SIZE, BATCH = 40, 4
READER = NumberReader({"a": SIZE})
INEXACT, DELIVERED = 3, 4

pytestmark = pytest.mark.filterwarnings("ignore:a pass over:UserWarning")


def service(fake: FakeMaster, folder: Path, *, in_process: bool = True, **arguments: Any) -> DataShardService:
    client = fake.connect(in_process=in_process)
    arguments = {"records_per_shard": 8, **arguments}
    return DataShardService(BATCH, client, reader=READER, audit_dir=folder, **arguments)


def loader(trainer: DataShardService) -> ElasticDataLoader:
    return ElasticDataLoader(ShardedDataset(trainer, READER))


def finish(trainer: DataShardService) -> None:
    batches = loader(trainer)
    while not trainer.finished:
        for _ in batches:
            pass


class Sgd:
    """An optimizer that steps on batches of numbers."""

    def __init__(self) -> None:
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.register_step_post_hook = self._optimizer.register_step_post_hook
        self.param_groups = self._optimizer.param_groups

    def step(self) -> None:
        self._optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        self._optimizer.step()


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_batch_whose_lease_was_taken_back_while_the_loop_had_it_is_not_exact(tmp_path, capsys, in_process):
    fake = FakeMaster()
    stopped = service(fake, tmp_path, in_process=in_process)
    batches = iter(loader(stopped))
    next(batches)
    next(batches)
    fake.break_stream(stopped.session.id)
    fake.clock.advance(60)
    fake.expire()
    with service(fake, tmp_path, in_process=in_process) as heir:
        finish(heir)
    assert list(batches) == []  # it goes on, and learns that its leases are others'
    stopped.close()
    status, said = by_command(tmp_path, capsys)
    assert (status, said["repeated"], said["acknowledged"]) == (INEXACT, BATCH, SIZE)


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(**AWAY)


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("away", [stopped, cut_off, stalled])
def test_what_a_loop_trained_on_twice_is_counted(tmp_path, capsys, fake, away, in_process):
    """With three batches to a step no report tells the master, nor the log, of those that are lost."""
    seen: Counter[int] = Counter()
    with service(fake, tmp_path, in_process=in_process) as trainer:
        optimizer = Sgd()
        trainer.attach(optimizer)
        number = 0
        while not trainer.finished:
            for batch in loader(trainer):
                number += 1
                if number == 5:  # one batch of the next step, and one in hand
                    if not in_process:  # and a lease fetched ahead
                        wait_until(lambda: trainer.record_count > 8)
                    away(fake, trainer.session.id)
                seen.update(batch.tolist())
                if number % 3 == 0:
                    optimizer.step()
            optimizer.step()
    status, said = by_command(tmp_path, capsys)
    twice = [record for record, times in seen.items() if times > 1]
    assert len(twice) == 2 * BATCH
    assert (status, said["repeated"], said["void"]) == (INEXACT, len(twice), len(twice))
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("saved", ["before", "after"])
def test_synchronous_ranks_that_left_a_step_are_exact_if_they_go_back_before_it(tmp_path, capsys, saved):
    fake, tokens = FakeMaster(), []

    def left(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for step, _ in enumerate(rank.one_pass()):
            if step == 1 and saved == "before":
                tokens.append(rank.service.state_dict())
            if step == 2:
                break  # with a batch in hand on each rank
        if saved == "after":
            tokens.append(rank.service.state_dict())

    def resumed(rank: Rank) -> None:
        rank.service.load_state_dict(tokens[0])
        while not rank.service.finished:
            list(rank.one_pass())

    ranks = run_ranks(fake, 3, left, READER, audit_dir=tmp_path)
    in_hand = [len(batch) for rank in ranks for batch, weight in rank.seen.passes[-1][-1:] if weight]
    run_ranks(fake, 2, resumed, READER, audit_dir=tmp_path)
    status, said = by_command(tmp_path, capsys)
    assert (status, said["repeated"]) == ((DELIVERED, 0) if saved == "before" else (INEXACT, sum(in_hand)))
    assert (said["acknowledged"], said["lineage"]) == (SIZE, 3)


@pytest.mark.parametrize("is_left", [False, True])
def test_reports_counted_over_several_workers_are_not_exact(tmp_path, capsys, is_left):
    with service(FakeMaster(), tmp_path) as trainer:
        data = ShardedDataset(trainer, READER)
        for number, _ in enumerate(DataLoader(data, BATCH, num_workers=2, multiprocessing_context="fork")):
            trainer.report_batch_done()
            if is_left and number == 4:
                break
        trainer.abandon_pass()
        finish(trainer)
    status, said = by_command(tmp_path, capsys)
    assert (status, said["acknowledged"], said["lost"]) == (INEXACT, SIZE, 0)
    assert said["uncounted" if is_left else "counted"] > 0


@pytest.mark.parametrize("away", [cut_off, stalled])
def test_no_less_is_counted_than_a_plain_loop_trained_on_twice(tmp_path, capsys, fake, away):
    seen: Counter[int] = Counter()
    with service(fake, tmp_path, in_process=False) as trainer:
        while not trainer.finished:
            for number, batch in enumerate(DataLoader(ShardedDataset(trainer, READER), BATCH)):
                if number == 3:
                    away(fake, trainer.session.id)
                seen.update(batch.tolist())
                trainer.report_batch_done()
    status, said = by_command(tmp_path, capsys)
    twice = [record for record, times in seen.items() if times > 1]
    assert twice
    assert said["repeated"] >= len(twice), (sorted(twice), said)
    assert status == INEXACT
