from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_index_cache import ADVERSARIAL

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers import TextReader
from edl_torch.shard import Shard, Task
from edl_torch.testing import check_reader


def write(folder: Path, content: str | bytes, name: str = "lines.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def lines(reader: TextReader) -> list:
    return [
        line
        for name, number in reader.create_shards().items()
        for line in reader.read_records(Task(shard=Shard(name=name, start=0, end=number)))
    ]


@pytest.mark.parametrize("newline", [None, "\n"])
@pytest.mark.parametrize("skip_empty", [False, True])
def test_adversarial_files_read_as_pythons_open_reads_them(tmp_path, newline, skip_empty):
    number = count()

    @given(text=ADVERSARIAL, chunk_bytes=st.integers(1, 24), mark=st.sampled_from([b"", b"\xef\xbb\xbf"]))
    def check(text: str, chunk_bytes: int, mark: bytes) -> None:
        path = write(tmp_path, mark + text.encode(), f"{next(number)}.txt")
        with open(path, newline=newline, encoding="utf-8-sig") as file:
            expected = [line.removesuffix("\n") for line in file]
        expected = [line for line in expected if line or not skip_empty]
        if not expected:
            return
        options = {
            "skip_empty": skip_empty,
            "universal_newlines": newline is None,
            "chunk_bytes": chunk_bytes,
        }
        reader = TextReader(path, **options)
        assert lines(reader) == expected
        assert [reader.read_record(path, at) for at in range(len(expected))] == expected
        assert lines(TextReader(path, as_bytes=True, **options)) == [line.encode() for line in expected]

    check()


def test_a_line_that_is_no_text_is_named(tmp_path):
    path = write(tmp_path, b"one\n\ntw\xf6\nthree\n")
    for options, line in (({}, 2), ({"skip_empty": True}, 1)):
        reader = TextReader(path, **options)
        with pytest.raises(
            BadRecord, match=r"lines.txt' line 3 is not utf-8: .* at its byte 2; .* errors='replace'"
        ):
            reader.read_record(path, line)
        assert reader.read_record(path, line + 1) == "three"
    assert lines(TextReader(path, errors="replace"))[2] == "tw\ufffd"
    assert lines(TextReader(path, encoding="latin-1"))[2] == "twö"
    assert lines(TextReader(path, as_bytes=True))[2] == b"tw\xf6"


def test_bytes_may_be_anything(tmp_path):
    path = write(tmp_path, b"\0\1\n\xff\0")
    assert lines(TextReader(path, as_bytes=True)) == [b"\0\1", b"\xff\0"]
    with pytest.raises(DataFormatError, match=r"is no text: it has a NUL byte"):
        TextReader(path)


def test_options_that_cannot_be_used_are_refused(tmp_path):
    path = write(tmp_path, "x")
    for options in ({"encoding": "utf-16"}, {"encoding": "nope"}, {"errors": "nope"}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            TextReader(path, **options)


def test_folders_have_text_files(tmp_path):
    names = [write(tmp_path, "1\n2\n", name) for name in ("a.jsonl", "b.txt", "c.ndjson")]
    write(tmp_path, "x", "d.csv")
    empty = write(tmp_path, "", "e.txt")
    assert TextReader(tmp_path).create_shards() == {**dict.fromkeys(names, 2), empty: 0}
    check_reader(lambda: TextReader(tmp_path))


def test_files_without_a_line_and_strangers_are_refused(tmp_path):
    for content in ("", "\ufeff"):
        with pytest.raises(DataFormatError, match=r"there is no line"):
            TextReader(write(tmp_path, content))
    with pytest.raises(DataFormatError, match=r"there is no line"):
        TextReader(write(tmp_path, "\n\r\n\n", "blank.txt"), skip_empty=True)
    path = write(tmp_path, "a\nb\n", "good.txt")
    with pytest.raises(ReaderError, match=r"has the records 0 to 2 here"):
        TextReader(path).read_record(path, 2)
    with pytest.raises(ReaderError, match=r"TextReader reads '.*good.txt', not 'x'"):
        TextReader(path).read_record("x", 0)
