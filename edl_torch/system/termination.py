"""Signals: the first SIGTERM to this process, and decisions that a signal's handler has cut off.

SIGTERM is noted while somebody listens. A handler that was there before is still called, and every later
SIGTERM does what it did before. It must not know who listens.

Python runs signal handlers between any two calls of the main thread. What one raises, as Ctrl-C does, may end
a decision there, with its state half changed. Nothing holds it back. Who decides notes before each decision
that one is under way, and after it that it has ended: by its result, or by an error of its own. Whoever finds
one under way, with the lock in hand, has come after a cut, or is called by a handler in the middle of it:
what the state is worth is not known, and the call is refused.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from traceback import walk_tb
from types import FrameType
from typing import Any

from edl_torch.errors import EdlError


class Termination:
    """Notes one signal, in front of the handler that it finds.

    The handler takes no lock, writes nothing and raises nothing of its own: it may run at any instruction of
    the main thread.

    Attributes:
        came: whether the signal came while somebody listened, until nobody does.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.came = False
        self._number = number
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_place = False  # whether the process calls `_on_signal`, itself or through a later handler
        self._before: Any = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Termination {signal.Signals(self._number).name} came={self.came}>"

    @property
    def is_handled(self) -> bool:
        """Whether the program has made the signal do something else than end it."""
        return signal.getsignal(self._number) != signal.SIG_DFL

    def listen(self, listener: object) -> bool:
        """Note the next signal for `listener`, until it leaves or is no more.

        False where no handler can be put in front: outside of the main thread, and where the one that is
        there was not made in Python.
        """
        if self._pid != os.getpid():  # a forked child: who listens does so in its parent
            self._listeners = weakref.WeakSet()
            self._pid = os.getpid()
        self.came &= len(self._listeners) > 0
        if not (self._in_place or self.came or self._put_in_front()):
            return False
        self._listeners.add(listener)
        return True

    def _put_in_front(self) -> bool:
        before = signal.getsignal(self._number)
        if before is None or threading.current_thread() is not threading.main_thread():
            return False
        if before != self._on_signal:  # else a framework has restored ours, which it had once found
            self._before = before
            signal.signal(self._number, self._on_signal)
        self._in_place = True
        return True

    def leave(self, listener: object) -> None:
        """Listen no more for `listener`. After the last one the handler of before is put back."""
        self._listeners.discard(listener)
        if not self._listeners and threading.current_thread() is threading.main_thread():
            self._put_back()

    def _put_back(self) -> None:
        # One that was put in front of ours later, and calls it, stays.
        if signal.getsignal(self._number) == self._on_signal:
            signal.signal(self._number, self._before)
            self._in_place = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # In a forked child a program's own children end as before.
        noted = not self.came and len(self._listeners) > 0 and self._pid == os.getpid()
        self.came |= noted
        self._put_back()
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and not noted:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


# Of the process, as signal handlers are.
sigterm = Termination()


# Decisions that an exception from outside has cut off -------------------------------------------------


def cut_off(what: str) -> str:
    """Return what to say of a decision that is under way, and that nobody will end any more."""
    return (
        f"{what} was cut off in its middle, by Ctrl-C or by what another signal's handler raised: what it "
        f"changed is not known, and nothing goes on from it. Begin anew from the last checkpoint, with a new "
        f"loader. A handler that sets a flag or calls loader.preempt(), and raises nothing, cuts nothing off"
    )


def is_own(error: BaseException) -> bool:
    """Whether a decision raised this error by itself, and not a handler that came in the middle of it."""
    return isinstance(error, EdlError) and all(
        frame.f_globals["__name__"].startswith("edl_torch.") for frame, _ in walk_tb(error.__traceback__)
    )


def is_of_a_handler(error: BaseException) -> bool:
    """Whether the handler of a signal raised this error, or one that it came from, in the middle of
    something that is not to blame for it."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if any(frame.f_code in codes for frame, _ in walk_tb(link.__traceback__)):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
