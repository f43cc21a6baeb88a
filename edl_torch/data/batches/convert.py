"""Samples and columns to tensors, as torch does it, and in fewer steps where that is faster.

It must not know where samples come from, in which order, or where a batch goes.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, get_worker_info
from torch.utils.data._utils import collate as torchs

from edl_torch.data.batches.transport import (
    IN_MESSAGE_BYTES,
    BatchMemory,
    Collated,
    is_plain,
    is_small,
    new_batch,
)
from edl_torch.errors import InvalidArgument
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.mixture import MixtureReader
from edl_torch.shard import IndexArray, Indices

# A batch that exists before its samples do --------------------------------------------------------------


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
        if kind is np.ndarray or isinstance(value, torch.Tensor):
            number, content = next(numbers), _plain(value)
            whole = self._wholes.get(number) or self._new_whole(number, value, content)
            placed = None if whole is None else whole.placed(value, content, row)
            return value if placed is None else placed
        return value

    def _new_whole(self, number: int, like: Any, content: Any) -> _Whole | None:
        if is_small(content.nbytes * self._size) or not _is_usual(content):
            return None
        with self._lock:
            if number not in self._wholes:  # another thread was faster
                self._wholes[number] = _Whole(like, content, self._size, self._memory)
            return self._wholes[number]

    def whole(self, values: Sequence[Any]) -> torch.Tensor | None:
        """The tensor that has these for its rows, all of them and in this order; None where none has."""
        for whole in self._wholes.values():
            if len(values) == self._size and all(map(is_, values, whole.rows)):
                return whole.tensor
        return None


class _Whole:
    """The tensor of one place of all samples: for arrays an array over it is filled, which costs a third."""

    def __init__(self, like: Any, content: Any, size: int, memory: BatchMemory) -> None:
        dtype = torch.as_tensor(content).dtype
        self.tensor = new_batch((size, *content.shape), dtype, memory)
        self.rows: list[Any] = [None] * size  # what samples have instead of their own
        self._content: Any = self.tensor.numpy() if type(content) is np.ndarray else self.tensor
        self._like = type(like), content.dtype, content.shape

    def placed(self, value: Any, content: Any, row: int) -> Any:
        """Copy a value. Returns its row; None where it is not like the others."""
        if (type(value), content.dtype, content.shape) != self._like or not _is_usual(content):
            return None
        own = self._content[row]
        if value is content:
            own[...] = value
        elif type(torch.stack([value], out=own[None])) is not torch.Tensor:
            return None
        self.rows[row] = own
        return own


def _plain(value: Any) -> Any:
    """Return a tensor of a subclass as a plain one: torchvision's images, for one, stack to plain tensors."""
    kind = type(value)
    if kind is np.ndarray or kind is torch.Tensor or kind in torchs.default_collate_fn_map:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _is_usual(value: Any) -> bool:
    """Whether stacking leaves each of its bytes as it is."""
    if isinstance(value, torch.Tensor):
        return is_plain(value)
    dtype, flags = value.dtype, value.flags
    return dtype.kind in "biufc" and dtype.isnative and flags.c_contiguous and flags.writeable


# Batches of samples and of columns ----------------------------------------------------------------------


_HELD_BY_TORCH = frozenset("biufc")


def to_batch(samples: list[Any], rows: Rows | None = None, *, components: str = "") -> Any:
    """torch's `default_collate`: the same batch, but no shared memory in a worker for small tensors, no
    tensor of its own for each small array, and numbers through an array, in a fifth of the time. Tensors that
    are all of the `rows` of one are that one. Errors name the `components` of a mixture."""
    table: dict[Any, Any] = torchs.default_collate_fn_map
    # Where another function than torch's stands, a user has put his own there.
    faster = dict(table)
    for kind, (own, ours) in _FASTER.items():
        if table.get(kind) is own:
            faster[kind] = ours
    if rows is not None and faster.get(torch.Tensor) is _stacked:
        faster[torch.Tensor] = partial(_whole_or, _stacked, rows)
        if faster.get(np.ndarray) is _joined:
            faster[np.ndarray] = partial(_whole_or, _joined, rows)
    try:
        if type(samples[0]) is tuple and not issubclass(tuple, tuple(table)):
            columns = None
            with suppress(TypeError, ValueError):  # these are not of one length: torch says so
                columns = list(zip(*samples, strict=True))
            if columns is not None:
                return [torchs.collate(column, collate_fn_map=faster) for column in columns]
        return torchs.collate(samples, collate_fn_map=faster)
    except (TypeError, KeyError, RuntimeError, InvalidArgument) as exc:
        if isinstance(exc, RuntimeError) and "of equal size" not in str(exc):
            raise  # not of tuples or lists that differ in length
        if not isinstance(exc, InvalidArgument):
            exc.add_note(
                "All samples of a batch need the same keys, types and lengths, and none is None, as of a "
                "`transform` that returns nothing; collate_fn=list keeps the records as they are"
            )
        if components:
            exc.add_note(
                f"A batch of this mixture has samples of {components}: where they are not alike, give each "
                f"MixtureComponent a `transform` that makes them so"
            )
        raise


