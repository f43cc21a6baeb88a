"""`RecordIOWriter`: whole or nothing, and what other libraries make of its files."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recordio_kit import FORMS, RECORDS, chunk_bounds, everything, write

from edl_torch.errors import InvalidArgument, OutputError
from edl_torch.readers import RecordIODataReader, RecordIOWriter

PYTHON_NUMBER = {"none": 1, "snappy": 2, "gzip": 3}


@pytest.fixture
def pyrecordio() -> Any:
    return pytest.importorskip("recordio.recordio", reason="needs pyrecordio==0.0.4")


@pytest.mark.filterwarnings("ignore:crc32c.crc32:DeprecationWarning")
@pytest.mark.parametrize("compressor", PYTHON_NUMBER)
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_pyrecordio_reads_what_is_written(
    tmp_path: Path, pyrecordio: Any, compressor: str, chunk: int
) -> None:
    from recordio import File

    path = write(tmp_path / "x", form=("python", compressor), chunk=chunk)
    with File(path, "r") as file:
        assert file.count() == len(RECORDS)
        assert list(file) == RECORDS
        assert [file.get(index) for index in range(len(RECORDS))] == RECORDS


@pytest.mark.filterwarnings("ignore:crc32c.crc32:DeprecationWarning")
@pytest.mark.parametrize("compressor", PYTHON_NUMBER)
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_what_pyrecordio_writes_is_read(tmp_path: Path, pyrecordio: Any, compressor: str, chunk: int) -> None:
    from recordio.recordio.header import Compressor
    from recordio.recordio.writer import Writer

    theirs = tmp_path / "theirs"
    with open(theirs, "wb") as file:
        writer = Writer(file, chunk, Compressor(PYTHON_NUMBER[compressor]))
        for record in RECORDS:
            writer.write(record)
        writer.flush()
    assert everything(RecordIODataReader(theirs)) == RECORDS
    ours = Path(write(tmp_path / "ours", form=("python", compressor), chunk=chunk))
    if compressor != "gzip":  # whose header has the time
        assert ours.read_bytes() == theirs.read_bytes()


def test_gos_file_is_written_byte_by_byte(tmp_path: Path, samples: Path) -> None:
    go = samples / "recordio" / "go_iris_c0.recordio"
    lines = everything(RecordIODataReader(go))
    assert Path(write(tmp_path / "x", lines, form=("go", "none"), chunk=1024)).read_bytes() == go.read_bytes()


@pytest.mark.parametrize("compressor", ["snappy", "gzip"])
def test_chunks_are_gos_whatever_the_compressor(tmp_path: Path, samples: Path, compressor: str) -> None:
    number = {"snappy": 1, "gzip": 2}[compressor]
    go = RecordIODataReader(samples / "recordio" / f"go_iris_c{number}.recordio")
    reader = RecordIODataReader(write(tmp_path / "x", everything(go), form=("go", compressor), chunk=1024))
    theirs, ours = ([s.firsts.tolist() for s in r._by_name().values()] for r in (go, reader))
    assert ours == theirs
    assert everything(reader) == everything(go)


def test_a_go_chunk_as_its_source_has_it(tmp_path: Path) -> None:
    """chunk.go and header.go: magic, CRC-32 (IEEE) of the data, compressor, size, number of records."""
    path = write(tmp_path / "x", [b"ab", b""], form=("go", "none"))
    expected = (
        "04030201" + "1b5a8ce0" + "00000000" + "0a000000" + "02000000" + "02000000" + "6162" + "00000000"
    )
    data = Path(path).read_bytes()
    import zlib

    assert int.from_bytes(data[4:8], "little") == zlib.crc32(data[20:])
    assert data[:4].hex() + data[8:].hex() == expected[:8] + expected[16:]


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_the_same_records_are_the_same_file(tmp_path: Path, form: tuple[str, str]) -> None:
    one, two = (Path(write(tmp_path / name, form=form)).read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_chunk_ends_before_it_is_too_large(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x", [b"12", b"34", b"5", b"", b"123456789", b"", b"1"], form=("go", "none"), chunk=4
    )
    assert RecordIODataReader(path)._arrays["firsts"].tolist() == [0, 2, 4, 5, 7]
    assert len(chunk_bounds(path, 3)) == 5


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"before")
    with RecordIOWriter(path) as writer:
        writer.write(b"record")
        assert path.read_bytes() == b"before"
    assert everything(RecordIODataReader(path)) == [b"record"]
    assert os.listdir(tmp_path) == ["x"]
    assert writer.count == 1
    assert repr(writer).endswith("python records=1 closed>")
    writer.close()
    with pytest.raises(OutputError, match="is closed"):
        writer.write(b"more")


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with RecordIOWriter(tmp_path / "x", max_chunk_bytes=1) as writer:
            writer.write(b"one")
            writer.write(b"two")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    writer = RecordIOWriter(tmp_path / "x", max_chunk_bytes=1)
    writer.write(b"one")
    assert len(os.listdir(tmp_path)) == 1
    del writer
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_take_its_parents_file_away(tmp_path: Path) -> None:
    code = (
        "import os, sys; from edl_torch.readers import RecordIOWriter\n"
        "with RecordIOWriter(sys.argv[1]) as writer:\n"
        "    writer.write(b'one')\n"
        "    if os.fork() == 0: sys.exit()\n"
        "    os.wait(); writer.write(b'two')\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "x"], check=True, timeout=60)
    assert everything(RecordIODataReader(tmp_path / "x")) == [b"one", b"two"]


def test_no_records_are_an_empty_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.recordio", [])
    assert os.path.getsize(path) == 0
    assert RecordIODataReader(path).count == 0


def test_bytes_of_every_kind_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [b"a", bytearray(b"b"), memoryview(b"c")])
    assert everything(RecordIODataReader(path)) == [b"a", b"b", b"c"]
    with pytest.raises(InvalidArgument, match="a record is bytes, not str"):
        write(tmp_path / "y", ["text"])
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dialect": "rust"}, "expected 'python'"),
        ({"compressor": "zstd"}, "expected one of 'none', 'snappy', 'gzip'"),
        ({"max_chunk_bytes": 0}, "max_chunk_bytes=0"),
    ],
)
def test_bad_arguments_say_what_is_wrong(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        RecordIOWriter(tmp_path / "x", **arguments)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        RecordIOWriter(tmp_path / "no" / "x")


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, resource, sys; from edl_torch.readers import RecordIOWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "with RecordIOWriter(sys.argv[1], compressor='none') as writer:\n"
        "    for _ in range(int(sys.argv[2])): writer.write(bytes(1000))\n"
    )
    for records in (30, 3000):  # in the last chunk, and long before
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "x", str(records)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "OutputError" in done.stderr
        assert "cannot be written: File too large; nothing of it was left" in done.stderr
        assert os.listdir(tmp_path) == []


def test_the_file_has_the_rights_of_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    rights = [stat.S_IMODE(os.stat(p).st_mode) for p in (write(tmp_path / "x"), tmp_path / "plain")]
    assert rights[0] == rights[1]
