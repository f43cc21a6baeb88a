"""The loop of docs/deepspeed.md trains, saves and goes on, as it stands; what it says of plain use is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.ops
import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import AccountingError, CheckpointError, ForeignLoop, InvalidArgument
from edl_torch.integrations.deepspeed import prepare
from edl_torch.readers import MapDatasetReader

PAGE = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text("utf-8")
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
RECORDS = [(torch.rand(2), n % 2) for n in range(438)]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    deepspeed.init_distributed("gloo")


def engine_of(accumulate: int = 1, **more: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulate}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **more)
    return engine


@pytest.fixture
def loader() -> Iterator[ElasticDataLoader]:
    with ElasticDataLoader(MapDatasetReader(RECORDS), 4, num_epochs=2) as made:
        yield made


def test_the_loop_trains_and_goes_on(tmp_path: Path) -> None:
    steps = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "criterion": torch.nn.functional.cross_entropy,
            "config": {"train_micro_batch_size_per_gpu": 4},
            "reader": MapDatasetReader(RECORDS),
        }
        exec(compile(BLOCK, "docs/deepspeed.md", "exec"), names)
        assert names["loader"].service.finished
        steps.append(names["engine"].global_steps)
        names["loader"].close()
    assert steps == [220, 220]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step200"


def test_the_checkpoint_that_is_loaded_has_a_name_at_any_time(
    loader: ElasticDataLoader, tmp_path: Path
) -> None:
    """`latest` is another file each time: DeepSpeed empties it first, and a death leaves it empty then."""
    engine = engine_of()
    prepare(engine, loader)
    engine.save_checkpoint(str(tmp_path), "one")
    (tmp_path / "before").hardlink_to(tmp_path / "latest")
    engine.save_checkpoint(str(tmp_path), "two")
    assert (tmp_path / "before").read_text() == "one"
    assert (tmp_path / "latest").read_text() == "two"
    engine.save_checkpoint(str(tmp_path), "three", save_latest=False)
    assert (tmp_path / "latest").read_text() == "two"


def test_five_lines_change() -> None:
    """Two imports, the loader, what is made of it, and the loop over epochs; the rest is DeepSpeed's."""
    ours = re.findall(r"^.*(?:edl_torch|ElasticDataLoader\(|prepare\(|\.epochs\(\)).*$", BLOCK, re.M)
    assert len(ours) == 5


def test_a_short_batch_weighs_what_it_has(loader: ElasticDataLoader) -> None:
    engine = engine_of()
    losses = []
    backward = engine.backward
    engine.backward = lambda loss, **_: losses.append(float(loss)) or backward(loss)
    batches = prepare(engine, loader)
    assert len(batches) == 110
    for points, _ in batches:
        engine.backward(engine(points).sum() * 0 + 1.0)
        engine.step()
    assert losses == [1.0] * 109 + [0.5]


def test_an_accumulation_that_the_epoch_cuts_is_filled_up_with_nothing(loader: ElasticDataLoader) -> None:
    engine = engine_of(accumulate=4)
    batches = prepare(engine, loader)
    seen = 0
    for _ in batches.epochs():
        for points, _ in batches:
            seen += 1
            loss = engine(points).sum()
            engine.backward(loss * torch.inf if batches._filling else loss)
            engine.step()
            assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
    assert seen == 224
    assert engine.global_steps == 56
    assert loader.progress().acknowledged == 2 * len(RECORDS)


def test_an_engine_goes_on_with_another_loader(loader: ElasticDataLoader) -> None:
    """The first one's weights are no more in its losses."""
    engine = engine_of()
    losses = []
    backward = engine.backward
    engine.backward = lambda loss, **_: losses.append(float(loss)) or backward(loss)
    for records in (RECORDS[:6], RECORDS[6:12]):
        with ElasticDataLoader(MapDatasetReader(records), 4) as one:
            for points, _ in prepare(engine, one):
                engine.backward(engine(points).sum() * 0 + 1.0)
                engine.step()
            assert one.progress().acknowledged == 6
    batches = prepare(engine, prepare(engine, loader).loader)
    points, _ = next(iter(batches))
    engine.backward(engine(points).sum() * 0 + 1.0)
    assert losses == [1.0, 0.5, 1.0, 0.5, 1.0]


def test_two_engines_train_on_one_loader(loader: ElasticDataLoader) -> None:
    engines = [engine_of(), engine_of()]
    batches = [prepare(engine, loader) for engine in engines]
    for points, _ in batches[0]:
        for engine in engines:
            engine.backward(engine(points).sum())
            engine.step()
    assert loader.progress().acknowledged == len(RECORDS)


