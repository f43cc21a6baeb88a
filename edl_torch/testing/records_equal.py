"""Whether two records are the same, whatever they are made of.

It must not import torch: a tensor is recognised by its methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def records_equal(left: Any, right: Any) -> bool:
    """Compare types, shapes, dtypes and values; NaN equals NaN and NaT NaT; containers by element."""
    left, right = _as_array(left), _as_array(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return _arrays_equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(records_equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(records_equal, left, right))
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(records_equal(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, float | np.inexact) and np.isnan(left):
        return bool(np.isnan(right))
    if isinstance(left, np.datetime64 | np.timedelta64) and np.isnat(left):
        return bool(np.isnat(right))
    return bool(np.all(left == right))


def batch_row_equals(batch: Any, row: int, record: Any) -> bool:
    """Whether row `row` of a columnar batch is `record`; numbers are compared by value, not by type."""
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return records_equal(batch[row], record)
    if isinstance(record, Mapping) or isinstance(batch, Mapping):
        same_keys = isinstance(record, Mapping) and isinstance(batch, Mapping) and set(record) == set(batch)
        return same_keys and all(batch_row_equals(batch[key], row, record[key]) for key in record)
    if isinstance(record, tuple):
        return len(batch) == len(record) and all(
            batch_row_equals(column, row, value) for column, value in zip(batch, record, strict=True)
        )
    left, right = np.asarray(_as_array(batch[row])), np.asarray(_as_array(record))
    return left.shape == right.shape and bool(np.all((left == right) | ((left != left) & (right != right))))


def _as_array(value: Any) -> Any:
    """A tensor as its array."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "numpy") else value


def _arrays_equal(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(records_equal, left.ravel().tolist(), right.ravel().tolist()))
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")
