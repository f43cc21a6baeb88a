"""Records of any reader as bytes, by one documented rule for each kind of record, and back.

bytes as they are; text as UTF-8; plain values as JSON; one array as `.npy`; a record with arrays in it as
`.npz`, each value under its path ("0", "1/boxes"). Or as a function of the user's makes them. It must not
know readers or files.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edl_torch.errors import BadRecord
from edl_torch.readers.base import imported

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]

_HELP = "write a function that makes bytes of it and name it with --encode module:function"


class AutoEncode:
    """Encodes by the kind of the first record. Raises BadRecord for a later one of another kind.

    One kind for all, because nothing in a file says which it is: what reads it back is one `decode=`.
    """

    def __init__(self) -> None:
        self.kind: str | None = None

    def __call__(self, record: Any) -> bytes:
        kind = kind_of(record)
        if self.kind is None:
            self.kind = kind
        if kind != self.kind:
            raise BadRecord(f"is {kind}, and those before it are {self.kind}: {_HELP}")
        return ENCODERS[kind](record)


def kind_of(record: Any) -> str:
    """ "bytes", "text", "json", "npy" or "npz". Raises BadRecord for other records."""
    if isinstance(record, bytes | bytearray | memoryview):
        return "bytes"
    if isinstance(record, str):
        return "text"
    if _is_array(record):
        return "npy"
    kinds = {_leaf_kind(value, path) for path, value in leaves(record)}
    return "npz" if "npy" in kinds else "json"


def leaves(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values inside a record with their paths; an empty container is a value."""
    inside: Any = None
    if isinstance(record, dict):
        inside = record.items()
        if wrong := next((key for key in record if not isinstance(key, str)), None):
            raise BadRecord(f"has the key {wrong!r}, which is no text: {_HELP}")
    elif isinstance(record, list | tuple):
        inside = enumerate(record)
    if not inside:
        yield path, record
        return
    for key, value in inside:
        yield from leaves(value, f"{path}/{key}" if path else str(key))


def _leaf_kind(value: Any, path: str) -> str:
    if _is_array(value):
        return "npy"
    plain = value is None or isinstance(value, bool | int | float | str | np.generic | dict | list | tuple)
    if not plain:
        where = f" at {path!r}" if path else ""
        raise BadRecord(f"holds a {type(value).__name__}{where}, which has no form here: {_HELP}")
    return "json"


def _is_array(value: Any) -> bool:
    """Arrays, and what turns into one without a loop, such as a tensor."""
    return hasattr(value, "__array__") and not isinstance(value, np.generic)


def _json(record: Any) -> bytes:
    def of_numpy(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is no plain value")

    try:
        text = json.dumps(
            record, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=of_numpy
        )
        return text.encode("utf-8")
    except (TypeError, ValueError) as exc:
        raise BadRecord(f"does not fit JSON: {exc}; {_HELP}") from exc


def _npy(record: Any) -> bytes:
    file = io.BytesIO()
    try:
        np.save(file, np.asarray(record), allow_pickle=False)
    except (ValueError, TypeError, RuntimeError) as exc:
        raise BadRecord(f"does not fit .npy: {exc}; {_HELP}") from exc
    return file.getvalue()


def _npz(record: Any) -> bytes:
    """An uncompressed `.npz`: the file's compressor sees all of a chunk. `np.savez` has reserved names."""
    file, seen = io.BytesIO(), set()
    with zipfile.ZipFile(file, "w") as archive:
        for path, value in leaves(record):
            if value is None or isinstance(value, dict) or path in seen:
                raise BadRecord(f"has {value!r} at {path!r}, which does not fit .npz: {_HELP}")
            seen.add(path)
            archive.writestr(zipfile.ZipInfo(f"{path}.npy"), _npy(value))
    return file.getvalue()


def _text(record: Any) -> bytes:
    if not isinstance(record, str):
        raise BadRecord(f"holds a {type(record).__name__} and no text: {_HELP}")
    try:
        return record.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise BadRecord(f"is no UTF-8 text: {exc.reason}; {_HELP}") from exc


ENCODERS: dict[str, Encode] = {"bytes": bytes, "text": _text, "json": _json, "npy": _npy, "npz": _npz}


def decoder(decode: Decode | str | None) -> Decode | None:
    """The function for `decode`: None, a callable, a name of `DECODERS`, or "module:function".

    Raises InvalidArgument for another, and ReaderUnavailable for a module that cannot be imported.
    """
    if decode is None or callable(decode):
        return decode
    if decode in DECODERS:
        return DECODERS[decode]
    return imported(decode, f"decode={decode!r}", "function", DECODERS)


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
