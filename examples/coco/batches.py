"""From a reader's records to the tensors of a batch.

Everything here is pickled to loader workers, so it is small and knows neither model nor master.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from vocabulary import PAD, Vocabulary

from edl_torch import AbstractDataReader, Task, TaskType
from edl_torch.fingerprint import Fingerprint

Image = npt.NDArray[np.uint8]


class Batch(NamedTuple):
    """Images (B, 3, S, S) uint8, captions (B, T) int64 padded with PAD, record numbers (B,) int64."""

    images: Tensor
    captions: Tensor
    numbers: Tensor


class NumberedReader(AbstractDataReader):
    """Another reader's records with the target replaced by `(record number, target)`.

    The record numbers are what `deliveries.py` counts.
    """

    def __init__(self, reader: AbstractDataReader) -> None:
        super().__init__()
        self.reader = reader

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> Any:
        return self.reader.create_shards(mode)

    def read_record(self, name: str, index: int) -> tuple[Image, tuple[int, Any]]:
        image, target = self.reader.read_record(name, index)
        return image, (index, target)

    def read_records(self, task: Task) -> Iterator[tuple[Image, tuple[int, Any]]]:
        return (self.read_record(task.shard_name, index) for index in range(task.start, task.end))

    def fingerprint(self, *, whole: bool = False) -> Fingerprint | str | None:
        return self.reader.fingerprint(whole=whole)  # so that no rank goes on with other pictures


class Fit:
    """Scale an image to fit a square of `size` pixels, grey around it, as (3, size, size) uint8."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image) -> Tensor:
        square = fit_square(image, self.size, fill=127)
        return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))


def fit_square(image: Image, size: int, fill: int) -> Image:
    """The image, scaled with its proportions kept, in the middle of a (size, size, 3) square."""
    height, width = image.shape[:2]
    scale = size / max(height, width)
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    scaled = cv2.resize(image, (width, height), interpolation=how)
    square = np.full((size, size, 3), fill, dtype=np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    square[top : top + height, left : left + width] = scaled
    return square


class Encode:
    """`(number, caption)` to `(number, tokens)`."""

    def __init__(self, vocabulary: Vocabulary, max_tokens: int) -> None:
        self.vocabulary = vocabulary
        self.max_words = max_tokens - 1  # the model reads BOS and the words, and predicts the words and EOS

    def __call__(self, target: tuple[int, str]) -> tuple[int, Tensor]:
        number, caption = target
        return number, torch.tensor(self.vocabulary.encode(caption, self.max_words))


def collate(samples: Iterable[tuple[Tensor, tuple[int, Tensor]]]) -> Batch:
    """Stack images and pad captions."""
    images, targets = zip(*samples, strict=True)
    numbers, captions = zip(*targets, strict=True)
    padded = pad_sequence(list(captions), batch_first=True, padding_value=PAD)
    return Batch(torch.stack(images), padded, torch.tensor(numbers))
