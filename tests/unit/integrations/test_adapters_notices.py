"""What the adapters for Lightning and Transformers do on a notice, without the frameworks.

`tests/with_lightning` and `tests/with_transformers` have the same with the frameworks themselves.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edl_torch import ElasticDataLoader
from edl_torch.integrations.transformers import _EndOnNotice


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
