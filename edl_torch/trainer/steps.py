"""How many of the batches handed to the loop may not be acknowledged yet, by what the loop has done since.

Counts only: batches read ahead by a wrapper, and batches that an attached optimizer has not stepped on.
"""

from __future__ import annotations

_NOBODY = -1  # in the place of optimizers of which the last was detached before it stepped


class Steps:
    """`lookahead` is how many batches a wrapper asks for before it trains on the one in hand."""

    def __init__(self, lookahead: int = 0) -> None:
        self._lookahead = lookahead
        self._ahead = 0  # newest batches that the wrapper may not have passed on yet
        self._since: dict[int, int] = {}  # optimizer -> newest batches that it has not stepped on
        self._names: dict[int, str] = {}  # of optimizers, for messages
        self._next = 0
        self._idle: set[int] = set()  # optimizers that have not stepped since the pass began
        self._never: set[int] = set()  # those that have not stepped at all
        self._told: set[int] = set()  # of those, the ones that somebody was told of
        self._replaced = False  # whether one did not step in the last pass, and others did

    @property
    def attached(self) -> bool:
        """Whether a step decides when a batch has been trained on."""
        return bool(self._since)

    @property
    def ahead(self) -> int:
        """Newest batches that stay out of every acknowledgement."""
        return self._ahead

    @property
    def keep(self) -> int:
        """Newest batches that may not be acknowledged, by reading ahead or for want of a step."""
        return max([self._ahead, *self._since.values()])

    @property
    def in_hand(self) -> int:
        """Newest batches that the loop cannot have finished with when it ends now."""
        return self._ahead + (self.keep > self._ahead)

    @property
    def untouched(self) -> int:
        """Newest batches that no attached optimizer has stepped on; 0 without one: nobody can say."""
        return min(self._since.values(), default=0)

    @property
    def all_step(self) -> bool:
        """Whether each attached optimizer is one whose steps have decided: it has stepped, and none has taken
        its place."""
        return bool(self._names) and not self._never and not self._replaced

    @property
    def slowest(self) -> list[str]:
        """Names of the optimizers that batches wait for longest."""
        return [self._names[n] for n, since in self._since.items() if n in self._names and since == self.keep]

    def attach(self, name: str = "optimizer") -> int:
        """Another optimizer; returns its number. Batches that wait for a step wait for one of it too."""
        number, self._next = self._next, self._next + 1
        self._since[number] = self.keep
        self._since.pop(_NOBODY, None)
        self._names[number] = name
        self._never.add(number)
        return number

    def detach(self, number: int) -> None:
        """Optimizer `number` decides no more. What only the last one had not stepped on waits for a step of
        one that is attached later, or for a report."""
        since = self._since.pop(number)
        del self._names[number]
        self._idle.discard(number)
        self._never.discard(number)
        self._replaced = False
        if not self._since and since > self._ahead:
            self._since[_NOBODY] = since

    def gone(self, number: int) -> None:
        """Optimizer `number` does not exist any more. The last one decides on: nothing steps in its place."""
        if len(self._since) > 1:
            self.detach(number)

    def handed(self) -> None:
        """One more batch went to the loop."""
        self._ahead = min(self._lookahead, self._ahead + 1)
        for number in self._since:
            self._since[number] += 1

    def stepped(self, number: int) -> None:
        """Optimizer `number` stepped."""
        self._since[number] = min(self._ahead, self._since[number])
        self._idle.discard(number)
        self._never.discard(number)

    def reported(self) -> None:
        """The loop says that it is done with what it was passed."""
        self._since.pop(_NOBODY, None)
        for number in self._since:
            self.stepped(number)

    def exhausted_step(self) -> None:
        """A step after the last batch of a pass: the wrapper has passed on one more of what it read ahead."""
        self._ahead = max(0, self._ahead - 1)

    def withdrawn(self, batches: int) -> None:
        """The newest batches were given back."""
        self._ahead = max(0, self._ahead - batches)
        for number in self._since:
            self._since[number] = max(0, self._since[number] - batches)
        self._forget_nobody()

    def failed(self) -> None:
        """The batch in hand went to quarantine: there is nothing to step on."""
        for number, since in self._since.items():
            self._since[number] = max(self._ahead, since - 1)
        self._forget_nobody()

    def _forget_nobody(self) -> None:
        if self._since.get(_NOBODY) == self._ahead:
            del self._since[_NOBODY]

    def passed_on(self) -> None:
        """The loop begins another pass: nothing is read ahead any more."""
        self._ahead = 0
        self._idle = set(self._names)

    def take_idle(self) -> list[str]:
        """Names of optimizers that have not stepped since the last pass began, where others have."""
        attached = self._names.keys()
        idle, self._idle = self._idle & attached, set()
        self._replaced = bool(idle) and idle != attached
        return [self._names[number] for number in sorted(idle)] if self._replaced else []

    def take_never(self) -> list[str]:
        """Names of optimizers that were attached when the last pass began and have never stepped, though
        batches wait for them; of each once."""
        idle = (self._never & self._idle) - self._told
        never = {number for number in idle if self._since[number] > self._ahead}
        self._told |= never
        return [self._names[number] for number in sorted(never)]

    def clear(self) -> None:
        """Another lineage: no batch is in flight."""
        self.withdrawn(self.keep)
