"""Which batches are in the gradients of one session's attached optimizers, and in each of their steps.

`Watched` knows what the gradients of one optimizer hold. What is found is returned, and the session tells the
trainer; but a batch is marked here.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from edl_torch.client.leftovers import leave_all, leftovers
from edl_torch.client.model import has_place, some
from edl_torch.client.watched import (
    HOOKED,
    Change,
    Watched,
    are_there,
    is_any,
    is_in_parts,
    parameters_of,
    trained,
)
from edl_torch.integrations.engines import hides_gradients
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.trainer import Trainer

_SAME, _, _OTHER, _GONE = Change  # Python 3.11 takes as long to look one up as for a call


class Used(NamedTuple):
    """What a step of an optimizer was on."""

    before_hand: bool  # on what came before the batch in hand
    back: Sequence[Batch] = ()  # on some of batches that went back
    several: Sequence[Batch] = ()  # that it, or another with a parameter of its, had stepped on
    padding: int = 0  # on so many padding batches of which the loop has not asked what they weigh
    doubts: Collection[str] = ()  # "again", "padding", "bad": as `ModelSeen.at`


_NOTHING_ELSE = Used(before_hand=False)


class Gradients:
    """Those of one session's attached optimizers."""

    def __init__(self, trainer: Trainer) -> None:
        self.is_reduced = False
        self._left: list[Batch] = []  # that were left before any optimizer was attached
        self._batches = trainer.state.batches
        self._watched: dict[int, Watched] = {}  # by the optimizer's number

    def __repr__(self) -> str:
        return f"<Gradients of {[type(optimizer).__name__ for optimizer in self.optimizers()]}>"

    # Optimizers -------------------------------------------------------------------------------------------

    def leave(self, batches: Sequence[Batch]) -> None:
        """Note that a loop was left with these batches before any step: they may be in any gradient."""
        if new := [batch for batch in batches if batch not in self._left]:
            self._left += new
            leave_all(weakref.ref(self), new)

    def watch(self, number: int, optimizer: Any, *, has_in_hand: bool = False) -> None:
        """Hook parameters of an optimizer, which may have gradients of the batch in hand.

        What other optimizers, or loops that were left, have put into the gradients of its parameters is there
        still.
        """
        parameters = trained(optimizer)
        watched = Watched(weakref.ref(optimizer), self._batches, is_reduced=self.is_reduced)
        mine = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for other in self._watched.values():
            theirs = (*trained(other.optimizer()), *other.parameters)  # it may be no more
            if not mine.isdisjoint(map(id, theirs)):
                watched.take_over(other)
                watched.is_strange |= other.is_strange
        for left in leftovers(mine, is_reduced=self.is_reduced):
            # Of a batch of another session this one cannot tell: it is as if a step had used it.
            if left.of() is self:
                watched.take_over(left)
            else:
                watched.is_used = True
        has_some = watched.gathered or watched.unsure
        if (has_some or watched.is_used) and watched.is_zero():  # the loop has thrown them away
            watched.drop()
        elif self._batches.in_hand is None and not has_some:  # a loop over other data has left them
            watched.is_used |= is_any(parameters)
        self._watched[number] = watched
        watched.hook(some([*filter(has_place, parameters)], HOOKED))
        if has_in_hand and not watched.is_zero():
            watched.add()
        self.look()

    def reduce(self) -> None:
        """Note that ranks reduce gradients, and may put others in their place."""
        self.is_reduced = True
        for watched in self._watched.values():
            watched.is_reduced = True

    def forget(self, number: int) -> None:
        """Look at parameters of an optimizer no more, but for what is left in their gradients."""
        watched = self._watched.pop(number, None)
        if watched is not None:
            watched.leave(weakref.ref(self))
        self.look()

    def optimizers(self) -> list[Any]:
        """Every attached optimizer that still exists."""
        found = (watched.optimizer() for watched in self._watched.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def _hides(self) -> bool:
        """Whether the gradients of some optimizer cannot be seen: also of one that only tells of steps, and
        has no parameters."""
        for optimizer in self.optimizers():
            parameters = parameters_of(optimizer)
            if hides_gradients(optimizer) or not parameters or any(map(is_in_parts, parameters)):
                return True
        return False

    # Gradients come ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """See, as a pass begins, whether gradients of all attached optimizers can be seen: then a batch
        without is in doubt."""
        for watched in self._watched.values():
            watched.was_idle, watched.backwards_after_end = False, 0
        self._batches.sees = bool(self._watched) and not self._hides()

    def let_go(self) -> None:
        """Note what is there as the loop lets the batch in hand go: it asks for the next, or is left."""
        in_doubt = self._batches.in_doubt
        for watched in self._watched.values():
            if in_doubt:
                watched.look_at_what_is_new(watched.refresh())
            elif watched.gathered or watched.unsure or watched.open:
                watched.refresh()

    def are_as_seen(self) -> bool:
        """Whether gradients are there, and all are those that were looked at last. For finalisers."""
        return all(watched.are_as_seen() for watched in list(self._watched.values()))

    # Steps ------------------------------------------------------------------------------------------------

    def use(self, number: int, *, skipped: bool, moved: bool | None) -> Used:
        """Note a step of an optimizer, or one that a scaler skips, on what its gradients hold.

        One that has not `moved` parameters has left them there. One that has, and leaves none, had some: a
        hook of the loop's own has thrown them away after it.
        """
        watched, batches = self._watched[number], self._batches
        if watched.open:
            watched.close()
            if watched.open and watched.came:
                watched.arrived()  # it steps inside of a backward pass
        if batches.in_doubt:
            self.let_go()
        is_plain = not (batches.in_doubt or batches.ended or batches.is_told)
        before_hand = not is_plain and self._is_before_hand(number, watched)
        now = _SAME if watched.is_same() else watched.look()
        is_hidden = now is _GONE and moved
        if now is not _SAME and not (skipped or is_hidden) and self._is_gone(watched, now):
            watched.drop()
            watched.was_idle = True
            return Used(before_hand)
        if batches.sees and batches.in_hand not in watched.gathered:
            watched.look_at_what_is_new(now)
        if moved is False:
            return Used(before_hand)
        if now is _OTHER and not self.is_reduced:
            watched.doubt([batch for batch in watched.gathered if batch is not batches.in_hand])
        learnt, last, bit = watched.gathered, watched.last, 1 << number
        used = [*learnt, *watched.unsure] if watched.unsure else learnt
        watched.was_idle = not used
        back, several, doubts = [], [], set[str]()
        for batch in used:
            if batch.went_back:
                back.append(batch)
            if batch.has_learnt:
                doubts.add(batch.counts_not)
        doubts.discard("back")
        for batch in learnt:
            batch.used_by |= bit
            batch.skipped_by |= bit * skipped
            if batch in last or (len(self._watched) > 1 and self._has_learnt(watched, batch)):
                several.append(batch)
        if skipped:
            watched.gathered, watched.unsure = [], []
            return Used(before_hand, back)
        padding = batches.take_unweighed(used) if batches.unweighed else 0
        is_again = watched.is_used or (watched.is_strange and used)
        if is_again and is_any(watched.parameters):
            doubts.add("again")
        if padding:
            doubts.discard("padding")
        watched.last, watched.gathered, watched.unsure = learnt or watched.last, [], []
        watched.is_used, watched.is_strange = True, False
        watched.steps += 1
        if not (before_hand or back or several or padding or doubts):
            return _NOTHING_ELSE
        return Used(before_hand, back, several, padding, doubts)

    def used_elsewhere(self, optimizer: Any) -> bool:
        """Note a step of another loader's optimizer: what it has used is not thrown away yet. Returns whether
        one of these had stepped on it before.

        Batches in hand here may be said to be in it. What is looked at before gradients are added, to one of
        the parameters that both have, tells whether it was thrown away.
        """
        its, is_again = set(map(id, trained(optimizer))), False
        for watched in self._watched.values():
            shared = [parameter for parameter in trained(watched.optimizer()) if id(parameter) in its]
            if is_any(shared):
                is_again |= watched.is_used and watched.has_stepped_on(its)
                watched.is_used = True
                watched.hook_shared(shared)
        return is_again

    def has_in_hand(self, optimizer: Any) -> bool:
        """Whether an optimizer that is not attached has gradients of the batch in hand, as attached ones know
        that train the same parameters."""
        its, hand = set(map(id, trained(optimizer))), self._batches.in_hand
        return any(
            (hand in watched.gathered or (watched.is_used and hand in watched.last))
            and is_any(parameter for parameter in trained(watched.optimizer()) if id(parameter) in its)
            for watched in self._watched.values()
        )

    def _is_before_hand(self, number: int, watched: Watched) -> bool:
        """Whether an optimizer steps now on what came before the batch in hand, as far as that can be seen.

        A step on no gradient at all is on no batch, unless all are: then the loop may hide its gradients.
        """
        batches = self._batches
        if batches.is_told and any(batches.has_stepped(number, batch) for batch in watched.gathered):
            return False  # it came before the wrapper passed its batch on: nobody knows which that is
        if batches.ended and batches.has_in_hand:
            if not batches.sees or batches.in_hand in watched.gathered or batches.in_hand in watched.last:
                return False
            if batches.read_to_the_end():
                return False  # a wrapper has passed on what lies after it
            are_none = all(parameter.grad is None for parameter in watched.parameters)
            return not are_none or (batches.is_told and not watched.was_idle)
        if not batches.in_doubt or batches.in_hand in watched.unsure:
            return False
        if watched.gathered or watched.unsure:
            return any(not batch.went_back for batch in (*watched.gathered, *watched.unsure))
        mine = trained(watched.optimizer())  # none of an optimizer that a framework puts in place of another
        return bool(mine) and not (watched.was_idle or are_there(mine))

    def _has_learnt(self, watched: Watched, batch: Batch) -> bool:
        """Whether the last step of another optimizer that trains a parameter of this one was on a batch."""
        others = [other for other in self._watched.values() if other is not watched and batch in other.last]
        if not others:
            return False
        mine = {id(parameter) for parameter in trained(watched.optimizer()) if parameter.grad is not None}
        return any(not mine.isdisjoint(map(id, trained(other.optimizer()))) for other in others)

    def _is_gone(self, watched: Watched, now: Change) -> bool:
        """Whether an optimizer steps on no gradient, or on 0, where it can be seen.

        What is 0 is seen in this machine's memory alone, and where something has written it after the
        backward pass: an accelerator would have to be waited for at each step.
        """
        if not self._batches.sees or now is _SAME:
            return False
        if now is _GONE:
            return watched.is_gone()
        return watched.is_zero()

    # Passes -----------------------------------------------------------------------------------------------

    def pass_left(self) -> None:
        """Note what is there as another pass is about to begin: the loop has left the last one."""
        self.let_go()
        for number, watched in self._watched.items():
            if not (watched.gathered or watched.unsure):
                self._batches.gathered_to_the_end(number, watched.backwards_after_end)

    def lost(self) -> list[Batch]:
        """Return, as a pass has begun, batches gathered for a step that have left no gradient.

        Where more than one batch is read ahead, unseen, nobody can say whose gradients were in the last step.
        What another optimizer has stepped on is not lost.
        """
        if self._batches.reads_far or not (window := self._batches.untouched()):
            return []
        parameters = [parameter for optimizer in self.optimizers() for parameter in trained(optimizer)]
        return window if parameters and not (self._hides() or are_there(parameters)) else []
