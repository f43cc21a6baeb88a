"""Ctrl-C that comes in the middle of a change, held back until the change is whole.

A `KeyboardInterrupt` may be raised between any two statements of the main thread. State that a program goes
on with, as a notebook does, must not be left half changed by it.
"""

from __future__ import annotations

import threading
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# Those of `_signal`: those of `signal` make enums, which costs ten times as much as the rest.
_MAIN = threading.main_thread().ident
_NUMBER = int(SIGINT)
_noted: list[FrameType | None] = []


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(frame)


def hold_interrupts() -> Handler | None:
    """Note SIGINT from now on, in place of the program's handler. Returns that, for `release_interrupts`.

    None where nothing changes: outside of the main thread, where handlers never run, while interrupts are
    held already, and where the program has no handler in Python.
    """
    if threading.get_ident() != _MAIN:
        return None
    before = getsignal(_NUMBER)
    if before is _note or not callable(before):
        return None
    _noted.clear()  # of a release that another Ctrl-C cut short: that one was heard
    signal(_NUMBER, _note)
    handler: Handler = before
    return handler


def release_interrupts(before: Handler) -> None:
    """Put the program's handler back, and call it where a SIGINT has come. Raises what it raises."""
    signal(_NUMBER, before)
    if _noted:
        frame = _noted[-1]
        _noted.clear()
        before(_NUMBER, frame)
