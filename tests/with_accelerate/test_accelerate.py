"""`prepare(accelerator, loader, optimizer)`: what Accelerate's loop does with a loader, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate_program import Remembers
from memory_model import BATCH, EPOCHS, RECORDS, Tally, each
from torch.utils.data import DataLoader

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ForeignLoop, InvalidArgument
from edl_torch.integrations.accelerate import PreparedLoader, prepare
from edl_torch.readers import MapDatasetReader


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader_of(**arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(
        torch.arange(RECORDS),
        batch_size=BATCH,
        shuffle=True,
        **{"num_epochs": EPOCHS, **arguments},
    )


class Job:
    """A model, its accelerator and its loader."""

    def __init__(self, loader: ElasticDataLoader, accumulate: int = 1) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.memory = Remembers()
        self.model, self.optimizer = self.accelerator.prepare(self.memory, Tally(self.memory.counts))
        self.batches = prepare(self.accelerator, loader, self.optimizer)
        self.loader = loader
        self.steps = 0

    def one_pass(self) -> Iterator[int]:
        """Train for an epoch; yields the number of each batch when it is over."""
        for number, batch in enumerate(self.batches):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).sum())
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.steps += self.accelerator.sync_gradients
            yield number

    def train(self) -> None:
        for _ in self.batches.epochs():
            for _ in self.one_pass():
                done = self.loader.progress().acknowledged
                assert done == sum(self.memory.learnt.values())


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_record_of_every_epoch_is_learnt_once(num_workers: int, accumulate: int) -> None:
    with loader_of(num_workers=num_workers) as loader:
        job = Job(loader, accumulate)
        job.train()
        assert loader.service.finished
        batches = -(-RECORDS // BATCH)
        assert len(job.batches) == batches
        assert job.steps == EPOCHS * -(-batches // accumulate)
    assert job.memory.learnt == each()


@pytest.mark.parametrize("after", [1, 6, 17])
def test_a_job_goes_on_from_accelerates_state(after: int, tmp_path: Path) -> None:
    with loader_of() as loader:
        job = Job(loader, 4)
        for number in job.one_pass():
            if number == after:
                job.accelerator.save_state(str(tmp_path))
                break
    _forget()
    with loader_of() as loader:
        job = Job(loader, 4)
        job.accelerator.load_state(str(tmp_path))
        job.train()
        assert loader.service.finished
    assert job.memory.learnt == each()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_state_that_is_loaded_in_mid_epoch_ends_the_loop(accumulate: int, tmp_path: Path) -> None:
    with loader_of() as loader:
        job = Job(loader, accumulate)
        job.accelerator.save_state(str(tmp_path))
        for number in job.one_pass():
            if number == 5:
                job.accelerator.load_state(str(tmp_path))
                assert job.accelerator.step == 0
        assert number == 5
        job.train()
        assert loader.service.finished
    assert job.memory.learnt == each()


@pytest.mark.parametrize("at", [5, 7])
def test_a_loop_that_is_left_gets_again_what_had_no_step(at: int) -> None:
    with loader_of() as loader:
        job = Job(loader, 4)
        left = False
        for _ in job.batches.epochs():
            for number in job.one_pass():
                if number == at and not left:
                    left = True
                    break
        assert loader.service.finished
    assert job.memory.learnt == each()


def test_a_loop_that_is_left_on_a_notice_gets_no_epoch_more() -> None:
    with loader_of() as loader:
        job = Job(loader, 4)
        for _ in job.batches.epochs():
            for number in job.one_pass():
                if number == 5:
                    loader.preempt()
                if loader.preempted:
                    break
        assert loader.progress().acknowledged == 4 * BATCH == sum(job.memory.learnt.values())


def test_accelerator_prepare_leaves_a_prepared_loader_alone() -> None:
    with loader_of() as loader:
        job = Job(loader)
        assert job.accelerator.prepare(job.batches) is job.batches
        job.train()
    assert job.memory.learnt == each()


def test_windows_of_accelerate_end_with_the_epoch_and_others_do_not_see_them() -> None:
    with loader_of(num_epochs=1) as loader:
        job = Job(loader, 4)
        state = GradientState()
        ends = [state.end_of_dataloader for _ in job.one_pass()]
        assert ends == [False] * (len(ends) - 1) + [True]
        assert not state.in_dataloader


def test_a_step_that_a_scaler_skips_is_done_with_its_batch() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as Accelerate has it on a GPU with fp16
    memory = Remembers()
    model, optimizer = accelerator.prepare(memory, Tally(memory.counts))
    with loader_of(num_epochs=1) as loader:
        batches = prepare(accelerator, loader, optimizer)
        for _ in batches.epochs():
            for number, batch in enumerate(batches):
                accelerator.backward(model(batch).sum() * (torch.inf if number == 4 else 1.0))
                optimizer.step()
                optimizer.zero_grad()
                assert loader.progress().acknowledged == min(RECORDS, (number + 1) * BATCH)
        assert loader.service.finished
    assert sum(memory.learnt.values()) == RECORDS - BATCH


# Plain use --------------------------------------------------------------------------------------------------


def test_a_loader_that_accelerate_has_not_seen_says_what_no_step_came_for() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    memory = Remembers()
    model, optimizer = accelerator.prepare(memory, Tally(memory.counts))
    with loader_of(lookahead=0, num_epochs=1) as loader:
        loader.attach(optimizer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in loader.epochs():
                for batch in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(batch).sum())
                        optimizer.step()
                        optimizer.zero_grad()
        assert loader.service.finished
    missing = RECORDS - sum(memory.learnt.values())
    assert missing  # of 18 batches the last two make no window
    assert [f"{missing} record(s)" in str(one.message) for one in said].count(True) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_elastic_loader_that_accelerate_prepares_is_refused(num_workers: int) -> None:
    with loader_of(num_workers=num_workers) as loader:
        prepared = Accelerator(cpu=True).prepare(loader)
        with pytest.raises(ForeignLoop, match=r"prepare\(accelerator, loader\)"):
            next(iter(prepared))
        assert loader.progress().acknowledged == 0


@pytest.mark.parametrize("dispatch", [True, False])
def test_a_plain_loader_over_a_sharded_dataset_is_refused(dispatch: bool) -> None:
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    reader = MapDatasetReader(range(RECORDS))
    with DataShardService(BATCH, reader=reader) as service:
        plain = DataLoader(ShardedDataset(service, reader), batch_size=BATCH)
        prepared = Accelerator(cpu=True, dataloader_config=config).prepare(plain)
        with pytest.raises(ForeignLoop, match=r"prepare\(accelerator, loader\)"):
            next(iter(prepared))
        assert service.progress().leased == 0


def test_a_shard_of_a_sharded_dataset_is_refused() -> None:
    from accelerate.data_loader import IterableDatasetShard

    reader = MapDatasetReader(range(RECORDS))
    with DataShardService(BATCH, reader=reader) as service:
        shard = IterableDatasetShard(ShardedDataset(service, reader), batch_size=BATCH, num_processes=2)
        with pytest.raises(ForeignLoop, match=r"prepare\(accelerator, loader\)"):
            next(iter(DataLoader(shard, batch_size=BATCH)))


def test_no_optimizer_is_refused() -> None:
    with loader_of() as loader, pytest.raises(InvalidArgument, match="needs the optimizers"):
        prepare(Accelerator(cpu=True), loader)


def test_several_processes_need_a_synchronous_loader() -> None:
    class Several:
        num_processes = 2

    with loader_of() as loader, pytest.raises(InvalidArgument, match=r"in 2 processes: .*synchronous=True"):
        prepare(Several(), loader, Tally(Remembers().counts))


def test_skipping_batches_of_a_prepared_loader_is_refused() -> None:
    with loader_of() as loader:
        job = Job(loader)
        assert isinstance(job.batches, PreparedLoader)
        with pytest.raises(AttributeError):
            job.accelerator.skip_first_batches(job.batches, 2)
