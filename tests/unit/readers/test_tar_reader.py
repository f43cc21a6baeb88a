"""`TarReader`: what a record is, which tars are refused and how, indexes beside tars, tars that change."""

from __future__ import annotations

import gzip
import io
import logging
import os
import pickle
import re
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from image_files import encode, render
from readers_kit import scan
from tar_files import add, samples_tar, write_tar

from edl_torch.cli.main import main
from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, ReaderError
from edl_torch.readers import TarReader, open_reader
from edl_torch.readers.base import is_source_error, reader_fingerprint
from edl_torch.readers.storage import Storage
from edl_torch.readers.tar.index import index_tar, parse_index, refuse_packed, write_beside
from edl_torch.testing import check_reader


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    content = {}
    for number in range(3):
        content |= {
            f"{number:03}.jpg": encode(render(number), ".jpg"),
            f"{number:03}.cls": b"%d" % number,
            f"{number:03}.json": b'{"n": %d}' % number,
            f"{number:03}.txt": "é".encode(),
            f"{number:03}.depth.npy": npy(np.arange(number, dtype=np.float32)),
            f"{number:03}.raw": b"\0" * number,
        }
    return write_tar(tmp_path / "a.tar", content)


# Records --------------------------------------------------------------------------------------------------


def test_members_are_decoded_by_suffix(pictures: str) -> None:
    record = TarReader(pictures).read_record(pictures, 2)
    assert list(record) == ["__key__", "__url__", "jpg", "cls", "json", "txt", "depth.npy", "raw"]
    assert (record["__key__"], record["__url__"]) == ("002", pictures)
    assert (record["cls"], record["json"], record["txt"], record["raw"]) == (2, {"n": 2}, "é", b"\0\0")
    assert np.array_equal(record["depth.npy"], np.arange(2, dtype=np.float32))
    picture = cv2.cvtColor(cv2.imdecode(np.frombuffer(encode(render(2), ".jpg"), np.uint8), 1), 4)
    assert np.array_equal(record["jpg"], picture)


def test_images_alone_and_with_a_target_are_what_other_readers_of_images_give(pictures: str) -> None:
    kinds = {"jpg": True, ("jpg;png", "cls"): True, ("cls", "jpg"): False, ("jpg;raw", "cls"): False}
    assert {fields: TarReader(pictures, fields).yields_images for fields in kinds} == kinds
    assert not TarReader(pictures, ("jpg", "cls"), decoders={"jpg": len}).yields_images
    assert not TarReader(pictures).yields_images


def test_own_decoders_come_first_and_the_longest_suffix_before_others(pictures: str) -> None:
    reader = TarReader(pictures, decoders={"npy": len, ".depth.NPY": bytes.hex, "raw": len})
    record = reader.read_record(pictures, 1)
    assert (record["depth.npy"], record["raw"]) == (npy(np.zeros(1, np.float32)).hex(), 1)
    raw = TarReader(pictures, decode=False, decoders={"cls": int}).read_record(pictures, 1)
    assert (raw["cls"], raw["txt"]) == (1, "é".encode())