def test_a_loop_that_is_left_before_it_trains_on_a_batch_gets_it_again(loader: ElasticDataLoader) -> None:
    engine = engine_of(accumulate=4)
    batches = prepare(engine, loader)
    for number, (points, _) in enumerate(batches):
        if number == 2:
            break
        train(engine, points)
    for points, _ in batches:
        train(engine, points)
    assert engine.global_steps == 28
    assert loader.progress().acknowledged == len(RECORDS)


def train(engine: Any, points: torch.Tensor) -> None:
    engine.backward(engine(points).sum())
    engine.step()


# Plain use --------------------------------------------------------------------------------------------------


def test_training_data_of_ours_is_refused(loader: ElasticDataLoader) -> None:
    reader = MapDatasetReader(RECORDS)
    with DataShardService(4, reader=reader) as service:
        for data in (ShardedDataset(service, reader), loader):
            with pytest.raises(ForeignLoop, match=r"training_data.*edl_torch\.integrations\.deepspeed"):
                engine_of(training_data=data)


def test_a_loop_on_one_rank_is_exact(loader: ElasticDataLoader) -> None:
    engine = engine_of()
    for _ in loader.epochs():
        for points, _ in loader:
            engine.backward(engine(points).sum())
            engine.step()
    assert loader.progress().acknowledged == 2 * len(RECORDS)


def test_several_ranks_have_to_say_that_they_step_together(
    loader: ElasticDataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(InvalidArgument, match="synchronous=True"):
        next(iter(loader))


def test_gradients_of_an_engine_are_not_scaled_by_hand(loader: ElasticDataLoader) -> None:
    engine = engine_of()
    loader.attach(engine)
    points, _ = next(iter(loader))
    engine.backward(loader.weigh(engine(points).sum()))
    for optimizer in (engine, engine.optimizer, SimpleNamespace(optimizer=engine)):
        with pytest.raises(InvalidArgument, match=r"prepare\(engine, loader\)"):
            loader.scale_gradients(optimizer)


def test_prepare_wants_ranks_that_step_together(loader: ElasticDataLoader) -> None:
    engine = engine_of()
    engine.dp_world_size = 2
    with pytest.raises(InvalidArgument, match="synchronous=True"):
        prepare(engine, loader)


def test_several_engines_of_which_one_accumulates_are_refused(loader: ElasticDataLoader) -> None:
    prepare(engine_of(accumulate=2), loader)
    with pytest.raises(InvalidArgument, match="gradient_accumulation_steps of 1"):
        prepare(engine_of(), loader)


def test_a_loop_left_in_an_accumulation_is_not_begun_again(loader: ElasticDataLoader) -> None:
    """The batch in hand would come again, and is in the gradients."""
    engine = engine_of(accumulate=4)
    batches = prepare(engine, loader)
    for points, _ in batches:
        train(engine, points)
        break
    with pytest.raises(AccountingError, match="left in the midst of an accumulation"):
        next(iter(batches))


def test_a_checkpoint_is_not_loaded_into_an_accumulation(loader: ElasticDataLoader, tmp_path: Path) -> None:
    engine = engine_of(accumulate=4)
    batches = prepare(engine, loader)
    for number, (points, _) in enumerate(batches):
        train(engine, points)
        if number == 3:
            engine.save_checkpoint(str(tmp_path))
        if number == 5:
            break
    with pytest.raises(AccountingError, match="in the midst of an accumulation"):
        engine.load_checkpoint(str(tmp_path))


def test_a_pipeline_engine_is_refused(loader: ElasticDataLoader) -> None:
    pipeline = PipelineEngine.__new__(PipelineEngine)
    torch.nn.Module.__init__(pipeline)
    pipeline.__dict__.update(global_steps=0, dp_world_size=1)
    with pytest.raises(InvalidArgument, match=r"PipelineEngine.*train_batch"):
        prepare(pipeline, loader)
    with pytest.raises(InvalidArgument, match=r"PipelineEngine.*train_batch"):
        loader.attach(pipeline)


def test_a_checkpoint_without_a_position_is_refused(loader: ElasticDataLoader, tmp_path: Path) -> None:
    engine_of().save_checkpoint(str(tmp_path / "theirs"))
    engine = engine_of()
    batches = prepare(engine, loader)
    with pytest.raises(CheckpointError, match="no data position"):
        engine.load_checkpoint(str(tmp_path / "theirs"))
    engine.load_checkpoint(str(tmp_path / "theirs"), load_module_only=True)
    engine.load_checkpoint(str(tmp_path / "theirs"), None, True, True, True, True)
    assert len(next(iter(batches))[1]) == 4
