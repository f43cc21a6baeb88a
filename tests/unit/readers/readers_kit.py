"""Small files of every format, and every way to read them: what the tests of readers share."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tar_files import add
from webdataset.tariterators import group_by_keys, tar_file_expander

from edl_torch.errors import BadRecord
from edl_torch.readers import RecordIODataReader, RecordIOWriter, TarReader
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.recordio.format import HEADER_BYTES
from edl_torch.shard import Shard, Task


def task(name: str, start: int, end: int) -> Task:
    return Task(shard=Shard(name=name, start=start, end=end))


def scan(reader: AbstractDataReader, name: str | Path, start: int = 0, end: int | None = None) -> list[Any]:
    """Records of a source, in sequence."""
    last = reader.create_shards()[str(name)] if end is None else end
    return list(reader.read_records(task(str(name), start, last)))


def everything(reader: AbstractDataReader) -> list[Any]:
    """All records of all sources, in order."""
    return [record for name in reader.create_shards() for record in scan(reader, name)]


# CSV: one table with all that it allows ---------------------------------------------------------------------


TABLE = (
    'id,word,size,ok\r\n1,one,0.5,true\r\n\r\n2,"two, and ""more""\nof it",,false\n'
    "3,,1e3,True\r4,  four ,-inf,0"
)
ROWS = [
    {"id": 1, "word": "one", "size": 0.5, "ok": True},
    {"id": 2, "word": 'two, and "more"\nof it', "size": float("nan"), "ok": False},
    {"id": 3, "word": "", "size": 1000.0, "ok": True},
    {"id": 4, "word": "  four ", "size": float("-inf"), "ok": False},
]


def write_csv(folder: Path, text: str | bytes = TABLE, name: str = "table.csv") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def same(left: object, right: object) -> bool:
    return repr(left) == repr(right)


# Parquet: values say which row they are ---------------------------------------------------------------------


def table(first: int, count: int) -> pa.Table:
    """Rows `first … first + count - 1`: every value is a function of `id`; every fifth `text` is NULL."""
    ids = np.arange(first, first + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "half": pa.array(ids / 2, pa.float32()),
            "text": pa.array([None if i % 5 == 0 else f"r{i}" for i in ids], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3) * 1.0), 3),
            "many": pa.array([list(range(i % 4)) for i in ids], pa.list_(pa.int32())),
        }
    )


def write_parquet(
    path: Path, rows: pa.Table | tuple[int, int] = (0, 20), group: int = 7, **options: Any
) -> str:
    """Write a file with row groups of `group` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = rows if isinstance(rows, pa.Table) else table(*rows)
    pq.write_table(content, path, row_group_size=group, **options)
    return str(path)


