"""`ElasticDataLoader`: a `DataLoader` whose consumption tells the master what was trained on.

One `for batch in loader` is one epoch, with whatever comes back from peers that die. It does not read
records and does not speak to the master; the session does.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

from edl_torch.client.service import DataShardService
from edl_torch.client.session import Session
from edl_torch.client.tickets import ticket_size
from edl_torch.data.collate import Envelope, TicketedCollate
from edl_torch.data.columns import tensors_of
from edl_torch.data.dataset import Feed, ShardedDataset
from edl_torch.errors import ConcurrentIteration, InvalidArgument, LoaderWorkerDied, ServiceClosed

WORKER_DIED = "DataLoader worker (pid"  # how torch begins to say it, in each of its three ways
_FROM_SERVICE: Any = object()
_ELSEWHERE = {
    "shuffle": "order is set by shuffle= at the dataset and shuffle_shards=, shuffle= at the service",
    "sampler": "the master decides who reads what",
    "batch_sampler": "the master decides who reads what",
}


class ElasticDataLoader(DataLoader[Any]):
    """A `DataLoader` over a `ShardedDataset`, with its arguments; `batch_size` comes from the service.

    A batch is acknowledged when the next one is asked for, or when the attached optimizer has stepped.
    Batches arrive as `collate_fn` made them. With `batch_size=None` the reader makes the batches where it
    has `read_batch`, of the service's `batch_size` records each; else samples arrive one by one.

    `len(loader)` is the epoch's records over the batch size; an estimate where several trainers share them.

    Raises:
        InvalidArgument: an argument that decides the order, or a `batch_size` other than the service's.
    """

    def __init__(
        self, dataset: ShardedDataset, batch_size: int | None = _FROM_SERVICE, **kwargs: Any
    ) -> None:
        if not isinstance(dataset, ShardedDataset):
            raise InvalidArgument(
                f"ElasticDataLoader takes a ShardedDataset or ImageDataset, not "
                f"{type(dataset).__name__}: wrap the reader in one"
            )
        _check_arguments(kwargs)
        service = dataset.service
        if batch_size is _FROM_SERVICE:
            batch_size = service.batch_size
        if batch_size is not None and batch_size != service.batch_size:
            raise InvalidArgument(f"batch_size is {service.batch_size} at the service: leave it out here")
        if batch_size is None and kwargs.get("drop_last"):
            raise InvalidArgument("drop_last needs batches made by the loader: leave out batch_size=None")
        super().__init__(dataset, batch_size=batch_size, **kwargs)
        self._arguments = kwargs
        self._inner: DataLoader[Any] | None = None
        self._feed: Feed | None = None
        self._live: weakref.ref[_Pass] | None = None

    @property
    def service(self) -> DataShardService:
        """Where the shards come from."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return dataset.service

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the last one; without barrier the one it began in.

        Other than `service.epoch` it cannot move on between a look at it and the batch that it is about.
        """
        return self.service.session.elastic.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        live = None if self._live is None else self._live()
        if live is not None and live.going_on:
            raise ConcurrentIteration(
                "an iterator over this loader is alive: finish it, break out of its loop, or call "
                "loader.close()"
            )
        iterator = _Pass(self, self.service.session)
        self._live = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        size = self.service.size
        if self.batch_size is None and not self._columnar:
            return size
        batch = self.service.batch_size
        return size // batch if self.drop_last else -(-size // batch)

    @property
    def _columnar(self) -> bool:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return self.batch_size is None and dataset.makes_batches

    def close(self) -> None:
        """End an iteration that is under way: what the loop has not finished with goes back."""
        live = None if self._live is None else self._live()
        if live is not None:
            live.close()

    def read(self) -> Iterator[Envelope]:
        """Begin to read what the session has leases for; the inner loader never drops a partial batch."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if self._inner is None:
            self._feed = Feed(columnar=self._columnar)
            batched = self.batch_size is not None
            collate = TicketedCollate(
                self._user_collate(), self._feed.tally, self._feed.generators, batched=batched
            )
            arguments = {**self._arguments, "collate_fn": collate, "drop_last": False}
            self._inner = DataLoader(dataset, batch_size=self.batch_size, **arguments)
        dataset.bind(self._feed)
        try:
            return iter(self._inner)
        finally:
            dataset.bind(None)  # the iterator has it: the dataset may serve a plain DataLoader again

    def _user_collate(self) -> Callable[[Any], Any]:
        given: Callable[[Any], Any] | None = self._arguments.get("collate_fn")
        if given is not None:
            return given
        return tensors_of if self.batch_size is None else default_collate


