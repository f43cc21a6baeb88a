"""Format of an audit log: its lines, written and read.

One file holds what one trainer session told the master, in order. Lines are ASCII and end with '\\n':

* `{…}`: JSON; the first line of a file names the session, the others are rare events;
* `epoch shard start upto task attempt step ms`: eight decimal numbers. The trainer is about to acknowledge
  positions `start` to `upto` of a shard, in the epoch's order; `ms` counts from the opening of the log;
* `=`: the master has answered everything above.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np

from edl_torch.errors import EdlError
from edl_torch.shard import IndexArray

VERSION = 3
SUFFIX = ".audit"
LEDGERS = "ledgers"  # the file in each folder of logs with the ids of ledgers, in the order of their coming
ANSWERED = b"=\n"
COLUMNS = 8
EPOCH, SHARD, START, UPTO, TASK, ATTEMPT, STEP, MS = range(COLUMNS)

_NEWLINE, _SPACE, _EQUALS = b"\n ="
_ALLOWED = b"0123456789 =\n"
_BLANK_ANSWERS = bytes.maketrans(b"=", b" ")
_LINE = re.compile(rb"=|\d{1,18}(?: \d{1,18}){7}")


class DamagedLine(EdlError):
    """Error: a line that no trainer wrote; `number` counts from 0 within what was read."""

    def __init__(self, number: int, text: bytes) -> None:
        super().__init__(f"line {number} is damaged: {text[:80]!r}")
        self.number = number
        self.text = text


# Events -----------------------------------------------------------------------------------------------


def write_event(values: Mapping[str, object]) -> bytes:
    """One JSON line. Names may hold undecodable bytes as lone surrogates, which ASCII escapes carry."""
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


# Acknowledgements -------------------------------------------------------------------------------------


def read_rows(text: bytes) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Read whole lines that are no events.

    Returns the rows, int64 of shape (n, 8), their line numbers, and those of the answers. Raises DamagedLine.
    """
    marks = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(marks == _NEWLINE)
    starts = np.concatenate(([0], ends[:-1] + 1))
    answers = marks[starts] == _EQUALS
    spaces = np.add.reduceat(marks == _SPACE, starts, dtype=np.int64)
    answered = int(answers.sum())
    rows = len(ends) - answered
    sound = (
        not text.translate(None, _ALLOWED)
        and text.count(b"=") == answered
        and bool((spaces == np.where(answers, 0, COLUMNS - 1)).all())
        and bool((ends[answers] - starts[answers] == 1).all())
    )
    numbers = _numbers(text) if sound else np.empty(0, dtype=np.int64)
    # A line of seven spaces has eight numbers at most, so the total says that each has eight.
    if not sound or len(numbers) != rows * COLUMNS:
        raise _first_damaged(text)
    lines = np.arange(len(ends), dtype=np.int64)
    return numbers.reshape(rows, COLUMNS), lines[~answers], lines[answers]


def _numbers(text: bytes) -> IndexArray:
    blank = text.translate(_BLANK_ANSWERS)
    if blank.isspace():
        return np.empty(0, dtype=np.int64)
    # mypy knows only the binary form's bytes; the text form takes them too.
    return np.fromstring(blank, dtype=np.int64, sep=" ")


def _first_damaged(text: bytes) -> DamagedLine:
    lines = text.split(b"\n")
    number = next(i for i, line in enumerate(lines) if not _LINE.fullmatch(line))
    return DamagedLine(number, lines[number])
