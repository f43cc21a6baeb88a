"""What the bytes of a record become: text, JSON, arrays, or what a function of the user's makes.

It must not know where the bytes come from. `record_bytes.py` is the other direction.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edl_torch.errors import BadRecord, InvalidArgument, ReaderUnavailable

Decode = Callable[[bytes], Any]


def decoder(decode: Decode | str | None) -> Decode | None:
    """The function for `decode`: None, a callable, a name of `DECODERS`, or "module:function".

    Raises InvalidArgument for another, and ReaderUnavailable for a module that cannot be imported.
    """
    if decode is None or callable(decode):
        return decode
    return DECODERS[decode] if decode in DECODERS else imported(decode, f"decode={decode!r}", DECODERS)


def imported(target: str, what: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `module:function`."""
    module_name, _, name = target.partition(":")
    if not (module_name and name):
        raise InvalidArgument(f"{what}: expected module:function or one of {', '.join(known)}")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as exc:
        raise ReaderUnavailable(
            f"{what}: cannot import {module_name!r}: {exc}; is it on PYTHONPATH?"
        ) from exc
    if not callable(found):
        raise InvalidArgument(f"{what}: the module {module_name} has no function {name}")
    return found  # type: ignore[no-any-return]


def decode_text(record: bytes) -> str:
    """UTF-8 as `str`. Raises BadRecord."""
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise BadRecord(f"is not UTF-8: {exc.reason} at byte {exc.start}") from exc


def decode_json(record: bytes) -> Any:
    """A JSON document. Raises BadRecord."""
    try:
        return json.loads(record)
    except ValueError as exc:
        raise BadRecord(f"is no JSON: {exc}") from exc


def decode_npy(record: bytes) -> Any:
    """The array of an `.npy` file, never with pickled objects. Raises BadRecord."""
    try:
        return np.lib.format.read_array(io.BytesIO(record), allow_pickle=False)
    except (ValueError, EOFError, OSError) as exc:
        raise BadRecord(f"is no .npy array: {exc}") from exc


def decode_npz(record: bytes) -> dict[str, Any]:
    """The arrays of an `.npz` file by name, never with pickled objects. Raises BadRecord."""
    try:
        with np.load(io.BytesIO(record), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as exc:
        raise BadRecord(f"is no .npz archive: {exc}") from exc


DECODERS: dict[str, Decode] = {
    "text": decode_text,
    "json": decode_json,
    "npy": decode_npy,
    "npz": decode_npz,
}
