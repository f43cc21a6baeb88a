"""The batch that one rank lends to another for padding, as bytes; nothing in them is run.

They are those of `torch.save`, read by `torch.load(weights_only=True)`: tensors, numpy arrays and plain
Python values.
"""

from __future__ import annotations

import codecs
import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    default_restore_location,
    get_safe_globals,
)

from edl_torch.errors import InvalidArgument

_BATCH, _REFUSED = b"b", b"r"
PLAIN: list[Any] = [
    *(bytes, set, frozenset, range, slice, codecs.encode),  # torch allows some of these from 2.5 on
    np.ndarray,
    np.dtype,
    *(value.__reduce__()[0] for value in (np.zeros(()), np.float32())),  # what makes arrays and scalars
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]


def packed_batch(batch: Any) -> bytes:
    """The batch, or why it cannot be lent."""
    file = io.BytesIO()
    try:
        torch.save(batch, file)
        _loaded(file.getvalue(), "cpu")
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as exc:
        return _REFUSED + _reason(exc).encode()
    return _BATCH + file.getvalue()


def unpacked_batch(packed: bytes) -> Any:
    """The batch, on the accelerator that this rank has chosen. Raises InvalidArgument for one that is not
    lent.
    """
    if packed[:1] == _REFUSED:
        raise InvalidArgument(packed[1:].decode())
    return _loaded(packed[1:], _of_this_rank)


def _reason(error: Exception) -> str:
    unsafe = ", ".join(re.findall(r"GLOBAL (\S+)", str(error)))
    return (
        f"a rank that never had a batch needs one of another rank's for padding, and this loader's cannot be "
        f"lent: they hold {unsafe or str(error).splitlines()[0]}. Tensors, numpy arrays, numbers, strings, "
        f"bytes, None, and lists, tuples and dicts of them are lent, and classes that every rank gives to "
        f"torch.serialization.add_safe_globals()"
    )


def _loaded(batch: bytes, where: Any) -> Any:
    with _plain_allowed():
        return torch.load(io.BytesIO(batch), map_location=where, weights_only=True)


@contextmanager
def _plain_allowed() -> Iterator[None]:
    """Let `weights_only` take plain values: torch's `safe_globals`, which came with 2.5."""
    before = get_safe_globals()
    add_safe_globals(PLAIN)
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _of_this_rank(storage: Any, location: str) -> Any:
    """Where the lender's storage was on cuda:3, this rank's is on the cuda device that it has chosen."""
    return default_restore_location(storage, location.partition(":")[0])  # type: ignore[no-untyped-call]
