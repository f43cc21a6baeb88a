"""What has changed: parts of the state, for the journal, and a version, for calls that wait.

A part is named by a key: its kind and what tells it from others of that kind. What a part looks like is
`core.persistence`'s business; nothing here keeps a value, so a mark too many costs a little and does no harm.
"""

from __future__ import annotations

from typing import Protocol

Key = tuple[str | int, ...]


class Mark(Protocol):
    """Called with the kind of a part and the rest of its key after the part has changed."""

    def __call__(self, kind: str, *key: str | int) -> None: ...


def unrecorded(kind: str, *key: str | int) -> None:
    """The mark of a state that nobody writes down."""


class Changes:
    """Keys that were marked since they were last taken."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def mark(self, kind: str, *key: str | int) -> None:
        """This part may have changed."""
        self._keys.add((kind, *key))

    def of(self, dataset: str) -> Mark:
        """Return a mark for the parts of one dataset, whose keys name it after the kind."""
        keys = self._keys

        def mark(kind: str, *key: str | int) -> None:
            keys.add((kind, dataset, *key))

        return mark

    def take(self) -> tuple[Key, ...]:
        """Return all keys, and begin anew."""
        keys = tuple(self._keys)
        self._keys.clear()  # in place: the marks of the datasets hold on to it
        return keys

    def __repr__(self) -> str:
        return f"<Changes n={len(self._keys)}>"


class Version:
    """Version counter that wakes long polls."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def grow(self) -> None:
        """Make every call that waits look again: records came back, or a pass may be over."""
        self.count += 1

    def __repr__(self) -> str:
        return f"<Version {self.count}>"
