"""Where records begin in a piece of a text file, without knowing whether the piece begins inside quotes.

A quote opens a field only at the field's start; inside, a doubled quote is data and a single one closes;
elsewhere it is an ordinary character (RFC 4180, and what Python's `csv` and Arrow do with the rest). So of
each run of quotes only its parity and the byte before it matter: an even run changes nothing, an odd one at
a field's start swaps inside and outside, any other odd one ends outside whatever was before. These three
maps compose by cumulative sums, and all line ends get their state for both beginnings at once. It must not
know of files, threads or fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LF, CR = 10, 13


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
