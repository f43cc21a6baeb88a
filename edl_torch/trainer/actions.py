"""What a procedure of the trainer wants done, as values: its shell does it and hands back what came of it.

A procedure is a generator. It runs under the shell's lock from one action to the next, so what it decides is
whole; the lock is free while an action is under way. The answer to an action is sent into the procedure; an
error that ended it is thrown in. A procedure that is given up is closed, and what it had begun is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from edl_torch.core.calls import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the master. The answer is the master's."""

    request: Request[Any]
    wait_s: float = 0.0  # how long a lease call may wait at the master


@dataclass(frozen=True, slots=True)
class Register:
    """Register the dataset; by its name alone where `again`. The answer is a `RegisterAnswer`."""

    again: bool


@dataclass(frozen=True, slots=True)
class Attend:
    """Begin to keep the session alive. The answer is whether its liveness is ever in doubt."""

    member: int


@dataclass(frozen=True, slots=True)
class Describe:
    """Make the token of the beginning of the data. The answer is its text, '' where the plan is not known."""


@dataclass(frozen=True, slots=True)
class LookAround:
    """Look for other trainers of the dataset in this process. The answer is a tuple of `SiblingSession`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingSession:
    """Another trainer of the same dataset in this process, whose loop has `records` records."""

    session: str
    records: int
    same_thread: bool  # its loop runs in the thread that looks, and so cannot go on meanwhile


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the user. There is no answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `ready()` holds, at most `timeout_s` seconds. The answer is its last value, and it has
    not changed yet when the procedure goes on."""

    ready: Callable[[], Any]
    timeout_s: float | None = None


# The shell holds its lock for `Wait` alone.
Action = Call | Register | Attend | Describe | LookAround | Warn | Wait
Procedure = Generator[Action, Any, T]
