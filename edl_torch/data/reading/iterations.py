"""Iterations over plain DataLoaders: which one a loader worker serves, and how many batches it has delivered.

torch tells neither. Seeds repeat from one iteration to the next, and process ids do not group workers. But
the iterator is on the stack while it starts a worker, and it counts the batches that it hands out.
This must not know what a pass is, nor what a report proves.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from edl_torch.client.workers.links import PlainIterations
from edl_torch.integrations.frameworks import check_module
from edl_torch.trainer.counting import DeliveredBatches, Deliveries

_OF_TORCH = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)


class Iteration(DeliveredBatches):
    """One iterator of a DataLoader. It does not keep the iterator alive, but remembers its last count."""

    def __init__(
        self, iterator: _BaseDataLoaderIter, loader: DataLoader[Any] | None, number: int, asked_by: str
    ) -> None:
        state = vars(iterator)
        known = type(iterator) in _OF_TORCH
        super().__init__(_batch_size(state) if known else 0, drop_last=known and state["_drop_last"])
        self.number = number
        self.run = f"{os.getpid()}:{number}"
        self.asked_by = asked_by  # the module that iterates the DataLoader
        self.counts_records = self.batch_size > 0 and _yields_records(state["_dataset"])
        self._loader = None if loader is None else weakref.ref(loader)
        self._state: dict[str, Any] = state
        self._iterator = weakref.ref(iterator, self._forget)

    def __repr__(self) -> str:
        return f"<Iteration {self.run} batches={self.batches} {'over' if self.is_over else 'going on'}>"

    @property
    def batches(self) -> int:
        """Batches delivered, in the present round where workers are persistent."""
        delivered: int = self._state.get("_num_yielded", 0)
        return delivered

    @property
    def is_over(self) -> bool:
        """Whether its iterator is gone."""
        return self._iterator() is None

    def _forget(self, _: object) -> None:
        """The iterator is gone: let go of what it had in its queues."""
        self._state = {"_num_yielded": self.batches}

    def renew_workers(self) -> None:
        """Let the loader start new workers the next time: torch would wait for the dead one each time."""
        loader = None if self._loader is None else self._loader()
        if loader is not None and loader._iterator is self._iterator():
            loader._iterator = None


def _batch_size(state: dict[str, Any]) -> int:
    """Samples in a whole batch; 0 where a loader of another make decides."""
    return int(getattr(state["_index_sampler"], "batch_size", 0)) if state["_auto_collation"] else 1


def _yields_records(dataset: object) -> bool:
    """Whether a sample is a record: not where another dataset, or a subclass, lies between."""
    return bool(getattr(dataset, "makes_lists", False))


class Iterations(PlainIterations):
    """Those that this process began. There is one for all, as for fork handlers."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.newest = 0
        self._of: weakref.WeakKeyDictionary[_BaseDataLoaderIter, Iteration] = weakref.WeakKeyDictionary()
        self._by_run: weakref.WeakValueDictionary[str, Iteration] = weakref.WeakValueDictionary()
        self._forking = threading.local()
        self.served = ""  # the run that this loader worker serves; empty in a process that is none

    def __repr__(self) -> str:
        return f"<Iterations newest={self.newest} alive={len(self._of)}>"

    # In the process that iterates -------------------------------------------------------------------------

    def number(self, run: str) -> int:
        process, _, number = run.partition(":")
        return int(number) if number and process == str(os.getpid()) else 0

    def is_over(self, run: str) -> bool:
        if not self.number(run):
            return False
        iteration = self._by_run.get(run)
        return iteration is None or iteration.is_over

    def deliveries(self, run: str) -> Deliveries | None:
        iteration = self._by_run.get(run)
        return iteration if iteration is not None and iteration.counts_records else None

    def check(self, run: str) -> None:
        iteration = self._by_run.get(run)
        if iteration is not None:
            check_module(iteration.asked_by, "a DataLoader over a ShardedDataset")

    def worker_died(self, run: str) -> None:
        iteration = self._by_run.get(run)
        if iteration is not None:
            iteration.renew_workers()

    def beginning(self) -> Iteration | None:
        """The iteration that is beginning further up the stack: it starts a worker, or reads by itself."""
        frame = sys._getframe()
        while (above := frame.f_back) is not None:
            # Of other frames the locals are not looked at: Python would keep what is in them alive.
            if frame.f_code.co_name == "__init__":
                iterator = frame.f_locals.get("self")
                if isinstance(iterator, _BaseDataLoaderIter):
                    return self._of.get(iterator) or self._add(iterator, above)
            frame = above
        return None

    def _add(self, iterator: _BaseDataLoaderIter, above: FrameType) -> Iteration:
        self.newest = next(self._numbers)
        iteration = Iteration(iterator, _persistent_loader(above), self.newest, _asked_by(above))
        self._of[iterator] = iteration
        self._by_run[iteration.run] = iteration
        return iteration

    # On the way to a worker -------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """The process that will be forked serves the iteration that starts it."""
        self._forking.run = self.beginning_run

    def after_fork(self) -> None:
        """In the child, whose main thread is the one that forked."""
        self.served = getattr(self._forking, "run", "")

    @property
    def beginning_run(self) -> str:
        """The run of the iteration that is beginning; empty where none is."""
        beginning = self.beginning()
        return "" if beginning is None else beginning.run

    def unpickled(self, run: str) -> None:
        """Note the run that came with an unpickled dataset: this process serves it. Empty for none."""
        self.served = run or self.served


def _asked_by(frame: FrameType | None) -> str:
    """The module that asks torch for an iterator."""
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith("torch.utils.data."):
            return name
        frame = frame.f_back
    return ""


def _persistent_loader(frame: Any) -> DataLoader[Any] | None:
    """The DataLoader that makes an iterator from here on the stack, where it keeps it."""
    while frame is not None and frame.f_code.co_name != "_get_iterator":
        frame = frame.f_back
    loader = None if frame is None else frame.f_locals.get("self")
    return loader if isinstance(loader, DataLoader) and loader.persistent_workers else None


# Of the process, as fork handlers are: they can be registered once and never taken back.
iterations = Iterations()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=iterations.before_fork, after_in_child=iterations.after_fork)
