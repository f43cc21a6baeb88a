"""`edl-torch convert`: any reader's records in RecordIO files, all or nothing."""

from __future__ import annotations

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
from recordio_kit import RECORDS, everything, write

from edl_torch.cli.datasets import ProgressLine
from edl_torch.cli.main import main
from edl_torch.errors import BadRecord, InvalidArgument, OutputError, ReaderError, SourceUnavailable
from edl_torch.readers import AbstractDataReader, MapDatasetReader, RecordIODataReader, RecordIOWriter
from edl_torch.readers.recordio.record_bytes import AutoEncode
from edl_torch.readers.recordio.writer import convert
from edl_torch.testing import wait_until


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


def test_one_file(tmp_path: Path) -> None:
    counts: list[int] = []
    files = convert(Rows(), tmp_path / "x", AutoEncode(), progress=counts.append)
    assert files == [str(tmp_path / "x")]
    assert everything(RecordIODataReader(tmp_path / "x", decode="text")) == ROWS
    assert counts == list(range(1, len(ROWS) + 1))
    assert os.listdir(tmp_path) == ["x"]


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


def test_nothing_becomes_an_empty_file(tmp_path: Path) -> None:
    convert(MapDatasetReader([]), tmp_path / "x", AutoEncode())
    convert(MapDatasetReader([]), tmp_path / "y", AutoEncode(), records_per_file=5)
    assert RecordIODataReader([tmp_path / "x", tmp_path / "y"]).count == 0


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
    with pytest.raises(BadRecord, match="record 0 of 'mine': the encoder made int of it"):
        convert(reader, tmp_path / "x", len, records_per_file=per_file)
    with pytest.raises(BadRecord, match="record 2 of 'mine': TypeError: object of type 'int' has no len"):
        convert(reader, tmp_path / "x", lambda r: bytes(len(r)), records_per_file=per_file)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("per_file", [None, 1000])
def test_an_interrupt_leaves_nothing(tmp_path: Path, per_file: int | None) -> None:
    def interrupt(count: int) -> None:
        if count == 3333:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Rows(), tmp_path / "x", AutoEncode(), records_per_file=per_file, progress=interrupt)
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
    ("arguments", "status", "message"),
    [
        (["nothing", "x"], 2, "does not exist"),
        (["data", "data"], 1, "exists: remove it"),
        (["data", "x", "--encode", "yaml"], 2, "expected module:function or one of bytes, text, json"),
        (["data", "x", "--encode", "text"], 2, "record 0 of"),
        (["data", "x", "--max_chunk_bytes", "0"], 2, "max_chunk_bytes=0"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data", RECORDS)
    assert run(*arguments) == status
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("per_file", [[], ["--records_per_file", "50"]], ids=["file", "folder"])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals, per_file: list[str]) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "out").mkdir()
    command = [
        sys.executable,
        "-m",
        "edl_torch",
        "convert",
        "s",
        "out/x",
        "--custom_data_reader",
        "slow:Slow",
    ]
    process = subprocess.Popen([*command, *per_file], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: os.listdir(tmp_path / "out") != [] or process.poll() is not None, timeout_s=60)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == b""
    assert os.listdir(tmp_path / "out") == []


def test_a_disk_that_is_full_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from edl_torch.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main(sys.argv[1:]))"
    )
    write(tmp_path / "data", [os.urandom(1000)] * 100, chunk=2000)
    (tmp_path / "out").mkdir()
    for more in ([], ["--records_per_file", "1000"]):
        command = [sys.executable, "-c", code, "convert", "data", "out/x", "--compressor", "none", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "edl-torch: error: 'out/x" in done.stderr
        assert "cannot be written: File too large; nothing of it was left" in done.stderr
        assert os.listdir(tmp_path / "out") == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_goes_away() -> None:
    now, stream = [0.0], Terminal()
    with ProgressLine(200, "records", stream, lambda: now[0]) as show:
        for count in range(1, 101):
            now[0] += 1 / 128
            show(count)
    assert stream.getvalue().count("\r") <= 12
    assert "] " in stream.getvalue()
    assert "of 200 records, 1 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_of_nothing_and_without_a_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with ProgressLine(0, "records", stream) as show:
            show(0)
    assert "100%" in terminal.getvalue()
    assert file.getvalue() == ""
