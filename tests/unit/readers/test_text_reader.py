from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readers_kit import everything
from test_index_cache import ADVERSARIAL

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument
from edl_torch.readers import TextReader


def write(folder: Path, content: str | bytes, name: str = "lines.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


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
        assert everything(reader) == expected
        assert [reader.read_record(path, at) for at in range(len(expected))] == expected
        assert everything(TextReader(path, as_bytes=True, **options)) == [line.encode() for line in expected]

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
    assert everything(TextReader(path, errors="replace"))[2] == "tw\ufffd"
    assert everything(TextReader(path, encoding="latin-1"))[2] == "twö"
    assert everything(TextReader(path, as_bytes=True))[2] == b"tw\xf6"


def test_bytes_may_be_anything(tmp_path):
    path = write(tmp_path, b"\0\1\n\xff\0")
    assert everything(TextReader(path, as_bytes=True)) == [b"\0\1", b"\xff\0"]
    with pytest.raises(DataFormatError, match=r"is no text: it has a NUL byte"):
        TextReader(path)


def test_options_that_cannot_be_used_are_refused(tmp_path):
    path = write(tmp_path, "x")
    for options in ({"encoding": "utf-16"}, {"encoding": "nope"}, {"errors": "nope"}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            TextReader(path, **options)


def test_files_without_a_line_are_refused(tmp_path):
    for content in ("", "\ufeff"):
        with pytest.raises(DataFormatError, match=r"there is no line"):
            TextReader(write(tmp_path, content))
    with pytest.raises(DataFormatError, match=r"there is no line"):
        TextReader(write(tmp_path, "\n\r\n\n", "blank.txt"), skip_empty=True)
