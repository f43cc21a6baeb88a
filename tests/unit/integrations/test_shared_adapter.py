"""What the integrations share: batches that they pass on, notices, engines, and what is not installed."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from edl_torch import ElasticDataLoader
from edl_torch.errors import ConcurrentIteration, IntegrationUnavailable, InvalidArgument
from edl_torch.integrations.adapter import (
    ModelPosition,
    check_synchronous,
    needed_by,
    read_ahead,
)
from edl_torch.integrations.engines import EngineSteps, check_not_hidden, is_engine
from edl_torch.integrations.ray import master_client
from edl_torch.integrations.transformers import _EndOnNotice


class Loader:
    """A loader that only has a position."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.position = "here"

    def state_dict(self) -> str:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def test_what_is_missing_is_named_with_its_extra() -> None:
    with (
        pytest.raises(IntegrationUnavailable, match=r"no_such_module is missing.*edl-torch\[ray\]"),
        needed_by("ray"),
    ):
        importlib.import_module("no_such_module")


def test_a_model_begins_at_the_beginning_of_its_data_or_where_its_checkpoint_is() -> None:
    loader: Any = Loader()
    position = ModelPosition(loader)
    assert position.begin()
    assert not position.begin()
    position.load("checkpoint")
    assert not position.begin()
    assert loader.loaded == [None, "checkpoint"]


def test_what_a_loop_that_was_left_has_not_learnt_comes_again_and_else_nothing() -> None:
    loader: Any = Loader()
    position = ModelPosition(loader)
    position.begin()
    position.leave()
    assert position.begin()
    position.leave()
    position.end()
    assert not position.begin()
    assert loader.loaded == [None, "here"]


def records_of(loader: ElasticDataLoader) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("lookahead", [0, 2, "manual"])
def test_a_framework_that_reads_ahead_says_which_batch_its_loop_gets(lookahead: Any) -> None:
    with ElasticDataLoader(torch.arange(20), 4, num_epochs=2, lookahead=lookahead) as loader:
        left = iter(loader)
        next(left)
        read_ahead(loader)
        assert loader.service.lookahead == "manual"
        with pytest.raises(ConcurrentIteration):
            next(left)
        batches = iter(loader)
        assert [batch.tolist()[0] for batch in islice(batches, 4)] == [0, 4, 8, 12], (
            "what was left comes again"
        )
        for _ in range(3):
            loader.passed_on()
        assert loader.weight == 4
        assert loader.progress().acknowledged == 8, "its loop has the third, and nobody the fourth"
        read_ahead(loader, lookahead)
        assert loader.service.lookahead == lookahead
        if lookahead != "manual":
            assert records_of(loader) == list(range(8, 20))
            assert records_of(loader) == list(range(20))
            assert records_of(loader) == []  # what is read ahead counts when the next pass begins
            assert loader.progress().finished


def test_a_framework_reads_on_where_a_loop_with_a_number_has_ended() -> None:
    with ElasticDataLoader(torch.arange(12), 4, num_epochs=2, lookahead=1) as loader:
        assert records_of(loader) == list(range(12))
        read_ahead(loader)
        assert [batch.tolist() for batch in islice(loader, 1)] == [[0, 1, 2, 3]]
        loader.passed_on()
        assert loader.progress().acknowledged == 12, "the last one of the first epoch was trained on"


def test_loaders_that_do_not_fit_are_refused() -> None:
    with ElasticDataLoader(range(8), 4) as loader:
        check_synchronous(loader, 1, "one model")
        with pytest.raises(InvalidArgument, match="synchronous=True"):
            check_synchronous(loader, 2, "one model on 2 ranks")
    check_synchronous(SimpleNamespace(synchronous=True), 2, "one model on 2 ranks")  # type: ignore[arg-type]


# What the adapters for Lightning and Transformers do on a notice, without the frameworks --------------------


class SIGTERMException(SystemExit):
    """Lightning's."""


class ModelCheckpoint:
    """Lightning's, as far as a notice needs it."""

    CHECKPOINT_NAME_LAST = "last"
    save_weights_only = False

    def __init__(self, folder: Path, *, save_last: bool) -> None:
        self.folder = folder
        self.save_last = save_last
        self.last_model_path = ""

    def format_checkpoint_name(self, metrics: dict[str, Any], filename: str) -> str:
        return str(self.folder / f"{filename}.ckpt")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a stand-in for a framework's module; what was imported with it is forgotten afterwards."""

    def make(name: str, **attributes: Any) -> None:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    yield make
    sys.modules.pop("edl_torch.integrations.lightning", None)


@pytest.fixture
def loader() -> Iterator[ElasticDataLoader]:
    before = signal.getsignal(signal.SIGTERM)
    with ElasticDataLoader(range(20), batch_size=2) as loader:
        yield loader
    assert signal.getsignal(signal.SIGTERM) == before


