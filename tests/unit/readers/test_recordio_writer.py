"""RecordIO files that are written, by `RecordIOWriter` and by `edl-torch convert`: whole or nothing."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from image_files import write_image_folder
from readers_kit import RECORDS, everything, write_recordio
from terminal import Terminal

from edl_torch.cli.datasets import ProgressLine
from edl_torch.cli.main import main
from edl_torch.errors import BadRecord, InvalidArgument, OutputError, ReaderError, SourceUnavailable
from edl_torch.readers import AbstractDataReader, MapDatasetReader, RecordIODataReader, RecordIOWriter
from edl_torch.readers.recordio.record_bytes import ENCODERS, AutoEncode
from edl_torch.readers.recordio.writer import convert
from edl_torch.testing import wait_until

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

    path = write_recordio(tmp_path / "x", form=("python", compressor), chunk=chunk)
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
    ours = Path(write_recordio(tmp_path / "ours", form=("python", compressor), chunk=chunk))
    if compressor != "gzip":  # whose header has the time
        assert ours.read_bytes() == theirs.read_bytes()


def test_gos_file_is_written_byte_by_byte(tmp_path: Path, samples: Path) -> None:
    go = samples / "recordio" / "go_iris_c0.recordio"
    lines = everything(RecordIODataReader(go))
    assert (
        Path(write_recordio(tmp_path / "x", lines, form=("go", "none"), chunk=1024)).read_bytes()
        == go.read_bytes()
    )


def test_a_go_chunk_as_its_source_has_it(tmp_path: Path) -> None:
    """chunk.go and header.go: magic, CRC-32 (IEEE) of the data, compressor, size, number of records."""
    path = write_recordio(tmp_path / "x", [b"ab", b""], form=("go", "none"))
    expected = (
        "04030201" + "1b5a8ce0" + "00000000" + "0a000000" + "02000000" + "02000000" + "6162" + "00000000"
    )
    data = Path(path).read_bytes()
    import zlib

    assert int.from_bytes(data[4:8], "little") == zlib.crc32(data[20:])
    assert data[:4].hex() + data[8:].hex() == expected[:8] + expected[16:]


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


def test_bytes_of_every_kind_are_taken(tmp_path: Path) -> None:
    path = write_recordio(tmp_path / "x", [b"a", bytearray(b"b"), memoryview(b"c")])
    assert everything(RecordIODataReader(path)) == [b"a", b"b", b"c"]
    with pytest.raises(InvalidArgument, match="a record is bytes, not str"):
        write_recordio(tmp_path / "y", ["text"])
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


# `edl-torch convert`: any reader's records in RecordIO files, all or nothing --------------------------------


class Rows(AbstractDataReader):
    """Record `i` of a source is "name i"; `wrong` changes what a range gives."""

    def __init__(self, data_origin: str = "", wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def create_shards(self) -> Any:
        return [("a", 10, 5000), ("b", 0, 7), ("a", 0, 10), ("none", 0, 0)]

    def read_records(self, task: Any) -> Iterator[str]:
        end = task.end + {"more": 1, "fewer": -1}.get(self.wrong, 0)
        for index in range(task.start, end):
            if self.wrong == "bad" and index == 4500:
                raise OSError("unreadable")
            if self.wrong == "away" and index == 4500:
                raise ConnectionResetError("the server hung up")
            yield f"{task.shard_name} {index}"


ROWS = [f"a {i}" for i in range(10, 5010)] + [f"b {i}" for i in range(7)] + [f"a {i}" for i in range(10)]


def encode_second(record: Any) -> bytes:
    return bytes([record[1]])


@pytest.mark.parametrize(("per_file", "parts"), [(1000, 6), (5017, 1), (5016, 2), (10**9, 1)])
def test_many_files(tmp_path: Path, per_file: int, parts: int) -> None:
    writer = partial(RecordIOWriter, dialect="go", compressor="gzip", max_chunk_bytes=100)
    files = convert(Rows(), f"{tmp_path}/out/", AutoEncode(), records_per_file=per_file, writer=writer)
    assert files[0] == f"{tmp_path}/out/part-00000-of-{parts:05}.recordio"
    reader = RecordIODataReader(tmp_path / "out", decode="text")
    assert reader.files == files
    assert everything(reader) == ROWS
    assert list(reader.create_shards().values())[:-1] == [per_file] * (parts - 1)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("per_file", [None, 1000])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("more", ReaderError, "more records than were asked for"),
        ("fewer", ReaderError, r"ended 1 record\(s\) early, at record 4105 of 'a'"),
        ("bad", BadRecord, "record 4500 of 'a': OSError: unreadable"),
        ("away", SourceUnavailable, r"record 4500 of 'a': ConnectionResetError: .*not to blame"),
    ],
)
def test_a_reader_that_fails_leaves_nothing(
    tmp_path: Path, per_file: int | None, wrong: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert(Rows(wrong=wrong), tmp_path / "x", AutoEncode(), records_per_file=per_file)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("per_file", [None, 2])
def test_an_encoder_that_fails_names_the_record(tmp_path: Path, per_file: int | None) -> None:
    reader = MapDatasetReader(["text", "text", 3], name="mine")
    with pytest.raises(BadRecord, match="record 2 of 'mine': is json, and those before it are text"):
        convert(reader, tmp_path / "x", AutoEncode(), records_per_file=per_file)
    with pytest.raises(BadRecord, match="record 2 of 'mine': holds a int and no text: write a function"):
        convert(reader, tmp_path / "x", ENCODERS["text"], records_per_file=per_file)
    with pytest.raises(BadRecord, match="record 0 of 'mine': the encoder made int of it"):
        convert(reader, tmp_path / "x", len, records_per_file=per_file)
    with pytest.raises(BadRecord, match="record 2 of 'mine': TypeError: object of type 'int' has no len"):
        convert(reader, tmp_path / "x", lambda r: bytes(len(r)), records_per_file=per_file)
    assert os.listdir(tmp_path) == []


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for per_file in (None, 5):
        with pytest.raises(OutputError, match="exists: remove it, or choose another"):
            convert(Rows(), f"{tmp_path}/x/", AutoEncode(), records_per_file=per_file)
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        convert(Rows(), tmp_path / "no" / "x", AutoEncode(), records_per_file=5)
    with pytest.raises(InvalidArgument, match="records_per_file=0"):
        convert(Rows(), tmp_path / "y", AutoEncode(), records_per_file=0)


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def test_the_command_converts_what_a_reader_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = write_image_folder(tmp_path / "photos")
    assert run(photos, tmp_path / "x", "--records-per-file", 4) == 0
    assert "6 records as npz in 2 file(s)" in capsys.readouterr().out
    records = everything(RecordIODataReader(tmp_path / "x", decode="npz"))
    assert [int(record["1"]) for record in records] == [0, 0, 0, 1, 1, 1]
    assert records[0]["0"].dtype == "uint8"
    assert run(tmp_path / "x", tmp_path / "again", "--dialect", "go", "--compressor", "gzip") == 0
    assert everything(RecordIODataReader(tmp_path / "again")) == everything(
        RecordIODataReader(tmp_path / "x")
    )
    assert run(photos, tmp_path / "y", "--encode", f"{__name__}:encode_second") == 0
    assert everything(RecordIODataReader(tmp_path / "y")) == [b"\0"] * 3 + [b"\1"] * 3


def test_the_command_takes_readers_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:Rows"
    assert run("anything", tmp_path / "x", "--custom_data_reader", name) == 0
    assert everything(RecordIODataReader(tmp_path / "x", decode="text")) == ROWS
    capsys.readouterr()
    bad = ("--custom_data_reader", name, "--custom_data_reader_params", "wrong=bad")
    assert run("anything", tmp_path / "y", *bad) == 2
    assert "record 4500 of 'a': OSError: unreadable" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encode", "yaml"], "expected module:function or one of bytes, text, json"),
        (["--encode", "text"], "record 0 of"),
        (["--max_chunk_bytes", "0"], "max_chunk_bytes=0"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recordio(tmp_path / "data", RECORDS)
    assert run("data", "x", *arguments) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["data"]


SLOW = """
import time
from edl_torch.readers import AbstractDataReader
class Slow(AbstractDataReader):
    def create_shards(self): return {"s": 10**6}
    def read_records(self, task):
        for i in range(task.start, task.end):
            time.sleep(0.001)
            yield bytes(100)
"""


@pytest.mark.parametrize(
    ("number", "per_file"),
    [(signal.SIGINT, []), (signal.SIGTERM, ["--records_per_file", "50"])],
    ids=["a file", "a folder"],
)
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals, per_file: list[str]) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "out").mkdir()
    options = ["--custom_data_reader", "slow:Slow", *per_file]
    command = [sys.executable, "-m", "edl_torch", "convert", "s", "out/x", *options]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: os.listdir(tmp_path / "out") != [] or process.poll() is not None, timeout_s=60)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == b""
    assert os.listdir(tmp_path / "out") == []


def test_progress_is_drawn_on_a_terminal_and_goes_away() -> None:
    now, stream = [0.0], Terminal()
    with ProgressLine(200, "records", stream, lambda: now[0]) as show:
        for count in range(1, 101):
            now[0] += 1 / 128
            show(count, 10 * count)
    assert stream.getvalue().count("\r") <= 12
    assert "] " in stream.getvalue()
    assert "92 of 200 records, 920 bytes, 1 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_of_nothing_and_without_a_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with ProgressLine(0, "records", stream) as show:
            show(0)
    assert "100%" in terminal.getvalue()
    assert file.getvalue() == ""
