"""Where each record of a text file begins: four bytes a record, memory-mapped, built once in parallel.

Offsets are 32 bits relative to the first record of their block of 64, so an index of 10⁷ records is 43 MB
whatever the size of the file, shared by all processes of a machine. It must not know what a record means.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from edl_torch.errors import DataFormatError
from edl_torch.readers.shared.mapped import Array
from edl_torch.readers.text.row_scan import LF, PieceScan, Positions, RowRules, scan_piece

BLOCK = 64
LARGEST_BLOCK = 1 << 32
CHUNK_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
_MOST_THREADS = 8

Read = Callable[[int, int], bytes]  # the bytes from … to before …


class RowIndex:
    """The records of one file by number; `arrays` are those of `build_row_index`."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self._arrays["starts"])

    def spans(self, numbers: npt.NDArray[np.int64]) -> tuple[Positions, Positions]:
        """The first byte of each record, and the byte after it: blank lines that follow are part of it."""
        return self._starts(numbers), self._starts(numbers + 1)

    def span(self, number: int) -> tuple[int, int]:
        """`spans` of one record."""
        starts, bases, count = self._arrays["starts"], self._arrays["bases"], self.count
        start = int(bases[number // BLOCK]) + int(starts[number])
        if number + 1 == count:
            return start, int(self._arrays["end"][0])
        return start, int(bases[(number + 1) // BLOCK]) + int(starts[number + 1])

    def line(self, number: int, read: Read) -> int:
        """The number of the line on which a record begins, from 1."""
        block = number // BLOCK
        between = read(int(self._arrays["bases"][block]), self.span(number)[0])
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

    def __reduce__(self) -> tuple[type[RowIndex], tuple[Mapping[str, Array]]]:
        return type(self), (self._arrays,)

    def __repr__(self) -> str:
        return f"<RowIndex records={self.count}>"


def build_row_index(path: str, rules: RowRules, *, chunk_bytes: int = CHUNK_BYTES) -> dict[str, Array]:
    """Scan a file and return the arrays of its index, mapped from temporary files of this process.

    Memory does not grow with the file. Pieces of `chunk_bytes` are scanned by threads (numpy lets go of the
    lock). Raises OSError, and DataFormatError, with the line, for a quoted field that the file's end does
    not close.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def read(start: int, end: int) -> bytes:
            return read_range(file.fileno(), start, end)

        first = 3 if read(0, min(3, size)) == _BOM else 0
        with _Assembly(first, rules) as rows:
            cuts = _cuts(read, first, size, chunk_bytes, rules)
            for offset, scan in _scans(cuts, read, first, rules):
                rows.add(offset, scan)
            return rows.finish(size, path)


def read_range(descriptor: int, start: int, end: int) -> bytes:
    """Read a range whole; less comes back only where the file ends before."""
    data = os.pread(descriptor, end - start, start)
    if len(data) == end - start or not data:
        return data
    parts, position = [data], start + len(data)
    while position < end and (more := os.pread(descriptor, end - position, position)):
        parts.append(more)
        position += len(more)
    return b"".join(parts)


def _cuts(read: Read, first: int, size: int, chunk_bytes: int, rules: RowRules) -> Iterator[tuple[int, int]]:
    start = first
    while start < size:
        end = min(start + chunk_bytes, size)
        while end < size and rules.splits(*read(end - 1, end + 1)):
            end += 1
        yield start, end
        start = end


def _scans(
    cuts: Iterator[tuple[int, int]], read: Read, first: int, rules: RowRules
) -> Iterator[tuple[int, PieceScan]]:
    """The scans in the order of the file; only a few wait at any time."""

    def scan(cut: tuple[int, int]) -> tuple[int, PieceScan]:
        start, end = cut
        before = LF if start == first else read(start - 1, start)[0]
        return start, scan_piece(read(start, end), before, rules)

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
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
        self._starts, self._bases, self._block_lines = (_temporary() for _ in range(3))

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


def _temporary() -> BinaryIO:
    return tempfile.TemporaryFile()


def _mapped(file: BinaryIO, dtype: type[np.generic]) -> Array:
    file.flush()
    if not os.fstat(file.fileno()).st_size:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
