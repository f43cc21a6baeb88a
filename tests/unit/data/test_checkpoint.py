"""Checkpoints are whole or not there, and continue where they were taken."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loader_kit import NumberReader
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.data import checkpoint
from edl_torch.data.checkpoint import load_checkpoint, save_checkpoint
from edl_torch.errors import CheckpointError, InvalidArgument, StaleLease, TokenError
from edl_torch.testing import FakeMaster


class Job:
    """A trainer of a tiny model."""

    def __init__(self, count: int = 24) -> None:
        torch.manual_seed(1)
        reader = NumberReader({"n": count})
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.service = DataShardService(
            4, FakeMaster(), reader=reader, shuffle_shards=True, records_per_shard=4
        )
        self.service.attach(self.optimizer)
        self.loader = ElasticDataLoader(ShardedDataset(self.service, reader))
        self.seen: list[int] = []

    def steps(self, most: int = 1000) -> Iterator[int]:
        """Train; yields after each step."""
        for step, batch in enumerate(self.loader, 1):
            self.seen += batch.tolist()
            loss = self.model(batch.float()[:, None] / 24).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield step
            if step == most:
                return

    def train_another(self, model: nn.Linear) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.service.close()

    def save(self, directory: Path, **extra: Any) -> Path:
        return save_checkpoint(directory, self.model, self.optimizer, self.service, **extra)

    def load(self, directory: Path) -> dict[str, Any] | None:
        return load_checkpoint(directory, self.model, self.optimizer, self.service)


NewJob = Callable[..., Job]


@pytest.fixture
def new_job() -> Iterator[NewJob]:
    """Makes jobs; closes them."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Job(*arguments))


def test_a_resumed_job_ends_with_the_weights_of_one_never_interrupted(
    tmp_path: Path, new_job: NewJob
) -> None:
    whole = new_job()
    assert whole.load(tmp_path / "none") is None
    list(whole.steps())
    first = new_job()
    for step in first.steps(3):
        if step == 2:
            first.save(tmp_path, step=step, schedule={"lr": [0.1, torch.ones(2)]})
    second = new_job()
    extra = second.load(tmp_path)
    assert extra is not None
    assert extra["step"] == 2
    assert torch.equal(extra["schedule"]["lr"][1], torch.ones(2))
    list(second.steps())
    assert first.seen[:8] + second.seen == whole.seen
    assert torch.equal(second.model.weight, whole.model.weight)


@pytest.mark.parametrize(("keep", "kept"), [({}, 2), ({"keep": 3}, 3), ({"keep": 1}, 1), ({"keep": 0}, 1)])
def test_the_newest_are_kept(keep: dict[str, int], kept: int, tmp_path: Path, new_job: NewJob) -> None:
    job, folder = new_job(), tmp_path / "jobs" / "first"  # made with the first checkpoint
    for number in range(1, 5):
        assert job.save(folder, **keep).name == f"{number:08d}"
    assert sorted(os.listdir(folder)) == [f"{number:08d}" for number in range(5 - kept, 5)]


def test_what_was_half_written_is_ignored_and_removed(tmp_path: Path, new_job: NewJob) -> None:
    job = new_job()
    next(job.steps())
    job.save(tmp_path)
    half = tmp_path / "00000002.partial"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"cut")
    assert new_job().load(tmp_path) == {}
    job.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]