@pytest.mark.parametrize(
    ("fields", "decoders", "said"),
    [((), None, "expected suffixes"), ((";",), None, "expected suffixes"), (None, {"a": 3}, "no function")],
)
def test_arguments_that_mean_nothing_are_refused(
    pictures: str, fields: Any, decoders: Any, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        TarReader(pictures, fields, decoders=decoders)


def broken(data: bytes) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("suffix", "data", "said"),
    [
        ("jpg", encode(render(0), ".jpg")[:-40], "image 'k.jpg' cannot be read: the JPEG is truncated"),
        ("png", b"", "the file is empty"),
        ("webp", b"none", "finds no image"),
        ("cls", b"x", "is no whole number: b'x'"),
        ("json", b"{", "is no JSON"),
        ("txt", b"\xff", "is not UTF-8"),
        ("npy", b"none", "is no .npy array"),
        ("npy", npy(np.array([{}], dtype=object)), "is no .npy array"),
        ("mine", b"", "KeyError: 'mine'"),
    ],
)
def test_a_broken_member_is_a_bad_record_with_tar_key_and_member(
    tmp_path: Path, suffix: str, data: bytes, said: str
) -> None:
    path = write_tar(tmp_path / "a.tar", {"j.txt": b"", f"k.{suffix}": data, "l.txt": b""})
    reader = TarReader(path, decoders={"mine": broken})
    with pytest.raises(BadRecord) as caught:
        reader.read_record(path, 1)
    assert str(caught.value).startswith(f"'{path}' sample 'k' member '{suffix}': ")
    assert said in str(caught.value)
    assert [reader.read_record(path, index)["__key__"] for index in (0, 2)] == ["j", "l"]


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "pickle", "x.pkl"])
def test_pickles_are_refused_and_never_quarantined(tmp_path: Path, suffix: str) -> None:
    path = write_tar(tmp_path / "a.tar", {f"a.{suffix}": pickle.dumps(1), "a.txt": b"x"})
    with pytest.raises(ReaderError, match=r"is a pickle.*fields=.*decoders=") as caught:
        TarReader(path).read_record(path, 0)
    assert is_source_error(caught.value)
    assert TarReader(path, "txt").read_record(path, 0) == "x"
    assert TarReader(path, decoders={suffix: len}).read_record(path, 0)[suffix] == len(pickle.dumps(1))
    assert TarReader(path, decode=False).read_record(path, 0)[suffix] == pickle.dumps(1)


def test_a_name_that_is_there_twice_makes_its_sample_bad(tmp_path: Path) -> None:
    content = [("a.txt", b""), ("b.txt", b"1"), ("b.TXT", b"2"), ("c.__key__", b""), ("d.txt", b"")]
    path = write_tar(tmp_path / "a.tar", content)
    reader = TarReader(path)
    for index, key, member in ((1, "b", "txt"), (2, "c", "__key__")):
        with pytest.raises(BadRecord, match=f"sample '{key}' has two members '{member}': rename"):
            reader.read_record(path, index)
    assert reader.read_record(path, 3)["__key__"] == "d"


def test_of_a_large_sample_only_what_is_wanted_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.mp4": bytes(5 << 20), "a.cls": b"7", "a.txt": b"text"})
    reader = TarReader(path, ("cls", "txt"))
    pread, sizes = os.pread, []

    def counted(descriptor: int, size: int, place: int) -> bytes:
        sizes.append(size)
        return pread(descriptor, size, place)

    monkeypatch.setattr("edl_torch.readers.shared.files.os.pread", counted)
    assert reader.read_record(path, 0) == (7, "text")
    assert sum(sizes) < 1 << 17


def test_a_record_is_read_alike_whatever_lies_around_it(tmp_path: Path) -> None:
    """Runs of small samples are read at once, middling ones alone, and of large ones a part at a time."""
    sizes = [10, 100_000, 20, 30, 300_000, 0, 3 << 20, 5, 5]
    content = [(f"{n}.{suffix}", bytes([n]) * size) for n, size in enumerate(sizes) for suffix in ("a", "b")]
    path = write_tar(tmp_path / "a.tar", content)
    reader = TarReader(path)
    alone = [reader.read_record(path, index) for index in range(len(sizes))]
    assert [record["b"] for record in alone] == [bytes([n]) * size for n, size in enumerate(sizes)]
    for start in range(len(sizes)):
        assert scan(reader, path, start, len(sizes)) == alone[start:]


