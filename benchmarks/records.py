"""The readers and transforms that all contenders of a comparison share.

They do not know which loader asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from edl_torch.readers import ImageFolderReader
from edl_torch.readers.base import AbstractDataReader, IndexedReader
from edl_torch.shard import IndexArray, Task, TaskType

SIDE = 224


class RepeatedImages(IndexedReader):
    """A folder of images, read round and round until `count` records are reached."""

    thread_safe = True

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(str(folder))
        self._images = ImageFolderReader(folder)
        self.count = count

    def load(self, index: int) -> Any:
        """The decoded image, without its label."""
        record = self._images.load(index % self._images.count)
        return record[0] if isinstance(record, tuple) else record


class TinyRows(AbstractDataReader):
    """Rows of 16 numbers with a label, in memory: records `(float32 [16], int)`, or whole columns of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        rng = np.random.default_rng(0)
        self._rows = rng.normal(size=(count, 16)).astype(np.float32)
        self._labels = rng.integers(0, 10, count)

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """One source."""
        return {"rows": len(self._rows)}

    def read_records(self, task: Task) -> Iterator[Any]:
        """One row after the other."""
        return map(self._row, range(task.start, task.end))

    def read_record(self, name: str, index: int) -> Any:
        """One row."""
        return self._row(index)

    def read_batch(self, name: str, indices: IndexArray) -> Any:
        """The rows `indices` at once: `(float32 [n, 16], int64 [n])`."""
        return self._rows[indices], self._labels[indices]

    def _row(self, index: int) -> tuple[npt.NDArray[np.float32], int]:
        return self._rows[index], int(self._labels[index])


class MapRows(Dataset[Any]):
    """The rows of `TinyRows` as a map-style dataset: an item is `(float32 tensor [16], int)`."""

    def __init__(self, rows: TinyRows) -> None:
        features, labels = rows.read_batch("rows", np.arange(rows.count))
        self._features, self._labels = torch.from_numpy(features), labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Any:
        return self._features[index], int(self._labels[index])


class MapBatches(Dataset[Any]):
    """The same rows by the batch: `__getitems__` gives `(float32 [n, 16], int64 [n])`."""

    def __init__(self, rows: TinyRows) -> None:
        self._features, self._labels = rows.read_batch("rows", np.arange(rows.count))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.from_numpy(self._features[indices]), torch.from_numpy(self._labels[indices])


def resized(image: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The image as [224, 224, 3]."""
    return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)


class ToTensor:
    """An RGB image [height, width, 3] to a tensor [3, 224, 224]: uint8, or float32 between 0 and 1."""

    def __init__(self, *, as_float: bool) -> None:
        self._as_float = as_float

    def __call__(self, image: npt.NDArray[np.uint8]) -> torch.Tensor:
        return self.tensor(resized(image))

    def tensor(self, image: npt.NDArray[Any]) -> torch.Tensor:
        """The resized image as a tensor."""
        planes = np.empty((3, SIDE, SIDE), np.uint8)
        cv2.split(image, list(planes))  # several times faster than torch's permute and contiguous
        tensor = torch.from_numpy(planes)
        return tensor.float().div_(255) if self._as_float else tensor
