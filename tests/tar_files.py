"""Small tars, written by Python."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **fields: Any) -> None:
    """Add a member."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def write_tar(path: Path, content: Mapping[str, bytes] | Iterable[tuple[str, bytes]], **options: Any) -> str:
    """A tar of these members; returns its path."""
    with tarfile.open(path, "w", **options) as tar:
        for name, data in content.items() if isinstance(content, Mapping) else content:
            add(tar, name, data)
    return str(path)


def samples_tar(path: Path, count: int, begin: int = 0, **options: Any) -> str:
    """A tar of `count` samples with a text and a class."""
    numbers = range(begin, begin + count)
    return write_tar(path, [(f"{n:05}.{s}", b"%d" % n) for n in numbers for s in ("txt", "cls")], **options)
