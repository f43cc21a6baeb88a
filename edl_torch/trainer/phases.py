"""The phases of a trainer's four parts, and tables of the changes that are legal.

Everything else is refused: an illegal change is a defect of this package, raises, and leaves the phase as it
was.
"""

from __future__ import annotations

from enum import Enum
from typing import NoReturn, TypeVar

from edl_torch.errors import AccountingError


class Phase(Enum):
    """The phase of one part of a trainer."""

    __hash__ = object.__hash__  # Enum's own runs Python, at each change


class Membership(Phase):
    """The session's part in its dataset: a member of the master's or not."""

    NEW = "not registered"
    REGISTERING = "registering"
    MEMBER = "registered"
    REJOINING = "registering anew, after the master gave it up"


class Loop(Phase):
    """What the training loop of an `ElasticDataLoader` is doing."""

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


class Table(dict[tuple[P, P], P]):
    """The legal changes of one part: `TABLE[phase, to]` is `to`. Another change raises AccountingError."""

    def __init__(self, follows: dict[P, set[P]]) -> None:
        super().__init__({(phase, to): to for phase, ways in follows.items() for to in ways})

    def __missing__(self, change: tuple[P, P]) -> NoReturn:
        phase, to = change
        raise AccountingError(f"{type(phase).__name__} is {phase.name}: it cannot become {to.name}")


MEMBERSHIP = Table(
    {
        Membership.NEW: {Membership.REGISTERING},
        Membership.REGISTERING: {Membership.MEMBER, Membership.NEW},
        Membership.MEMBER: {Membership.REJOINING},
        Membership.REJOINING: {Membership.MEMBER},
    }
)
LOOP = Table(
    {
        Loop.IDLE: {Loop.ASKING},
        Loop.ASKING: {Loop.ASKING, Loop.TRAINING, Loop.IDLE},
        Loop.TRAINING: {Loop.ASKING, Loop.IDLE},
    }
)
ASKING = Table({Asking.IDLE: {Asking.ASKING}, Asking.ASKING: {Asking.IDLE}})
TELLING = Table(
    {
        Telling.IDLE: {Telling.SENDING},
        Telling.SENDING: {Telling.IDLE, Telling.STALLED},
        Telling.STALLED: {Telling.SENDING, Telling.IDLE},
    }
)
