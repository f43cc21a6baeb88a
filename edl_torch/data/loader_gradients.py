"""The methods of an `ElasticDataLoader` for losses and gradients of ranks with unequal batches."""

from __future__ import annotations

from typing import Any

import torch

from edl_torch.data.padding import Statistics
from edl_torch.data.weights import Weights
from edl_torch.integrations.engines import check_not_hidden


class GradientMethods:
    """Hands each call on to the loader's weights and to the running statistics that it watches."""

    _weights: Weights
    _statistics: Statistics
    service: Any  # a DataShardService

    @property
    def weight(self) -> int:
        """Records in the batch in hand; 0 for a padding batch, or one that was reported as failed."""
        return self._weights.own

    def begin_batch(self, records: int) -> None:
        """Say, in a framework's loop that reads several batches before it trains on the first, that it begins
        with one of so many records: `weight` and `weigh` are of that one."""
        self._weights.step(records)

    def weigh(self, loss: torch.Tensor, count: float | torch.Tensor | None = None) -> torch.Tensor:
        """What to backpropagate: the batch's mean loss times its records, which is the sum over them.

        Where the loss is a mean over something else, `count` is how much that is: what the loss was divided
        by, as a number or a tensor of one (read at once: from an accelerator that waits for it). Tokens that
        are not ignored, the class weights' sum, boxes. Give it always or never.

        Of a padding batch, of one that has failed, and where `count` is 0, it is 0 and gives every parameter
        a gradient of exactly 0, whatever the loss was. Any shape; dtype and shape are kept. The batch counts
        for `scale_gradients` when the result is backpropagated, once for each batch, before the next one is
        asked for.
        """
        self._statistics.put_back()
        return self._weights.weigh(loss, count)

    def scale_gradients(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make gradients the mean over all records (or counts) of all ranks that were weighed since the last
        call.

        Call it once before each `step()`, for the optimizers that step: before clipping, and with a
        `GradScaler` after `unscale_(optimizer)`. Each optimizer has a window of its own: the batches
        backpropagated since its gradients were last scaled, or since `zero_grad()` made them None (zeros of
        `set_to_none=False` are not seen: what they threw away counts on). A second call for a window does
        nothing; a parameter of two optimizers is scaled once. With several optimizers, `service.attach` each
        before the loop: the first window of one that nobody knew of may be refused.

        On synchronous ranks all call it at the same point. Needs weighed losses, and a wrapper that averages
        over the ranks, as DDP does. Raises InvalidArgument where some batches were weighed with `count` and
        others without, and with an engine of DeepSpeed's.
        """
        check_not_hidden(*optimizers, *self.service.session.gradients.optimizers())
        self._statistics.put_back()
        self._weights.scale(*optimizers)

    def freeze_statistics(self, model: torch.nn.Module) -> None:
        """Let padding batches leave running statistics (batch norms) as they were.

        They are put back by `weigh`, `scale_gradients` and the next batch; the model may be compiled. Call it
        before the loop. Raises InvalidArgument for a model with SyncBatchNorm, which takes them into all
        ranks' statistics.
        """
        self._statistics.watch(model)
