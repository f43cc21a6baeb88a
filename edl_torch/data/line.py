"""Messages between two ranks over gloo, of which neither waits for a rank that is gone.

gloo does not notice that a rank is gone whose message has come, or left, in part: its wait lasts until its
time is up. A small message that is waited for fails at once. So one follows what is sent, and one comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Line:
    """Messages between this rank and another one. Both know of each what comes next."""

    def __init__(self, gloo: Any, other: int) -> None:
        self._gloo = gloo
        self._other = other
        self._tag = 0
        self._mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._sent: list[Any] = []  # torch gives up a message whose work nobody keeps
        self._marks: list[Any] = []  # to be waited for first
        self._coming: list[Any] = []
        self._answers = False  # whether the other rank waits to hear that all has come

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors, and the mark behind them."""
        for tensor in (*tensors, self._mark):
            self._sent.append(self._gloo.send([tensor], self._other, self._next_tag()))

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive as many."""
        for tensor in tensors:
            self._coming.append(self._gloo.recv([tensor], self._other, self._next_tag()))
        mark = torch.empty_like(self._mark)
        self._marks.append(self._gloo.recv([mark], self._other, self._next_tag()))

    def expect_answer(self) -> None:
        """The other rank will say that all has come."""
        self.receive([])

    def expect_to_answer(self) -> None:
        """`settle` is to say that all has come."""
        self._answers = True

    def wait(self) -> None:
        """Wait for all that was begun to receive."""
        if not self._marks:
            return
        for works in (self._marks, self._coming):
            while works:
                works.pop(0).wait()
        self._sent.clear()  # the other rank sends its mark when it has all of it

    def settle(self) -> None:
        """Wait until all that was sent, or comes, is there."""
        self.wait()
        if self._answers:
            self._answers = False
            self.send([])

    def _next_tag(self) -> int:
        self._tag += 1
        return self._tag
