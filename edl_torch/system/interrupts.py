"""Ctrl-C that comes in the middle of a change, held back until the change is whole.

A `KeyboardInterrupt` may be raised between any two statements of the main thread. State that a program goes
on with, as a notebook does, must not be left half changed by it.
"""

from __future__ import annotations

import threading
from _signal import default_int_handler, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Handler = Callable[[int, FrameType | None], Any]

# Those of `_signal`: those of `signal` make enums, which costs ten times as much as the rest.
MAIN = threading.main_thread().ident
NUMBER = int(SIGINT)


class Switch:
    """A handler of SIGINT: the program's own, or during a change one that only notes the signal.

    Python calls what is in the slot `__call__`. To put another handler there takes a hundredth of what
    `signal()` does, and no frame of this package is in the traceback of a program that Ctrl-C ends.

    `noted` is None when no change is under way. `kept` counts who keeps the switch installed; without any it
    is for one change.
    """

    __slots__ = ("__call__", "kept", "note", "noted", "program")

    __call__: Handler

    def __init__(self, program: Handler) -> None:
        self.__call__ = self.program = program
        self.note: Handler = self._note
        self.noted: Any = None  # () during a change; then the arguments of the handler
        self.kept = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = number, frame


def torn_by(error: BaseException, what: str) -> str:
    """Return what to say of state that an error, as of a handler of another signal, left half changed."""
    return (
        f"{type(error).__name__} was raised in the middle of {what}, as by a handler of signals: what it "
        f"changed is not known, and nothing goes on from it. Start again from the last checkpoint; let a "
        f"handler set a flag or call loader.preempt(), and raise nothing"
    )


UNUSED = Switch(lambda number, frame: None)  # of other threads, where handlers never run
UNUSED.kept = 1
_FOR_ONE = Switch(default_int_handler)  # change, where none is kept


def uninterrupted(change: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Call `change`; Ctrl-C comes when it is done. Returns, or raises, what `change` does.

    Nothing is held back outside of the main thread, where handlers never run, and where the program has no
    handler in Python. The handler is called once, for the last signal, and may raise.
    """
    switch = getsignal(NUMBER) if threading.get_ident() == MAIN else UNUSED
    if type(switch) is not Switch or switch.noted is not None:
        switch = other_switch(switch)
    switch.noted, switch.__call__ = (), switch.note
    try:
        return change(*arguments)
    finally:
        if not switch.kept:
            uninstall(switch)
        switch.__call__ = switch.program
        noted, switch.noted = switch.noted, None
        if noted:
            switch.program(*noted)


def other_switch(installed: Any) -> Switch:
    """Return the switch for a change, where the installed handler is none or is in use."""
    if type(installed) is Switch:
        # One that notes holds for the change that this one is a part of. Else a later Ctrl-C overtook
        # what is noted.
        return UNUSED if installed.__call__ is installed.note else installed
    if not callable(installed):
        return UNUSED
    _FOR_ONE.program = _FOR_ONE.__call__ = installed
    return _install(_FOR_ONE)


def _install(switch: Switch) -> Switch:
    try:
        signal(NUMBER, switch)
    except BaseException:  # Ctrl-C, before there is a change
        uninstall(switch)
        raise
    return switch


def uninstall(switch: Switch) -> None:
    """Put the program's handler back, where no other one has been installed meanwhile."""
    if getsignal(NUMBER) is switch:
        signal(NUMBER, switch.program)


def keep_switch() -> Switch:
    """Install a switch until `drop_switch`: changes are then held together at next to no cost.

    A program that installs a handler meanwhile has its own, and changes cost what they cost without.
    """
    installed = getsignal(NUMBER) if threading.get_ident() == MAIN else UNUSED
    if type(installed) is Switch:
        switch = installed
    else:
        switch = _install(Switch(installed)) if callable(installed) else UNUSED
    switch.kept += 1
    return switch


def drop_switch(switch: Switch) -> None:
    """Let go of a switch that was kept. Finalisers may call it, in any thread: it takes no lock."""
    switch.kept -= 1
    if not switch.kept and switch.noted is None and threading.get_ident() == MAIN:
        uninstall(switch)


def forget_switch() -> None:
    """Put the program's handler back in a child that was forked during a change."""
    installed = getsignal(NUMBER)
    if type(installed) is Switch:
        signal(NUMBER, installed.program)