def _whole_or(
    ours: Callable[..., Any], rows: Rows, values: Sequence[Any], *, collate_fn_map: Any = None
) -> Any:
    whole = rows.whole(values)
    return ours(values, collate_fn_map=collate_fn_map) if whole is None else whole


def _stacked(tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = tensors[0]
    unusual = first.layout is not torch.strided or first.is_nested  # some of these have no `nbytes`
    try:
        if unusual or first.nbytes * len(tensors) > IN_MESSAGE_BYTES:
            if get_worker_info() is not None and all(map(is_plain, tensors)):
                return torch.stack(tensors, out=new_batch((len(tensors), *first.shape), first.dtype))
            stacked: torch.Tensor = torchs.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
            return stacked
        return torch.stack(tensors)
    except RuntimeError as exc:
        unequal = next((tensor for tensor in tensors if tensor.shape != first.shape), None)
        if unequal is None:
            raise
        raise InvalidArgument(
            f"samples of one batch have the shapes {list(first.shape)} and {list(unequal.shape)}, which do "
            "not make one tensor: make them equal in `transform` (resize or pad), or pass a `collate_fn` to "
            "the loader; collate_fn=list keeps the records as they are"
        ) from exc


def _joined(arrays: Sequence[npt.NDArray[Any]], *, collate_fn_map: Any = None) -> Any:
    first = arrays[0]
    if (
        is_small(first.nbytes * len(arrays))
        and first.dtype.kind in _HELD_BY_TORCH
        and set(map(type, arrays)) == {np.ndarray}
    ):
        with suppress(ValueError):  # unequal shapes: `_stacked` says so
            joined = np.array(arrays)
            if joined.dtype == first.dtype:  # else numpy and torch may disagree on what holds them all
                return torch.as_tensor(joined)
    return torchs.collate_numpy_array_fn(arrays, collate_fn_map=collate_fn_map)


def _integers(numbers: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    if type(numbers[0]) is int:
        with suppress(OverflowError, TypeError):  # not all are whole numbers of 64 bits: torch decides
            return torch.as_tensor(torch.frombuffer(array("q", numbers), dtype=torch.int64))
    return torchs.collate_int_fn(numbers, collate_fn_map=collate_fn_map)


def _floats(numbers: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    with suppress(OverflowError, TypeError):
        return torch.as_tensor(torch.frombuffer(array("d", numbers), dtype=torch.float64))
    return torchs.collate_float_fn(numbers, collate_fn_map=collate_fn_map)


_FASTER: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    torch.Tensor: (torchs.collate_tensor_fn, _stacked),
    np.ndarray: (torchs.collate_numpy_array_fn, _joined),
    int: (torchs.collate_int_fn, _integers),
    float: (torchs.collate_float_fn, _floats),
}


def to_tensors(batch: Any) -> Any:
    """torch's `default_convert`, but what it has no type for (dates, strings, objects) stays an array."""
    if isinstance(batch, np.ndarray):
        return _array(batch)
    if type(batch) is dict:
        return {key: to_tensors(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(map(to_tensors, batch))
    return torchs.default_convert(batch)  # type: ignore[no-untyped-call]


def _array(column: npt.NDArray[Any]) -> Any:
    if column.dtype.kind not in _HELD_BY_TORCH:
        return column
    try:
        return torch.from_numpy(column if column.flags.writeable else column.copy())
    except ValueError:  # another byte order, or strides that a tensor cannot have
        return torch.from_numpy(column.astype(column.dtype.newbyteorder("="), order="C"))


# Batches of TensorDatasets ------------------------------------------------------------------------------


_AT_ONCE = 4 << 20  # bytes of a mixture's rows that are gathered at once
_FEW = 32  # TensorDatasets: of more there are few rows of each in a lease
_SMALL_ROW = 1 << 13  # bytes of a row that takes less to copy twice than to have a tensor of its own


class TensorRows:
    """Makes batches of row numbers: what `to_batch` makes of those rows. `numbers` reads the numbers."""

    def __init__(self, reader: MapDatasetReader) -> None:
        self.numbers: AbstractDataReader = MapDatasetReader(range(reader.count), reader.name)
        self._dataset: TensorDataset = reader.dataset

    def batch(self, numbers: Sequence[int]) -> Collated:
        return _batch_of(self._dataset.tensors, np.fromiter(numbers, np.int64, len(numbers)))


class MixedTensorRows:
    """The same for a mixture of them. Rows are gathered a lease at once, and called by a running number."""

    def __init__(self, reader: MixtureReader) -> None:
        self.numbers = self._gathered = _GatheredRows(reader)

    def batch(self, numbers: Sequence[int]) -> Collated:
        held = self._gathered.held
        while (rows := held[0]).after <= numbers[-1]:
            del held[0]
            if rows.after > numbers[0]:  # it has the first rows, and the next one the others
                held[0] = rows.joined(held[0])
        first = numbers[0] - rows.after
        return _batch_of(rows.tensors, rows.places[first:][: len(numbers)])


class _Gathered(NamedTuple):
    """Rows up to number `after`; `places` says where each lies in `tensors`."""

    after: int
    tensors: list[torch.Tensor]
    places: IndexArray

    def joined(self, other: _Gathered) -> _Gathered:
        tensors = list(map(torch.cat, zip(self.tensors, other.tensors, strict=True)))
        places = np.concatenate((self.places, other.places + len(self.places)))
        return _Gathered(other.after, tensors, places)


class _GatheredRows(MixtureReader):
    """Reads the rows of a mixture into `held`, many at once, and yields their numbers."""

    def __init__(self, reader: MixtureReader) -> None:
        super().__init__(reader.parts, weights=(), size=0)
        self.held: list[_Gathered] = []
        self._next = 0

    def read_each(self, indices: Indices) -> Iterator[int]:
        """Yield the number of each row, when it is gathered."""
        size = _AT_ONCE // _SMALL_ROW
        parts = (indices[start : start + size] for start in range(0, len(indices), size))
        return chain.from_iterable(map(self._gather, parts))

    def _gather(self, indices: Indices) -> range:
        components = self.ways(indices.names).places[indices.sources]
        by_component = np.argsort(components, kind="stable")
        numbers = torch.from_numpy(indices.numbers[by_component])
        found, after = [], 0
        for part, length in zip(self.parts, np.bincount(components).tolist(), strict=False):
            if length:
                assert isinstance(part.reader, MapDatasetReader)
                part.reader.check_unchanged()
                own, after = numbers[after : after + length], after + length
                found.append([tensor.index_select(0, own) for tensor in part.reader.dataset.tensors])
        places = np.empty_like(by_component)
        places[by_component] = np.arange(after)
        first, self._next = self._next, self._next + after
        self.held.append(_Gathered(self._next, list(map(torch.cat, zip(*found, strict=True))), places))
        return range(first, self._next)


def tensor_rows(reader: AbstractDataReader) -> TensorRows | MixedTensorRows | None:
    """Return what makes batches of a reader's rows: a `TensorDataset`'s, or small ones of a few."""
    if type(reader) is MapDatasetReader and type(reader.dataset) is TensorDataset:
        return TensorRows(reader)
    if type(reader) is MixtureReader and not reader.tagged and len(reader.parts) <= _FEW:
        kinds = {_kind_of_row(part.reader) for part in reader.parts if not part.left}
        if len(kinds) == 1 and None not in kinds:
            return MixedTensorRows(reader)
    return None


def _kind_of_row(reader: AbstractDataReader) -> tuple[tuple[torch.dtype, torch.Size], ...] | None:
    """Types and shapes of a TensorDataset's small rows; None of others."""
    if type(reader) is not MapDatasetReader or type(reader.dataset) is not TensorDataset:
        return None
    tensors = reader.dataset.tensors
    row_bytes = sum(tensor.element_size() * tensor.shape[1:].numel() for tensor in tensors)
    small = all(map(is_plain, tensors)) and row_bytes <= _SMALL_ROW
    return tuple((tensor.dtype, tensor.shape[1:]) for tensor in tensors) if small else None


def _batch_of(tensors: Sequence[torch.Tensor], numbers: IndexArray) -> Collated:
    # Where another function than torch's stands, a user has put his own there.
    if torchs.default_collate_fn_map.get(torch.Tensor) is torchs.collate_tensor_fn and all(
        map(is_plain, tensors)
    ):
        index = torch.from_numpy(numbers)
        made: Any = [_gathered(tensor, index) for tensor in tensors]
    else:
        made = to_batch([tuple(tensor[number] for tensor in tensors) for number in numbers.tolist()])
    return Collated(made, len(numbers))


def _gathered(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if is_small(tensor[0].nbytes * len(index)):
        return tensor.index_select(0, index)
    return torch.index_select(tensor, 0, index, out=new_batch((len(index), *tensor.shape[1:]), tensor.dtype))
