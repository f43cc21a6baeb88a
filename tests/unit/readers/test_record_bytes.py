"""Records as bytes and back, one rule for each kind of record."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edl_torch.errors import BadRecord
from edl_torch.readers.recordio.record_bytes import DECODERS, ENCODERS, AutoEncode, kind_of
from edl_torch.testing.check_reader import records_equal

IMAGE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("record", "kind", "back"),
    [
        (b"\0x", "bytes", b"\0x"),
        (bytearray(b"x"), "bytes", b"x"),
        (memoryview(b"x"), "bytes", b"x"),
        ("größe", "text", "größe"),
        ("", "text", ""),
        (None, "json", None),
        (3, "json", 3),
        (np.int64(3), "json", 3),
        ({"a": [1, 2.5, None, True], "ü": "ü"}, "json", {"a": [1, 2.5, None, True], "ü": "ü"}),
        ((1, "x"), "json", [1, "x"]),
        ({"n": np.float32(0.5)}, "json", {"n": 0.5}),
        ([], "json", []),
        (IMAGE, "npy", IMAGE),
        (np.float64([1, np.nan]), "npy", np.float64([1, np.nan])),
        (torch.arange(3), "npy", np.arange(3)),
        ((IMAGE, 7), "npz", {"0": IMAGE, "1": np.array(7)}),
        ((IMAGE, {"boxes": IMAGE[0], "names": ["a", "b"]}), "npz",
         {"0": IMAGE, "1/boxes": IMAGE[0], "1/names/0": np.array("a"), "1/names/1": np.array("b")}),
        ({"file": IMAGE, "allow_pickle": torch.ones(1)}, "npz",
         {"file": IMAGE, "allow_pickle": np.ones(1, np.float32)}),
    ],
)  # fmt: skip
def test_records_come_back(record: object, kind: str, back: object) -> None:
    assert kind_of(record) == kind
    data = AutoEncode()(record)
    assert type(data) is bytes
    found = DECODERS[kind](data) if kind != "bytes" else data
    assert records_equal(found, back), found


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (object(), "holds a object, which has no form here.*--encode"),
        ([1, {2, 3}], "holds a set at '1'"),
        ({1: 2}, "has the key 1, which is no text"),
        (float("nan"), "does not fit JSON"),
        ("\udcff", "is no UTF-8 text"),
        (np.array([object()]), "does not fit .npy"),
        ((IMAGE, None), "has None at '1'"),
        ({"a": {"b": IMAGE}, "a/b": 1}, "has 1 at 'a/b'"),
        (torch.ones(1, requires_grad=True), "does not fit .npy"),
    ],
)
def test_other_records_are_refused_with_a_way_out(record: object, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        AutoEncode()(record)


def test_one_dataset_has_one_kind() -> None:
    encode = AutoEncode()
    encode("text")
    with pytest.raises(BadRecord, match="is json, and those before it are text"):
        encode(3)
    assert encode.kind == "text"


@pytest.mark.parametrize("kind", DECODERS)
def test_damaged_records_are_bad_records(kind: str) -> None:
    with pytest.raises(BadRecord, match="is n"):
        DECODERS[kind](b"\xff\x00 nonsense")


def test_pickled_objects_are_not_loaded() -> None:
    import io

    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(BadRecord, match="allow_pickle"):
        DECODERS["npy"](file.getvalue())


def test_the_same_record_is_the_same_bytes() -> None:
    assert ENCODERS["npz"]((IMAGE, 1)) == ENCODERS["npz"]((IMAGE, 1))
