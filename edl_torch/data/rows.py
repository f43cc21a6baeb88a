"""A batch that exists before its samples do: each is copied to its place when it is made.

A sample's memory is then used again at once for the next one, and a batch's for a later batch. It must not
know where samples come from.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch

from edl_torch.data.batch_memory import BatchMemory
from edl_torch.data.transport import is_plain, is_small, new_batch


class Rows:
    """The tensors of a batch of `size` samples, each as large as all of its rows, in `memory`.

    They are made like the tensors and arrays of the first sample that comes. What is not like these, small or
    unusual stays where it is: then the batch is made of the samples.
    """

    def __init__(self, size: int, memory: BatchMemory) -> None:
        self._size = size
        self._memory = memory
        self._lock = threading.Lock()
        self._wholes: dict[int, torch.Tensor] = {}  # by the place that a tensor has in its sample

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
            tensor = self._as_tensor(value)
            if tensor is not None and (whole := self._whole(number, tensor)) is not None:
                own = whole[row].copy_(tensor)
                return own if kind is torch.Tensor else own.numpy()
        return value

    def _as_tensor(self, value: Any) -> torch.Tensor | None:
        """The value, where stacking leaves each of its bytes as it is."""
        if is_small(value.nbytes * self._size):
            return None
        if isinstance(value, np.ndarray):
            plain = value.dtype.kind in "biufc" and value.dtype.isnative
            usual = plain and value.flags.c_contiguous and value.flags.writeable
            return torch.from_numpy(value) if usual else None
        return value if is_plain(value) else None

    def _whole(self, number: int, like: torch.Tensor) -> torch.Tensor | None:
        whole = self._wholes.get(number)
        if whole is None:
            with self._lock:
                whole = self._wholes.get(number)
                if whole is None:
                    shape = self._size, *like.shape
                    whole = self._wholes[number] = new_batch(shape, like.dtype, self._memory)
        return whole if whole.shape[1:] == like.shape and whole.dtype == like.dtype else None

    def whole(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """The tensor that has these for its rows, all of them and in this order; None where none has."""
        first = tensors[0].data_ptr()
        for whole in self._wholes.values():
            if whole.data_ptr() == first and len(tensors) == self._size and tensors[0].dtype == whole.dtype:
                step = whole.stride(0) * whole.element_size()
                places = range(first, first + step * self._size, step)
                return whole if [tensor.data_ptr() for tensor in tensors] == list(places) else None
        return None
