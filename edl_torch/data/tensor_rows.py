"""Batches of a `TensorDataset`, gathered from its tensors with no tensor made for each row.

It must not know which rows come in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset, get_worker_info
from torch.utils.data._utils import collate as torchs

from edl_torch.data.collate import Collated
from edl_torch.data.convert import to_batch
from edl_torch.data.transport import IN_MESSAGE_BYTES
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
            map(_is_plain, tensors)
        ):
            index = torch.tensor(numbers)
            made: Any = [_gathered(tensor, index) for tensor in tensors]
        else:
            made = to_batch([self._dataset[number] for number in numbers])
        return Collated(made, len(numbers))


def tensor_rows(reader: AbstractDataReader) -> TensorRows | None:
    """Return what makes batches of a reader's rows, where these are a `TensorDataset`'s."""
    if type(reader) is MapDatasetReader and type(reader.dataset) is TensorDataset:
        return TensorRows(reader)
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether rows that are gathered cannot be told from rows that are stacked."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided  # first: other layouts have no answer to what follows
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


def _gathered(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    shape = (len(index), *tensor.shape[1:])
    if get_worker_info() is None or tensor[0].nbytes * len(index) <= IN_MESSAGE_BYTES:
        return tensor.index_select(0, index)
    # Elsewhere it would be copied there to be sent to the trainer.
    shared = torch.UntypedStorage._new_shared(tensor[0].nbytes * len(index))  # type: ignore[no-untyped-call]
    out = torch.empty(0, dtype=tensor.dtype).set_(shared).view(shape)
    return torch.index_select(tensor, 0, index, out=out)
