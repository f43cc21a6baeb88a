"""Where each record of a text file begins: four bytes a record, memory-mapped, built once in parallel.

Offsets are 32 bits relative to the first record of their block of 64, so an index of 10⁷ records is 43 MB
whatever the size of the file, shared by all processes of a machine. It must not know what a record means.

Pieces of the file are scanned without knowing whether they begin inside quotes. A quote opens a field only at
the field's start; inside, a doubled quote is data and a single one closes; elsewhere it is an ordinary
character (RFC 4180, and what Python's `csv` and Arrow do with the rest). So of each run of quotes only its
parity and the byte before it matter: an even run changes nothing, an odd one at a field's start swaps inside
and outside, any other odd one ends outside whatever was before. These three maps compose by cumulative sums,
and all line ends get their state for both beginnings at once.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from edl_torch.errors import DataFormatError
from edl_torch.readers.shared.files import Read
from edl_torch.readers.shared.mapped import Array

BLOCK = 64
LARGEST_BLOCK = 1 << 32
CHUNK_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
_MOST_THREADS = 8

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LF, CR = 10, 13


class RowIndex:
    """The records of one file by number; `arrays` are those of `build_row_index`."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self._arrays["starts"])

    @property
    def layout(self) -> bytes:
        """Where each block of records begins: rows of unequal length have another one in another order."""
        return self._arrays["bases"].tobytes()

    def spans(self, numbers: npt.NDArray[np.int64]) -> tuple[Positions, Positions]:
        """The first byte of each record, and the byte after it: blank lines that follow are part of it."""
        return self._starts(numbers), self._starts(numbers + 1)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """`spans` of the records `start … end - 1`, of which there is one, in one piece."""
        starts, bases = self._arrays["starts"], self._arrays["bases"]
        first = int(bases[start // BLOCK]) + int(starts[start])
        if end == len(starts):
            return first, int(self._arrays["end"][0])
        return first, int(bases[end // BLOCK]) + int(starts[end])

    def line(self, number: int, read: Read) -> int:
        """The number of the line on which a record begins, from 1."""
        block = number // BLOCK
        between = read(int(self._arrays["bases"][block]), self.span(number, number + 1)[0])
        ends = between.count(b"\n")
        if self._arrays["cr"][0]:
            ends += between.count(b"\r") - between.count(b"\r\n")
        return int(self._arrays["lines"][block]) + ends + 1

    def _starts(self, numbers: npt.NDArray[np.int64]) -> Positions:
        starts, bases = self._arrays["starts"], self._arrays["bases"]
        if not len(starts):
            return np.zeros(len(numbers), dtype=np.int64)
        within = np.minimum(numbers, len(starts) - 1)
        found: Positions = bases[within // BLOCK] + starts[within]
        return np.where(numbers < len(starts), found, self._arrays["end"][0])

    def __repr__(self) -> str:
        return f"<RowIndex records={self.count}>"


def build_row_index(
    read: Read, size: int, path: str, rules: RowRules, *, chunk_bytes: int = CHUNK_BYTES
) -> dict[str, Array]:
    """Scan a file of `size` bytes and return the arrays of its index, mapped from temporary files of this
    process.

    Memory does not grow with the file. Pieces of `chunk_bytes` are scanned by threads (numpy lets go of the
    lock). Raises what `read` does, and DataFormatError, with the line, for a quoted field that the file's end
    does not close.
    """
    first = 3 if read(0, min(3, size)) == _BOM else 0
    with _Assembly(first, rules) as rows:
        cuts = _cuts(read, first, size, chunk_bytes, rules)
        for offset, scan in _scans(cuts, read, first, rules):
            rows.add(offset, scan)
        return rows.finish(size, path)


def _cuts(read: Read, first: int, size: int, chunk_bytes: int, rules: RowRules) -> Iterator[tuple[int, int]]:
    start = first
    while start < size:
        end = min(start + chunk_bytes, size)
        while end < size and rules.splits(*read(end - 1, end + 1)):
            end += 1
        yield start, end
        start = end


def scanning_threads() -> int:
    """How many pieces are scanned at once; twice as many, and three, are read by then."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def _scans(
    cuts: Iterator[tuple[int, int]], read: Read, first: int, rules: RowRules
) -> Iterator[tuple[int, PieceScan]]:
    """The scans in the order of the file; only a few wait at any time."""

    def scan(cut: tuple[int, int]) -> tuple[int, PieceScan]:
        start, end = cut
        before = LF if start == first else read(start - 1, start)[0]
        return start, scan_piece(read(start, end), before, rules)

    threads = scanning_threads()
    waiting: deque[Future[tuple[int, PieceScan]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="edl-index") as pool:
        for cut in cuts:
            waiting.append(pool.submit(scan, cut))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Assembly:
    """Puts scans together, in order: what the state was at each border, and where each record begins."""

    def __init__(self, first: int, rules: RowRules) -> None:
        self._rules = rules
        self._inside = False
        self._start = first  # of the record under way
        self._start_line = 0
        self._lines = 0  # line ends so far
        self._rows = 0
        self._base = first
        self._starts, self._bases, self._block_lines = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115  `__exit__` closes them

    def __enter__(self) -> _Assembly:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in (self._starts, self._bases, self._block_lines):
            file.close()  # arrays that are mapped stay

    def add(self, offset: int, scan: PieceScan) -> None:
        which = scan.row_ends(self._inside)
        self._inside = scan.exits[self._inside]
        if len(which):
            self._add_rows(offset, scan, which)
        self._lines += len(scan.ends)

    def _add_rows(self, offset: int, scan: PieceScan, which: Positions) -> None:
        ends = scan.ends[which] + offset
        starts = np.concatenate(([self._start], ends[:-1]))
        lines = np.concatenate(([self._start_line], self._lines + which[:-1] + 1))
        if not self._rules.keeps_empty:
            blank = scan.blank[which]
            blank[0] &= self._start == offset
            if blank.any():
                starts, lines = starts[~blank], lines[~blank]
        self._start, self._start_line = int(ends[-1]), self._lines + int(which[-1]) + 1
        if len(starts):
            self._write(starts, lines)

    def _write(self, starts: Positions, lines: Positions) -> None:
        numbers = np.arange(self._rows, self._rows + len(starts))
        begins = numbers % BLOCK == 0
        bases = np.concatenate(([self._base], starts[begins]))
        relative = starts - bases[np.cumsum(begins)]
        if relative.max() >= LARGEST_BLOCK:
            raise DataFormatError(
                f"{BLOCK} records take more than 4 GiB (around byte {int(starts[relative.argmax()]):,}): "
                "such a file has no lines that are records; check delimiter, quotes and kind of the file"
            )
        self._starts.write(relative.astype(np.uint32).data)
        self._bases.write(starts[begins].astype(np.int64).data)
        self._block_lines.write(lines[begins].astype(np.int64).data)
        self._base = int(bases[-1])
        self._rows += len(starts)

    def finish(self, size: int, path: str) -> dict[str, Array]:
        if self._inside:
            raise DataFormatError(
                f"'{path}' ends inside a quoted field of the record that begins on line "
                f"{self._start_line + 1}: close the quote there, or read the file with quote_char=None"
            )
        if self._start < size:  # the last line has no end
            self._write(np.array([self._start]), np.array([self._start_line]))
        return {
            "starts": _mapped(self._starts, np.uint32),
            "bases": _mapped(self._bases, np.int64),
            "lines": _mapped(self._block_lines, np.int64),
            "end": np.array([size], dtype=np.int64),
            "cr": np.array([self._rules.cr_ends_line], dtype=np.bool_),
        }


def _mapped(file: BinaryIO, dtype: type[np.generic]) -> Array:
    file.flush()
    if not os.fstat(file.fileno()).st_size:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """How a text is cut into records.

    `quote` and `delimiter` are bytes, or None where there are no fields; `cr_ends_line` says that a carriage
    return without a line feed ends a line too; `keeps_empty` that a line without anything in it is a record.
    """

    quote: int | None = None
    delimiter: int | None = None
    cr_ends_line: bool = True
    keeps_empty: bool = False

    def splits(self, before: int, after: int) -> bool:
        """Whether two neighbouring bytes must stay in one piece: a run of quotes, CR and LF."""
        return (before == after == self.quote) or (before == CR and after == LF)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceScan:
    """The line ends of one piece.

    Attributes:
        ends: The position after each line end, counted from the piece's start.
        inside: For each, whether it is inside quotes if the piece begins outside; None if none is.
        unsettled: How many of the first line ends are the other way round if the piece begins inside.
        exits: Whether the piece ends inside quotes if it begins outside, and if inside.
        blank: For each, whether its line has nothing in it.
    """

    ends: Positions
    inside: Flags | None
    unsettled: int
    exits: tuple[bool, bool]
    blank: Flags

    def row_ends(self, began_inside: bool) -> Positions:
        """Which line ends end a record."""
        if self.inside is None and not (began_inside and self.unsettled):
            return np.arange(len(self.ends))
        inside = np.zeros(len(self.ends), dtype=np.bool_) if self.inside is None else self.inside.copy()
        if began_inside:
            inside[: self.unsettled] ^= True
        return np.flatnonzero(~inside)


def scan_piece(piece: bytes, before: int, rules: RowRules) -> PieceScan:
    """Find the line ends of a piece; `before` is the byte in front of it (LF at the beginning of the data).

    No boundary of the piece may lie where `rules.splits` says so.
    """
    data = np.frombuffer(piece, dtype=np.uint8)
    has_cr = rules.cr_ends_line and b"\r" in piece
    ends = _line_ends(data, has_cr)
    blank = _blank_lines(data, ends, has_cr)
    if rules.quote is None or bytes((rules.quote,)) not in piece:
        return PieceScan(ends=ends, inside=None, unsettled=len(ends), exits=(False, True), blank=blank)
    position, swaps = _odd_runs(data, before, rules)
    if not len(position):
        return PieceScan(ends=ends, inside=None, unsettled=len(ends), exits=(False, True), blank=blank)
    count = np.cumsum(swaps)
    # The count at the last odd run that ends outside; -1 before the first.
    since_reset = np.maximum.accumulate(np.where(swaps, -1, count))
    state = np.asarray((count - np.maximum(since_reset, 0)) % 2 == 1)
    settled = int(np.argmax(since_reset >= 0)) if since_reset[-1] >= 0 else len(position)
    run_before = np.searchsorted(position, ends - 1)  # how many odd runs lie before each line end
    inside = np.concatenate(([False], state))[run_before]
    unsettled = int(np.searchsorted(run_before, settled, side="right"))
    last = bool(state[-1])
    other = last if settled < len(position) else not last
    return PieceScan(ends=ends, inside=inside, unsettled=unsettled, exits=(last, other), blank=blank)


def _line_ends(data: Bytes, has_cr: bool) -> Positions:
    found = data == LF
    if has_cr:
        lone = data == CR
        lone[:-1] &= data[1:] != LF
        found |= lone
    return np.flatnonzero(found) + 1


def _blank_lines(data: Bytes, ends: Positions, has_cr: bool) -> Flags:
    length = np.diff(ends, prepend=0)
    blank: Flags = length == 1
    if has_cr:
        two = np.flatnonzero(length == 2)
        blank[two] = data[ends[two] - 2] == CR
    return blank


def _odd_runs(data: Bytes, before: int, rules: RowRules) -> tuple[Positions, Flags]:
    """Where runs of an odd number of quotes begin, and whether each swaps inside and outside."""
    quotes = np.flatnonzero(data == rules.quote)
    first = np.flatnonzero(np.diff(quotes, prepend=-2) != 1)
    odd = np.diff(first, append=len(quotes)) & 1 == 1
    position = quotes[first[odd]]
    previous = np.where(position == 0, before, data[position - 1])
    return position, (previous == rules.delimiter) | (previous == LF) | (previous == CR)