# Refused --------------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(DataFormatError) as caught:
        TarReader(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "pack", "command"),
    [
        ("a.tar.gz", gzip.compress, "gunzip -c '{0}/a.tar.gz' > '{0}/a.tar'"),
        ("a.tgz", gzip.compress, "gunzip -c '{0}/a.tgz' > '{0}/a.tar'"),
        ("a.tar", gzip.compress, "gunzip -c '{0}/a.tar' > '{0}/a.plain.tar'"),
        ("a.tar.zst", lambda data: b"\x28\xb5\x2f\xfd" + data, "unzstd -c '{0}/a.tar.zst' > '{0}/a.tar'"),
    ],
)
def test_a_packed_tar_is_refused_with_the_command_that_unpacks_it(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], command: str
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(Path(samples_tar(tmp_path / "plain", 3)).read_bytes()))
    (tmp_path / "plain").unlink()
    said = refused(path)
    assert command.format(tmp_path) in said
    with pytest.raises(DataFormatError, match="packed"):  # not "no reader knows it"
        open_reader(path)
    with pytest.raises(DataFormatError, match="packed"):
        open_reader(tmp_path)
    if "gunzip" in command:
        subprocess.run(said[said.index("gunzip") :], shell=True, check=True)
        plain = said.split("'")[-2]
        assert TarReader(plain).count == 3


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s3://b/x.tgz", "aws s3 cp 's3://b/x.tgz' - | gunzip -c | aws s3 cp - 's3://b/x.tar'"),
        ("gs://b/x.tgz", "copy it here, unpack it (gunzip -c), and put it there as 'gs://b/x.tar'"),
    ],
)
def test_a_packed_tar_in_a_store_is_refused_with_a_command_that_works_there(url: str, remedy: str) -> None:
    with pytest.raises(DataFormatError, match=re.escape(remedy)):
        refuse_packed(url, gzip.compress(b""))


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
def test_a_sparse_member_is_refused_by_name(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    with open(tmp_path / "k.bin", "wb") as file:
        file.seek(10 << 20)
        file.write(b"end")
    for form in ("gnu", "posix") if program == "tar" else ("pax",):
        command = [program, f"--format={form}", "-C", str(tmp_path), "-cf", str(tmp_path / "a.tar"), "k.bin"]
        subprocess.run(command + ["--sparse"] * (program == "tar"), check=True)
        if (tmp_path / "a.tar").stat().st_size > 10 << 20:
            pytest.skip(f"{program} saw no hole on this file system")
        assert "its member 'k.bin' is sparse" in refused(tmp_path / "a.tar")


def test_tars_that_end_early_or_late_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = Path(samples_tar(path, 3)).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for cut, said in (
        (0, "it has no byte"),
        (end, "zeros that end a tar"),
        (end - 512, "is cut short in"),
    ):
        path.write_bytes(whole[:cut])
        assert said in refused(path)
    path.write_bytes(whole + whole)
    assert "two tars in one file" in refused(path)
    path.write_bytes(whole[:1024] + b"x" * 512 + whole[1536:])
    assert "there is no header of a tar at byte 1,024" in refused(path)
    path.write_bytes(whole[:end] + bytes(512))  # one block of zeros is an end, too
    assert TarReader(path).count == 3


def test_global_pax_records_that_rename_members_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.txt": b""}, pax_headers={"path": "b.txt"})
    assert "gives all members one b'path'" in refused(Path(path))
    path = write_tar(tmp_path / "b.tar", {"a.txt": b"x"}, pax_headers={"comment": "of git"})
    assert TarReader(path).read_record(path, 0)["txt"] == "x"


@pytest.mark.parametrize("field", [slice(124, 136), slice(148, 156)])
@pytest.mark.parametrize("value", [b"\xff" + b"\xff" * 11, b"-1", b"\x80" + b"\xff" * 11, b"9"])
def test_numbers_that_lead_nowhere_are_refused(tmp_path: Path, field: slice, value: bytes) -> None:
    path = tmp_path / "a.tar"
    header = bytearray(Path(samples_tar(path, 1)).read_bytes())
    size = field.stop - field.start
    header[field] = value[:size].ljust(size, b"\0")
    if field.start == 124:
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + 256 + sum(header[156:512]))
    path.write_bytes(header)
    assert "no header of a tar at byte 0" in refused(path) or "cut short" in refused(path)


