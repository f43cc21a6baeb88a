"""Chunks are split as a plain loop would split them, whatever is in them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recordio_kit import naive_split

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio import source as recordio_source
from edl_torch.readers.recordio.source import Chunk, cut, in_pieces, split

# Zeros and small numbers are what lengths are made of; 256 and 65,536 have a zero byte first.
TRICKY = st.binary(max_size=40) | st.lists(st.sampled_from([0, 1, 4, 255]), max_size=12).map(bytes)
LONG = st.sampled_from([256, 511, 512, 4096, 65536]).map(lambda size: b"t" * size)


def payload_of(records: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(record)) + record for record in records)


def check(payload: bytes, records: int) -> None:
    expected = naive_split(payload, records)
    if expected is None:
        with pytest.raises(DataFormatError):
            split(payload, records)
        return
    chunk = Chunk(payload, records)
    assert list(cut(payload, split(payload, records))) == list(expected)
    assert [chunk[index] for index in range(records)] == list(expected)
    for start, end in ((0, records), (records // 3, records - records // 3), (records, records)):
        assert list(chunk.records(start, end)) == list(expected[start:end])


@settings(max_examples=60)
@given(st.lists(TRICKY | LONG, max_size=12), st.integers(0, 300), st.integers(-2, 2))
@example([b""], 300, 0)
@example([b"\0\0\0\0"], 300, 0)
@example([b"a" * 256, b"b"], 200, 0)
@example([], 0, 1)
def test_a_chunk_is_split_as_a_loop_splits_it(some: list[bytes], times: int, off: int) -> None:
    records = some * (1 + times // max(1, len(some)))
    check(payload_of(records), len(records))
    check(payload_of(records), max(0, len(records) + off))


@settings(max_examples=120)
@given(st.lists(TRICKY, min_size=1, max_size=30), st.data())
def test_damaged_payloads_are_split_as_a_loop_splits_them(records: list[bytes], data: st.DataObject) -> None:
    payload = bytearray(payload_of(records))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    check(bytes(payload), len(records))
    check(bytes(payload[: data.draw(st.integers(0, len(payload)))]), len(records))


@pytest.mark.parametrize("piece", [1, 7, 100, 1 << 16])
def test_pieces_are_all_records_in_order(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(recordio_source, "_PIECE_BYTES", piece)
    for records in ([], [b""], [b"", b"a" * 90, b"", b"b"], [b"%d" % number for number in range(50)]):
        payload = payload_of(records)
        pieces = list(in_pieces(payload, split(payload, len(records))))
        assert [record for part in pieces for record in part] == records
        assert all(pieces), "none is empty"


def test_joined_chunks_must_end_where_each_ends() -> None:
    one, two = payload_of([b"a", b"bc"]), payload_of([b"d"])
    assert split(one + two, 3, [(2, len(one)), (3, len(one + two))])[2] == len(one)
    with pytest.raises(DataFormatError, match="2 records end at byte 11, not at 10"):
        split(one + two, 3, [(2, 10), (3, len(one + two))])


def test_a_view_of_any_memory_is_split() -> None:
    payload = payload_of([b"a", b"", b"bc"])
    view = memoryview(bytearray(b"..." + payload))[3:]
    assert cut(view, split(view, 3)) == (b"a", b"", b"bc")
