"""Frameworks whose loops do more with a loader than to go through it, and what does it right.

They are told by the module that asks for an iterator. Nothing of them is imported.
"""

from __future__ import annotations

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
_LOOPS = {"lightning.pytorch": _LIGHTNING, "pytorch_lightning": _LIGHTNING, "accelerate": _ACCELERATE}


def check_asked_by(module: str, what: str) -> None:
    """Raise ForeignLoop where `module`, which begins to iterate `what`, is of such a framework."""
    for prefix, why in _LOOPS.items():
        if module == prefix or module.startswith(f"{prefix}."):
            raise ForeignLoop(f"{what} is iterated by {prefix} itself: {why}")