def test_transformers_saves_after_the_step_and_does_not_evaluate(loader: ElasticDataLoader) -> None:
    notices = _EndOnNotice(loader)
    control = SimpleNamespace(should_save=False, should_evaluate=True, should_training_stop=False)
    notices.on_train_begin(None, None, control)
    notices.on_step_end(None, None, control)
    notices.on_epoch_end(None, None, control)
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (0, 1, 0)
    signal.raise_signal(signal.SIGTERM)
    notices.on_step_end(None, None, control)
    assert (control.should_save, control.should_evaluate, control.should_training_stop) == (1, 0, 1)
    control.should_save = control.should_evaluate = True  # as the Trainer's own callback has it
    notices.on_epoch_end(None, None, control)
    assert (control.should_save, control.should_evaluate) == (False, False)
    assert notices.ended


@pytest.mark.parametrize("save_last", [True, False])
def test_lightning_saves_at_the_end_of_the_window(
    stand_in: Any, loader: Any, save_last: bool, tmp_path: Path
) -> None:
    callbacks = SimpleNamespace(Callback=object, ModelCheckpoint=ModelCheckpoint)
    for name in ("lightning", "lightning.pytorch.utilities"):
        stand_in(name)
    stand_in("lightning.pytorch", callbacks=callbacks)
    stand_in("lightning.pytorch.utilities.exceptions", SIGTERMException=SIGTERMException)
    module = importlib.import_module("edl_torch.integrations.lightning")
    saved: list[tuple[str, int]] = []
    trainer = SimpleNamespace(
        callbacks=[],
        callback_metrics={},
        checkpoint_callbacks=[object(), ModelCheckpoint(tmp_path, save_last=save_last)],
        current_epoch=0,
        global_step=3,
        save_checkpoint=lambda path: saved.append((path, trainer.global_step)),
        strategy=SimpleNamespace(process_dataloader=None),
        world_size=1,
    )
    model = SimpleNamespace(automatic_optimization=True, training_step=lambda batch, batch_idx: None)
    callback = module.ElasticCallback(loader)
    callback.setup(trainer, model, "fit")
    (notices,) = trainer.callbacks
    others = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("Lightning's handler"))
    notices.on_train_start(trainer, model)
    notices.on_train_batch_end(trainer, model, None, None, 0)
    signal.raise_signal(signal.SIGTERM)
    notices.on_train_batch_end(trainer, model, None, None, 1)
    assert not saved, "in the midst of a window"
    trainer.global_step += 1
    with pytest.raises(SIGTERMException) as end:
        notices.on_train_batch_end(trainer, model, None, None, 2)
    assert end.value.code == 143
    assert saved == [(str(tmp_path / "last.ckpt"), 4)]
    callback.on_exception(trainer, model, end.value)
    signal.signal(signal.SIGTERM, others)  # Lightning puts back what it had found: ours
    assert trainer.callbacks == []


# Engines that step by themselves, with an optimizer's hooks -------------------------------------------------


class Engine:
    """One that accumulates two micro-batches."""

    def __init__(self) -> None:
        self.global_steps = self.micro_steps = 0

    def gradient_accumulation_steps(self) -> int:
        return 2

    def step(self) -> None:
        self.micro_steps += 1
        self.global_steps += self.micro_steps % 2 == 0


def watch(engine: Engine, told: list[str], name: str = "") -> EngineSteps:
    steps = EngineSteps(engine)
    steps.register_step_pre_hook(lambda *_: told.append(f"{name}before"))
    return steps.register_step_post_hook(lambda *_: told.append(f"{name}after"))


def test_the_hook_after_a_step_comes_at_the_end_of_an_accumulation() -> None:
    engine, told = Engine(), list[str]()
    watch(engine, told)
    for _ in range(4):
        engine.step()
    assert told == ["before", "before", "after"] * 2


def test_an_engine_steps_as_before_once_its_hooks_are_removed_as_often_as_they_were_registered() -> None:
    engine, told = Engine(), list[str]()
    steps = watch(engine, told)
    steps.remove()
    gc.collect()
    steps.remove()
    engine.step()
    assert told == []
    assert "step" not in vars(engine)


def test_others_that_watch_it_go_on() -> None:
    engine, told = Engine(), list[str]()
    first, _ = watch(engine, told, "1 "), watch(engine, told, "2 ")
    first.remove()
    engine.step()
    assert told == ["2 before"]


def test_what_is_no_engine_is_told_from_one_in_wrappers() -> None:
    assert not is_engine(object())
    check_not_hidden(object())
    wrapper = type("Wrapper", (), {"optimizer": Engine()})()
    with pytest.raises(InvalidArgument, match=r"prepare\(engine, loader\)"):
        check_not_hidden(object(), wrapper)


# What is said where the framework of an integration is not installed ----------------------------------------


def test_tensorflow_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not
    monkeypatch.delitem(sys.modules, "edl_torch.integrations.tensorflow", raising=False)
    with pytest.raises(IntegrationUnavailable, match=r"pip install 'edl-torch\[tensorflow\]'") as caught:
        import edl_torch.integrations.tensorflow  # noqa: F401
    assert isinstance(caught.value, ImportError)


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(IntegrationUnavailable, match=r"pip install 'edl-torch\[ray\]'"):
        master_client()
