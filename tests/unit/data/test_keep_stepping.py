"""Padding batches, steps that go on without data, and how many batches are done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loader_kit import session_at_once
from lockstep_kit import Rank, run_ranks
from torch import nn

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.data.loop.loader_methods import GradientMethods
from edl_torch.data.loop.lockstep_pass import FIRST_WAIT_S, PaddedPass
from edl_torch.data.weights import PaddingBatch, Statistics, Weights
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.testing import FakeMaster


def loader_of(records: int, fake: FakeMaster, **arguments: object) -> ElasticDataLoader:
    return ElasticDataLoader(
        range(records), 4, records_per_shard=4, master_client=fake, synchronous=False, **arguments
    )


def test_a_batch_stands_in_while_another_trainer_holds_the_rest() -> None:
    fake = FakeMaster()
    weight = torch.nn.Parameter(torch.zeros(8))
    with loader_of(8, fake) as other, loader_of(8, fake) as loader:
        loader.keep_stepping()
        steps = torch.optim.SGD([weight], lr=1.0)
        loader.attach(steps)
        theirs, mine = iter(other), iter(loader)
        held = next(theirs)
        weights = []
        for _ in range(3):
            batch = next(mine)
            assert len(batch) == 4
            steps.zero_grad()
            loader.weigh(weight[batch].mean().neg()).backward()
            steps.step()
            weights.append(loader.weight)
        assert weights == [4, 0, 0]
        assert list(theirs) == []  # it is done with what it held
        assert list(mine) == []
        assert loader.service.finished
    assert weight[held].tolist() == [0.0] * 4
    assert weight.sum() == 4
    fake.outcomes["training"].check_complete(1)


@pytest.mark.filterwarnings(r"ignore:4 record\(s\) of 'training'")  # as it is closed
def test_a_loop_that_would_get_padding_batches_for_ever_is_told_which_optimizer_never_steps() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    used, never = (torch.optim.SGD([weight], lr=1.0) for _ in range(2))

    fake = FakeMaster()

    def train() -> None:
        with loader_of(8, fake) as loader:
            loader.keep_stepping()
            loader.attach(used)
            loader.attach(never)
            for _ in loader:
                used.zero_grad()
                loader.weigh(weight.sum()).backward()
                used.step()

    never_stepped = r"SGD has never stepped.*loader\.detach\(optimizer\)"
    with loader_of(8, fake) as other:
        theirs = iter(other)
        assert len(next(theirs)) == 4  # which it holds
        with pytest.raises(AccountingError, match=never_stepped):
            train()


def test_what_comes_back_from_another_trainer_is_read() -> None:
    fake = FakeMaster()
    with loader_of(8, fake) as loader:
        loader.keep_stepping()
        other = loader_of(8, fake)
        theirs, mine = iter(other), iter(loader)
        next(theirs)
        first = next(mine).tolist()
        assert next(mine).tolist() == first
        assert loader.weight == 0
        other.close()
        second = next(mine).tolist()
        assert loader.weight == 4
        assert sorted(first + second) == list(range(8))
        assert list(mine) == []
    fake.outcomes["training"].check_complete(1)


def test_behind_a_wrapper_a_padding_batch_that_is_read_ahead_puts_no_statistics_back() -> None:
    fake = FakeMaster()
    norm = torch.nn.BatchNorm1d(1)
    with loader_of(8, fake) as other, loader_of(8, fake, lookahead="manual") as loader:
        loader.keep_stepping()
        loader.freeze_statistics(norm)
        theirs, mine = iter(other), iter(loader)
        next(theirs)
        batch = next(mine)
        loader.passed_on()
        padding = next(mine)
        norm(batch.float()[:, None])
        learnt = norm.running_mean.clone()
        next(mine)
        assert torch.equal(norm.running_mean, learnt)
        loader.passed_on()
        norm(padding.float()[:, None])
        loader.passed_on()
        assert torch.equal(norm.running_mean, learnt)


def test_a_padding_batch_leaves_running_statistics_as_they_were_when_the_loop_goes_on_or_ends() -> None:
    fake = FakeMaster()
    norm = torch.nn.BatchNorm1d(1)
    with loader_of(8, fake) as other, loader_of(8, fake) as loader:
        loader.keep_stepping()
        loader.freeze_statistics(norm)
        theirs, mine = iter(other), iter(loader)
        next(theirs)
        norm(next(mine).float()[:, None])
        learnt = norm.running_mean.clone()
        padding = next(mine)
        for goes_on in (lambda: next(mine), mine.close):
            assert loader.weight == 0
            norm(padding.float()[:, None])
            assert not torch.equal(norm.running_mean, learnt)
            goes_on()
            assert torch.equal(norm.running_mean, learnt)


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("more", [True, False])
def test_a_pass_without_a_step_settles_what_earlier_ones_left_unstepped(
    more: bool, is_over: bool, stepped: bool, padding: bool
) -> None:
    settled: list[bool] = []
    waits: list[float] = []
    looking = PaddedPass.__new__(PaddedPass)
    looking._padding = SimpleNamespace(made=padding)  # type: ignore[assignment]
    looking._stepped = stepped
    looking._passes = SimpleNamespace(  # type: ignore[assignment]
        look_for_more=lambda wait_s: waits.append(wait_s) or more,
        is_over=is_over,
        settle_stuck=lambda: settled.append(True),
    )
    looking._session = session_at_once()
    assert looking._more_to_read() is more
    assert bool(settled) == (is_over and not more and not stepped)
    assert waits == [0.0 if padding else FIRST_WAIT_S], "without a batch to pad with it can only wait"


# How many batches of an epoch are done: what a loop that goes on counts from --------------------------------


RECORDS, BATCH = 30, 2  # 15 batches an epoch: three windows of four, and three batches


def counted_loader(master: LocalMaster, **arguments: Any) -> ElasticDataLoader:
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
    with counted_loader(LocalMaster(), audit_dir=tmp_path) as loader:
        token, learnt = job.train(loader, counts_on=True, kill_after=kill_after)
    heir = Job()
    with counted_loader(LocalMaster(), audit_dir=tmp_path) as loader:
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
    with counted_loader(LocalMaster()) as loader:
        token, _ = job.train(loader, counts_on=True, kill_after=5)
    with counted_loader(LocalMaster()) as loader:
        loader.load_state_dict(token)
        with pytest.warns(UserWarning, match=r"enumerate\(loader, loader.batches_done\)"):
            Job().train(loader, counts_on=False)


def test_batches_that_wait_for_a_step_are_done_with() -> None:
    job = Job()
    with counted_loader(LocalMaster()) as loader:
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


# A padding batch is a copy, and leaves running statistics as they were --------------------------------------


def test_stand_ins_are_copies_of_the_first_batch() -> None:
    padding = PaddingBatch()
    assert not padding.made
    batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    padding.keep(batch)
    padding.keep({"x": torch.ones(2)})
    batch["x"] += 5  # the loop works in place
    given = padding.batch()
    assert torch.equal(given["x"], torch.zeros(2))
    given["x"] += 1
    assert torch.equal(padding.batch()["x"], torch.zeros(2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_batches_that_count(momentum: float | None, compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=momentum))
    called = torch.compile(model, backend="aot_eager") if compiled else model
    called(torch.randn(8, 2)).sum().backward()  # compiled before it is watched
    statistics = Statistics()
    statistics.watch(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    statistics.keep()
    loss = called(torch.full((8, 2), torch.nan)).sum()
    statistics.put_back()
    loss.backward()
    called(torch.randn(8, 2))
    statistics.let_go()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    called(torch.randn(8, 2))
    statistics.let_go()
    assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
    assert model.state_dict()["1.num_batches_tracked"] == 2


def test_a_norm_that_mixes_ranks_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(InvalidArgument, match="SyncBatchNorm"):
        Statistics().watch(model)


class Methods(GradientMethods):
    """Without a loader behind them."""

    def __init__(self) -> None:
        self._statistics = Statistics()
        self._weights = Weights()
        self.attached: list[Any] = []
        gradients = SimpleNamespace(optimizers=lambda: self.attached)
        self.service = SimpleNamespace(session=SimpleNamespace(gradients=gradients))


@pytest.mark.parametrize(
    "then", [lambda loader: loader.weigh(torch.zeros(1)), lambda loader: loader.scale_gradients()]
)
def test_running_statistics_are_put_back_where_a_padding_batch_was_passed_forward(
    then: Callable[[Methods], object],
) -> None:
    """Also by `scale_gradients`: checkpointed activations are computed again on the way back."""
    loader, norm = Methods(), nn.BatchNorm1d(1)
    loader.freeze_statistics(norm)
    loader._statistics.keep()
    norm(torch.tensor([[1.0], [3.0]]))
    assert norm.running_mean is not None
    assert norm.running_mean.item() > 0
    then(loader)
    assert norm.running_mean.item() == 0


def test_an_engine_that_scales_gradients_itself_is_refused_before_any_is_touched() -> None:
    loader = Methods()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    engine = SimpleNamespace(step=None, global_steps=0, gradient_accumulation_steps=None)
    with pytest.raises(InvalidArgument, match="DeepSpeed engine"):
        loader.scale_gradients(engine)  # type: ignore[arg-type]
    loader.attached = [engine]
    with pytest.raises(InvalidArgument, match="DeepSpeed engine"):
        loader.scale_gradients(optimizer)
