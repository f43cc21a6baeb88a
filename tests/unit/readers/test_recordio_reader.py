"""RecordIO files: both dialects, all compressors, chunks, and what lies around a file."""

from __future__ import annotations

import pickle
import struct
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from readers_kit import (
    FORMS,
    RECORDS,
    everything,
    go_chunk_of_no_records,
    naive_split,
    one_by_one,
    write_recordio,
)

from edl_torch.errors import DataFormatError, InvalidArgument, ReaderError, ReaderUnavailable
from edl_torch.readers import RecordIODataReader
from edl_torch.readers.recordio import format as recordio_format
from edl_torch.readers.recordio import source as recordio_source
from edl_torch.readers.recordio.source import Chunk, cut, split
from edl_torch.readers.registry import open_reader
from edl_torch.readers.shared.files import FileStamp, OpenFile, OpenFiles
from edl_torch.readers.shared.mapped import MappedArrays
from edl_torch.testing import check_reader


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_what_is_written_is_read(tmp_path: Path, form: tuple[str, str], chunk: int) -> None:
    path = write_recordio(tmp_path / "x.recordio", form=form, chunk=chunk)
    check_reader(lambda: RecordIODataReader(path))
    check_reader(lambda: RecordIODataReader(path, dialect=form[0], cache_bytes=0))
    reader = RecordIODataReader(path)
    assert reader.create_shards() == {path: len(RECORDS)}
    assert everything(reader) == one_by_one(reader) == RECORDS


