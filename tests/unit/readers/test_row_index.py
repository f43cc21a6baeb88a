"""The index against a state machine that goes byte by byte, and against Python's own readers."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl_torch.errors import DataFormatError
from edl_torch.readers.shared.mapped import MappedArrays
from edl_torch.readers.text.row_index import BLOCK, RowIndex, RowRules, build_row_index

QUOTED = RowRules(quote=ord('"'), delimiter=ord(","))
LINES = RowRules(keeps_empty=True)
ADVERSARIAL = st.lists(
    st.sampled_from(['"', '""', '"""', ",", "\n", "\r", "\r\n", "a", " ", "é", ',"', '",', '"\n', "\n\n"]),
    max_size=60,
).map("".join)


def reference(data: bytes, rules: RowRules) -> tuple[list[tuple[int, int]], bool]:
    """Byte by byte: (start, line) of each record, and whether the end is inside quotes."""
    rows, state, start, line, begin_line, at = [], "field start", 0, 0, 0, 0
    while at < len(data):
        byte = data[at]
        is_end = byte == 10 or (byte == 13 and rules.cr_ends_line)
        width = 2 if rules.cr_ends_line and data[at : at + 2] == b"\r\n" else 1
        if is_end:
            line += 1
        if state == "inside":
            if byte == rules.quote:
                if data[at + 1 : at + 2] == bytes([rules.quote]):
                    width = 2
                else:
                    state = "field"
        elif is_end:
            if at > start or rules.keeps_empty:
                rows.append((start, begin_line))
            start, begin_line, state = at + width, line, "field start"
        elif byte == rules.quote and state == "field start":
            state = "inside"
        else:
            state = "field start" if byte == rules.delimiter else "field"
        at += width
    if start < len(data):
        rows.append((start, begin_line))
    return rows, state == "inside"


def build(path: Path, data: bytes, rules: RowRules, chunk_bytes: int) -> RowIndex:
    path.write_bytes(data)
    return RowIndex(build_row_index(str(path), rules, chunk_bytes=chunk_bytes))


def rows_of(index: RowIndex, data: bytes) -> list[bytes]:
    starts, ends = index.spans(np.arange(index.count))
    assert [index.span(number) for number in range(index.count)] == list(
        zip(starts.tolist(), ends.tolist(), strict=True)
    )
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    "rules",
    [QUOTED, LINES, RowRules(), RowRules(cr_ends_line=False, keeps_empty=True), RowRules(cr_ends_line=False)],
    ids=["csv", "lines", "lines without empty", "only LF", "only LF without empty"],
)
def test_records_begin_where_one_byte_after_the_other_says(tmp_path, rules):
    path = tmp_path / "data"

    @settings(max_examples=250)
    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24))
    @example(text='a,"\n""\n', chunk_bytes=3)
    @example(text="a\r\nb\rc", chunk_bytes=2)
    @example(text='"a"\n"b""\n', chunk_bytes=5)
    @example(text='5" disk,"a\nb"\n', chunk_bytes=7)
    def check(text: str, chunk_bytes: int) -> None:
        data = text.encode()
        expected, unclosed = reference(data, rules)
        if unclosed:
            with pytest.raises(DataFormatError, match=f"begins on line {expected[-1][1] + 1}:"):
                build(path, data, rules, chunk_bytes)
            return
        index = build(path, data, rules, chunk_bytes)
        starts, _ = index.spans(np.arange(index.count))
        lines = [index.line(number, lambda start, end: data[start:end]) - 1 for number in range(index.count)]
        assert list(zip(starts.tolist(), lines, strict=True)) == expected

    check()


def test_records_are_those_of_pythons_csv(tmp_path):
    path = tmp_path / "data"

    @settings(max_examples=250)
    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24))
    def check(text: str, chunk_bytes: int) -> None:
        data = text.encode()
        if reference(data, QUOTED)[1]:
            return
        rows = rows_of(build(path, data, QUOTED, chunk_bytes), data)
        fields = [next(csv.reader([row.decode().rstrip("\r\n")])) for row in rows]
        assert fields == [row for row in csv.reader(io.StringIO(text, newline="")) if row]

    check()


def test_lines_are_those_of_pythons_open(tmp_path):
    path = tmp_path / "data"

    @settings(max_examples=200)
    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24), marked=st.booleans())
    def check(text: str, chunk_bytes: int, marked: bool) -> None:
        data = b"\xef\xbb\xbf" * marked + text.encode()
        rows = rows_of(build(path, data, LINES, chunk_bytes), data)
        with open(path, encoding="utf-8-sig") as file:
            assert [row.decode().rstrip("\r\n") for row in rows] == [line.rstrip("\n") for line in file]

    check()


def test_many_blocks_and_chunks_give_the_same_as_one(tmp_path):
    rng = np.random.default_rng(5)
    rows = [
        b'%d,"%s\n%s"\n' % (number, b"x" * int(rng.integers(9)), b'""' * int(rng.integers(3)))
        for number in range(20 * BLOCK + 3)
    ]
    data = b"".join(rows)
    for chunk_bytes in (97, 4096, len(data)):
        index = build(tmp_path / "data", data, QUOTED, chunk_bytes)
        assert rows_of(index, data) == rows
        assert index.line(1000, lambda start, end: data[start:end]) == 2001


def test_the_index_takes_four_bytes_a_record_and_a_bit(tmp_path):
    index = build_row_index(_write(tmp_path / "data", b"1,2\n" * 100_000), QUOTED)
    assert sum(array.nbytes for array in index.values()) < 4.3 * 100_000


def test_chunks_do_not_wait_in_memory(tmp_path):
    """What has been scanned is written out: at most a few chunks are held at any time."""
    import tracemalloc

    path = _write(tmp_path / "data", b"1,2\n" * 2_000_000)
    tracemalloc.start()
    build_row_index(path, QUOTED, chunk_bytes=1 << 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 << 20  # the index alone is 8.5 MB


def test_records_larger_than_the_offsets_can_say_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("edl_torch.readers.text.row_index.LARGEST_BLOCK", 100)
    with pytest.raises(DataFormatError, match="64 records take more than 4 GiB"):
        build(tmp_path / "data", b"x" * 60 + b"\n" + b"y" * 60 + b"\nz", LINES, 1000)


def test_an_index_survives_its_file_and_pickling(tmp_path):
    import pickle

    arrays = MappedArrays.spill(build_row_index(_write(tmp_path / "data", b"a\nb\n"), LINES))
    copy = pickle.loads(pickle.dumps(RowIndex(arrays)))
    assert (copy.count, copy.span(1)) == (2, (2, 4))


def test_an_empty_file_and_a_lone_mark_have_no_records(tmp_path):
    for data in (b"", b"\xef\xbb\xbf"):
        index = build(tmp_path / "data", data, LINES, 10)
        assert index.count == 0
        assert index.spans(np.arange(0))[0].size == 0


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)
