"""Which batches are in the gradients of the attached optimizers' parameters, as far as some of them show it.

A batch that goes back, or whose gradient is thrown away, may be in the next step all the same, or in none.
What is found is returned, and the session tells the trainer; but a batch is marked here, where a gradient
of it is seen to come. Two parameters of each optimizer have a hook for that; where none was called, some are
looked at. It holds no optimizer and no gradient alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from edl_torch.client.model import has_place, some
from edl_torch.integrations.engines import hides_gradients
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.trainer import Trainer

WATCHED = 8  # parameters of an optimizer whose gradients are looked at
HOOKED = 2  # of these, that say when a gradient comes

_Known = list[tuple[Any, weakref.ref[Any], int]]  # parameters, their gradients, and torch's count of writes
_Kept = list[tuple[Any, weakref.ref[Any] | None]]  # parameters, and the gradients that they had


@dataclass(slots=True, eq=False)
class _Held:
    """What the parameters of one optimizer hold, as far as some of them show it."""

    optimizer: weakref.ref[Any]
    watched: list[Any]
    hooked: list[Any] = field(default_factory=list)  # parameters that say when a gradient comes
    hooks: list[Any] = field(default_factory=list)  # torch's handles of that
    batches: list[Batch] = field(default_factory=list)  # whose gradients are there, and in no step yet
    known: _Known = field(default_factory=list)  # of hooked ones, after the last backward pass or step
    is_used: bool = False  # whether `known` is what a step has left, and no backward pass came since
    again: bool = False  # whether a backward pass has added to gradients that a step has used
    backward: int = -1  # the backward pass that reached a hook last

    def gradients(self) -> Iterator[tuple[Any, Any]]:
        """The hooked parameters that have a gradient, each with it."""
        return ((parameter, parameter.grad) for parameter in self.hooked if parameter.grad is not None)

    def as_known(self) -> bool:
        """Whether some gradient is as it was after the last backward pass or step."""
        return any(
            parameter.grad is gradient() and parameter.grad is not None and parameter.grad._version == version
            for parameter, gradient, version in self.known
        )

    def drop(self) -> None:
        """Note that what was there is gone."""
        self.batches.clear()
        self.again = False


class Gradients:
    """Those of one session's attached optimizers. `reduced` says that ranks may put others in their place."""

    def __init__(self, trainer: Trainer) -> None:
        self.reduced = False
        self._passes = trainer.elastic
        self._batches = trainer.state.batches
        self._held: dict[int, _Held] = {}  # by the optimizer's number
        # Of the optimizer that was detached last: its parameters, which this does not keep alive, and batches
        self._former: tuple[list[weakref.ref[Any]], list[Batch]] = [], []
        # Of a parameter its gradient, which this does not keep alive, as the batch in hand came
        self._marks: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._abandoned_with: list[Any] | None = None  # what had changed as an iterator was collected
        # What went back, until the next step: batches, and parameters with the gradients that have them.
        self.left: list[tuple[list[Batch], _Kept]] = []

    def __repr__(self) -> str:
        return f"<Gradients of {[type(optimizer).__name__ for optimizer in self.optimizers()]}>"

    # Optimizers -------------------------------------------------------------------------------------------

    def watch(self, number: int, optimizer: Any) -> None:
        """Look at parameters of an optimizer from now on. What is in the gradients of those that it has from
        another one stays there."""
        watched = some(trained(optimizer), WATCHED)
        held = _Held(weakref.ref(optimizer), watched)
        mine = {id(parameter) for parameter in watched if parameter.grad is not None}
        former, left = self._former
        others = [(other.watched, other.batches) for other in self._held.values()]
        for theirs, batches in [*others, ([parameter() for parameter in former], left)]:
            if not mine.isdisjoint(map(id, theirs)):
                held.batches += [batch for batch in batches if batch not in held.batches]
        comes = calling(self._comes, number)
        held.hooked = some([*filter(has_place, watched)], HOOKED)
        held.hooks = [parameter.register_hook(comes) for parameter in held.hooked]
        self._held[number], self._former = held, ([], [])
        self.look()

    def forget(self, number: int) -> None:
        """Look at those of an optimizer no more."""
        held = self._held.pop(number, None)
        if held is not None:
            self._former = [weakref.ref(parameter) for parameter in held.watched], held.batches
            for hook in held.hooks:
                hook.remove()
        self.look()

    def optimizers(self) -> list[Any]:
        """Every attached optimizer that still exists."""
        found = (held.optimizer() for held in self._held.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def _parameters(self) -> list[Any]:
        """Return all parameters; none where the gradients of some cannot be seen."""
        optimizers = self.optimizers()
        hidden = any(hasattr(p, "full_tensor") for o in optimizers for p in _parameters(o)) or any(
            hides_gradients(optimizer) for optimizer in optimizers
        )
        return [] if hidden else [p for optimizer in optimizers for p in trained(optimizer)]

    # Marks ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See whether gradients of all attached optimizers can be seen: then a batch without is in doubt."""
        self._batches.sees = bool(self._parameters())

    def _comes(self, number: int) -> None:
        """Note a backward pass as it reaches an optimizer, before it changes a gradient."""
        held = self._held.get(number)
        backward = sys.modules["torch"]._C._current_graph_task_id()
        if held is None or backward == held.backward:
            return
        held.backward = backward
        found = next(held.gradients(), None)
        if found is None or self._is_empty(held, found[1]) or self._is_other(held):
            if not self._batches.ended:  # a wrapper may hold what is in hand then
                held.drop()
        elif held.is_used:
            held.again = held.as_known() and _any(held.hooked)  # what is 0 adds nothing
        held.is_used = False
        held.known = [(found[0], weakref.ref(found[1]), found[1]._version + 1)] if found else []
        self._add(held)

    def _is_empty(self, held: _Held, gradient: Any) -> bool:
        """Whether a window's gradient was made 0 since a backward pass: it is looked at if it was written."""
        if held.is_used or not held.batches:
            return False
        if held.known:
            return not held.as_known() and not bool(gradient.any())
        return bool(gradient._version) and not bool(gradient.any())

    def _is_other(self, held: _Held) -> bool:
        """Whether the loop has put a gradient of its own in the place of one: nobody knows what is in it.

        `torch.autograd.grad` calls the hooks, too. Ranks that reduce gradients may put others there.
        """
        in_window = held.known and not held.is_used and not self.reduced
        return bool(in_window) and all(parameter.grad is not known() for parameter, known, _ in held.known)

    def _add(self, held: _Held) -> None:
        """Note that a gradient of the batch in hand is in an optimizer's parameters."""
        self._batches.in_doubt = False
        held.batches += [batch for batch in self._batches.in_training() if batch not in held.batches]

    def see(self) -> None:
        """Look for a gradient of the batch in hand where none was seen to come."""
        for held in self._held.values():
            self._look_at(held)

    def _look_at(self, held: _Held) -> None:
        """Look for a gradient of the batch in hand in one optimizer's parameters.

        Where the loop has put another gradient in the place of one, nobody knows what is in it; what ranks
        reduce is in another one, too.
        """
        changed = [p for p in self._changed_of(held) if p.grad is not None]
        if not any(p.grad.any() for p in changed) and not self._reached_others(held):
            return
        marks = [(p.grad, self._marks[id(p)][0]) for p in changed if id(p) in self._marks]
        if not self.reduced and any(known() is not gradient for gradient, known in marks):
            held.batches.clear()
        self._add(held)

    def _reached_others(self, held: _Held) -> bool:
        """Whether there are gradients where none that is watched has one: these have come after that."""
        return all(parameter.grad is None for parameter in held.watched) and any(
            parameter.grad is not None for parameter in trained(held.optimizer())
        )

    def gathered(self, number: int) -> bool:
        """Whether an optimizer's parameters have gradients of batches before the one in hand, and none of
        that was seen: then a step is on those."""
        batches = self._batches
        return batches.in_doubt and any(batch in batches.unfinished for batch in self._held[number].batches)

    def use(self, number: int, *, skipped: bool) -> bool:
        """Note a step of an optimizer, or one that a scaler skips, on what its gradients hold. Returns
        whether it used gradients that it had stepped on before."""
        held = self._held[number]
        if not skipped and self._is_gone(held):
            held.drop()
            held.is_used = False
            return False
        if self._batches.sees and self._batches.in_hand not in held.batches:
            self._look_at(held)
        is_other = self._is_other(held)
        for batch in held.batches:
            batch.used |= not is_other or batch is self._batches.in_hand
        held.batches.clear()
        if skipped:
            return False
        again = (held.again or held.is_used) and self._is_there(held)
        held.again, held.is_used = False, True
        held.known = [(p, weakref.ref(gradient), gradient._version) for p, gradient in held.gradients()]
        return again

    def _is_gone(self, held: _Held) -> bool:
        """Whether an optimizer steps on no gradient, or on 0, where it can be seen.

        What is 0 is seen in this machine's memory alone, and where something has written it after the
        backward pass: an accelerator would have to be waited for at each step.
        """
        if not self._batches.sees:
            return False
        if all(parameter.grad is None for parameter in held.watched):
            return all(parameter.grad is None for parameter in trained(held.optimizer()))
        if held.is_used or held.as_known():
            return False
        if not held.known and all(gradient._version < 2 for _, gradient in held.gradients()):
            return False  # as a backward pass leaves a new one
        return not (_any(held.hooked) or _any(trained(held.optimizer())))

    def _is_there(self, held: _Held) -> bool:
        """Whether gradients that a step has left are still in place, and not 0."""
        return any(
            (gradient := known()) is not None and parameter.grad is gradient and gradient.any()
            for parameter, known, _ in held.known
        )

    # The batch in hand ------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Note what gradients are in place, as a batch comes to the loop. Called for each batch."""
        self._marks = marks = {}
        for held in self._held.values():
            for parameter in held.watched:
                gradient = parameter.grad
                if gradient is not None:
                    marks[id(parameter)] = weakref.ref(gradient), gradient._version
        if self.left:
            left = [(batches, self._in_place(kept)) for batches, kept in self.left]
            self.left = [(back, [(p, weakref.ref(p.grad)) for p, _ in kept]) for back, kept in left if kept]

    def unchanged(self) -> bool:
        """Whether there are gradients, and all are as they were when the batch in hand came."""
        return bool(self._marks) and not any(map(self._has_changed, self._all_watched()))

    def _all_watched(self) -> list[Any]:
        return [parameter for held in self._held.values() for parameter in held.watched]

    def _has_changed(self, parameter: Any) -> bool:
        gradient = parameter.grad
        mark = self._marks.get(id(parameter))
        if gradient is None or mark is None:
            return gradient is not mark
        is_same = mark[0]() is gradient
        return not is_same or gradient._version != mark[1]

    def _changed(self) -> list[Any]:
        """Return parameters whose gradient changed since the batch in hand came."""
        held = list(self._held.values())  # a finaliser may ask, in any thread
        found = [parameter for one in held for parameter in self._changed_of(one)]
        return [parameter for parameter in found if parameter.grad is not None]

    def _changed_of(self, held: _Held) -> list[Any]:
        """Return an optimizer's.

        Where none that is watched has a gradient, they tell nothing: then all that have one may have changed.
        """
        tell = any(p.grad is not None or id(p) in self._marks for p in held.watched)
        return list(filter(self._has_changed, held.watched)) if tell else trained(held.optimizer())

    def abandon(self) -> None:
        """Note what the batch in hand has changed, as its iterator is collected: the loop may scale or clip
        what is gathered before the pass is ended. For finalisers: takes no lock, and never raises."""
        if self._held:
            self._abandoned_with = self._changed()

    def _of_batch_in_hand(self) -> _Kept:
        if not (self._held and self._batches.has_in_hand):
            return []
        changed = self._changed() if self._abandoned_with is None else self._abandoned_with
        return self._in_place([(parameter, None) for parameter in changed])

    def _in_place(self, kept: _Kept) -> _Kept:
        """Return those of some gradients that are still there.

        Until the next batch comes, whatever is there and not 0: a loop may scale what it has gathered, and
        ranks reduce it, into other tensors; these always may.
        """
        found: _Kept = []
        for parameter, known in kept:
            gradient = parameter.grad
            if gradient is None or (known is None and not gradient.any()):
                continue
            if known is None or gradient is known() or self.reduced:
                found.append((parameter, None))
        return found

    # Batches that go back, or are gathered for a step -----------------------------------------------------

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Keep the gradients of the batch in hand where it goes back: a step may still use them."""
        discarded, batch, kept = self._passes.discarded, self._batches.in_hand, self._of_batch_in_hand()
        self._abandoned_with = None
        try:
            yield
        finally:
            if kept and batch is not None and self._passes.discarded != discarded:
                self.left.append(([batch], kept))

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Keep the gradients of the window where the data go back: a step may still use them."""
        left = []
        if window := self._batches.untouched():
            if self._batches.in_hand in window and not self._of_batch_in_hand():
                window.pop()
            left = [(window, self._in_place([(parameter, None) for parameter in self._parameters()]))]
        yield
        self.left += left

    def learnt_again(self) -> list[Batch]:
        """Return batches that went back, and whose gradients the step has used that was just made."""
        left, self.left = self.left, []
        return [batch for batches, kept in left if self._in_place(kept) for batch in batches]

    def lost(self) -> list[Batch]:
        """Return, as a pass has begun, batches gathered for a step that have left no gradient.

        Where more than one batch is read ahead, unseen, nobody can say whose gradients were in the last step.
        What another optimizer has stepped on is not lost.
        """
        if self._batches.reads_far or not (window := self._batches.untouched()):
            return []
        parameters = self._parameters()
        there = (p.grad for p in parameters if p.grad is not None)
        # What was never written to is no gradient that zero_grad(set_to_none=False) has made 0.
        is_there = any(not gradient._version or gradient.any() for gradient in there)
        return window if parameters and not is_there else []


def trained(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains.

    None of DeepSpeed's engines, and none in parts: nobody sees their gradients here.
    """
    return [p for p in _parameters(optimizer) if p.requires_grad and not hasattr(p, "full_tensor")]


def _parameters(optimizer: Any) -> list[Any]:
    found = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    return [parameter for parameter in found if hasattr(parameter, "requires_grad")]


def _any(parameters: Iterable[Any]) -> bool:
    """Whether a gradient of some parameters is not 0; what is not in the CPU's memory counts as such."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return any(gradient.device.type != "cpu" or bool(gradient.any()) for gradient in gradients)


def calling(method: Callable[[int], None], number: int) -> Callable[[Any], None]:
    """Return a hook of parameters that calls a method, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def comes(gradient: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(number)

    return comes
