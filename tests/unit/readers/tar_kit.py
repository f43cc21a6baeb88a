"""Tars of every maker, with every oddity of names, and what the `webdataset` package makes of them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tar_files import add
from webdataset.tariterators import group_by_keys, tar_file_expander

from edl_torch.errors import BadRecord
from edl_torch.readers import TarReader

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
