"""How many batches of an epoch are done: what a loop that goes on counts from."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lockstep_kit import Rank, run_ranks

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.testing import FakeMaster

RECORDS, BATCH = 30, 2  # 15 batches an epoch: three windows of four, and three batches


def loader_of(master: LocalMaster, **arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(torch.arange(RECORDS), BATCH, num_epochs=2, master_client=master, **arguments)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("records", [1, 7, 8, 30])
def test_it_is_where_a_pass_goes_on(records: int, drop_last: bool) -> None:
    with ElasticDataLoader(
        range(records), 4, num_epochs=2, master_client=LocalMaster(), drop_last=drop_last
    ) as loader:
        for left in range(len(loader)):
            assert loader.batches_done == left
            batches = iter(loader)
            next(batches)
            loader.stepped()
            del batches
        # A rest that makes no batch is dropped when the next pass asks; then comes the next epoch.
        assert loader.batches_done == (len(loader) if drop_last and records % 4 else 0)


class Job:
    """The loop that everybody writes."""

    def __init__(self) -> None:
        self.learnt = torch.zeros(RECORDS, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.learnt], lr=1.0)

    def train(self, loader: ElasticDataLoader, *, counts_on: bool, kill_after: int = -1) -> Any:
        loader.attach(self.optimizer)
        steps = 0
        for _ in loader.epochs():
            for i, batch in enumerate(loader, loader.batches_done if counts_on else 0):
                (-self.learnt[batch].sum()).backward()  # type: ignore[no-untyped-call]
                if (i + 1) % 4 == 0 or i + 1 == len(loader):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    steps += 1
                    if steps == kill_after:
                        return loader.state_dict(), self.learnt.detach().clone()
        return None


@pytest.mark.parametrize("kill_after", range(1, 8))
def test_a_loop_that_steps_at_the_length_of_the_loader_learns_all_after_a_resume(
    kill_after: int, tmp_path: Any
) -> None:
    job = Job()
    with loader_of(LocalMaster(), audit_dir=tmp_path) as loader:
        token, learnt = job.train(loader, counts_on=True, kill_after=kill_after)
    heir = Job()
    with loader_of(LocalMaster(), audit_dir=tmp_path) as loader:
        loader.load_state_dict(token)
        with torch.no_grad():
            heir.learnt.copy_(learnt)
        heir.train(loader, counts_on=True)
        assert loader.service.finished
    assert heir.learnt.tolist() == [2.0] * RECORDS
    (verdict,) = audit([tmp_path])
    assert verdict.outcome is Outcome.PROVEN


def test_where_it_counts_from_0_the_warning_names_the_remedy() -> None:
    job = Job()
    with loader_of(LocalMaster()) as loader:
        token, _ = job.train(loader, counts_on=True, kill_after=5)
    with loader_of(LocalMaster()) as loader:
        loader.load_state_dict(token)
        with pytest.warns(UserWarning, match=r"enumerate\(loader, loader.batches_done\)"):
            Job().train(loader, counts_on=False)


def test_batches_that_wait_for_a_step_are_done_with() -> None:
    job = Job()
    with loader_of(LocalMaster()) as loader:
        loader.attach(job.optimizer)
        for i, _ in enumerate(loader):
            if i == 2:  # two are gathered, the third comes again
                break
        assert loader.batches_done == 2


def test_it_is_one_number_for_all_ranks() -> None:
    counted: list[tuple[int, int]] = []

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for step, _ in enumerate(rank.loader, rank.loader.batches_done):
            if step == 1:
                break
        counted.append((rank.loader.batches_done, len(rank.loader)))

    run_ranks(FakeMaster(), 2, work, {"a": 32}, records_per_shard=4)
    assert len(set(counted)) == 1


def test_a_loop_over_epochs_that_are_over_says_so_when_it_is_run_again() -> None:
    with ElasticDataLoader(range(4), 2, master_client=LocalMaster()) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [len(list(loader)) for _ in loader.epochs()] == [2]
        for _ in range(2):
            with pytest.warns(
                UserWarning, match=r"all epochs of 'training' are over.*load_state_dict\(None\)"
            ):
                assert list(loader.epochs()) == []
        loader.load_state_dict(None)
        assert [len(list(loader)) for _ in loader.epochs()] == [2]
