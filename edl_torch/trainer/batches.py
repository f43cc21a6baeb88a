"""The batches that a training loop was handed and is not done with, and the steps by which it is.

Each has a number, in the order in which they were handed out; a padding batch has one too, and no records. A
batch is *read ahead* until a wrapper around the loader passes it on, then *in hand* until the loop asks for
the next one, and *gathered* until the step. What an optimizer has done is one number: that of the newest
batch which the loop was passed when it stepped. So a batch that goes back, or fails, moves no other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from edl_torch.errors import AccountingError
from edl_torch.shard import Slice
from edl_torch.trainer.vocabulary import Ticket, ticket_size

Hold = tuple[Slice, int, int]  # of a slice the positions `first … after - 1`

_NOBODY = -1  # in the place of optimizers of which the last was detached before it stepped


@dataclass(slots=True, eq=False)
class Batch:
    """One batch that was handed out. One without a ticket is a padding batch."""

    number: int
    ticket: Ticket = ()
    holds: list[Hold] | tuple[()] = ()
    lost: bool = False  # its gradient is gone, and no optimizer has stepped on it
    used_by: int = 0  # a bit for each optimizer that stepped on a gradient of it, as far as that was seen
    skipped_by: int = 0  # of these bits, one for each of which a scaler skipped the step
    went_back: bool = False  # it comes again, also where its gradient stays
    several: bool = False  # optimizers stepped on it more than once, each time on new gradients
    instead_of: Batch | None = None  # one that the loop gave back, or reported as bad, and still has
    counts_not: str = ""  # why nothing of it may be learnt: "padding", "back", "bad"
    has_learnt: bool = False  # where nothing may be: a gradient of it came that is not 0
    is_guessed: bool = False  # no step is known to be on it: a wrapper had read it and others to the end

    @property
    def records(self) -> int:
        return ticket_size(self.ticket)


@dataclass(slots=True)
class _InPass:
    """What one optimizer has done since the pass began."""

    before: int  # batches that were handed out before its first step
    steps: int = 0  # before the pass ended
    steps_after_end: int = 0


class Batches:
    """The batches of the newest pass, and those of passes before it that wait for a step.

    `lookahead` is how many a wrapper asks for before it trains on the one in hand; None where it says of each
    when it passes it on.
    """

    def __init__(self, lookahead: int | None = 0) -> None:
        self.lookahead = lookahead
        self.is_told = lookahead is None  # a wrapper says of each batch when it passes it on
        self.ahead: deque[Batch] = deque()  # read, and not passed on; oldest first, as the next
        self.unfinished: deque[Batch] = deque()  # passed on, with records, and the loop is not done with them
        self.in_hand: Batch | None = None  # the one that the loop has; without a ticket once it has let go
        # Padding batches of which the loop has not asked what they weigh, and no step is known that used them
        self.unweighed: list[Batch] = []
        self.hears_steps = False  # of any optimizer, and none has stepped: the next one attaches itself
        self.unclear: list[Batch] = []  # went back until then: its first step shows that none was on them
        self.attached = False  # whether a step decides when a batch has been trained on
        self.insists = False  # whether the user says so: else an optimizer was seen to step, and may be gone
        self.settled = 0  # batches that were acknowledged, or put into quarantine
        self._newest = 0  # the number of the batch that was handed out last
        self._passed = 0  # of the one that was passed on last
        self._touched = 0  # of the newest that a step may have been on
        self._handed = 0  # batches in this pass
        self._unstepped = 0  # of those, the ones up to the first that the loop was done with without a step
        self.ended = False  # the pass has come to its end; a wrapper may still hold batches of it
        self._at_the_end = 0  # `_passed` then
        self._stepped: dict[int, int] = {}  # optimizer -> the newest batch that it has stepped on
        self._by_steps: dict[int, int] = {}  # the same, which reports do not write
        self._in_pass: dict[int, _InPass] = {}
        self._names: dict[int, str] = {}  # of the attached optimizers, for messages
        self._bits = 0  # of these, as in `Batch.used_by`
        self._expected: set[int] = set()  # optimizers that were attached when the pass began
        self._numbers = count()  # of optimizers
        self._never: set[int] = set()  # optimizers that have not stepped at all
        self._told: set[int] = set()  # of those, the ones that somebody was told of
        self._replaced = False  # whether one did not step in the last pass, and others did
        self.counted_lost: list[Batch] = []  # that a step has counted though their gradients were gone
        self.sees = False  # whether they tell: gradients of all attached optimizers can be looked at
        self.in_doubt = False  # whether no gradient of the batch in hand was seen so far, where one would be
        self.counted_unseen = False  # whether one was counted of which no step used a gradient
        self.counted_partly: list[
            Batch
        ] = []  # of which steps of some attached optimizers used a gradient alone

    def __repr__(self) -> str:
        return f"<Batches ahead={len(self.ahead)} unfinished={len(self.unfinished)} in_hand={self.in_hand}>"

    def __len__(self) -> int:
        return sum(map(bool, self.tickets))  # padding and void batches hold no record

    @property
    def tickets(self) -> list[Ticket]:
        """What all of them hold, oldest first."""
        return [batch.ticket for batch in (*self.unfinished, *self.ahead)]

    @property
    def records(self) -> int:
        return sum(map(ticket_size, self.tickets))

    @property
    def has_in_hand(self) -> bool:
        """Whether the loop has a batch with records that it is not done with."""
        return self.in_hand in self.unfinished

    @property
    def is_learnt(self) -> bool:
        """Whether the batch in hand counts, or an attached optimizer has stepped on it."""
        hand = self.in_hand
        if hand is None or not hand.ticket:
            return False
        has_stepped = bool(hand.used_by) or any(self.has_stepped(number, hand) for number in self._names)
        return not self.has_in_hand or has_stepped

    def touched(self) -> list[Batch]:
        """Return those that may have been trained on: without optimizers nobody can say of any."""
        newest = self._touched if self._stepped else self._passed
        return [batch for batch in self.unfinished if batch.number <= newest]

    @property
    def is_unclear(self) -> bool:
        """Whether nobody knows yet if steps decide."""
        return self.hears_steps and not (self.attached or self.settled)

    def before_any_step(self) -> list[Batch]:
        """Return those, in hand or gone back, of which the first step will show whether it is on them."""
        in_hand = [batch for batch in self.unfinished if batch is self.in_hand]
        return [*self.unclear, *in_hand] if self.is_unclear else []

    def untouched(self) -> list[Batch]:
        """Return those that the loop was passed, and no attached optimizer has stepped on."""
        return [batch for batch in self.unfinished if self._names and batch.number > self._touched]

    @property
    def reads_far(self) -> bool:
        """Whether several batches may be on their way to the loop, unseen."""
        return self.lookahead is not None and self.lookahead > 1

    # Which batches are in the gradients -------------------------------------------------------------------

    def read_to_the_end(self) -> list[Batch]:
        """Return what a silent wrapper has read ahead, as the pass is at its end: any may be in hand."""
        return [] if not self.ended or self.is_told else [*self.ahead]

    # Batches come and go ----------------------------------------------------------------------------------

    def hand(self, ticket: Ticket = (), holds: list[Hold] | tuple[()] = ()) -> None:
        """Hand out one more batch; without a ticket it is a padding batch."""
        self._newest += 1
        self._handed += 1
        batch = Batch(self._newest, ticket, holds, counts_not="" if ticket else "padding")
        self.ahead.append(batch)
        if not ticket:
            self.unweighed.append(batch)
        if self.lookahead is not None and len(self.ahead) > self.lookahead:
            self.pass_on()

    def pass_on(self) -> Batch | None:
        """Pass the oldest that was read ahead on to the loop. Returns it; None where none is left."""
        if not self.ahead:
            self._let_go()
            return None
        self.in_hand = batch = self.ahead.popleft()
        self._passed = batch.number
        if batch.ticket:
            self.unfinished.append(batch)
        self.in_doubt = self.sees and bool(batch.ticket) and not batch.used_by
        return batch

    def weigh_padding(self, batch: Batch | None) -> None:
        """Note that somebody knows that a batch, if it is a padding batch, weighs nothing."""
        self.unweighed = [other for other in self.unweighed if other is not batch]

    def weigh_gathered(self) -> None:
        """Note that the loop knows what each batch weighs that it was passed."""
        self.unweighed = [batch for batch in self.unweighed if batch.number > self._passed]

    def asked(self) -> None:
        """Note that somebody asks for a batch: the loop, where no wrapper tells when it does."""
        if not self.is_told and self.unfinished:
            self._let_go()

    def _let_go(self) -> None:
        """The loop has no batch in hand any more; what the last one held may still be looked at."""
        self.in_doubt = False
        if self.in_hand is not None:
            self.in_hand = Batch(self.in_hand.number, (), self.in_hand.holds)

    def done(self) -> list[Ticket]:
        """Take what all optimizers have stepped on; without one, all that the loop was passed."""
        upto = min(self._stepped.values()) if self._stepped else self._passed
        done, unfinished = [], self.unfinished
        while unfinished and unfinished[0].number <= upto:
            batch = unfinished.popleft()
            done.append(batch.ticket)
            if batch.lost:
                self.counted_lost.append(batch)
            if self.sees and (batch.is_guessed or not batch.used_by):
                self.counted_unseen = True
            elif self.sees and self._bits & ~(batch.used_by & ~batch.skipped_by):
                self.counted_partly.append(batch)
        self.settled += len(done)
        return done

    def give_up(self) -> list[Ticket]:
        """Take all that wait for a step: there will be none."""
        self._stepped = dict.fromkeys(self._stepped, self._newest)
        while self.ahead:
            self.pass_on()
        return self.done()

    def reported(self) -> list[Ticket]:
        """Take all that the loop was passed: it is done with them, as it says."""
        self._unstepped = self._unstepped or self._handed
        self._stepped = dict.fromkeys(self._stepped, self._passed)
        done = self.done()
        self._forget_nobody()
        return done

    def failed(self) -> Ticket:
        """Take the batch in hand, which goes to quarantine: there is nothing to step on."""
        batch = self.in_hand
        if batch is None or not self.has_in_hand:
            return ()
        self.unfinished.remove(batch)
        batch.counts_not, batch.has_learnt = "bad", True  # where its gradient is used
        self.in_hand, self.in_doubt = (
            Batch(batch.number, (), batch.holds, instead_of=batch, counts_not="bad"),
            False,
        )
        self._unstepped = self._unstepped or self._handed
        self.settled += 1
        self._forget_nobody()
        return batch.ticket

    def take_back(self, batches: list[Batch], *, by_loop: bool = False) -> None:
        """Forget batches that go back, the one in hand among them, which the loop still has: `by_loop`."""
        for batch in batches:
            batch.went_back = True
        self.unfinished = deque(batch for batch in self.unfinished if batch not in batches)
        self.ahead = deque(batch for batch in self.ahead if batch not in batches)
        self.unweighed = [batch for batch in self.unweighed if batch not in batches]
        self._handed = max(0, self._handed - len(batches))
        hand = self.in_hand if by_loop and self.in_hand in batches else None
        self.in_hand, self.in_doubt = (
            Batch(self._passed, instead_of=hand, counts_not="back" if hand else ""),
            False,
        )
        self._forget_nobody()

    def clear(self) -> None:
        """Forget all batches: they are void. A wrapper that tells still passes on what it holds, and the loop
        still has the one in hand."""
        held = [Batch(batch.number) for batch in self.ahead] if self.is_told else []
        has_in_hand = self.has_in_hand
        self.take_back([*self.unfinished, *self.ahead], by_loop=True)
        self.ahead.extend(held)
        self.unweighed, self.unclear = [], []
        if not has_in_hand:
            self.in_hand = None

    # Passes -----------------------------------------------------------------------------------------------

    def set_lookahead(self, lookahead: int | None) -> None:
        """Have so many read ahead from the next pass on, or None: what is ahead now was passed on."""
        while self.ahead:
            self.pass_on()
        self._let_go()
        self.lookahead, self.is_told = lookahead, lookahead is None

    def begin_pass(self) -> None:
        """Note that the loop begins another pass: what was read ahead, and nobody told of, was passed on."""
        while self.ahead:
            self.pass_on()
        self._let_go()
        self.ended = False
        if not self.attached:
            self.unweighed = []  # no step will say what became of them
        self._handed = self._unstepped = 0
        self._in_pass.clear()
        self._expected = set(self._names)

    def gathered_to_the_end(self, number: int, backwards: int) -> None:
        """Note, as the loop has left a pass, that optimizer `number` has no gradients; so many backward
        passes have reached it after the end.

        It may have stepped once on all that a silent wrapper had read ahead: nobody can say of which.
        """
        mine, may_be_all = self._in_pass.get(number), backwards >= self._newest - self._at_the_end
        if self.ended and self.reads_far and may_be_all and mine is not None and mine.steps_after_end:
            self._touched = self._stepped[number] = self._newest

    def end_pass(self) -> None:
        """Note that the pass has come to its end: no batch is asked for any more.

        Of several that a silent wrapper has read ahead nobody can say which one a step is on: a loop may step
        more than once on one, and it may be left.
        """
        self.ended, self._at_the_end = True, self._passed
        for batch in self.ahead if self.reads_far else ():
            batch.is_guessed = True

    def left_for_another(self) -> None:
        """Note that the loop begins a pass over other data: after the end of this one it has, when all is
        counted, no batch of it in hand any more."""
        if self.ended and not (self.ahead or self.unfinished or self.unweighed):
            self.in_hand = None

    # Optimizers -------------------------------------------------------------------------------------------

    @property
    def all_step(self) -> bool:
        """Whether each attached optimizer is one whose steps have decided: it has stepped, and none has taken
        its place."""
        return bool(self._names) and not self._never and not self._replaced

    @property
    def slowest(self) -> list[str]:
        """Names of the optimizers that batches wait for longest."""
        least = min(self._stepped.values(), default=0)
        return [self._names[n] for n, upto in self._stepped.items() if n in self._names and upto == least]

    def _waits_for(self, number: int) -> bool:
        """Whether a batch that the loop was passed waits for an optimizer."""
        return bool(self.unfinished) and self.unfinished[-1].number > self._stepped[number]

    def attach(self, name: str = "optimizer", insists: bool = True) -> int:
        """Add an optimizer; returns its number. Batches that wait for a step wait for one of it too."""
        self.insists |= insists
        number = next(self._numbers)
        if not self._stepped:
            self._touched = self._passed  # nobody can say of those before
        self._stepped[number] = self.unfinished[0].number - 1 if self.unfinished else self._passed
        self._by_steps[number] = self._stepped[number]
        self._stepped.pop(_NOBODY, None)
        self.attached, self.unclear = True, []
        self._names[number] = name
        self._bits |= 1 << number
        self._never.add(number)
        return number

    def detach(self, number: int) -> None:
        """Optimizer `number` decides no more. What only the last one had not stepped on waits for a step of
        one that is attached later, or for a report."""
        upto = self._stepped.pop(number)
        del self._names[number], self._by_steps[number]
        self._bits -= 1 << number
        self._never.discard(number)
        self._replaced = False
        if not self._stepped:
            if self.insists:
                self._stepped[_NOBODY] = upto
            self._forget_nobody()

    def gone(self, number: int) -> None:
        """Forget optimizer `number`, which does not exist any more. The last one stays: a step decides."""
        if len(self._stepped) > 1 or not self.insists:
            self.detach(number)

    def _forget_nobody(self) -> None:
        if not self.unfinished:
            self._stepped.pop(_NOBODY, None)
        self.attached = bool(self._stepped)

    def take_unweighed(self, used: list[Batch]) -> int:
        """Take the padding batches that a step has used. Returns how many of them nobody has weighed.

        Where gradients cannot be seen these are all that the loop was passed.
        """
        before = len(self.unweighed)
        if self.sees:
            self.unweighed = [batch for batch in self.unweighed if batch not in used]
        else:
            self.weigh_gathered()
        return before - len(self.unweighed)

    def stepped(self, number: int, *, before_hand: bool = False) -> None:
        """Note that optimizer `number` stepped; with `before_hand` on what came before the batch in hand."""
        mine = self._in_pass.get(number)
        if mine is None:
            mine = self._in_pass[number] = _InPass(self._handed)
            self._never.discard(number)
        if before_hand:
            self._stepped[number] = max(self._stepped[number], self._passed - 1)
        elif not self.ended:
            mine.steps += 1
            self._stepped[number] = self._passed
        else:
            self._stepped_after_the_end(number, mine)
        self._by_steps[number] = self._stepped[number]
        self._touched = max(self._touched, self._stepped[number])

    def has_stepped(self, number: int, batch: Batch) -> bool:
        """Whether optimizer `number` has stepped since a batch was passed on."""
        return batch.number <= self._by_steps[number]

    def _stepped_after_the_end(self, number: int, mine: _InPass) -> None:
        """Note a step after the pass came to its end.

        A wrapper that does not tell has passed on one more of what it read ahead, once all optimizers
        stepped. Raises AccountingError where it has read further ahead than it said: batches were
        acknowledged too soon.
        """
        mine.steps_after_end += 1
        if self.is_told:
            self._stepped[number] = self._passed
            return
        if self.in_hand is not None and not self.ahead and not self._waits_for(number):
            self._check_lookahead(mine)
        upto = min(self._at_the_end + mine.steps_after_end, self._newest)
        self._stepped[number] = max(self._stepped[number], upto)
        after = [self._in_pass[n].steps_after_end if n in self._in_pass else 0 for n in self._names]
        while self.ahead and self.ahead[0].number <= self._at_the_end + min(after):
            self.pass_on()

    def _check_lookahead(self, mine: _InPass) -> None:
        """Raise AccountingError for a loop whose steps show that more was read ahead than `lookahead`."""
        behind = min(mine.before, self._unstepped or mine.before) - 1
        each = mine.steps > 1 and mine.steps == self._handed - behind
        if self.lookahead is not None and each and behind > self.lookahead:
            raise AccountingError(
                f"the loop steps on batches after the last one was handed out: what lies between it and the "
                f"loader reads {behind} ahead, and lookahead is {self.lookahead}, so that batches were "
                f"acknowledged before they were trained on. Give lookahead={behind}, or lookahead='manual' "
                f"and call loader.passed_on() for each batch that reaches the loop. Where nothing reads "
                f"ahead and the loop skipped {behind} step(s) at first, give attach() the GradScaler, or "
                f"call loader.stepped() for each batch without a step"
            )

    # Optimizers that do not step --------------------------------------------------------------------------

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

    def waits_for_ever(self) -> list[str]:
        """Names of optimizers that have never stepped, though batches wait for them."""
        return [self._names[number] for number in sorted(self._never) if self._waits_for(number)]

    def take_never(self) -> list[str]:
        """Names of optimizers that were attached when the last pass began and have never stepped, though
        batches wait for them; of each once."""
        never = {number for number in (self._never & self._idle) - self._told if self._waits_for(number)}
        self._told |= never
        return [self._names[number] for number in sorted(never)]
