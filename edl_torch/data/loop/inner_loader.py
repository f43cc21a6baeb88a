"""The `DataLoader` of torch inside an `ElasticDataLoader`, and its workers.

It is made when it first reads. It does not know when a batch has been trained on, nor what an epoch is.
"""

from __future__ import annotations

import multiprocessing
import pickle
import weakref
from collections.abc import Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from edl_torch.data.batches.convert import to_batch, to_tensors
from edl_torch.data.batches.transport import Envelope, IterationSetup, TicketedCollate
from edl_torch.data.dataset import ShardedDataset
from edl_torch.data.reading.worker_start import WorkerStart, end_by_kill, started_beside
from edl_torch.errors import InvalidArgument
from edl_torch.readers.base import has_batch_reads

_TORCHS_NAME = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"  # in its profiler's tables


def reads_here(loader: DataLoader[Any]) -> bool:
    """Whether nothing of torch's is needed: no worker, nor batches to be made or pinned."""
    return not (loader.num_workers or loader.pin_memory or loader.timeout or loader.batch_size is not None)


class ReadingHere(Iterator[Any]):
    """The dataset's batches, collated in this process.

    torch's iterator names each batch to its profiler, running or not: a tenth of what a small batch costs.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as each of torch's begins
        self._batches = map(loader.collate_fn, iter(loader.dataset))

    def __next__(self) -> Any:
        if not _profiler_enabled():
            return next(self._batches)
        with record_function(_TORCHS_NAME):
            return next(self._batches)


# The DataLoader inside --------------------------------------------------------------------------------


class InnerLoader:
    """Reads what the session of `dataset` has leases for, in batches with their tickets.

    `arguments` are torch's. A partial batch is never dropped here.
    """

    def __init__(
        self,
        dataset: ShardedDataset,
        batch_size: int | None,
        arguments: dict[str, Any],
        *,
        threads: int,
        ahead: int,
    ) -> None:
        self._dataset = dataset
        self._threads = threads
        self._ahead = ahead  # batches that threads may be ahead
        self._batch_size = batch_size
        self._arguments = arguments
        self._setup: IterationSetup | None = None
        self.loader: DataLoader[Any] | None = None
        self._working: weakref.ref[Any] | None = None  # torch's newest iterator with workers
        self.persistent_workers = bool(arguments.get("persistent_workers"))

    @property
    def columnar(self) -> bool:
        """Whether the reader makes the batches."""
        return self._batch_size is None and has_batch_reads(self._dataset.reader)

    def read(self) -> Iterator[Envelope]:
        if self.loader is None:
            self.loader = self._make()
        self._dataset.bind(self._setup)
        try:
            return self._start(self.loader)
        finally:
            self._dataset.bind(None)  # the iterator has it: the dataset may serve a plain DataLoader again

    def _start(self, loader: DataLoader[Any]) -> Iterator[Envelope]:
        if reads_here(loader):
            return ReadingHere(loader)
        if not loader.num_workers:
            return iter(loader)
        if not self.persistent_workers:
            self.end_workers()  # of an iterator that somebody keeps: its pass is over
        if self.persistent_workers and loader._iterator is not None:
            try:  # they are only told to begin anew, which may take as long as they like
                iterator: Any = iter(loader)
            except BaseException:
                self.end_workers()  # torch would take answers to this pass for batches of the next
                raise
        else:
            signal_handling._set_SIGCHLD_handler()  # torch does so in the main thread alone
            try:
                iterator = started_beside(
                    partial(_iterate, loader, _device()), loader.multiprocessing_context
                )
            except (pickle.PicklingError, AttributeError, TypeError) as exc:
                if self._start_method != "fork":
                    self._check_pickles(exc)
                raise
        end_by_kill(iterator)
        self._working = weakref.ref(iterator)
        return cast("Iterator[Envelope]", iterator)

    @property
    def _start_method(self) -> str:
        context = self._arguments.get("multiprocessing_context")
        return str(getattr(context, "_name", context) or multiprocessing.get_start_method())

    def _check_pickles(self, why: Exception) -> None:
        """Raise InvalidArgument for what cannot be sent to loader workers that are not forked."""
        own = vars(self._dataset)
        sent = {name: own.get(name) for name in ("transform", "target_transform")}
        sent |= {name: self._arguments.get(name) for name in ("collate_fn", "worker_init_fn")}
        sent["data"] = self._dataset.reader
        for name, value in sent.items():
            try:
                ForkingPickler.dumps(value)
            except (pickle.PicklingError, AttributeError, TypeError) as exc:
                raise InvalidArgument(
                    f"{name}= cannot be sent to loader workers that are started by {self._start_method!r}: "
                    f"{exc}. Have functions and classes at the top of a module, no lambda and none inside a "
                    f"function; or give multiprocessing_context='fork'"
                ) from why

    def _make(self) -> DataLoader[Any]:
        size, collate = self._batch_size, self._arguments.get("collate_fn")
        components = self._dataset.components
        by_default = partial(to_batch, components=components) if components else to_batch
        list_size = 0 if size is None or not self._dataset.makes_lists else size
        setup = IterationSetup(
            columnar=self.columnar,
            list_size=list_size,
            collate=by_default if collate is None else None,
            threads=self._threads,
            ahead=self._ahead,
        )
        self._setup = setup
        if collate is None:
            collate = to_tensors if size is None else by_default
        ticketed = TicketedCollate(collate, setup, batched=size is not None)
        arguments = {**self._arguments, "collate_fn": ticketed, "drop_last": False}
        if self._arguments.get("num_workers"):
            arguments["worker_init_fn"] = WorkerStart(self._arguments.get("worker_init_fn"))
            self._dataset.service.session.loaders.add(self)
        return DataLoader(self._dataset, batch_size=None if list_size else size, **arguments)

    def end_threads(self) -> None:
        self._dataset.end_reading()

    def end_workers(self) -> None:
        """End all workers: as the program exits torch would wait for those that are left, or complain."""
        iterator = None if self._working is None else self._working()
        if self.loader is not None:
            self.loader._iterator = None
        if iterator is not None:
            iterator._shutdown_workers()


def _device() -> int | None:
    """The GPU of this thread, for which torch pins memory; None where the program has none in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _iterate(loader: DataLoader[Any], device: int | None) -> Iterator[Any]:
    if device is not None:
        torch.cuda.set_device(device)
    return iter(loader)
