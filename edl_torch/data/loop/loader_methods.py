"""What an `ElasticDataLoader` hands on: to its service, its session, its weights and its statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from edl_torch.client.optimizers import SteppingOptimizer, SteppingScaler
from edl_torch.client.service import DataShardService, Progress
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.data.dataset import ShardedDataset
from edl_torch.data.loop.notice import Notice
from edl_torch.data.weights import Statistics, Weights
from edl_torch.integrations.engines import check_not_hidden
from edl_torch.shard import Indices
from edl_torch.system.user_warnings import warn_user


class ServiceMethods:
    """Hands each call on to the service of `dataset`."""

    dataset: Any  # torch's; a ShardedDataset
    _weights: Weights
    _statistics: Statistics
    notice: Notice
    _came_to_the_end = False  # whether a loop over epochs() did

    @property
    def service(self) -> DataShardService:
        """Where the shards come from."""
        dataset: ShardedDataset = self.dataset
        return dataset.service

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the last one; without barrier the one it began in.

        Other than `service.epoch` it cannot move on between a look at it and the batch that it is about.
        """
        return self.service.session.passes.epoch

    @property
    def records(self) -> Indices:
        """Name and record number of each sample of the batch in hand, in its order.

        A lazy sequence of `(name, index)`, computed when it is asked for; empty for a padding batch.
        Behind a wrapper that reads `lookahead` batches ahead it is the one so many before the last.
        """
        return self.service.session.passes.records_in_hand()

    def epochs(self) -> Iterator[int]:
        """Go through the epochs that are left: `for epoch in loader.epochs(): for batch in loader: …`.

        Yields the number of the epoch that the next pass reads, until every record of every epoch has its
        outcome, here and at every other trainer. A loop that leaves an epoch early gets it again, but not
        once it has seen that it is `preempted`: then this ends too. Begun again when all is done, it warns.
        """
        is_again, has_begun = self._came_to_the_end, False
        while not (self.notice.seen or self.service.finished):
            has_begun = self.service.position.was_used = True
            yield self._running_epoch()
        self._came_to_the_end = not self.notice.seen
        if is_again and not has_begun and self._came_to_the_end:
            warn_user(
                f"all epochs of {self.service.dataset_name!r} are over, and this loop over them trains on "
                f"nothing, as it was run to its end before. To train more make another loader, with more "
                f"num_epochs; or go back to the beginning with loader.load_state_dict(None)"
            )

    def _running_epoch(self) -> int:
        """The epoch that the next pass reads; the same on all synchronous ranks, which ask together."""
        lockstep = self.service.session.lockstep
        return self.service.epoch if lockstep is None else self.service.position.epoch_of_all(lockstep)

    def attach(
        self, optimizer: SteppingOptimizer, *, scaler: SteppingScaler | None = None, one_model: str = ""
    ) -> None:
        """Acknowledge batches after each `optimizer.step()`; see `DataShardService.attach`."""
        self.service.attach(optimizer, scaler=scaler, one_model=one_model)

    def detach(self, optimizer: SteppingOptimizer) -> None:
        """Let an attached optimizer decide no more; see `DataShardService.detach`."""
        self.service.detach(optimizer)

    def stepped(self) -> None:
        """Say that the batches in hand were trained on, without an attached optimizer that steps on them."""
        self.service.report_batch_done()

    def passed_on(self) -> None:
        """Say, in a wrapper that reads ahead, that the oldest batch which it has read goes to its loop.

        For `lookahead="manual"`. Call it for each batch when the loop asks for it, and once more when it asks
        and none is left. What was read and not passed on is neither acknowledged nor lost. Synchronous ranks
        make these calls together.
        """
        batch = self.service.session.passed_on()
        self._statistics.let_go()
        if batch is None:
            self.service.position.agree_again()
            return
        self._weights.step(batch.records)
        if not batch.records:
            self._statistics.keep()

    def give_back(self, *, window: bool = False) -> None:
        """Say that the batch in hand was not trained on, as after a commit that failed: it is read again.

        With `window` so is every batch that was handed out and is not acknowledged: all that were gathered
        for a step which did not take place. With several attached optimizers some may have stepped on it.
        Raises AccountingError where the batch in hand was acknowledged already: call it before the last
        optimizer steps.
        """
        session = self.service.session
        session.run(session.passes.give_back(window=window))

    def state_dict(self) -> dict[str, Any]:
        """The data position, to be saved with the model; see `DataShardService.state_dict`."""
        return self.service.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | str | None) -> None:
        """Make the master go back to `state`; see `DataShardService.load_state_dict`."""
        self.service.load_state_dict(state)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Give a mixture other weights; see `DataShardService.set_weights`."""
        return self.service.set_weights(weights)

    def quarantined(self) -> list[QuarantinedRecord]:
        """The records that could not be read, of all trainers; see `DataShardService.quarantined`."""
        return self.service.quarantined()

    def progress(self) -> Progress:
        """How far all trainers are, and how long this one waits; see `DataShardService.progress`."""
        return self.service.progress()


class GradientMethods:
    """Hands each call on to the loader's weights and to the running statistics that it watches."""

    _weights: Weights
    _statistics: Statistics
    service: Any  # a DataShardService

    @property
    def weight(self) -> int:
        """Records in the batch in hand; 0 for a padding batch, or one that was reported as failed."""
        return self._weights.own

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
