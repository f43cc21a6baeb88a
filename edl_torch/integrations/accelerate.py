"""An `ElasticDataLoader` under Accelerate, by `prepare(accelerator, loader, optimizer)`.

Importing it imports Accelerate. It moves batches to the accelerator's device, tells Accelerate which batch is
the last, and keeps the data position in its states; what counts as trained on is the loader's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from edl_torch.data.loader import ElasticDataLoader
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.adapter import ModelPosition, check_synchronous, needed_by, read_ahead

with needed_by("accelerate"):
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState
    from accelerate.utils import send_to_device

__all__ = ["PreparedLoader", "prepare"]

StateMixin: Any = DataLoaderStateMixin


def prepare(accelerator: Any, loader: ElasticDataLoader, *optimizers: Any) -> PreparedLoader:
    """Prepare a loader for the accelerator; `accelerator.prepare(loader)` would read its data by itself.

    A batch counts once each of the optimizers has stepped on it: give every one that trains on it, prepared
    or not. The position is saved and loaded by `accelerator.save_state` and `load_state` from now on.

    Raises:
        InvalidArgument: a loader that is not synchronous where there are several processes, or no optimizer.
    """
    ranks: int = accelerator.num_processes
    check_synchronous(loader, ranks, f"Accelerate trains one model in {ranks} processes")
    if not optimizers:
        raise InvalidArgument(
            "prepare(accelerator, loader, optimizer) needs the optimizers that train on the loader: a batch "
            "counts when each of them has stepped on it"
        )
    read_ahead(loader)  # by one batch, so that Accelerate knows the last one
    for optimizer in optimizers:
        loader.attach(optimizer, scaler=accelerator.scaler)
    prepared = PreparedLoader(accelerator, loader, optimizers)
    accelerator.register_for_checkpointing(prepared)
    return prepared


class PreparedLoader(StateMixin):  # type: ignore[misc]
    """The batches of an `ElasticDataLoader` on an accelerator's device; made by `prepare`.

    Its first pass begins at the position that `accelerator.load_state` has loaded, or, where it has loaded
    none, at the beginning of the data. It may be given to `accelerator.prepare`, which leaves it as it is.
    """

    def __init__(self, accelerator: Any, loader: ElasticDataLoader, optimizers: Iterable[Any]) -> None:
        self._accelerator = accelerator
        self._loader = loader
        self._optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self.gradient_state = GradientState()
        self._drop_last = True  # no batch is filled up with records of others
        self._position = ModelPosition(loader)
        self._positions = 0  # how often it was moved

    def __repr__(self) -> str:
        return f"<PreparedLoader {self._loader!r}>"

    def __len__(self) -> int:
        """Batches of an epoch, as far as they can be told; see `ElasticDataLoader`."""
        return len(self._loader)

    def epochs(self) -> Iterator[int]:
        """Go through the epochs that are left, on all processes together.

        Yields the number of the epoch that the next pass reads, until every record of every epoch has its
        outcome. A loop that leaves an epoch early gets it again, but not once the program has seen that it is
        `preempted`: then this ends too.
        """
        self._begin()
        for epoch in self._loader.epochs():
            yield epoch
            if not self._loader.notice.seen:
                self._begin()

    def _begin(self) -> None:
        if self._position.begin():
            self._moved()

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        self.begin()
        position = self._positions
        self._position.leave()  # until it has ended
        try:
            batches = iter(self._loader)
            waiting = [batch for batch in (next(batches, self),) if batch is not self]
            while waiting:
                following = next(batches, self)
                self.end_of_dataloader = following is self
                self._loader.passed_on()
                yield self._on_device(waiting.pop())
                if position != self._positions:
                    return  # what was read ahead is of the position before
                if following is not self:
                    waiting.append(following)
            self._loader.passed_on()
            self._position.end()
        finally:
            self.end()

    def _on_device(self, batch: Any) -> Any:
        accelerator = self._accelerator
        if not accelerator.device_placement:
            return batch
        return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)

    # Synchronous ranks ------------------------------------------------------------------------------------

    def weigh(self, loss: Any, count: Any = None) -> Any:
        """What to give to `accelerator.backward`: see `ElasticDataLoader.weigh`."""
        # Accelerate divides every loss by the number of batches that it gathers.
        return self._loader.weigh(loss, count) * self._accelerator.gradient_accumulation_steps

    def scale_gradients(self, *optimizers: Any) -> None:
        """Make gradients the mean over all records of all ranks, before a step that is one.

        Call it before `clip_grad_norm_` and `optimizer.step()`; where Accelerate goes on gathering it does
        nothing. See `ElasticDataLoader.scale_gradients`.
        """
        if self._accelerator.sync_gradients:
            self._loader.scale_gradients(*optimizers)

    # Checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The data position. Synchronous ranks take it together, as Accelerate does."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go back to a position, or to the beginning, where a window begins.

        A loop that is under way ends with its batch. Gradients are thrown away: what had no step comes again.
        """
        self._position.load(state)
        self._moved()

    def _moved(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._accelerator.step = 0  # Accelerate keeps it by process, and another number of them may go on
        self._positions += 1