def test_what_is_no_tar_or_has_no_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"text " * 1000)
    assert "there is no header of a tar at byte 0" in refused(tmp_path / "a.tar")
    write_tar(tmp_path / "b.tar", {"README": b"", "__meta__/a.txt": b""})
    assert "there is no sample" in refused(tmp_path / "b.tar")
    (tmp_path / "c.tar").mkdir()
    with pytest.raises(DataFormatError, match="has no data file"):
        TarReader(tmp_path / "c.tar")


def test_links_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "a.txt", b"x")
        add(tar, "b.txt", type=tarfile.LNKTYPE, linkname="a.txt")
    with caplog.at_level(logging.WARNING, "edl_torch.readers"):
        assert TarReader(tmp_path / "a.tar").count == 1
    assert "links=1" in caplog.text
    assert "--hard-dereference" in caplog.text


def test_keys_that_come_again_behind_others_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a.txt", "b.txt", "a.cls", "c.cls", "c.txt", "a.json"]
    path = write_tar(tmp_path / "a.tar", dict.fromkeys(names, b"1"))
    assert TarReader(path).count == 5
    assert "samples=2 keys come again behind other samples, such as 'a'" in caplog.text


# By what the data are called ------------------------------------------------------------------------------


def test_a_tar_a_folder_a_glob_and_a_list_are_known(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    names = [samples_tar(folder / f"t-{number}.tar", 2, begin=2 * number) for number in range(3)]
    (folder / "t-0.idx").write_text("v1.2 0\n")
    (folder / "index.json").write_text("{}")
    (folder / ".nv-meta").mkdir()
    for data, expected in ((names[1], names[1:2]), (folder, names), (f"{folder}/t-[12].tar", names[1:])):
        reader = open_reader(data)
        assert isinstance(reader, TarReader)
        assert reader.files == expected
    assert TarReader([names[2], names[0]]).files == [names[2], names[0]]
    (folder / "more").mkdir()
    assert not isinstance(TarReader.arguments_for(str(folder), None, {}), dict)  # type: ignore[arg-type]


# Indexes beside a tar -------------------------------------------------------------------------------------


def dali(path: str) -> str:
    """As DALI's wds2idx writes it."""
    lines: dict[str, list[str]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            base, _, suffix = member.name.partition(".")
            lines.setdefault(base, []).append(f"{suffix} {member.offset_data} {member.size} {member.name}")
    return "\n".join([f"v1.2 {len(lines)}", *map(" ".join, lines.values()), ""])


def energon(path: str) -> bytes:
    """As Megatron Energon's `energon prepare` writes it."""
    places, last = [], None
    with tarfile.open(path) as tar:
        for member in tar:
            if member.name.partition(".")[0] != last:
                last = member.name.partition(".")[0]
                places.append(member.offset)
        return struct.pack(f"<{len(places) + 1}Q", *places, tar.offset)


@pytest.mark.parametrize("kind", ["energon", "dali", "ours"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_an_index_beside_a_tar_is_taken(tmp_path: Path, kind: str, form: int) -> None:
    path = samples_tar(tmp_path / "a.tar", 300, format=form)
    made = TarReader(path)
    if kind == "ours":
        place = write_beside(path, index_tar(path, Storage()).starts, Storage())
        assert Path(place).read_bytes() == energon(path)
    elif kind == "energon":
        Path(f"{path}.idx").write_bytes(energon(path))
    else:
        (tmp_path / "a.idx").write_text(dali(path))
    assert index_tar(path, Storage()).taken_from == str(
        tmp_path / ("a.idx" if kind == "dali" else "a.tar.idx")
    )
    taken = TarReader(path)
    assert scan(taken, path, 0, 300) == scan(made, path, 0, 300)
    assert reader_fingerprint(taken) == reader_fingerprint(made)
    check_reader(lambda: TarReader(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"12345",
        b"v1.2 7\n",
        b"v1.9 0\n",
        b"v1.2 1\njpg 1 2\n",
        b"v1.2 1\njpg a b c\n",
        b"v1.",
        b"\0" * 8,
    ],
)
def test_a_file_that_is_no_index_is_not_used(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = samples_tar(tmp_path / "a.tar", 5)
    Path(f"{path}.idx").write_bytes(content)
    with caplog.at_level(logging.WARNING, "edl_torch.readers"):
        assert TarReader(path).count == 5
    assert "does not fit, and is not used" in caplog.text


@pytest.mark.parametrize("wrong", ["shifted", "too short", "split", "joined", "of another tar"])
def test_an_index_that_does_not_fit_is_not_used(
    tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = samples_tar(tmp_path / "a.tar", 5)
    starts = parse_index(energon(path))
    changed = {
        "shifted": starts + 512,
        "too short": starts[:-1],
        "split": np.sort(np.append(starts, starts[2] + 1024)),
        "joined": np.delete(starts, 2),
        "of another tar": parse_index(energon(samples_tar(tmp_path / "b.tar", 9))),
    }[wrong]
    Path(f"{path}.idx").write_bytes(changed.astype("<i8").tobytes())
    with caplog.at_level(logging.WARNING, "edl_torch.readers"):
        assert TarReader(path).count == 5
    assert "does not fit, and is not used" in caplog.text


def test_an_index_of_two_tars_in_one_file_does_not_fit(tmp_path: Path) -> None:
    """The zeros that end the first one are no part of a sample."""
    path = Path(samples_tar(tmp_path / "a.tar", 5))
    starts, size, content = parse_index(energon(str(path))), path.stat().st_size, path.read_bytes()
    path.write_bytes(content + content)
    both = np.concatenate([starts[:-1], starts + size])
    Path(f"{path}.idx").write_bytes(both.astype("<i8").tobytes())
    assert "two tars in one file" in refused(path)


def test_an_index_that_is_wrong_between_what_was_tried_is_one_error_when_it_is_used(tmp_path: Path) -> None:
    path = samples_tar(tmp_path / "a.tar", 2000)
    starts = parse_index(energon(path))
    for wrong in range(1, 1999):  # far from all that was tried
        Path(f"{path}.idx").write_bytes(np.delete(starts, wrong).astype("<i8").tobytes())
        if index_tar(path, Storage()).taken_from:
            break
    reader = TarReader(path)
    with pytest.raises(ReaderError, match=r"not as its index .*a\.tar\.idx.*remove the index") as caught:
        reader.read_record(path, wrong - 1)
    assert is_source_error(caught.value), "no record is to blame"
    os.remove(f"{path}.idx")
    assert TarReader(path).count == 2000


# edl-torch index ------------------------------------------------------------------------------------------


def test_the_command_writes_an_index_beside_each_tar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [samples_tar(tmp_path / f"{number}.tar", 40 + number) for number in range(3)]
    assert main(["index", str(tmp_path)]) == 0
    assert "123 samples in 3 tar(s)" in capsys.readouterr().out
    assert [Path(f"{path}.idx").read_bytes() for path in paths] == [*map(energon, paths)]
    samples_tar(Path(paths[1]), 7)  # its index does not fit any more
    assert main(["index", *paths]) == 0
    assert "89 samples in 3 tar(s)" in (said := capsys.readouterr().out)
    assert "1 index(es) written" in said
    assert index_tar(paths[1], Storage()).taken_from == f"{paths[1]}.idx"
    assert TarReader(tmp_path).count == 89


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(samples_tar(tmp_path / "a.tar", 3))
    path.write_bytes(path.read_bytes()[:700])
    for data in (path, tmp_path / "none"):
        assert main(["index", str(data)]) == 2
        assert str(data) in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_command_says_soon_that_nobody_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edl_torch.readers.storage.storage._FIRST_PATIENCE_S", 1.0)
    monkeypatch.setattr("edl_torch.readers.storage.storage.PATIENCE_S", 300.0)
    assert main(["index", "http://127.0.0.1:9/a.tar"]) == 2
    tried_s = re.search(r"cannot be reached.*tried for (\d+) s", capsys.readouterr().err)
    assert tried_s is not None
    assert int(tried_s[1]) < 60, "a second, and the time that another process takes to start"
