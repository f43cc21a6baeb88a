"""Frameworks whose loops do more with a loader than to go through it, and what does it right.

They are told by the module that asks for an iterator or a length. Nothing of them is imported.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from edl_torch.errors import EdlError, ForeignLoop

_LIGHTNING = (
    "Lightning's loop ends epochs by a length, reads ahead, and keeps no position that is its model's. Train "
    "on an ElasticDataLoader, and give it to callbacks=[ElasticCallback(loader)] of "
    "edl_torch.integrations.lightning; validate on a plain DataLoader over other data"
)
_ACCELERATE = (
    "accelerator.prepare() makes another loader of its dataset, which reads ahead, drops the position, and "
    "deals out or repeats records by rank. Train on prepare(accelerator, loader) of "
    "edl_torch.integrations.accelerate, with an ElasticDataLoader that accelerator.prepare() has not seen"
)
_RAY = (
    "Ray's prepare_data_loader() reads one batch ahead, so that batches would count before they are "
    "trained on. Leave it out, or give move_to_device=False: the records are shared out without it. "
    "Move each batch in the loop, to ray.train.torch.get_device()"
)
_TRANSFORMERS = (
    "a transformers Trainer fixes the steps of an epoch before it reads, skips batches when it resumes, "
    "and saves no data position: records would be lost or repeated. Declare class MyTrainer("
    "ElasticTrainer, Trainer), with edl_torch.integrations.transformers.ElasticTrainer, and give it "
    "elastic_loader=ElasticDataLoader(…), not train_dataset=; evaluate on a dataset of torch's own"
)
_DEEPSPEED = (
    "deepspeed.initialize(training_data=) makes a plain DataLoader of a dataset, which deals out records by "
    "rank. Leave training_data out: train on prepare(engine, loader) of edl_torch.integrations.deepspeed, "
    "with an ElasticDataLoader"
)
_TORCHTITAN = (
    "torchtitan reads all batches of a step before it trains on them, so that batches would count too early: "
    "give dataloader=ElasticLoader.Config(…) to an ElasticTrainer.Config, both of "
    "edl_torch.integrations.torchtitan"
)
_TORCHFT = (
    "a torchft Manager decides which steps count: call attach_manager(loader, manager) of "
    "edl_torch.integrations.torchft before the loop; evaluate on a plain DataLoader"
)
_LOOPS = {  # by the module, or the package, that asks
    "lightning.pytorch": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "accelerate": _ACCELERATE,
    "ray.train.torch.train_loop_utils": _RAY,
}
_TRAINERS = {  # by the module of what asks by way of others, with an attribute that its adapter has, if any
    "transformers.trainer": ("elastic_loader", _TRANSFORMERS),
    "torchtitan.trainer": ("dataloader.attach", _TORCHTITAN),
    "deepspeed.runtime.engine": ("", _DEEPSPEED),
}


def check_asked_by(frame: FrameType, what: str) -> None:
    """Raise ForeignLoop where `frame`, which begins to iterate `what`, is of such a framework."""
    check_no_trainer(frame)
    check_module(frame.f_globals.get("__name__", ""), what)


def raising(error: EdlError) -> Iterator[Any]:
    """Return an iterator that raises `error` in place of the first batch.

    Frameworks tear down what they have set up when `iter()` raises, and may hide its error by one of their
    own.
    """
    return map(_raise, [error])


def _raise(error: EdlError) -> NoReturn:
    raise error


def check_module(module: str, what: str) -> None:
    """Raise ForeignLoop where `module`, which begins to iterate `what`, is of such a framework."""
    for prefix, why in _LOOPS.items():
        if module == prefix or module.startswith(f"{prefix}."):
            raise ForeignLoop(f"{what} is iterated by {prefix} itself: {why}")


def check_no_trainer(frame: FrameType | None) -> None:
    """Raise ForeignLoop where a framework's trainer without its adapter is at work, around `frame`."""
    if sys.modules.keys().isdisjoint(_TRAINERS):
        return
    while frame is not None:
        attribute, why = _TRAINERS.get(frame.f_globals.get("__name__", ""), ("", ""))
        if why:
            if attribute and _has(frame.f_locals.get("self"), attribute):
                return
            raise ForeignLoop(why)
        frame = frame.f_back


def check_no_manager() -> None:
    """Raise ForeignLoop where this process has a manager of torchft's, whoever holds it."""
    torchft = sys.modules.get("torchft.manager")
    if torchft is None or not _is_alive(torchft.Manager):
        return
    gc.collect()  # one that nobody holds any more is none
    if _is_alive(torchft.Manager):
        raise ForeignLoop(_TORCHFT)


def _is_alive(kind: type) -> bool:
    return any(issubclass(type(value), kind) for value in gc.get_objects())


def _has(value: Any, path: str) -> bool:
    """Whether there is an attribute of an attribute."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is not None