def _check_arguments(kwargs: dict[str, Any]) -> None:
    for name, why in _ELSEWHERE.items():
        if kwargs.pop(name, None) not in (None, False):
            raise InvalidArgument(f"ElasticDataLoader takes no {name}: {why}")


class _Pass(Iterator[Any]):
    """One iteration over the loader: inner passes until the master says that the epoch is over."""

    _closed = True

    def __init__(self, loader: ElasticDataLoader, session: Session) -> None:
        self._loader = loader
        self._session = session
        self._passes = session.elastic
        self._batch_size = loader.batch_size if loader.drop_last else None
        self._inner: Iterator[Envelope] | None = None
        self._pid = os.getpid()
        self._number = self._passes.open()
        self._closed = False  # last: without a pass there is nothing to close

    @property
    def going_on(self) -> bool:
        """Whether it may still hand out batches: not closed, and no token was loaded meanwhile."""
        return not self._closed and self._passes.is_open(self._number)

    def __next__(self) -> Any:
        if not self.going_on:
            self._end_early()
        going_on = False
        try:
            self._passes.batch_requested()
            envelope = self._next_envelope()
            going_on = envelope is not None
        except RuntimeError as exc:
            if str(exc).startswith(WORKER_DIED):
                raise self._name_records(exc) from exc
            raise
        finally:
            if not going_on:
                self.close()
        if envelope is None:
            raise StopIteration
        return envelope.batch

    def _end_early(self) -> NoReturn:
        closed, self._closed = self._closed, True
        self._let_go()
        if self._session.closed and not closed:
            raise ServiceClosed("the DataShardService was closed while its loader was being iterated")
        raise StopIteration

    def _next_envelope(self) -> Envelope | None:
        while True:
            if self._inner is None:
                if not self._passes.more_to_read():
                    return None
                self._inner = self._loader.read()
            for envelope in self._inner:
                if self._is_crumb(envelope):
                    self._passes.crumble(envelope.ticket)
                elif self._passes.hand(envelope.ticket):
                    return envelope
            self._inner = None

    def _name_records(self, exc: RuntimeError) -> LoaderWorkerDied:
        broken = self._session.broken_streams(timeout_s=1.0)
        where = "; ".join(f"{stream} was at {records}" for stream, records in sorted(broken.items()))
        return LoaderWorkerDied(
            f"{str(exc).rstrip('. ')}. {where or 'It held no record'}. Nothing was put in quarantine: those "
            f"records go back to the master and are read again"
        )

    def _is_crumb(self, envelope: Envelope) -> bool:
        return self._batch_size is not None and ticket_size(envelope.ticket) < self._batch_size

    def close(self) -> None:
        """End the pass; a batch in hand that is not finished with goes back."""
        if self._closed:
            return
        self._closed = True
        try:
            self._passes.close(self._number)  # first: workers that wait for a lease hear of it
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """End the workers now: where the loop raised, its traceback would keep them, and the garbage
        collector can take 5 s for each."""
        inner, self._inner = self._inner, None
        shut_down = getattr(inner, "_shutdown_workers", None)
        if shut_down is not None and not self._loader.persistent_workers:
            shut_down()

    def __del__(self) -> None:
        # A forked child has a copy of this object, and no business with the trainer's pass.
        if not self._closed and self._pid == os.getpid():
            self.close()
