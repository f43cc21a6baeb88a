"""How many of the batches handed to the loop may not be acknowledged yet, by what the loop has done since.

Counts only: batches read ahead by a wrapper, and batches that an attached optimizer has not stepped on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from edl_torch.errors import AccountingError

_NOBODY = -1  # in the place of optimizers of which the last was detached before it stepped


@dataclass(slots=True)
class _InPass:
    """What one optimizer has done since the pass began."""

    before: int = 0  # batches that were handed out before its first step
    steps: int = 0  # before the last batch was handed out
    after: int = 0  # after that


class Steps:
    """What the loop has done with the newest batches.

    `lookahead` is how many of them a wrapper asks for before it trains on the one in hand; None where it says
    of each when it passes it on.
    """

    def __init__(self, lookahead: int | None = 0) -> None:
        self._lookahead = lookahead
        self.is_told = lookahead is None  # a wrapper says of each batch when it passes it on
        self.ahead = 0  # newest batches that the wrapper may not have passed on yet: not to be acknowledged
        self._handed = 0  # batches in this pass
        self._unstepped = 0  # of those, the ones up to the first that the loop was done with without a step
        self._asked_for_more = True  # the loop behind a wrapper that tells has had every batch
        self._covered = 0  # batches read ahead that all optimizers have stepped on after the end
        self._since: dict[int, int] = {}  # optimizer -> newest batches that it has not stepped on
        self._in_pass: dict[int, _InPass] = {}
        self._names: dict[int, str] = {}  # of optimizers, for messages
        self._expected: set[int] = set()  # optimizers that were attached when the pass began
        self._numbers = count()  # of optimizers
        self._never: set[int] = set()  # optimizers that have not stepped at all
        self._told: set[int] = set()  # of those, the ones that somebody was told of
        self._replaced = False  # whether one did not step in the last pass, and others did

    @property
    def attached(self) -> bool:
        """Whether a step decides when a batch has been trained on."""
        return bool(self._since)

    @property
    def keep(self) -> int:
        """Newest batches that may not be acknowledged, by reading ahead or for want of a step."""
        return max([self.ahead, *self._since.values()])

    @property
    def in_hand(self) -> int:
        """Newest batches that the loop cannot have finished with when it ends now."""
        return self.ahead + (self.keep > self.ahead)

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
        """Add an optimizer; returns its number. Batches that wait for a step wait for one of it too."""
        number = next(self._numbers)
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
        self._never.discard(number)
        self._replaced = False
        if not self._since and since > self.ahead:
            self._since[_NOBODY] = since

    def gone(self, number: int) -> None:
        """Forget optimizer `number`, which does not exist any more. The last one stays: a step decides."""
        if len(self._since) > 1:
            self.detach(number)

    def handed(self) -> None:
        """Note that one more batch went to the loop."""
        self._handed += 1
        self._asked_for_more = False
        if self._lookahead is None or self.ahead < self._lookahead:
            self.ahead += 1
        for number in self._since:
            self._since[number] += 1

    def padded(self) -> None:
        """Note that a padding batch went to the loop, which steps on it like on any other."""
        self._handed += 1

    def stepped(self, number: int) -> None:
        """Note that optimizer `number` stepped."""
        mine = self._in_pass.get(number)
        if mine is None:
            mine = self._in_pass[number] = _InPass(before=self._handed)
            self._never.discard(number)
        mine.steps += 1
        self._since[number] = min(self.ahead, self._since[number])

    def reported(self) -> None:
        """Note that the loop is done with what it was passed, as it says."""
        self._since.pop(_NOBODY, None)
        self._unstepped = self._unstepped or self._handed
        for number, since in self._since.items():
            self._since[number] = min(self.ahead, since)

    def stepped_after_the_end(self, number: int) -> None:
        """Note a step of optimizer `number` after the last batch of a pass.

        The wrapper has passed on one more of what it read ahead, once all optimizers stepped. Raises
        AccountingError where it has read further ahead than it said: batches were acknowledged too soon.
        """
        mine = self._in_pass.setdefault(number, _InPass(before=self._handed))
        self._never.discard(number)
        mine.after += 1
        if not self._since[number]:
            self._check_lookahead(mine)
        if self.is_told:
            self._since[number] = min(self.ahead, self._since[number])
            return
        at_the_end = self.ahead + self._covered
        self._since[number] = min(max(0, at_the_end - mine.after), self._since[number])
        self._covered = min(at_the_end, *[self._after(optimizer) for optimizer in self._names])
        self.ahead = at_the_end - self._covered

    def _after(self, number: int) -> int:
        found = self._in_pass.get(number)
        return 0 if found is None else found.after

    def _check_lookahead(self, mine: _InPass) -> None:
        """Raise AccountingError for a loop whose steps show that more was read ahead than `lookahead`."""
        behind = min(mine.before, self._unstepped or mine.before) - 1
        each = mine.steps > 1 and mine.steps == self._handed - behind
        if self._lookahead is not None and each and behind > self._lookahead:
            raise AccountingError(
                f"the loop steps on batches after the last one was handed out: what lies between it and the "
                f"loader reads {behind} ahead, and lookahead is {self._lookahead}, so that batches were "
                f"acknowledged before they were trained on. Give lookahead={behind}, or lookahead='told' and "
                f"call loader.passed_on() for each batch that reaches the loop. Where nothing reads ahead "
                f"and the loop skipped {behind} step(s) at first, give attach() the GradScaler, or call "
                f"loader.stepped() for each batch without a step"
            )

    def passed_on(self) -> None:
        """Note that a wrapper passes on the oldest batch that it has read ahead, or that none is left."""
        self._asked_for_more = not self.ahead
        self.ahead = max(0, self.ahead - 1)

    @property
    def told_in_hand(self) -> bool:
        """Whether a wrapper that tells has batches to pass on, or its loop has one and asked for no more."""
        if not self.is_told or self._asked_for_more:
            return False
        return bool(self.in_hand) if self.attached else True

    def withdrawn(self, batches: int) -> None:
        """Note that the newest batches were given back."""
        self.ahead = max(0, self.ahead - batches)
        self._handed = max(0, self._handed - batches)
        for number in self._since:
            self._since[number] = max(0, self._since[number] - batches)
        self._forget_nobody()

    def failed(self) -> None:
        """Note that the batch in hand went to quarantine: there is nothing to step on."""
        self._unstepped = self._unstepped or self._handed
        for number, since in self._since.items():
            self._since[number] = max(self.ahead, since - 1)
        self._forget_nobody()

    def _forget_nobody(self) -> None:
        if self._since.get(_NOBODY) == self.ahead:
            del self._since[_NOBODY]

    def begin_pass(self) -> None:
        """Note that the loop begins another pass: nothing is read ahead any more."""
        self.ahead = self._handed = self._unstepped = self._covered = 0
        self._in_pass.clear()
        self._expected = set(self._names)

    @property
    def _idle(self) -> set[int]:
        """Optimizers that were attached when the pass began and have not stepped since."""
        return (self._expected & self._names.keys()) - self._in_pass.keys()

    def take_idle(self) -> list[str]:
        """Return the names of optimizers that have not stepped since the pass began, where others have."""
        idle = self._idle
        self._expected.clear()
        self._replaced = bool(idle) and idle != self._names.keys()
        return [self._names[number] for number in sorted(idle)] if self._replaced else []

    def take_never(self) -> list[str]:
        """Names of optimizers that were attached when the last pass began and have never stepped, though
        batches wait for them; of each once."""
        idle = (self._never & self._idle) - self._told
        never = {number for number in idle if self._since[number] > self.ahead}
        self._told |= never
        return [self._names[number] for number in sorted(never)]

    def clear(self) -> None:
        """Forget all batches: the lineage is another one."""
        self.withdrawn(self.keep)
