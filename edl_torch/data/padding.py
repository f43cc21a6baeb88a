"""Padding batch for a rank that has none while others have: all must take the step.

It is a real batch seen before, so that every layer can compute it, and must leave no trace in the model:
`Weights` masks its loss, `Statistics` puts running statistics back.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from edl_torch.errors import InvalidArgument


class PaddingBatch:
    """Keeps a copy of the first batch, and gives out copies of that: loops may change batches in place."""

    def __init__(self) -> None:
        self._batch: Any = None
        self.made = False  # whether there is one

    def keep(self, batch: Any) -> None:
        """Make one of this batch, unless there is one."""
        if not self.made:
            self._batch, self.made = copy.deepcopy(batch), True

    def batch(self) -> Any:
        """A batch to step on."""
        return copy.deepcopy(self._batch)


class Statistics:
    """Running statistics of batch norms, which a padding batch must not change.

    They are put back after its forward passes, not kept from changing in them: hooks of modules do not run in
    what `torch.compile` has made of them.
    """

    def __init__(self) -> None:
        self._norms: list[nn.Module] = []
        self._kept: list[tuple[nn.Module, str, torch.Tensor]] = []

    def watch(self, model: nn.Module) -> None:
        """Take those of `model` along. Raises InvalidArgument for layers that mix ranks."""
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        if any(isinstance(module, nn.SyncBatchNorm) for module in norms):
            raise InvalidArgument(
                "SyncBatchNorm takes padding batches into the statistics, and the gradients, of all ranks: "
                "use BatchNorm, which keeps to its rank, or a norm without batches, such as GroupNorm"
            )
        known = {id(module) for module in self._norms}
        self._norms += [norm for norm in norms if id(norm) not in known]

    def keep(self) -> None:
        """A padding batch goes to the loop."""
        self._kept = [
            (norm, name, buffer.clone()) for norm in self._norms for name, buffer in norm.named_buffers()
        ]

    def put_back(self) -> None:
        """Its forward passes are over; there may be more of them."""
        for norm, name, value in self._kept:
            # Through `data`: a backward pass that is still to come does not need what is overwritten.
            getattr(norm, name).data.copy_(value)

    def let_go(self) -> None:
        """The batch is over."""
        self.put_back()
        self._kept = []
