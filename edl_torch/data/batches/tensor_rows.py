"""Batches of a `TensorDataset`, gathered from its tensors with no tensor made for each row.

It must not know which rows come in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset
from torch.utils.data._utils import collate as torchs

from edl_torch.data.batches.collate import Collated
from edl_torch.data.batches.convert import to_batch
from edl_torch.data.batches.transport import is_plain, is_small, new_batch
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.map_dataset import MapDatasetReader


class TensorRows:
    """Makes batches of row numbers: what `to_batch` makes of those rows. `numbers` reads the numbers."""

    def __init__(self, reader: MapDatasetReader) -> None:
        self.numbers = MapDatasetReader(range(reader.count), reader.name)
        self._dataset: TensorDataset = reader.dataset

    def batch(self, numbers: Sequence[int]) -> Collated:
        """Return the batch of these rows."""
        tensors = self._dataset.tensors
        # Where another function than torch's stands, a user has put his own there.
        if torchs.default_collate_fn_map.get(torch.Tensor) is torchs.collate_tensor_fn and all(
            map(is_plain, tensors)
        ):
            index = torch.from_numpy(np.fromiter(numbers, np.int64, len(numbers)))
            made: Any = [_gathered(tensor, index) for tensor in tensors]
        else:
            made = to_batch([self._dataset[number] for number in numbers])
        return Collated(made, len(numbers))


def tensor_rows(reader: AbstractDataReader) -> TensorRows | None:
    """Return what makes batches of a reader's rows, where these are a `TensorDataset`'s."""
    if type(reader) is MapDatasetReader and type(reader.dataset) is TensorDataset:
        return TensorRows(reader)
    return None


def _gathered(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if is_small(tensor[0].nbytes * len(index)):
        return tensor.index_select(0, index)
    return torch.index_select(tensor, 0, index, out=new_batch((len(index), *tensor.shape[1:]), tensor.dtype))
