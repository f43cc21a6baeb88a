"""Events of a job and trainers that have gone, as values for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NAME_CHARS = 80  # of a name in an event
TEXT_CHARS = 240


class EventKind(Enum):
    """Kind of an event; the values are those of the wire and of JSON."""

    STARTED = "started"
    JOINED = "joined"
    LEFT = "left"
    DIED = "died"
    STALLED = "stalled"
    EPOCH_OVER = "epoch_over"
    FINISHED = "finished"
    QUARANTINED = "quarantined"
    CHECKPOINT = "checkpoint"
    RESTORED = "restored"
    SUSPENDED = "suspended"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of a job: what happened at `at`, in seconds since 1970.

    `number` grows from event to event. Events of one kind that follow each other closely are one, `count` of
    them. `records` are those that came back, or have an outcome now. `text` says more: a reason, a record.
    """

    number: int
    at: float
    kind: EventKind
    dataset: str = ""
    worker_id: str = ""
    count: int = 1
    slices: int = 0
    records: int = 0
    text: str = ""

    @property
    def line(self) -> str:
        """The event in words."""
        return _WORDS[self.kind](self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """Trainer that has gone: when, why, how many records it had trained on and how many went back.

    `died` is False for one that said goodbye. `at` is in seconds since 1970.
    """

    session: str
    worker_id: str
    at: float
    died: bool
    why: str
    trained: int
    slices: int
    records: int


def _went_back(event: Event) -> str:
    if not event.records:
        return "; it held no records"
    return f"; {_count(event.records, 'record')} in {_count(event.slices, 'slice')} went back"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _gone(verb: str, event: Event) -> str:
    return f"trainer {event.worker_id} {verb}{_because(event)}{_went_back(event)}"


def _because(event: Event) -> str:
    return f": {event.text}" if event.text else ""


_WORDS = {
    EventKind.STARTED: lambda e: f"the master started{_because(e)}",
    EventKind.JOINED: lambda e: f"trainer {e.worker_id} joined {e.dataset}",
    EventKind.LEFT: lambda e: _gone("left", e),
    EventKind.DIED: lambda e: _gone("died", e),
    EventKind.STALLED: lambda e: _gone("stalled", e),
    EventKind.EPOCH_OVER: lambda e: f"{e.dataset}: {e.text} over",
    EventKind.FINISHED: lambda e: f"{e.dataset} finished: {e.text}",
    EventKind.QUARANTINED: lambda e: f"{e.dataset}: {_count(e.count, 'record')} quarantined{_because(e)}",
    EventKind.CHECKPOINT: lambda e: (
        f"{e.dataset}: {_count(e.count, 'checkpoint')}, the last by trainer {e.worker_id}"
    ),
    EventKind.RESTORED: lambda e: f"{e.dataset} went back to {e.text}",
    EventKind.WEIGHTS: lambda e: f"{e.dataset} has other weights {e.text}",
    EventKind.SUSPENDED: lambda e: f"{e.dataset} suspended{_because(e)}",
}
