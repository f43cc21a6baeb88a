"""Samples and columns to tensors, as torch does it, and in fewer steps where that is faster.

It must not know where samples come from or where a batch goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torchs

from edl_torch.data.batches.rows import Rows
from edl_torch.data.batches.transport import IN_MESSAGE_BYTES, is_plain, is_small, new_batch
from edl_torch.errors import InvalidArgument

_HELD_BY_TORCH = frozenset("biufc")


def to_batch(samples: list[Any], rows: Rows | None = None) -> Any:
    """torch's `default_collate`: the same batch, but no shared memory in a worker for small tensors, no
    tensor of its own for each small array, and numbers through an array, in a fifth of the time. Tensors that
    are all of the `rows` of one are that one."""
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
    if type(samples[0]) is tuple and not issubclass(tuple, tuple(table)):
        columns = _transposed(samples)
        if columns is not None:
            return [torchs.collate(column, collate_fn_map=faster) for column in columns]
    return torchs.collate(samples, collate_fn_map=faster)


def _transposed(samples: list[Any]) -> list[tuple[Any, ...]] | None:
    """Return the columns of tuples; None where these are not of one length: torch says so."""
    try:
        return list(zip(*samples, strict=True))
    except (TypeError, ValueError):
        return None


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
