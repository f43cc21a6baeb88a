"""The phases of a trainer's four parts, and the table of the changes that are legal.

Everything else is refused: an illegal change is a defect of this package, raises, and leaves the phase as it
was.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from edl_torch.errors import AccountingError


class Phase(Enum):
    """What one part of a trainer is at."""

    __hash__ = object.__hash__  # Enum's own runs Python, at each change


class Member(Phase):
    """How the session takes part in its dataset."""

    NEW = "not registered"
    REGISTERING = "registering"
    MEMBER = "registered"
    REJOINING = "registering anew, after the master gave it up"


class Loop(Phase):
    """What the training loop of an `ElasticDataLoader` is at."""

    IDLE = "not iterating"
    ASKING = "waits for a batch"
    TRAINING = "has a batch"


class Asking(Phase):
    """The call for leases."""

    IDLE = "none is under way"
    ASKING = "one is under way"


class Telling(Phase):
    """The report to the master."""

    IDLE = "none is under way"
    SENDING = "one is under way"
    STALLED = "the last one was not answered"


P = TypeVar("P", bound=Phase)

TABLE: dict[Phase, frozenset[Phase]] = {
    Member.NEW: frozenset({Member.REGISTERING}),
    Member.REGISTERING: frozenset({Member.MEMBER, Member.NEW}),
    Member.MEMBER: frozenset({Member.REJOINING}),
    Member.REJOINING: frozenset({Member.MEMBER}),
    Loop.IDLE: frozenset({Loop.ASKING}),
    Loop.ASKING: frozenset({Loop.ASKING, Loop.TRAINING, Loop.IDLE}),
    Loop.TRAINING: frozenset({Loop.ASKING, Loop.IDLE}),
    Asking.IDLE: frozenset({Asking.ASKING}),
    Asking.ASKING: frozenset({Asking.IDLE}),
    Telling.IDLE: frozenset({Telling.SENDING}),
    Telling.SENDING: frozenset({Telling.IDLE, Telling.STALLED}),
    Telling.STALLED: frozenset({Telling.SENDING, Telling.IDLE}),
}


def moved(phase: P, to: P) -> P:
    """Return the phase `to`. Raises AccountingError where it may not follow on `phase`."""
    if to not in TABLE[phase]:
        raise AccountingError(f"{type(phase).__name__} is {phase.name}: it cannot become {to.name}")
    return to
