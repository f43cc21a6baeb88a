"""Loaders under torchtitan's trainer, and the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_device  # noqa: F401  first: torchtitan looks for a device when it is imported
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from processes import quiet_port

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ForeignLoop, InvalidArgument
from edl_torch.readers import MapDatasetReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports are deprecated in many ways
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.trainer import Trainer

    from edl_torch.integrations.torchtitan import ElasticLoader, next_tokens

IGNORED = -100


@pytest.fixture(autouse=True)
def only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)
    where = f"tcp://127.0.0.1:{quiet_port()}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def loader_of(rows: Any, **config: Any) -> ElasticLoader:
    made = ElasticLoader.Config(**{"data": rows, "shuffle": False, **config})
    return made.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=None,
        seq_len=4,
        local_batch_size=4,
        snapshot_every_n_steps=None,
    )


ROWS = torch.arange(50).reshape(10, 5)  # two whole batches of four rows, and one of two


def test_a_record_is_a_row_of_tokens_each_labelled_with_the_next() -> None:
    inputs, labels = next_tokens([5, 6, 7], tokenizer=None, seq_len=4)
    assert inputs["input"].tolist() == [5, 6, 0, 0]
    assert inputs["positions"].tolist() == [0, 1, 2, 3]
    assert labels.tolist() == [6, 7, IGNORED, IGNORED]
    assert next_tokens({"tokens": [1, 2, 3, 4, 5]}, tokenizer=None, seq_len=4)[1].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("record", [[1], [1, 2, 3, 4, 5, 6], [[1, 2], [3, 4]], {"a": [1, 2], "b": [3, 4]}])
def test_what_is_no_row_is_refused(record: Any) -> None:
    with pytest.raises(InvalidArgument, match="row="):
        next_tokens(record, tokenizer=None, seq_len=4)


def test_a_loader_that_knows_no_optimizer_is_refused() -> None:
    dataloader = loader_of(ROWS)
    with dataloader.loader, pytest.raises(InvalidArgument, match=r"TitanTrainer\.Config"):
        next(iter(dataloader))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("plain", [False, True])
def test_a_loader_that_is_not_torchtitans_is_refused_under_its_trainer(plain: bool, num_workers: int) -> None:
    trainer = Trainer.__new__(Trainer)
    reader = MapDatasetReader(ROWS)
    with DataShardService(4, reader=reader) as service:
        dataset = ShardedDataset(service, reader)
        if plain:
            ours = StatefulDataLoader(dataset, batch_size=4, num_workers=num_workers)
        else:
            ours = ElasticDataLoader(dataset, num_workers=num_workers)

        class Theirs:
            def __iter__(self) -> Iterator[Any]:
                yield from ours

        for loader in (ours, Theirs()):
            with pytest.raises(ForeignLoop, match=r"ElasticLoader\.Config"):
                next(trainer.batch_generator(loader))
        assert not service.progress().acknowledged


def test_every_batch_is_whole_and_every_epoch_ends_with_a_step(optimizer: torch.optim.Optimizer) -> None:
    dataloader = loader_of(ROWS, num_epochs=2)
    dataloader.attach(optimizer)
    real = []
    for number, (inputs, labels) in enumerate(dataloader, 1):
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, 4)
        real.append(int((labels != IGNORED).any(dim=1).sum()))
        if number % 2 == 0:
            optimizer.step()
    assert real == [4, 4, 2, 0, 4, 4, 2, 0]
    assert dataloader.loader.service.finished
    assert dataloader.loader.progress().acknowledged == 20
    dataloader.loader.close()


def test_a_position_counts_whole_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    dataloader = loader_of(ROWS)
    dataloader.attach(optimizer)
    batches = iter(dataloader)
    beginning = dataloader.state_dict()
    next(batches)
    assert dataloader.loader.progress().acknowledged == 0
    next(batches)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.sum().backward()
    optimizer.step()
    dataloader.state_dict()
    assert dataloader.loader.progress().acknowledged == 8
    next(batches)
    dataloader.state_dict()
    assert dataloader.loader.progress().acknowledged == 8
    batches.close()
    dataloader.load_state_dict(beginning)
    assert next(iter(dataloader))[0]["input"][0].tolist() == [0, 1, 2, 3]
    dataloader.loader.close()


def test_a_window_of_shards_is_said_in_the_configuration(
    optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    rows = Path(tmp_path, "rows.parquet")
    pq.write_table(pa.table({"tokens": ROWS.tolist()}), rows, row_group_size=2)
    config = {"data": None, "dataset": str(rows), "shuffle": True, "shuffle_window": 3}
    dataloader = loader_of(None, **config)
    dataloader.attach(optimizer)
    firsts = []
    for inputs, _ in dataloader:
        firsts += inputs["input"][:, 0].tolist()
        optimizer.step()
    in_order = ROWS[:, 0].tolist()
    assert sorted(firsts[:10]) == in_order
    windows = [{number // 10 for number in firsts[start:end]} for start, end in ((0, 6), (6, 10))]
    assert [len(shards) for shards in windows] == [3, 2], "shards of two rows, three in a window"
    assert firsts[:6] != sorted(firsts[:6])
    dataloader.loader.close()


# The page ---------------------------------------------------------------------------------------------------


HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "torchtitan.md").read_text(encoding="utf-8")


def test_five_lines_of_torchtitans_own_configuration_change() -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert len(re.findall(r"^\+", block, re.M)) <= 5
    assert len(re.findall(r"^-", block, re.M)) <= 5


@pytest.mark.timeout(600)
def test_torchtitans_own_model_trains_to_the_end_of_the_data(tmp_path: Path) -> None:
    tokens = [[(7 * n + i) % 2048 for i in range(3 + n)] for n in range(11)]  # the last is short of its batch
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "rows.parquet")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    said = subprocess.run(
        [sys.executable, str(HERE / "page_trainer.py")],
        cwd=tmp_path,
        env=kept
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHDYNAMO_DISABLE": "1"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quiet_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == "5 22 True\n"
    assert (tmp_path / "checkpoint" / "step-5" / ".metadata").exists()
