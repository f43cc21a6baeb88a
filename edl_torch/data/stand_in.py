"""A batch for a rank that has none, while others have: the step must be taken by all.

It is a real batch seen before, so that every layer can compute it, and must leave no trace in the model:
`Weights` masks its loss, `freeze_statistics` keeps running statistics as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class StandIn:
    """Keeps a copy of the first batch, and gives out copies of that: loops may change batches in place."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._made = False

    @property
    def made(self) -> bool:
        """Whether there is one."""
        return self._made

    def keep(self, batch: Any) -> None:
        """Make one of this batch, unless there is one."""
        if not self._made:
            self._batch, self._made = copy.deepcopy(batch), True

    def batch(self) -> Any:
        """A batch to step on."""
        return copy.deepcopy(self._batch)


def freeze_statistics(model: nn.Module, when: Callable[[], bool]) -> list[Any]:
    """Keep the running statistics of batch norms as they are in forward passes for which `when()` is true.

    Returns the handles of the hooks, to remove them.
    """
    handles = []
    for module in model.modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            frozen = _Frozen(when)
            handles += [
                module.register_forward_pre_hook(frozen.before),
                module.register_forward_hook(frozen.after, always_call=True),
            ]
    return handles


class _Frozen:
    """One module's statistics around a forward pass, on copies: autograd keeps what it worked on."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self._when = when
        self._kept: dict[str, torch.Tensor] = {}

    def before(self, module: nn.Module, inputs: Any) -> None:
        self._kept = {}
        if self._when() and module.training:
            self._kept = dict(module.named_buffers(recurse=False))
            for name, buffer in self._kept.items():
                setattr(module, name, buffer.clone())

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, buffer in self._kept.items():
            setattr(module, name, buffer)
        self._kept = {}
