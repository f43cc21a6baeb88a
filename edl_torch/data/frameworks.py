"""Frameworks whose loops do more with a loader than to go through it, and what does it right.

They are told by the module that asks for an iterator or a length. Nothing of them is imported.
"""

from __future__ import annotations

import sys
from types import FrameType

from edl_torch.errors import ForeignLoop

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
_LOOPS = {  # by the module, or the package, that asks
    "lightning.pytorch": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "accelerate": _ACCELERATE,
    "ray.train.torch.train_loop_utils": _RAY,
}
_TRAINERS = {  # by the module of a loop that asks by way of others, with the attribute that its adapter has
    "transformers.trainer": ("elastic_loader", _TRANSFORMERS),
}


def check_asked_by(frame: FrameType, what: str) -> None:
    """Raise ForeignLoop where `frame`, which begins to iterate `what`, is of such a framework."""
    check_no_trainer(frame)
    check_module(frame.f_globals.get("__name__", ""), what)


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
            if hasattr(frame.f_locals.get("self"), attribute):
                return
            raise ForeignLoop(why)
        frame = frame.f_back
