"""Damaged, cut, changed and foreign files: an error with file, chunk and offset, and never a wrong record."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from readers_kit import FORMS, RECORDS, chunk_bounds, everything, one_by_one, scan, write_recordio

from edl_torch.errors import DataFormatError
from edl_torch.readers import RecordIODataReader
from edl_torch.readers.recordio import source as recordio_source
from edl_torch.readers.recordio.format import PYTHON
from edl_torch.shard import Shard, Task

SMALL = [b"one", b"", b"three", b"four"]
SIZE_WORD = {"python": 4, "go": 3}


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("named", [False, True], ids=["asked", "named"])
def test_a_changed_byte_is_an_error_or_changes_nothing(
    tmp_path: Path, form: tuple[str, str], named: bool
) -> None:
    path = write_recordio(tmp_path / "x", SMALL, form=form, chunk=8)
    whole = Path(path).read_bytes()
    dialect = form[0] if named else None
    for position in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            Path(path).write_bytes(damaged)
            for read in (everything, one_by_one):
                try:
                    found = read(RecordIODataReader(path, dialect=dialect))
                except DataFormatError as exc:
                    assert re.search(r"x' chunk \d+ at offset \d+: ", str(exc)), exc  # noqa: PT017
                else:
                    assert found == SMALL, (position, flip)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_cut_file_is_an_error_but_between_two_chunks(tmp_path: Path, form: tuple[str, str]) -> None:
    """A file has no end mark: one that is cut between two chunks is a shorter file."""
    path = write_recordio(tmp_path / "x", SMALL, form=form, chunk=8)
    whole, bounds = Path(path).read_bytes(), chunk_bounds(path, SIZE_WORD[form[0]])
    assert len(bounds) >= 3
    for size in range(len(whole)):
        Path(path).write_bytes(whole[:size])
        if size in bounds:
            found = everything(RecordIODataReader(path))
            assert found == SMALL[: len(found)]
            continue
        chunk = sum(bound <= size for bound in bounds) - 1
        with pytest.raises(DataFormatError, match=f"x' chunk {chunk} at offset {bounds[chunk]}: "):
            RecordIODataReader(path)


@pytest.mark.parametrize(
    "data", [b"\0", b"GIF89a", b"\4\3\2\1", b"\4\3\2\1" * 5, b"\4\3\2\1" * 100, bytes(100), b"a,b\n" * 99]
)
def test_other_files_are_errors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    for dialect in (None, "python", "go"):
        with pytest.raises(DataFormatError, match=r"x' chunk 0 at offset 0: .* or no RecordIO"):
            RecordIODataReader(tmp_path / "x", dialect=dialect)


def damage_data(path: str, dialect: str, chunk: int) -> None:
    """Change the last byte of a chunk's data."""
    data = bytearray(Path(path).read_bytes())
    data[chunk_bounds(path, SIZE_WORD[dialect])[chunk + 1] - 1] ^= 0x55
    Path(path).write_bytes(data)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path: Path, form: tuple[str, str]) -> None:
    records = [b"%d" % number for number in range(40)]
    path = write_recordio(tmp_path / "x", records, form=form, chunk=8)  # 4 to 8 records a chunk
    damage_data(path, form[0], 3)
    reader, seen = RecordIODataReader(path), []
    source = next(iter(reader._files.values()))
    first, after = source.firsts[3], source.firsts[4]
    offset = chunk_bounds(path, SIZE_WORD[form[0]])[3]
    with pytest.raises(DataFormatError, match=f"x' chunk 3 at offset {offset}: its data has the checksum"):
        seen.extend(record for record in _each(reader, path, 0, 40, seen))
    assert seen == records[:first], "what stands before is read"
    assert scan(reader, path, after, 40) == records[after:]
    for index in range(40):
        if first <= index < after:
            with pytest.raises(DataFormatError, match="chunk 3"):
                reader.read_record(path, index)
        else:
            assert reader.read_record(path, index) == records[index]


def _each(reader: RecordIODataReader, name: str, start: int, end: int, seen: list[bytes]) -> list[bytes]:
    for record in reader.read_records(Task(shard=Shard(name=name, start=start, end=end))):
        seen.append(record)
    return []


@pytest.mark.parametrize("at_once", [1, 100, 1 << 17])
def test_records_before_a_damaged_chunk_are_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(recordio_source, "PAYLOAD_BYTES", at_once)
    path = write_recordio(tmp_path / "x")
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)
    reader = RecordIODataReader(path)
    shard = Shard(name=path, start=0, end=len(RECORDS))
    given: list[bytes] = []
    with pytest.raises(DataFormatError, match="checksum"):
        given.extend(reader.read_records(Task(shard=shard)))
    assert given == RECORDS[: len(given)]
    assert len(RECORDS) - 10 < len(given) < len(RECORDS)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_file_of_damaged_chunks_has_the_dialect_of_its_headers(
    tmp_path: Path, form: tuple[str, str], chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_recordio(tmp_path / "x", [b"record"] * chunks, form=form, chunk=8)
    for chunk in range(chunks):
        damage_data(path, form[0], chunk)
    reader = RecordIODataReader(path)
    assert reader.create_shards() == {path: chunks}
    assert f"path={path} dialect={form[0]} its first {chunks} chunk(s) are damaged" in caplog.text
    for chunk, offset in enumerate(chunk_bounds(path, SIZE_WORD[form[0]])[:-1]):
        with pytest.raises(DataFormatError, match=f"x' chunk {chunk} at offset {offset}: its data has the"):
            reader.read_record(path, chunk)


def test_records_behind_a_count_of_none_are_an_error(tmp_path: Path) -> None:
    """No checksum covers a header: a count that became 0 would hide a chunk for ever."""
    path = write_recordio(tmp_path / "x", [b"r" * 3000] * 3, form=("go", "none"), chunk=1)
    data = bytearray(Path(path).read_bytes())
    data[3024 + 16] = 0
    Path(path).write_bytes(data)
    with pytest.raises(DataFormatError, match="chunk 1 at offset 3,024: its header promises no record, and"):
        RecordIODataReader(path)


def test_a_small_chunk_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    """Its compressor is a word of the header, which no checksum covers."""
    body = b"\xff\xff\xff\xff\x0f" + bytes(20)  # as a snappy block: 4 GiB
    path = write_recordio(tmp_path / "x", [body], form=("python", "none"))
    data = bytearray(Path(path).read_bytes()[:20] + body)
    data[8:20] = struct.pack("<3I", PYTHON.checksum(body), 2, len(body))
    Path(path).write_bytes(data)
    with pytest.raises(DataFormatError, match=r"4,294,967,295 bytes cannot come from 25"):
        everything(RecordIODataReader(path))
