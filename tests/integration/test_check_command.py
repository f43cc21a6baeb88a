"""`edl-torch check` as a command: every reader, exit statuses, JSON, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import preloaded
import pytest
from every_reader import KINDS, made
from image_files import write_image_folder, write_manifest
from processes import alive

from edl_torch.cli.main import main
from edl_torch.readers import RecordIOWriter, read_image
from edl_torch.testing import wait_until

ROOT = Path(__file__).parents[2]
READERS = Path(__file__).parents[1] / "unit" / "checking"
HERE = ("--workers", 0)  # a process of its own costs an interpreter


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["check", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_is_checked_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    with made(kind, tmp_path / "data") as data:
        for name, value in data.environment.items():
            monkeypatch.setenv(name, value)
        sheet = tmp_path / "sheet.png"
        status, out, err = run(capsys, data.data, "--json", *HERE, "--sample", sheet, "--sample-count", 3)
    assert (status, err) == (0, "")
    value = json.loads(out)
    assert (value["clean"], value["reader"]) == (True, data.reader)
    assert (value["records"], value["read"]) == (data.counts[0], data.counts[0])
    assert sum(source["count"] for source in value["sources"]) == data.counts[0]
    assert len(read_image(str(sheet))) > 100


def test_another_mode_is_another_part_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with made("voc", tmp_path) as data:
        assert json.loads(run(capsys, data.data, "--mode", "prediction", "--json", *HERE)[1])["records"] == 2


def test_findings_are_named_and_make_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_manifest(tmp_path, [0] * 30)
    for number in range(10, 14):
        (tmp_path / "images" / f"{number:04d}.png").write_bytes(b"")
    (tmp_path / "images" / "0020.png").unlink()
    with open(manifest, "a", encoding="ascii") as file:
        file.write("images/0002.png,0\n")
    status, out, err = run(capsys, manifest, "--list", 2)
    assert (status, err) == (1, "")
    assert "unreadable: 4" in out
    assert "record 11 of" in out
    assert "record 12 of" not in out
    assert "… and 2 more" in out
    assert "missing: 1" in out
    assert "entry 30 of" in out
    assert out.endswith("FINDINGS\n")
    value = json.loads(run(capsys, manifest, "--json", *HERE)[1])
    assert [item["start"] for item in value["unreadable"]["findings"]] == [10, 11, 12, 13]
    assert (value["clean"], value["duplicate"]["records"]) == (False, 1)


def test_a_sample_reads_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_image_folder(tmp_path / "f", per_class=20)
    status, out, _ = run(capsys, folder, "--limit", 6, *HERE)
    assert status == 0
    assert "40 record(s)" in out
    assert "read 6 of them" in out


def test_a_reader_without_a_fingerprint_is_told_what_that_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(READERS))
    reader = ("--custom_data_reader", "checked_readers:Numbers", "--custom_data_reader_params", "count=3")
    status, out, _ = run(capsys, "x", *HERE, *reader)
    assert status == 0
    assert "fingerprint: none; a job does not notice other data, unless its loader has fingerprint=" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/data"], "does not exist"),
        (["."], "knows '.'|has no image|no image"),
        (["x", "--custom_data_reader", "nocolon"], "module:Class"),
        (["x", "--custom_data_reader", "checked_readers:Numbers"], "argument 'colour'"),
        (["x", "--custom_data_reader", "checked_readers:Empty"], "no class Empty"),
        (["x", "--limit", "0"], "--limit 0"),
        (["x", "--workers", "-1"], "--workers -1"),
        (["x", "--sample_count", "0"], "--sample_count 0"),
        (["x", "--sample", "/no/such/folder/x.png"], "the folder does not exist"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(READERS))
    if message == "argument 'colour'":
        arguments = [*arguments, "--custom_data_reader_params", "colour=red"]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("edl-torch: error: ")
    assert err.count("\n") == 1
    assert any(part in err for part in message.split("|"))


def test_a_source_out_of_reach_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(READERS))
    reader = ("--custom_data_reader", "checked_readers:Unreachable")
    parameters = ("--custom_data_reader_params", "count=100; bad=(50, 51)")
    status, out, err = run(capsys, "x", *HERE, *reader, *parameters)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("edl-torch: error: record 50 of 'n': ConnectionResetError: the server hung up.")


def test_coco_ids_that_occur_twice_make_data_unusable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with made("coco_captions", tmp_path) as data:
        path = Path(data.data)
        path.write_text(path.read_text().replace('"id": 102', '"id": 101', 1))
        status, _, err = run(capsys, path, *HERE)
    assert status == 2
    assert "id 101" in err


def start(tmp_path: Path, reader: str, *options: str, **settings: Any) -> subprocess.Popen[bytes]:
    """The command over a reader of `checked_readers`, in a process group of its own."""
    path = os.pathsep.join([str(ROOT), str(READERS)])
    return preloaded.Popen(
        [
            *(sys.executable, "-m", "edl_torch", "check", "x", "--custom_data_reader"),
            *(f"checked_readers:{reader}", *options),
        ],
        env={**os.environ, "PYTHONPATH": path, "SLOW_PIDS": str(tmp_path / "pids")},
        start_new_session=True,
        **settings,
    )


def test_a_record_that_kills_does_not_kill_the_command(tmp_path: Path) -> None:
    options = ("--custom_data_reader_params", "count=8; bad=(5,)", "--sample", str(tmp_path / "sheet.png"))
    process = start(tmp_path, "Lethal", *options, stdout=subprocess.PIPE)
    out = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 1
    assert "record 5 of 'n': the process that read it was killed by SIGKILL" in out
    assert "8 record(s) drawn" in out


def test_damage_inside_a_recordio_file_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.recordio"
    with RecordIOWriter(path, max_chunk_bytes=100) as writer:
        for number in range(40):
            writer.write(b"record %02d" % number)
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(content)
    status, out, _ = run(capsys, path, *HERE)
    assert status == 1
    assert re.search(r"records 3\d to 39 of '.*a\.recordio': .*chunk \d+ at offset", out)
    path.write_bytes(content[:-5])
    status, out, err = run(capsys, path, *HERE)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err


def test_a_recordio_file_of_one_damaged_chunk_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        with RecordIOWriter(tmp_path / f"{name}.recordio") as writer:
            for number in range(5):
                writer.write(b"record %d" % number)
    content = bytearray((tmp_path / "a.recordio").read_bytes())
    content[-3] ^= 0xFF
    (tmp_path / "a.recordio").write_bytes(content)
    status, out, _ = run(capsys, tmp_path, *HERE)
    assert status == 1
    assert re.search(
        r"records 0 to 4 of '.*a\.recordio': .*a\.recordio' chunk 0 at offset 0: its data has", out
    )
    assert "unreadable: 5" in out


def blocks_sigint(pid: int) -> bool:
    """Whether the process never lets the signal through."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (blocked,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
    return bool(blocked & 1 << (signal.SIGINT - 1))


