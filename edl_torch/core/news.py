"""How often something has happened for which calls that wait should look again. It knows neither of these."""

from __future__ import annotations


class News:
    """One number for all that grows it: who waits compares it with what it was."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Something happened: records came back, or a pass may be over."""
        self.count += 1

    def __repr__(self) -> str:
        return f"<News n={self.count}>"