def test_empty_files_and_empty_chunks(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    path = write_recordio(tmp_path / "go", [b"one", b"two"], form=("go", "none"), chunk=1)
    data = Path(path).read_bytes()
    half, hole = len(data) // 2, go_chunk_of_no_records()
    (tmp_path / "go").write_bytes(hole + data[:half] + hole + hole + data[half:] + hole)
    (tmp_path / "holes").write_bytes(hole * 3)
    reader = RecordIODataReader(tmp_path)
    assert list(reader.create_shards().values()) == [0, 2, 0]
    assert everything(reader) == one_by_one(reader) == [b"one", b"two"]
    check_reader(lambda: RecordIODataReader(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dialect": "rust"}, InvalidArgument, "expected 'python'"),
        ({"dialect": 1}, InvalidArgument, "expected 'python'"),
        ({"cache_bytes": -1}, InvalidArgument, "cache_bytes=-1"),
        ({"cache_bytes": True}, InvalidArgument, "cache_bytes=True"),
        ({"decode": "yaml"}, InvalidArgument, "expected module:function or one of text, json"),
        ({"decode": "no_such_module:f"}, ReaderUnavailable, "cannot import 'no_such_module'"),
        ({"decode": "os:no_such_function"}, InvalidArgument, "has no function no_such_function"),
    ],
)
def test_bad_arguments_say_what_is_wrong(
    tmp_path: Path, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    path = write_recordio(tmp_path / "x")
    with pytest.raises(error, match=message):
        RecordIODataReader(path, **arguments)


def test_repr_says_what_it_reads(tmp_path: Path) -> None:
    write_recordio(tmp_path / "x")
    write_recordio(tmp_path / "y")
    assert repr(RecordIODataReader(tmp_path)).endswith(f"x' … files=2 records={2 * len(RECORDS)}>")


def test_thousands_of_files_pickle_small_and_are_indexed_in_parallel(tmp_path: Path) -> None:
    data = Path(write_recordio(tmp_path / "x", [b"a", b"b"])).read_bytes()
    for number in range(1500):
        (tmp_path / f"part-{number:05}").write_bytes(data)
    reader = RecordIODataReader(str(tmp_path / "part-*"))
    assert reader.count == 3000
    data = pickle.dumps(reader)
    assert len(data) < 200 * 1500
    assert isinstance(reader._arrays, MappedArrays), "loader workers get a descriptor of it"
    copy = pickle.loads(data)
    assert copy.create_shards() == reader.create_shards()
    assert everything(copy) == [b"a", b"b"] * 1500


def test_a_file_that_was_put_away_stays_open_for_its_user(tmp_path: Path) -> None:
    """Else another file could get its number, and be read in its place."""
    files = OpenFiles(limit=1)
    paths = [write_recordio(tmp_path / name, [name.encode()], form=("go", "none")) for name in ("one", "two")]
    one, two = (
        files.get("", path, partial(OpenFile, FileStamp.of(path), lambda read: False)) for path in paths
    )
    assert one.read(0, 100).endswith(b"one")
    assert two.read(0, 100).endswith(b"two")


def test_the_index_of_a_file_that_was_asked_for_its_dialect_is_not_taken_for_a_named_one(
    tmp_path: Path,
) -> None:
    path = write_recordio(tmp_path / "x", [bytes(3000)] * 100, form=("go", "none"))
    assert RecordIODataReader(path, index_dir="beside").count == 100
    with pytest.raises(DataFormatError, match="chunk 0 at offset 0"):
        RecordIODataReader(path, index_dir="beside", dialect="python")


class Reads:
    """Counts chunks that are read by themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        read_chunk = recordio_source.RecordIOSource.read_chunk

        def counted(source: recordio_source.RecordIOSource, file: object, row: int) -> object:
            self.rows.append(row)
            return read_chunk(source, file, row)

        monkeypatch.setattr(recordio_source.RecordIOSource, "read_chunk", counted)


def test_the_last_chunks_are_kept_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_recordio(tmp_path / "x", [bytes(1000)] * 40, form=("go", "none"), chunk=4000)  # 10 chunks
    reads = Reads(monkeypatch)
    reader = RecordIODataReader(path, cache_bytes=14_000)
    for index in (0, 1, 2, 3, 4, 0, 7, 39, 36, 0):
        reader.read_record(path, index)
    assert reads.rows == [0, 1, 9]
    assert len(reader._cache) <= 3
    assert reader._cache.nbytes <= 14_000
    reader.read_record(path, 8)
    reader.read_record(path, 4)
    assert reads.rows == [0, 1, 9, 2, 1], "chunk 1 was the one not used for longest"


def test_threads_share_a_reader(tmp_path: Path) -> None:
    records = [b"%d" % number for number in range(2000)]
    path = write_recordio(tmp_path / "x", records, chunk=100)
    reader = RecordIODataReader(path, cache_bytes=2000)
    wrong: list[int] = []

    def read(step: int) -> None:
        wrong.extend(i for n in range(2000) if reader.read_record(path, i := n * step % 2000) != records[i])

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 7, 13, 999)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("package", "form"), [("google_crc32c", ("python", "none")), ("cramjam", ("go", "snappy"))]
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, form: tuple[str, str]
) -> None:
    path = write_recordio(tmp_path / "x", form=form)
    plain = write_recordio(tmp_path / "plain", form=("go", "gzip"))
    monkeypatch.setitem(sys.modules, package, None)
    for known in (recordio_format._crc32c_value, recordio_format._snappy):
        known.cache_clear()
    with pytest.raises(ReaderUnavailable, match=r"pip install 'edl-torch\[recordio\]'"):
        everything(RecordIODataReader(path))
    assert everything(RecordIODataReader(plain, dialect="go")) == RECORDS


def test_the_registry_knows_recordio(tmp_path: Path) -> None:
    path = write_recordio(tmp_path / "x.bin")
    (tmp_path / "empty.recordio").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("# notes")
    assert type(open_reader(path)) is RecordIODataReader
    assert type(open_reader(tmp_path / "empty.recordio")) is RecordIODataReader
    assert open_reader(str(tmp_path / "*.bin")).files == [path]
    assert open_reader(path, decode="text").read_record(path, 0) == "china"
    with pytest.raises(
        DataFormatError, match=r"README\.md' chunk 0 at offset 0: it starts with b'# no', and"
    ):
        open_reader(tmp_path)
    with pytest.raises(ReaderError, match="no reader knows"):
        open_reader(str(tmp_path / "notes" / "*.md"))
    with pytest.raises(ReaderError, match="does not exist"):
        open_reader(str(tmp_path / "*.nothing"))


@pytest.mark.parametrize(
    "name", ["iris", "coco_captions", "digits", "go_iris_c0", "go_iris_c1", "go_iris_c2"]
)
def test_real_files(samples: Path, name: str) -> None:
    path = str(samples / "recordio" / f"{name}.recordio")
    check_reader(lambda: RecordIODataReader(path), max_records=600)
    reader = RecordIODataReader(path)
    if "iris" in name:
        lines = (samples / "csv" / "iris.csv").read_bytes().splitlines()[1:]
        assert everything(reader) == one_by_one(reader) == lines
    assert reader.count == {"coco_captions": 565, "digits": 50}.get(name, 150)


# Chunks are split as a plain loop would split them, whatever is in them -------------------------------------


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


@given(st.lists(TRICKY | LONG, max_size=12), st.integers(0, 300), st.integers(-2, 2))
@example([b""], 300, 0)
@example([b"\0\0\0\0"], 300, 0)
@example([b"a" * 256, b"b"], 200, 0)
@example([], 0, 1)
def test_a_chunk_is_split_as_a_loop_splits_it(some: list[bytes], times: int, off: int) -> None:
    records = some * (1 + times // max(1, len(some)))
    check(payload_of(records), len(records))
    check(payload_of(records), max(0, len(records) + off))


@given(st.lists(TRICKY, min_size=1, max_size=30), st.data())
def test_damaged_payloads_are_split_as_a_loop_splits_them(records: list[bytes], data: st.DataObject) -> None:
    payload = bytearray(payload_of(records))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    check(bytes(payload), len(records))
    check(bytes(payload[: data.draw(st.integers(0, len(payload)))]), len(records))


def test_joined_chunks_must_end_where_each_ends() -> None:
    one, two = payload_of([b"a", b"bc"]), payload_of([b"d"])
    assert split(one + two, 3, [(2, len(one)), (3, len(one + two))])[2] == len(one)
    with pytest.raises(DataFormatError, match="2 records end at byte 11, not at 10"):
        split(one + two, 3, [(2, 10), (3, len(one + two))])