def write_hive(root: Path) -> str:
    """Two years, one folder of each colour; 35 rows in files of 20, 15 and 0."""
    write_parquet(root / "year=2023" / "colour=light%20blue" / "a.parquet", (0, 20))
    write_parquet(root / "year=2024" / "colour=red" / "b.parquet", (20, 15))
    write_parquet(root / "year=2024" / "colour=red" / "empty.parquet", (0, 0))
    (root / "_SUCCESS").touch()
    (root / "_temporary").mkdir()
    (root / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    (root / ".hidden.parquet").write_bytes(b"")
    return str(root)


# RecordIO ---------------------------------------------------------------------------------------------------


FORMS = [(dialect, compressor) for dialect in ("python", "go") for compressor in ("none", "snappy", "gzip")]

# Empty ones, one of zeros, one larger than a chunk, one with what looks like a length.
RECORDS = [
    b"china", b"", b"usa", b"", b"", b"x" * 70, b"\0\0\0\0", b"\4\0\0\0", b"germany", b"\x04\x03\x02\x01",
    *(f"line {number},{'y' * (number % 7)}".encode() for number in range(30)),
    b"",
]  # fmt: skip


def write_recordio(
    path: Path, records: Iterable[bytes] = RECORDS, *, form: tuple[str, str] = FORMS[1], chunk: int = 40
) -> str:
    """A file; returns its path."""
    dialect, compressor = form
    with RecordIOWriter(path, dialect=dialect, compressor=compressor, max_chunk_bytes=chunk) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def one_by_one(reader: RecordIODataReader) -> list[bytes]:
    """All records through random access, asked for from the end."""
    shards = reader.create_shards().items()
    backwards = [[reader.read_record(name, i) for i in reversed(range(n))] for name, n in shards]
    return [record for records in backwards for record in reversed(records)]


def go_chunk_of_no_records() -> bytes:
    """As Go's library would write it, did it write any."""
    return struct.pack("<5I", 0x01020304, 0, 0, 0, 0)


def chunk_bounds(path: str, size_word: int) -> list[int]:
    """Where the chunks of a file begin and the last one ends, by hand."""
    data, at = Path(path).read_bytes(), 0
    bounds = [0]
    while at < len(data):
        at += HEADER_BYTES + struct.unpack_from("<5I", data, at)[size_word]
        bounds.append(at)
    return bounds


def naive_split(payload: bytes, records: int) -> Sequence[bytes] | None:
    """The records of a chunk, one after the other; None where they are not exactly the payload."""
    found, at = [], 0
    for _ in range(records):
        if at + 4 > len(payload):
            return None
        length = int.from_bytes(payload[at : at + 4], "little")
        if at + 4 + length > len(payload):
            return None
        found.append(payload[at + 4 : at + 4 + length])
        at += 4 + length
    return found if at == len(payload) else None


# Tars of every maker, with every oddity of names, and what `webdataset` makes of them -----------------------


GNU_FORMATS = ("v7", "oldgnu", "gnu", "ustar", "posix")
BSD_FORMATS = ("ustar", "pax", "gnutar")
PYTHON_FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

_FOLDERS = ("", "", "./", "a/", "a.b/", "with blank/", "ü/", "\udcff/", "deep/" * 30, "__meta__/", "x\ny/")
_BASES = ("0001", "0002", "b.c", "é", "\udce9t", "long" * 40, ".hidden", "__about__", "plain", "a b")
_SUFFIXES = (".jpg", ".JPG", ".cls", ".seg.png", ".tar.gz", ".", "", ".txt", ".x y")


def odd_content(chance: random.Random) -> list[tuple[str, bytes]]:
    """Some members, most of them in groups, with names that no two files of a folder have."""
    found: dict[str, bytes] = {}
    for _ in range(chance.randrange(12)):
        base = chance.choice(_FOLDERS) + chance.choice(_BASES)
        for suffix in chance.sample(_SUFFIXES, chance.randint(1, 4)):
            size = chance.choice([0, 1, 511, 512, 513, 700, 70_000])
            found.setdefault(base + suffix, chance.randbytes(size))
    content = list(found.items())
    if chance.random() < 0.2:  # groups are broken up
        chance.shuffle(content)
    if content and chance.random() < 0.1:  # a name twice
        content.insert(chance.randrange(len(content)), chance.choice(content))
    return content


def by_python(path: Path, content: list[tuple[str, bytes]], form: str, chance: random.Random) -> None:
    """With links, folders and records of pax between the members."""
    with tarfile.open(path, "w", format=PYTHON_FORMATS[form]) as tar:
        for name, data in content:
            other = chance.random()
            if other < 0.1:
                add(tar, "folder.d", type=tarfile.DIRTYPE)
            elif other < 0.2:
                add(tar, "link.jpg", type=chance.choice([tarfile.LNKTYPE, tarfile.SYMTYPE]), linkname="a.jpg")
            fields: dict[str, Any] = {}
            if form != "ustar":
                fields = {"uid": chance.choice([0, 1 << 30]), "mtime": chance.choice([0, 1 << 34])}
            if form == "pax" and other > 0.7:
                fields["pax_headers"] = {"comment": "é" * 300, "SCHILY.xattr.user.a": "="}
            try:
                add(tar, name, data, **fields)
            except ValueError:  # too long for ustar
                continue


def by_program(
    path: Path, content: list[tuple[str, bytes]], program: list[str], chance: random.Random
) -> None:
    """By GNU tar or bsdtar from files, some of them linked; what a format cannot have is left out of it."""
    root = path.with_suffix(".files")
    names = []
    for name, data in content:
        place = os.fsencode(f"{root}/") + os.fsencode(name)
        if place.endswith(b"/"):
            continue
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(place):
            continue
        with open(place, "wb") as file:
            file.write(data)
        names.append(os.fsencode(name))
        if chance.random() < 0.1:
            os.makedirs(root / "links", exist_ok=True)
            link = root / "links" / f"{len(names)}.jpg"
            chance.choice([os.link, os.symlink])(place, link)
            names.append(os.fsencode(f"links/{len(names)}.jpg"))
    root.mkdir(exist_ok=True)
    listed = path.with_suffix(".list")
    listed.write_bytes(b"".join(name + b"\0" for name in names))
    command = [*program, "-cf", str(path), "-C", str(root), "--null", "-T", str(listed)]
    subprocess.run(command, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"})
    shutil.rmtree(root)
    listed.unlink()


def of_webdataset(path: str | Path) -> tuple[list[dict[str, Any]], bool]:
    """The samples that the package gives, and whether an error ended them."""
    found = []
    with open(path, "rb") as stream:  # the package's own opener leaves it open
        try:
            for sample in group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])):
                found.append(sample)
        except ValueError:
            return found, True
    return found, False


def of_reader(reader: TarReader, name: str | Path) -> list[dict[str, Any] | None]:
    """All samples, None for each that is bad."""
    found = []
    for index in range(reader.create_shards()[str(name)]):
        try:
            found.append(reader.read_record(str(name), index))
        except BadRecord:
            found.append(None)
    return found
