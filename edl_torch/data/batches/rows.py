"""A batch that exists before its samples do: each is copied to its place when it is made.

A sample's memory is then used again at once for the next one, and a batch's for a later batch. It must not
know where samples come from.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from operator import is_
from typing import Any

import numpy as np
import torch

from edl_torch.data.batches.batch_memory import BatchMemory
from edl_torch.data.batches.transport import is_plain, is_small, new_batch


class Rows:
    """The tensors of a batch of `size` samples, each as large as all of its rows, in `memory`.

    They are made like the tensors and arrays of the first sample that comes. What is not like these, small or
    unusual stays where it is: then the batch is made of the samples.
    """

    def __init__(self, size: int, memory: BatchMemory) -> None:
        self._size = size
        self._memory = memory
        self._lock = threading.Lock()
        self._wholes: dict[int, _Whole] = {}  # by the place that a tensor has in its sample

    def place(self, sample: Any, row: int) -> Any:
        """Return the sample with its large tensors and arrays in their row. Several threads may call it."""
        return self._placed(sample, row, count())

    def _placed(self, value: Any, row: int, numbers: Iterator[int]) -> Any:
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(self._placed(item, row, numbers) for item in value)
        if kind is dict:
            return {key: self._placed(item, row, numbers) for key, item in value.items()}
        if kind is torch.Tensor or kind is np.ndarray:
            number = next(numbers)
            whole = self._wholes.get(number) or self._new_whole(number, value)
            return value if whole is None else whole.placed(value, row)
        return value

    def _new_whole(self, number: int, like: Any) -> _Whole | None:
        if is_small(like.nbytes * self._size) or not _is_usual(like):
            return None
        with self._lock:
            if number not in self._wholes:  # another thread was faster
                self._wholes[number] = _Whole(like, self._size, self._memory)
            return self._wholes[number]

    def whole(self, values: Sequence[Any]) -> torch.Tensor | None:
        """The tensor that has these for its rows, all of them and in this order; None where none has."""
        for whole in self._wholes.values():
            if len(values) == self._size and all(map(is_, values, whole.rows)):
                return whole.tensor
        return None


class _Whole:
    """The tensor of one place of all samples: for arrays an array over it is filled, which costs a third."""

    def __init__(self, like: Any, size: int, memory: BatchMemory) -> None:
        dtype = torch.as_tensor(like).dtype
        self.tensor = new_batch((size, *like.shape), dtype, memory)
        self.rows: list[Any] = [None] * size  # what samples have instead of their own
        self._content: Any = self.tensor if type(like) is torch.Tensor else self.tensor.numpy()
        self._like = type(like), like.dtype, like.shape

    def placed(self, value: Any, row: int) -> Any:
        if (type(value), value.dtype, value.shape) != self._like or not _is_usual(value):
            return value
        own = self.rows[row] = self._content[row]
        own[...] = value
        return own


def _is_usual(value: Any) -> bool:
    """Whether stacking leaves each of its bytes as it is."""
    if isinstance(value, torch.Tensor):
        return is_plain(value)
    dtype, flags = value.dtype, value.flags
    return dtype.kind in "biufc" and dtype.isnative and flags.c_contiguous and flags.writeable