@pytest.mark.parametrize("how", ["all get the signal", "a worker, then the command"])
def test_its_workers_end_with_it(tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    count = "--custom_data_reader_params", "count=1000"
    process = start(tmp_path, "Slow", "--workers", "2", *count, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, timeout_s=60)
        workers = [int(line) for line in pids.read_text().split()]
        assert all(map(alive, workers))
        assert all(map(blocks_sigint, workers))
        if how == "all get the signal":
            os.killpg(process.pid, signal.SIGINT)  # as of a terminal
        else:
            os.kill(workers[0], signal.SIGINT)
            process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == 130
        wait_until(lambda: not any(map(alive, workers)))
    finally:
        process.kill()
        process.wait(60)


def watch(terminal: int, pieces: list[bytes]) -> None:
    with suppress(OSError):  # what Linux says at the end of a terminal
        while piece := os.read(terminal, 4096):
            pieces.append(piece)


def test_progress_is_drawn_on_a_terminal_alone(tmp_path: Path) -> None:
    count = "--custom_data_reader_params", "count=300_000"
    ours, theirs = pty.openpty()
    process = start(tmp_path, "Numbers", "--workers", "1", *count, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    pieces: list[bytes] = []
    watching = threading.Thread(
        target=watch, args=(ours, pieces)
    )  # a terminal that nobody reads holds writers up
    watching.start()
    out, _ = process.communicate(timeout=60)
    watching.join(60)
    os.close(ours)
    drawn = b"".join(pieces)
    assert process.returncode == 0
    assert b"of 300,000 records" in drawn
    assert drawn.endswith(b"\x1b[K")
    assert b"\r" not in out
