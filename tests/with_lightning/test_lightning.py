"""`ElasticCallback`: what Lightning's loop does with a loader, in one process."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_program import Remembers
from memory_model import BATCH, EPOCHS, RECORDS, Tally, each

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import CheckpointError, InvalidArgument
from edl_torch.integrations.lightning import ElasticCallback
from edl_torch.readers import MapDatasetReader


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def loader_of(**arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(
        torch.arange(RECORDS),
        batch_size=BATCH,
        shuffle=True,
        **{"num_epochs": EPOCHS, **arguments},
    )


def trainer_of(folder: Path, *callbacks: Callback, **arguments: Any) -> pl.Trainer:
    given = {"max_epochs": -1, "limit_val_batches": 0, "enable_checkpointing": False, **arguments}
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **given,
    )


class Epochs(Callback):
    """Notes Lightning's and the loader's epoch at each step, and how many records had been acknowledged."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.seen: list[tuple[int, int]] = []
        self.ends = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        learnt = sum(pl_module.learnt.values())
        assert self.loader.progress().acknowledged == learnt
        self.seen.append((trainer.current_epoch, self.loader.epoch))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ends += 1


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_record_of_every_epoch_is_learnt_once(
    num_workers: int, accumulate: int, tmp_path: Path
) -> None:
    model = Remembers()
    with loader_of(num_workers=num_workers) as loader:
        epochs = Epochs(loader)
        trainer = trainer_of(tmp_path, ElasticCallback(loader), epochs, accumulate_grad_batches=accumulate)
        trainer.fit(model, loader)
        assert loader.service.finished
        batches = -(-RECORDS // BATCH)
        assert epochs.seen == [(epoch, epoch) for epoch in range(EPOCHS) for _ in range(batches)]
        assert epochs.ends == EPOCHS
        assert trainer.global_step == EPOCHS * -(-batches // accumulate)
        assert loader.service.session.gradients.optimizers() == []
    assert model.learnt == each()


def test_validation_and_its_sanity_check_acknowledge_nothing(tmp_path: Path) -> None:
    class Validates(Remembers):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            looked.append(sum(self.learnt.values()) - loader.progress().acknowledged)

    looked: list[int] = []
    held_out = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    model = Validates()
    with loader_of(num_workers=1) as loader:
        trainer = trainer_of(
            tmp_path,
            ElasticCallback(loader),
            limit_val_batches=3,
            num_sanity_val_steps=2,
            val_check_interval=5,
            accumulate_grad_batches=4,
        )
        trainer.fit(model, loader, held_out)
        assert loader.service.finished
    assert looked == [0] * (2 + EPOCHS * 3 * 3)  # 18 batches of an epoch: after 5, 10 and 15
    assert model.learnt == each()


@pytest.mark.parametrize("source", ["module", "datamodule"])
def test_the_loader_may_come_from_a_hook(source: str, tmp_path: Path) -> None:
    class Gives(Remembers):
        def train_dataloader(self) -> Any:
            return loader

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

    model = Gives() if source == "module" else Remembers()
    with loader_of() as loader:
        trainer = trainer_of(tmp_path, ElasticCallback(loader))
        trainer.fit(model, datamodule=Data() if source == "datamodule" else None)
        assert loader.service.finished
    assert model.learnt == each()


class Two(Remembers):
    """Steps two optimizers by itself, the second one on every third batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.others = torch.nn.Parameter(torch.zeros(RECORDS, dtype=torch.float64))

    def configure_optimizers(self) -> Any:
        return [Tally(self.counts), Tally(self.others)]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        self.manual_backward(-self.counts[batch].sum() - self.others[batch].sum())
        often.step()
        often.zero_grad()
        if batch_idx % 3 == 2 or self.trainer.is_last_batch:
            seldom.step()
            seldom.zero_grad()


def test_with_manual_optimisation_a_batch_counts_once_every_optimizer_has_stepped(tmp_path: Path) -> None:
    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            assert loader.progress().acknowledged == int(pl_module.others.sum())

    model = Two()
    with loader_of() as loader:
        trainer_of(tmp_path, ElasticCallback(loader), Watch()).fit(model, loader)
        assert loader.service.finished
    assert model.learnt == each()
    assert torch.equal(model.others, model.counts)


def test_with_manual_optimisation_a_window_may_run_on_into_the_next_epoch(tmp_path: Path) -> None:
    class Windows(Remembers):
        gathered = 0

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.gathered += 1
            if self.gathered % 4 == 0:  # 18 batches an epoch
                optimizer.step()
                optimizer.zero_grad()

    model = Windows()
    with loader_of() as loader:
        epochs = Epochs(loader)
        trainer_of(tmp_path, ElasticCallback(loader), epochs).fit(model, loader)
        assert loader.service.finished
        assert epochs.ends == EPOCHS
    assert model.learnt == each()


def test_without_an_optimizer_of_lightnings_a_batch_counts_when_the_next_is_trained_on(
    tmp_path: Path,
) -> None:
    class Own(Remembers):
        def configure_optimizers(self) -> None:
            return None

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            assert loader.progress().acknowledged == sum(self.learnt.values())
            with torch.no_grad():
                self.counts[batch] += 1
            return self.loss(batch)

    model = Own()
    with loader_of() as loader:
        trainer_of(tmp_path, ElasticCallback(loader)).fit(model, loader)
        assert loader.service.finished
    assert model.learnt == each()


def test_a_scaler_that_skips_a_step_is_done_with_its_batch(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    class Overflows(Remembers):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * (torch.inf if batch_idx == 4 else 1.0)

    model = Overflows()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with loader_of(num_epochs=1) as loader:
        trainer_of(tmp_path, ElasticCallback(loader), plugins=[precision]).fit(model, loader)
        assert loader.service.finished
    assert sum(model.learnt.values()) == RECORDS - BATCH


def saving(folder: Path, **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", save_last=True, **arguments)


def test_a_job_that_stops_in_mid_epoch_goes_on_from_lightnings_checkpoint(tmp_path: Path) -> None:
    with loader_of() as loader:
        saves = saving(tmp_path, every_n_train_steps=7)
        trainer_of(tmp_path, ElasticCallback(loader), saves, enable_checkpointing=True, max_steps=8).fit(
            Remembers(), loader
        )
        assert not loader.service.finished
    model = Remembers()
    with loader_of() as loader:
        saves = saving(tmp_path, every_n_train_steps=7)
        trainer = trainer_of(tmp_path, ElasticCallback(loader), saves, enable_checkpointing=True)
        trainer.fit(model, loader, ckpt_path="last")
        assert loader.service.finished
        assert trainer.current_epoch == EPOCHS
    assert model.learnt == each()
    with loader_of() as loader:  # from the end there is nowhere to go
        trainer = trainer_of(tmp_path, ElasticCallback(loader), saving(tmp_path), enable_checkpointing=True)
        path = tmp_path / "over.ckpt"
        trainer.fit(again := Remembers(), loader)
        trainer.save_checkpoint(path)
        trainer_of(tmp_path, ElasticCallback(loader)).fit(again, loader, ckpt_path=path)
        assert again.learnt == each()


def test_a_model_that_asks_for_the_number_of_steps_begins_where_its_checkpoint_was(tmp_path: Path) -> None:
    class Asks(Remembers):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches in (-1, 8)  # Lightning has no length to count by
            return super().configure_optimizers()

    with loader_of() as loader:
        trainer = trainer_of(tmp_path, ElasticCallback(loader), max_epochs=EPOCHS, max_steps=8)
        trainer.fit(Asks(), loader)
        trainer.save_checkpoint(tmp_path / "eight.ckpt")
    model = Asks()
    with loader_of() as loader:
        epochs = EPOCHS + 1  # Lightning takes what `max_steps` cut off for a whole one
        trainer = trainer_of(tmp_path, ElasticCallback(loader), max_epochs=epochs)
        trainer.fit(model, loader, ckpt_path=tmp_path / "eight.ckpt")
        assert loader.service.finished
    assert model.learnt == each()


def test_a_second_fit_goes_on_and_testing_a_checkpoint_takes_nothing_back(tmp_path: Path) -> None:
    class Tests(Remembers):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            assert len(batch)

    model = Tests()
    with loader_of() as loader:
        callback = ElasticCallback(loader)
        first = trainer_of(tmp_path, callback, max_steps=5)
        first.fit(model, loader)
        first.save_checkpoint(tmp_path / "five.ckpt")
        done = loader.progress().acknowledged
        held_out = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
        first.test(Tests(), held_out, ckpt_path=tmp_path / "five.ckpt", verbose=False)
        assert loader.progress().acknowledged == done
        trainer_of(tmp_path, callback).fit(model, loader)
        assert loader.service.finished
    assert model.learnt == each()


@pytest.mark.parametrize(("accumulate", "at"), [(1, 4), (4, 6)])
def test_a_fit_that_is_interrupted_leaves_all_as_it_was(accumulate: int, at: int, tmp_path: Path) -> None:
    class Breaks(Remembers):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == at:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    model = Breaks()
    with loader_of() as loader:
        callback = ElasticCallback(loader)
        trainer = trainer_of(tmp_path, callback, accumulate_grad_batches=accumulate)
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(model, loader)
        assert loader.service.session.gradients.optimizers() == []
        assert "process_dataloader" not in vars(trainer.strategy)
        assert loader.progress().acknowledged == 4 * BATCH == sum(model.learnt.values())
        whole = Remembers()
        whole.load_state_dict(model.state_dict())
        trainer_of(tmp_path, callback, accumulate_grad_batches=accumulate).fit(whole, loader)
        assert loader.service.finished
    assert whole.learnt == each()


@pytest.mark.parametrize(("accumulate", "at"), [(1, 3), (4, 6)])
def test_a_batch_that_a_hook_skips_comes_again_with_its_window(
    accumulate: int, at: int, tmp_path: Path
) -> None:
    class Skips(Remembers):
        skipped = False

        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> int | None:
            if batch_idx == at and not self.skipped:
                self.skipped = True
                return -1  # Lightning leaves the epoch
            return None

    model = Skips()
    with loader_of() as loader:
        trainer_of(tmp_path, ElasticCallback(loader), accumulate_grad_batches=accumulate).fit(model, loader)
        assert loader.service.finished
    assert model.learnt == each()


def test_a_fit_that_is_stopped_within_a_window_goes_on_in_the_next(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, at: int) -> None:
            trainer.should_stop = at == 5

    model = Remembers()
    with loader_of() as loader:
        callback = ElasticCallback(loader)
        trainer_of(tmp_path, callback, Stops(), accumulate_grad_batches=4).fit(model, loader)
        assert sum(model.learnt.values()) == loader.progress().acknowledged == 4 * BATCH
        trainer_of(tmp_path, callback, accumulate_grad_batches=4).fit(model, loader)
        assert loader.service.finished
    assert model.learnt == each()


def test_epochs_of_a_limited_number_of_batches_are_parts_of_the_loaders(tmp_path: Path) -> None:
    model = Remembers()
    with loader_of(num_workers=2) as loader:
        trainer_of(tmp_path, ElasticCallback(loader), limit_train_batches=5).fit(model, loader)
        assert loader.service.finished
    assert model.learnt == each()


def test_max_epochs_that_end_before_the_data_warn(tmp_path: Path) -> None:
    model = Remembers()
    with loader_of() as loader:
        trainer = trainer_of(tmp_path, ElasticCallback(loader), max_epochs=1)
        with pytest.warns(UserWarning, match="max_epochs=1, and .* has more to train on"):
            trainer.fit(model, loader)
    assert model.learnt == each(1)


def test_max_epochs_as_many_as_those_of_the_data_are_fine(tmp_path: Path) -> None:
    model = Remembers()
    with loader_of() as loader:
        trainer_of(tmp_path, ElasticCallback(loader), max_epochs=EPOCHS).fit(model, loader)
    assert model.learnt == each()


# Notices ----------------------------------------------------------------------------------------------------


class Told(Callback):
    """Gets SIGTERM in the midst of a batch, and notes which batches have come to their ends."""

    def __init__(self, at: int, tell: Any = lambda: signal.raise_signal(signal.SIGTERM)) -> None:
        self.at = at
        self.tell = tell
        self.ended: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.at:
            self.tell()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, at: int) -> None:
        self.ended.append(at)


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize(("accumulate", "at", "last"), [(1, 5, 5), (1, 17, 17), (4, 5, 7), (4, 16, 17)])
def test_a_notice_saves_when_the_step_is_made_and_ends_the_program(
    accumulate: int, at: int, last: int, every: int, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    arguments = {"accumulate_grad_batches": accumulate, "enable_checkpointing": True}
    model = Remembers()
    with loader_of() as loader:
        told = Told(at)
        trainer = trainer_of(
            tmp_path, saving(tmp_path, every_n_train_steps=every), ElasticCallback(loader), told, **arguments
        )
        with pytest.raises(SIGTERMException) as end:
            trainer.fit(model, loader)
        assert end.value.code == 143
        assert told.ended == list(range(last + 1))  # though that callback comes after ours
        assert len(trainer.callbacks) == 3
        done = loader.progress().acknowledged
        assert done == sum(model.learnt.values()) == min((last + 1) * BATCH, RECORDS)
    assert signal.getsignal(signal.SIGTERM) == before
    model = Remembers()
    with loader_of() as loader:
        saves = saving(tmp_path, every_n_train_steps=every)
        trainer = trainer_of(tmp_path, ElasticCallback(loader), saves, **arguments)
        trainer.fit(model, loader, ckpt_path="last")
        assert loader.service.finished
        assert trainer.global_step == EPOCHS * -(-RECORDS // BATCH // accumulate)  # nothing was done twice
    assert model.learnt == each()
    assert [path.name for path in (tmp_path / "checkpoints").glob("last*")] == ["last.ckpt"]


def test_a_notice_of_the_programs_own_ends_it_too_and_where_nothing_is_saved_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loader_of() as loader:
        trainer = trainer_of(tmp_path, ElasticCallback(loader), Told(5, loader.preempt))
        with pytest.raises(SIGTERMException):
            trainer.fit(Remembers(), loader)
        assert loader.progress().acknowledged == 6 * BATCH
    assert "no ModelCheckpoint" in caplog.text


def test_lightnings_own_handler_is_not_called_and_the_programs_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        with loader_of() as loader:
            trainer = trainer_of(tmp_path, ElasticCallback(loader), Told(5))
            with pytest.raises(SIGTERMException):
                trainer.fit(Remembers(), loader)
            assert not trainer.received_sigterm  # by which Lightning would have ended this rank at once
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [1]


# Refused ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_position_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(Remembers(), torch.utils.data.DataLoader(torch.arange(RECORDS), batch_size=BATCH))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with loader_of() as loader, pytest.raises(CheckpointError, match="saved without ElasticCallback"):
        trainer_of(tmp_path, ElasticCallback(loader)).fit(
            Remembers(), loader, ckpt_path=tmp_path / "plain.ckpt"
        )


def test_windows_that_lightning_would_not_end_are_refused(tmp_path: Path) -> None:
    with loader_of() as loader, pytest.raises(InvalidArgument, match="leave out limit_train_batches"):
        trainer_of(tmp_path, ElasticCallback(loader), limit_train_batches=5, accumulate_grad_batches=4).fit(
            Remembers(), loader
        )


def test_another_loader_than_the_callbacks_is_refused(tmp_path: Path) -> None:
    with loader_of() as loader, pytest.raises(InvalidArgument, match="trains on something else"):
        trainer_of(tmp_path, ElasticCallback(loader)).fit(
            Remembers(), torch.utils.data.DataLoader(torch.arange(RECORDS), batch_size=BATCH)
        )


def test_a_step_that_reads_by_itself_is_refused(tmp_path: Path) -> None:
    class Reads(Remembers):
        def training_step(self, dataloader_iter: Any) -> None: ...

    with loader_of() as loader, pytest.raises(InvalidArgument, match="takes a batch"):
        trainer_of(tmp_path, ElasticCallback(loader)).fit(Reads(), loader)


def test_a_loader_without_the_callback_is_refused(tmp_path: Path) -> None:
    with loader_of() as loader, pytest.raises(InvalidArgument, match=r"ElasticCallback\(loader\)"):
        trainer_of(tmp_path).fit(Remembers(), loader)


def test_an_elastic_loader_is_not_for_validation(tmp_path: Path) -> None:
    class Validates(Remembers):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...

    with (
        loader_of() as loader,
        loader_of(dataset_name="held out") as held_out,
        pytest.raises(InvalidArgument, match="validate on a plain DataLoader"),
    ):
        trainer_of(tmp_path, ElasticCallback(loader), limit_val_batches=3).fit(Validates(), loader, held_out)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_plain_loader_over_a_sharded_dataset_is_refused(
    start: str, num_workers: int, tmp_path: Path
) -> None:
    reader = MapDatasetReader(range(RECORDS))
    with DataShardService(BATCH, reader=reader) as service:
        plain = torch.utils.data.DataLoader(
            ShardedDataset(service, reader),
            batch_size=BATCH,
            num_workers=num_workers,
            multiprocessing_context=start if num_workers else None,
        )
        with pytest.raises(InvalidArgument, match=r"ElasticCallback\(loader\)"):
            trainer_of(tmp_path, max_epochs=1).fit(Remembers(), plain)
        assert service.progress().acknowledged == 0


def test_several_ranks_need_a_synchronous_loader() -> None:
    with (
        loader_of() as loader,
        pytest.raises(InvalidArgument, match=r"one model on 2 ranks: .*synchronous=True"),
    ):
        ElasticCallback(loader).setup(SimpleNamespace(world_size=2), Remembers(), "fit")


class RestoresLate(SingleDeviceStrategy):
    """Loads a checkpoint when the model and its optimizers are set up, as for FSDP and DeepSpeed."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("asks", [True, False])
def test_a_position_that_comes_after_the_first_batch_was_read_is_refused(asks: bool, tmp_path: Path) -> None:
    class Asks(Remembers):
        def configure_optimizers(self) -> Any:
            if asks:
                _ = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    path = tmp_path / "four.ckpt"
    with loader_of() as loader:
        trainer = trainer_of(tmp_path, ElasticCallback(loader), max_epochs=EPOCHS + 1, max_steps=4)
        trainer.fit(Asks(), loader)
        trainer.save_checkpoint(path)
    model = Asks()
    with loader_of() as loader:
        strategy = RestoresLate(torch.device("cpu"))
        late = trainer_of(tmp_path, ElasticCallback(loader), max_epochs=EPOCHS + 1, strategy=strategy)
        if asks:
            with pytest.raises(InvalidArgument, match="begun to read before it loaded the checkpoint"):
                late.fit(model, loader, ckpt_path=path)
            return
        late.fit(model, loader, ckpt_path=path)
        assert loader.service.finished
    assert model.learnt == each()