def test_a_checkpoint_counts_only_when_it_is_on_the_disk(
    tmp_path: Path, new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = new_job()
    first = job.save(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"00000002.*No space left on device \(rank 0\)$"):
            job.save(tmp_path)
    assert os.listdir(tmp_path) == [first.name]  # what was written goes: the disk may be full of it
    assert new_job().load(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, new_job: NewJob) -> None:
    (tmp_path / "file").write_text("")
    job = new_job()
    with pytest.raises(CheckpointError, match="file/checkpoints"):
        job.save(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_is_no_checkpoint_that_cannot_be_written_or_read(
    error: type[BaseException], tmp_path: Path, new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise error

    job = new_job()
    list(job.steps(1))
    job.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", interrupted)
        with pytest.raises(error):
            job.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", interrupted)
        with pytest.raises(error):
            new_job().load(tmp_path)


@pytest.mark.parametrize("call", ["os.rename", "shutil.rmtree"])
def test_a_checkpoint_that_ctrl_c_came_with_is_no_other_incarnations(
    call: str, tmp_path: Path, new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = {"os": os, "shutil": shutil}[call.partition(".")[0]], call.partition(".")[2]
    original = getattr(module, name)

    def interrupted(*arguments: Any) -> None:
        original(*arguments)
        if "00000002" in os.listdir(tmp_path):  # torch renames a file of its own before
            signal.raise_signal(signal.SIGINT)

    job = new_job()
    job.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.save(tmp_path, keep=1)
    assert "00000002" in os.listdir(tmp_path)
    assert job.save(tmp_path).name == "00000003"


def test_an_older_checkpoint_that_stays_is_named_and_the_new_one_is_saved(
    tmp_path: Path, new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    job = new_job()
    job.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", fails)
        with pytest.raises(CheckpointError, match=r"00000001' cannot be removed: .* busy\. '.*2' is saved$"):
            job.save(tmp_path, keep=1)
    assert job.save(tmp_path, keep=1).name == "00000003"
    assert os.listdir(tmp_path) == ["00000003"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path, new_job: NewJob) -> None:
    job = new_job()
    folder = job.save(tmp_path)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=f"{folder}.*cannot be read"):
        new_job().load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path, new_job: NewJob) -> None:
    new_job().save(tmp_path)
    other = new_job()
    other.train_another(nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match=r"Size mismatch .*model\.weight") as raised:
        other.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert "Give the model and the kind of optimizer that it was saved with" in str(raised.value)


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, new_job: NewJob) -> None:
    new_job().save(tmp_path)
    with pytest.raises(TokenError, match="25"):
        new_job(25).load(tmp_path)


@pytest.mark.parametrize("has_saved", [False, True])
def test_of_two_incarnations_that_are_alive_one_goes_on(
    has_saved: bool, tmp_path: Path, new_job: NewJob
) -> None:
    new_job().save(tmp_path)
    old, new = new_job(), new_job()
    old.load(tmp_path)
    if has_saved:
        old.save(tmp_path)
    new.load(tmp_path)
    last = new.save(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{last.name}.*another incarnation"):
        old.save(tmp_path)
    new.save(tmp_path)
    assert last.name in os.listdir(tmp_path)


def test_who_saves_at_the_same_time_does_not_overwrite(
    tmp_path: Path, new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_job(), new_job()
    first.load(tmp_path)
    second.load(tmp_path)
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        if Path(target).name == "00000001":
            monkeypatch.setattr(os, "rename", rename)
            second.save(tmp_path)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(CheckpointError, match=r"00000001.*another incarnation"):
        first.save(tmp_path)
    assert os.listdir(tmp_path) == ["00000001"]
    assert new_job().load(tmp_path) == {}


class WhenSaved:
    """Does something at the moment when a checkpoint's files are written."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __reduce__(self) -> Any:
        self._act()
        return int, (0,)


class SavesItself(nn.Linear):
    """A model that does something at that moment."""

    def __init__(self, *shape: int, act: Callable[[], object]) -> None:
        super().__init__(*shape)
        self.act = act

    def get_extra_state(self) -> Any:
        return WhenSaved(self.act)

    def set_extra_state(self, state: Any) -> None:
        return


def test_who_saves_while_another_one_does_is_told_so(tmp_path: Path, new_job: NewJob) -> None:
    """The other removes what this one has begun to write."""
    first, second = new_job(), new_job()
    first.load(tmp_path)
    second.load(tmp_path)
    first.train_another(SavesItself(1, 1, act=lambda: second.save(tmp_path)))
    with pytest.raises(CheckpointError, match=r"00000001' was saved by another incarnation"):
        first.save(tmp_path)


def restored_by_another(job: Job) -> None:
    """A replacement takes the data back."""
    fake = job.service.session.master
    assert isinstance(fake, FakeMaster)
    fake.go_back("training", None)


def test_files_that_somebody_removes_meanwhile_are_no_other_incarnations(
    tmp_path: Path, new_job: NewJob
) -> None:
    job = new_job()
    job.save(tmp_path)

    def remove() -> None:
        for half in tmp_path.glob("*.partial"):
            shutil.rmtree(half)

    job.train_another(SavesItself(1, 1, act=remove))
    with pytest.raises(CheckpointError, match=r"00000002\..*cannot be written: "):
        job.save(tmp_path)


def test_a_trainer_that_is_superseded_while_it_saves_leaves_no_checkpoint(
    tmp_path: Path, new_job: NewJob
) -> None:
    job = new_job()
    for _ in job.steps(1):
        with pytest.raises(StaleLease, match="lineage 2; the call is of lineage 1"):
            job.save(tmp_path, moment=WhenSaved(lambda: restored_by_another(job)))
        break
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".partial")] == []


def test_a_checkpoint_that_was_read_before_others_went_back_is_not_restored(
    tmp_path: Path, new_job: NewJob
) -> None:
    """What they have trained and saved since, its reader does not know."""
    job = new_job()
    for _ in job.steps(1):
        job.save(tmp_path)
        break
    late = new_job()
    late.service.close()
    late.service = DataShardService(
        4,
        job.service.session.master,
        reader=NumberReader({"n": 24}),
        shuffle_shards=True,
        records_per_shard=4,
    )
    late.model.register_load_state_dict_pre_hook(lambda *_: restored_by_another(job))
    with pytest.raises(StaleLease, match="taken back to a checkpoint by another trainer while this one read"):
        late.load(tmp_path)
    late.service.close()


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_a_look_at_an_optimizer_without_state_counts_nothing_as_trained_on(
    tmp_path: Path, whose: str
) -> None:
    """torch steps such an optimizer, to see what state it makes."""
    reader, fake, model = NumberReader({"n": 24}), FakeMaster(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DataShardService(4, fake, reader=reader, records_per_shard=4) as service:
        service.attach(optimizer)
        loader = ElasticDataLoader(ShardedDataset(service, reader))
        for batch in loader:
            if whose == "ours":
                save_checkpoint(tmp_path, model, optimizer, service)
            else:
                get_state_dict(model, optimizer)
            service.session.flush()
            assert fake.dataset_status("training").acknowledged == 0
            model(batch.float()[:, None]).sum().backward()
            optimizer.step()
            service.session.flush()
            assert fake.dataset_status("training").acknowledged == 4
            break


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """As if there were another rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_ranks_that_would_not_agree_on_a_checkpoint_are_refused(
    tmp_path: Path, new_job: NewJob, two_ranks: None
) -> None:
    job = new_job()
    for act in (job.load, job.save):
        with pytest.raises(InvalidArgument, match="2 ranks, and 1 of them"):
            act(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_others_are_removing_too_is_left_to_them(
    tmp_path: Path, new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "00000007.partial").mkdir()
    removed: list[bool] = []
    monkeypatch.setattr(
        checkpoint.shutil, "rmtree", lambda path, ignore_errors: removed.append(ignore_errors)
    )
    new_job().save(tmp_path)
    assert removed == [True]


class Unknown:
    """Nothing that a checkpoint may hold."""


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, new_job: NewJob) -> None:
    new_job().save(tmp_path, own=Unknown())
    with pytest.raises(pickle.UnpicklingError, match="Unknown"):
        new_job().load(tmp_path)
