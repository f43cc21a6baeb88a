"""What torch's iterator without workers does, for a `DataLoader` whose dataset yields whole batches.

It must not know what is in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader

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
