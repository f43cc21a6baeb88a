"""Tar files as samples: headers, names cut into key and suffix, and where each sample begins.

A sample is a run of neighbouring members whose names are alike up to the first dot behind the last slash, as
in the `webdataset` package. The index of a tar says where each sample begins and where the last one ends: 8
bytes a sample. Sizes and names are not in it. A sample is read in one piece with its headers, so what is read
shows whether the index fits. Nothing here knows what is in a member.

The pass that makes an index reads headers alone. It refuses a tar that it cannot follow to its end: nobody
would miss the records behind a damaged header. Format: POSIX.1-2024 (pax, "ustar Interchange Format"), and
GNU tar's manual ("Basic Tar Format") for long names and numbers in base 256.
"""

from __future__ import annotations

import hashlib
import logging
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edl_torch.errors import DataFormatError
from edl_torch.readers.shared.files import FileStamp, Read, readable
from edl_torch.readers.shared.finder import Finder
from edl_torch.readers.shared.looks import blocks, chosen
from edl_torch.readers.shared.mapped import Array
from edl_torch.readers.shared.sources import ObjectStamp, index_of, look_at, read_once
from edl_torch.readers.storage import Storage, is_elsewhere, is_url

log = logging.getLogger("edl_torch.readers")

BLOCK = 512
TARS = Finder(  # packed ones are refused by name
    suffixes=(".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".tar.zst", ".tar.bz2", ".tar.xz"),
    beside=(".idx", ".json", ".yaml", ".md", ".txt"),
)
LOOKED_AT = 64  # blocks of 4 KiB
END = bytes(BLOCK)  # what ends a tar
_KIND = "tar1"
_WINDOW = 1 << 16  # of small members many headers are read at once
_FAR = 1 << 14  # members larger than this: their headers are read one by one
_WINDOW_AWAY, _FAR_AWAY = 4 << 20, 1 << 20  # the same, where a request takes its time
_LONGEST = 1 << 20  # bytes of a long name, or of a member's pax records
_PIECE = 1 << 20
_TRIED = 8  # samples by which an index of another program is tried

Fetch = Callable[[int, int], bytes]  # so many bytes from a place on; fewer only at the end
Starts = npt.NDArray[np.int64]

# Name, size, checksum, type, magic and version, prefix.
_FIELDS = Struct("100s24x12s12x8sc100x8s80x155s12x").unpack
_PAX = re.compile(rb"(\d{1,20}) ([^=]+)=")
_REGULAR, _LINKS, _LONG_NAMES, _PAX_KINDS = b"0\0007", b"12", b"LK", b"xX"
_NO_DATA = b"123456"  # links, devices, folders, pipes
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")  # of `webdataset`
_META = re.compile(r"__[^/]*__(?:$|/)")


class BrokenTar(Exception):
    """What is wrong with a tar, and where; whoever knows its name says it."""


class TarMember(NamedTuple):
    """A member: its first header begins at `start`, its data at `data`, the next member at `after`."""

    name: str
    is_file: bool
    is_link: bool
    start: int
    data: int
    size: int
    after: int


def members(fetch: Fetch, at: int, end: int) -> Iterator[TarMember]:
    """Yield the members that begin from `at` on, until one ends at `end` or zeros end the tar.

    Raises BrokenTar for what is none, is cut short, reaches beyond `end`, or is sparse.
    """
    start, long_name, long_size = at, None, None
    while at < end:
        block = fetch(at, BLOCK)
        if block == END:
            if start != at:
                raise BrokenTar(f"the member at byte {start:,} has no header of its own")
            return
        name, kind, size = _header(block, at)
        data = at + BLOCK
        if kind in _LONG_NAMES or kind in _PAX_KINDS or kind == b"g":
            if size > _LONGEST:
                raise BrokenTar(f"the header at byte {at:,} says that {size:,} bytes of names follow")
            text = fetch(data, size)
            if len(text) < size:
                raise BrokenTar(f"it is cut short in the names at byte {data:,}")
            if kind == b"L" and long_name is None:
                long_name = text.split(b"\0", 1)[0]
            elif kind not in _LONG_NAMES:
                records = _pax_records(text, at)
                if kind == b"g":
                    if strange := records.keys() & {b"path", b"size"}:
                        raise BrokenTar(
                            f"the pax header at byte {at:,} gives all members one {strange.pop()!r}"
                        )
                else:  # the first of several headers is the one that counts
                    long_name = records.get(b"path") if long_name is None else long_name
                    long_size = records.get(b"size") if long_size is None else long_size
            at = data + -(-size // BLOCK) * BLOCK
            continue
        if long_size is not None:
            if not long_size.isdigit():
                raise BrokenTar(f"the pax header at byte {start:,} has the size {long_size!r}")
            size = int(long_size)
        if kind == b"\0" and name.endswith(b"/"):
            kind = b"5"
        if long_name is not None:
            name = long_name
        text_name = name.decode("utf-8", "surrogateescape")
        if kind == b"S":
            raise _sparse(text_name)
        after = data if kind in _NO_DATA else data + -(-size // BLOCK) * BLOCK
        if after > end:
            raise BrokenTar(f"it is cut short in {text_name!r}, whose {size:,} bytes begin at byte {data:,}")
        yield TarMember(text_name, kind in _REGULAR, kind in _LINKS, start, data, size, after)
        at = start = after
        long_name = long_size = None
    if start != at:
        raise BrokenTar(f"it is cut short behind the header at byte {start:,}")


def _header(block: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Name, type and size of a header."""
    if len(block) < BLOCK:
        raise BrokenTar(f"it is cut short in the header at byte {at:,}")
    name, size, checksum, kind, magic, prefix = _FIELDS(block)
    try:
        # A header is summed with blanks in the place of its checksum. The low half of an Adler-32 is 1 and
        # the sum of all bytes, modulo 65521, and takes a twentieth of the time. Old programs summed signed.
        said = _number(checksum)
        is_sum = (said + sum(checksum) - 8 * 32 + 1) % 65521 == zlib.adler32(block) & 0xFFFF
        if not is_sum and said != sum(array("b", block)) - sum(array("b", checksum)) + 8 * 32:
            raise ValueError
        length = _number(size)
    except ValueError:
        raise BrokenTar(f"there is no header of a tar at byte {at:,}") from None
    name = name.split(b"\0", 1)[0]
    if prefix[0] and magic[:6] == b"ustar\0":
        name = prefix.split(b"\0", 1)[0] + b"/" + name
    return name, kind, length


def _number(field: bytes) -> int:
    """Octal digits, or, after a byte 0x80, a binary number. Raises ValueError."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise ValueError
        return int.from_bytes(field[1:])
    number = int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    if number < 0:
        raise ValueError
    return number


def _pax_records(text: bytes, at: int) -> dict[bytes, bytes]:
    records, position = {}, 0
    while position < len(text) and text[position]:
        found = _PAX.match(text, position)
        length = int(found[1]) if found else 0
        if found is None or not found.end() < position + length <= len(text):
            raise BrokenTar(f"the pax header at byte {at:,} is damaged")
        value = text[found.end() : position + length - 1]
        records[found[2]] = value.rstrip(b"/") if found[2] == b"path" else value  # as `tarfile` has it
        position += length
    if any(key.startswith(b"GNU.sparse.") for key in records):
        name = records.get(b"GNU.sparse.name") or records.get(b"path") or b"?"
        raise _sparse(name.decode("utf-8", "surrogateescape"))
    return records


def _sparse(name: str) -> BrokenTar:
    return BrokenTar(
        f"its member {name!r} is sparse, and so not in one piece: unpack the tar and pack it again without "
        "--sparse (bsdtar: with --no-read-sparse)"
    )


def key_and_suffix(member: TarMember) -> tuple[str, str] | None:
    """The key of its sample and what it is in it; None for what is no part of any."""
    name = member.name
    if not member.is_file or _META.match(name) or ("/" not in name and name[:2] == "__" == name[-2:]):
        return None
    found = _NAME.match(name)
    return None if found is None else (found[1], found[2].lower())


def sample_parts(fetch: Fetch, start: int, end: int) -> tuple[str, dict[str, tuple[int, int]]]:
    """The key of the sample that has all bytes `start … end - 1`, and of each of its members place and size.

    Raises BrokenTar where these bytes are not one sample, and DataFormatError where a name is there twice.
    """
    key, parts, after = None, {}, start
    for member in members(fetch, start, end):
        after = member.after
        if (cut := key_and_suffix(member)) is None:
            continue
        if key is None:
            key = cut[0]
        elif cut[0] != key:
            raise BrokenTar(
                f"two samples, {key!r} and {cut[0]!r}, begin between the bytes {start:,} and {end:,}"
            )
        if cut[1] in parts or cut[1] in ("__key__", "__url__"):
            raise DataFormatError(f"sample {key!r} has two members {cut[1]!r}: rename one of them")
        parts[cut[1]] = member.data, member.size
    if key is None or after != end:
        raise BrokenTar(f"no sample has the bytes {start:,} to {end:,}")
    return key, parts


class TarPass(NamedTuple):
    """What one pass over the headers of a tar finds: where each sample begins and the last one ends, the
    names of links, and the keys of samples that were there before in this tar."""

    starts: array[int]
    links: list[str]
    again: list[str]


def pass_over(fetch: Fetch, size: int) -> TarPass:
    """Pass over a tar of `size` bytes. Raises BrokenTar."""
    if not size:
        raise BrokenTar("it has no byte: its writing, or its upload, was cut short")
    found, keys, key, after = TarPass(array("q"), [], []), set[int](), None, 0
    for member in members(fetch, 0, size):
        after = member.after
        if member.is_link:
            found.links.append(member.name)
        cut = key_and_suffix(member)
        if cut is not None and cut[0] != key:
            key = cut[0]
            found.starts.append(member.start)
            if hash(key) in keys:
                found.again.append(key)
            keys.add(hash(key))
    check_end(fetch, after, size)
    found.starts.append(after)
    return found


def check_end(fetch: Fetch, at: int, size: int) -> None:
    """Raise BrokenTar unless zeros, and nothing else, follow the last member, which ends `at`."""
    if fetch(at, BLOCK) != END:
        raise BrokenTar(
            f"it ends at byte {size:,} without the zeros that end a tar: it was cut short between two "
            "members, or its writer left them off (`truncate -s +1024` adds them)"
        )
    for place in range(at, size, _PIECE):
        piece = fetch(place, min(_PIECE, size - place))
        if piece.count(0) != len(piece):
            raise BrokenTar(
                f"there are more bytes behind the zeros that end it at byte {at:,}: two tars in one file are "
                "read as the first one; put the second one beside it as a file of its own"
            )


class Windowed:
    """Fetches small pieces from larger ones, where they lie close together."""

    def __init__(self, read: Read, size: int, far: int = _FAR, window: int = _WINDOW) -> None:
        self._read, self._size, self._far, self._window = read, size, far, window
        self._start, self._bytes, self._asked = 0, b"", -far

    def __call__(self, at: int, length: int) -> bytes:
        """So many bytes from `at` on; fewer at the end of the file."""
        position = at - self._start
        if not 0 <= position <= len(self._bytes) - length:
            ahead = self._window if at - self._asked < self._far else 0
            self._start, position = at, 0
            self._bytes = self._read(at, min(at + max(length, ahead), self._size))
        self._asked = at
        return self._bytes[position : position + length]


# Of files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTar:
    """A tar as it is now; `read` gives its bytes from … to before …, and refuses another one's."""

    name: str
    stamp: FileStamp
    read: Read
    storage: Storage

    @classmethod
    def of(cls, name: str, storage: Storage) -> OpenTar:
        """Look at a tar. Raises OSError and ReaderError, DataFormatError for one that is packed."""
        stamp = look_at(name, storage, "a tar")
        tar = cls(name=name, stamp=stamp, read=read_once(stamp, storage), storage=storage)
        refuse_packed(name, tar.read(0, min(8, stamp.size)))
        return tar

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stamp.size

    def fetch(self) -> Fetch:
        """What its headers are read by."""
        far, window = (_FAR_AWAY, _WINDOW_AWAY) if is_url(self.name) else (_FAR, _WINDOW)
        return Windowed(self.read, self.size, far, window)

    def beside(self, place: str) -> bytes | None:
        """The bytes of a file beside it; None where there is none."""
        if not is_url(place):
            try:
                return Path(place).read_bytes()
            except FileNotFoundError:
                return None
        found = self.storage.look(place)
        return None if found is None else self.storage.read(found)

    def looks(self, starts: Starts) -> bytes:
        """A digest of some blocks: of a file of this machine, which may get another time and be the same."""
        most = 0 if isinstance(self.stamp, ObjectStamp) else LOOKED_AT
        return bytes.fromhex(looks_of(self.read, self.size, starts, most))


class TarIndex(NamedTuple):
    """A tar as it was indexed: `starts` of its samples and the end of the last, what `OpenTar.looks` tells,
    and the file that the index was taken from, '' where it was made here."""

    stamp: FileStamp
    starts: Starts
    looks: bytes
    taken_from: str


def index_tar(name: str, storage: Storage) -> TarIndex:
    """Index a tar, or find its index: one beside it that fits, else the kept one, else it is made and kept.

    Raises DataFormatError that names the tar, and what a store raises.
    """
    with readable(f"'{name}'", "check its permissions"):
        tar = OpenTar.of(name, storage)
        found = index_beside(tar)
        if found is not None:
            return TarIndex(tar.stamp, found[1], tar.looks(found[1]), found[0])
        arrays = index_of(tar.stamp, _KIND, partial(_build, tar), storage)
        return TarIndex(tar.stamp, arrays["starts"], arrays["looks"].tobytes(), "")


def _build(tar: OpenTar) -> dict[str, Array]:
    starts = made_index(tar)
    return {"starts": starts, "looks": np.frombuffer(tar.looks(starts), np.uint8)}


def made_index(tar: OpenTar, progress: Callable[[int], object] = lambda at: None) -> Starts:
    """Where samples begin, by all headers; `progress` hears of the place in the tar.

    Raises DataFormatError; warns of links.
    """
    fetch = tar.fetch()

    def told(at: int, length: int) -> bytes:
        progress(at)
        return fetch(at, length)

    try:
        found = pass_over(told, tar.size)
    except BrokenTar as exc:
        raise DataFormatError(f"'{tar.name}' cannot be used: {exc}") from exc
    if found.links:
        log.warning(
            "path=%s links=%d links to other members, such as %r, are no part of samples; tar's "
            "--hard-dereference and --dereference pack what they link to",
            *(tar.name, len(found.links), found.links[0]),
        )
    if found.again:
        log.warning(
            "path=%s samples=%d keys come again behind other samples, such as %r, and are samples of their "
            "own there; members of one sample must lie together (tar --sort=name)",
            *(tar.name, len(found.again), found.again[0]),
        )
    return np.array(found.starts, np.int64)


def looks_of(read: Read, size: int, starts: Starts, most: int, *, whole: bool = False) -> str:
    """A digest of the size, where samples begin, and `most` blocks, or the `whole`."""
    also = hashlib.blake2b(starts.tobytes(), digest_size=16).digest()
    return blocks(size, read, also, whole=whole, most=most)


_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd -c"),
    b"BZh": ("bzip2", "bunzip2 -c"),
    b"\xfd7zXZ": ("xz", "unxz -c"),
}
_ENDING = re.compile(r"(\.tgz|\.tbz2?|\.txz|\.tzst|(\.tar)?\.(gz|zst|bz2|xz))$", re.IGNORECASE)


def refuse_packed(path: str, head: bytes) -> None:
    """Raise DataFormatError with the command that unpacks it, for a compressed tar, whatever its name is."""
    for magic, (what, unpack) in _PACKED.items():
        if head.startswith(magic):
            plain = _ENDING.sub("", path) if _ENDING.search(path) else path.removesuffix(".tar") + ".plain"
            if path.startswith("s3://"):
                command = f"aws s3 cp '{path}' - | {unpack} | aws s3 cp - '{plain}.tar'"
            elif is_elsewhere(path):
                command = f"copy it here, unpack it ({unpack}), and put it there as '{plain}.tar'"
            else:
                command = f"{unpack} '{path}' > '{plain}.tar'"
            raise DataFormatError(
                f"'{path}' is packed with {what}, and no record of it can be read by itself: {command}"
            )


# Indexes beside a tar ------------------------------------------------------------------------------------


def place_beside(path: str) -> str:
    """Where `write_beside` writes, and Megatron Energon: 64-bit little-endian numbers, one for each sample's
    first header, and one for the end of the last sample."""
    return f"{path}.idx"


def write_beside(name: str, starts: Starts, storage: Storage) -> str:
    """Write the index of a tar beside it; returns where. Raises OutputError."""
    place = place_beside(name)
    storage.put(place, starts.astype("<i8").tobytes())
    return place


def index_beside(tar: OpenTar) -> tuple[str, Starts] | None:
    """The index of this package's `edl-torch index`, Energon or DALI, if there is one and it fits."""
    for place in (place_beside(tar.name), tar.name.removesuffix(".tar") + ".idx"):
        data = tar.beside(place)
        if data is None:
            continue
        try:
            starts = parse_index(data)
            try_index(starts, tar.fetch(), tar.size)
            return place, starts
        except (BrokenTar, DataFormatError, ValueError) as exc:
            log.warning("path=%s its index '%s' does not fit, and is not used: %s", tar.name, place, exc)
    return None


def parse_index(data: bytes) -> Starts:
    """The starts that an index has in Energon's or DALI's format. Raises ValueError."""
    if not data.startswith(b"v1."):
        if not data or len(data) % 8:
            raise ValueError(f"{len(data):,} bytes are no 64-bit numbers")
        return np.frombuffer(data, "<i8").astype(np.int64)
    # DALI's wds2idx: version, count; a line a sample, with extension, place, size (and name) of each member
    lines = data.splitlines()
    version, count = lines[0].split()
    width = {b"v1.1": 3, b"v1.2": 4}.get(version)
    if width is None or int(count) != len(lines) - 1:
        raise ValueError(f"its first line {lines[0][:40]!r} does not fit its {len(lines) - 1:,} others")
    starts = array("q", [0])
    for line in lines[1:]:
        words = line.split()
        if not words or len(words) % width:
            raise ValueError(f"its line {line[:80]!r} has not {width} words for each member")
        ends = [
            int(at) + -(-int(size) // BLOCK) * BLOCK
            for at, size in zip(words[1::width], words[2::width], strict=True)
        ]
        starts.append(max(ends))
    return np.array(starts, np.int64)


def try_index(starts: Starts, fetch: Fetch, size: int) -> None:
    """Raise BrokenTar, or DataFormatError, unless some samples are where the index says, and the end too."""
    if (starts % BLOCK).any() or (np.diff(starts) <= 0).any() or starts[0] < 0 or starts[-1] + BLOCK > size:
        raise BrokenTar("its numbers are no places in the tar, one after the other")
    check_end(fetch, int(starts[-1]), size)
    count, keys = len(starts) - 1, dict[int, str]()
    for number in chosen(count, _TRIED):
        for each in range(max(number - 1, 0), min(number + 2, count)):
            if each not in keys:
                keys[each], _ = sample_parts(fetch, int(starts[each]), int(starts[each + 1]))
    for number, key in keys.items():
        if keys.get(number + 1) == key:
            raise BrokenTar(f"it has two samples, {number:,} and the next, for the one key {key!r}")
