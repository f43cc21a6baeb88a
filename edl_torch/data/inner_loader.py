"""The `DataLoader` of torch inside an `ElasticDataLoader`, and its workers.

It is made when it first reads. It does not know when a batch has been trained on, nor what an epoch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from edl_torch.data.collate import Envelope, TicketedCollate
from edl_torch.data.convert import to_batch, to_tensors
from edl_torch.data.dataset import Feed, ShardedDataset


class InnerLoader:
    """Reads what the session of `dataset` has leases for, in batches with their tickets.

    `arguments` are torch's. A partial batch is never dropped here.
    """

    def __init__(self, dataset: ShardedDataset, batch_size: int | None, arguments: dict[str, Any]) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._arguments = arguments
        self._feed: Feed | None = None
        self.loader: DataLoader[Any] | None = None
        self.persistent_workers = bool(arguments.get("persistent_workers"))

    @property
    def columnar(self) -> bool:
        """Whether the reader makes the batches."""
        return self._batch_size is None and self._dataset._makes_batches

    def read(self) -> Iterator[Envelope]:
        """Begin to read."""
        if self.loader is None:
            self.loader = self._make()
        self._dataset._bind(self._feed)
        try:
            return iter(self.loader)
        finally:
            self._dataset._bind(None)  # the iterator has it: the dataset may serve a plain DataLoader again

    def _make(self) -> DataLoader[Any]:
        size = self._batch_size
        list_size = 0 if size is None or not self._dataset._makes_lists else size
        self._feed = Feed(columnar=self.columnar, list_size=list_size)
        collate = TicketedCollate(
            self._user_collate(), self._feed.tally, self._feed.generators, batched=size is not None
        )
        arguments = {**self._arguments, "collate_fn": collate, "drop_last": False}
        if self.persistent_workers:
            self._dataset.service._take_along(self)
        return DataLoader(self._dataset, batch_size=None if list_size else size, **arguments)

    def _user_collate(self) -> Callable[[Any], Any]:
        given: Callable[[Any], Any] | None = self._arguments.get("collate_fn")
        if given is not None:
            return given
        return to_tensors if self._batch_size is None else to_batch

    def end_workers(self) -> None:
        """End persistent workers; torch complains of those that are left when the program exits."""
        if self.loader is None:
            return
        iterator: Any
        iterator, self.loader._iterator = self.loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()
