"""Which batches are in the gradients of the attached optimizers' parameters, as far as some of them show it.

A batch that goes back, or whose gradient is thrown away, may be in the next step all the same, or in none.
What is found is returned, and the session tells the trainer; but a batch is marked here, where a gradient
of it is seen to come. Two parameters of each optimizer have a hook for that; where none was called, some are
looked at. It holds no optimizer and no gradient alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edl_torch.client.model import has_place, some
from edl_torch.integrations.engines import hides_gradients
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.trainer import Trainer

WATCHED = 8  # parameters of an optimizer whose gradients are looked at
HOOKED = 2  # of these, that say when a gradient comes

_Kept = list[tuple[Any, weakref.ref[Any] | None]]  # parameters, and the gradients that they had


class Gradients:
    """Those of one session's attached optimizers. `reduced` says that ranks may put others in their place."""

    def __init__(self, trainer: Trainer) -> None:
        self.reduced = False
        self._passes = trainer.elastic
        self._batches = trainer.state.batches
        self._watched: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}  # by the optimizer's number
        self._hooked: dict[int, list[tuple[Any, Any]]] = {}  # parameters with their hooks
        self._came: set[int] = set()  # optimizers that have not stepped since a backward pass
        self._backward = -1  # the backward pass that reached a hook last
        # By the optimizer's number: parameters, and their gradients as it has stepped on them
        self._used: dict[int, list[tuple[Any, weakref.ref[Any], int]]] = {}
        self._again = False  # whether a backward pass has added to such gradients
        self._grown: tuple[weakref.ref[Any], int] | None = None  # a gradient after the last backward pass
        # Of a parameter its gradient, which this does not keep alive, as the batch in hand came
        self._marks: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._abandoned_with: list[Any] | None = None  # what had changed as an iterator was collected
        # What went back, until the next step: batches, and parameters with the gradients that have them.
        self.left: list[tuple[list[Batch], _Kept]] = []

    def __repr__(self) -> str:
        return f"<Gradients of {[type(optimizer).__name__ for optimizer in self.optimizers()]}>"

    # Optimizers -------------------------------------------------------------------------------------------

    def watch(self, number: int, optimizer: Any) -> None:
        """Look at parameters of an optimizer from now on."""
        watched = some(trained(optimizer), WATCHED)
        self._watched[number] = weakref.ref(optimizer), watched
        comes, hooked = calling(self._comes), some([*filter(has_place, watched)], HOOKED)
        self._hooked[number] = [(parameter, parameter.register_hook(comes)) for parameter in hooked]
        self.look()

    def forget(self, number: int) -> None:
        """Look at those of an optimizer no more."""
        self._watched.pop(number, None)
        self._used.pop(number, None)
        for _, hook in self._hooked.pop(number, ()):
            hook.remove()
        self.look()

    def optimizers(self) -> list[Any]:
        """Every attached optimizer that still exists."""
        found = (optimizer() for optimizer, _ in self._watched.values())
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

    def _comes(self) -> None:
        """Note a backward pass as it reaches the first parameter, before it changes the gradient."""
        backward = sys.modules["torch"]._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._again = self._again or any(map(self._are_used, self._used))
        self._came.update(self._watched)
        for hooked in self._hooked.values():
            for parameter, _ in hooked:
                gradient: Any = parameter.grad
                if gradient is not None:
                    self._batches.mark(is_first=self._is_empty(gradient))
                    self._grown = weakref.ref(gradient), gradient._version + 1
                    return
        self._grown = None
        self._batches.mark(is_first=True)

    def _is_empty(self, gradient: Any) -> bool:
        """Whether a window's gradient was made 0 since a backward pass: it is looked at if it was written."""
        if len(self._batches.unfinished) < 2:
            return False
        if self._grown is None:
            as_it_was = gradient._version == 0
        else:
            known: Any = self._grown[0]()
            as_it_was = known is gradient and known._version == self._grown[1]
        return not as_it_was and not bool(gradient.any())

    def are_gone(self, number: int) -> bool:
        """Whether an optimizer steps without a gradient, where it can be seen."""
        optimizer, watched = self._watched[number]
        if not self._batches.sees or any(parameter.grad is not None for parameter in watched):
            return False
        return all(parameter.grad is None for parameter in trained(optimizer()))

    def see(self) -> None:
        """Look for a gradient of the batch in hand where none was seen to come."""
        if any(parameter.grad.any() for parameter in self._changed()) or self._reached_others():
            self._batches.mark()

    def _reached_others(self) -> bool:
        """Whether there are gradients where none that is watched has one: these have come after that."""
        return any(
            p.grad is not None
            for optimizer, watched in self._watched.values()
            if all(parameter.grad is None for parameter in watched)
            for p in trained(optimizer())
        )

    def used(self, number: int) -> bool:
        """Note a step of an optimizer. Returns whether it used gradients that it had stepped on before."""
        again = any(
            (gradient := known()) is not None
            and parameter.grad is gradient
            and (
                self._again or ((number not in self._came or gradient._version == version) and gradient.any())
            )
            for parameter, known, version in self._used.get(number, ())
        )
        self._again = False
        self._came.discard(number)
        self._used[number] = [
            (parameter, weakref.ref(parameter.grad), parameter.grad._version)
            for parameter, _ in self._hooked[number]
            if parameter.grad is not None
        ]
        return again

    def _are_used(self, number: int) -> bool:
        """Whether the last step of an optimizer has left gradients, and they are as they were."""
        for parameter, known, version in self._used.get(number, ()):
            gradient: Any = known()
            if gradient is not None and parameter.grad is gradient and gradient._version == version:
                return bool(gradient.any())  # what is 0 adds nothing
        return False

    # The batch in hand ------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Note what gradients are in place, as a batch comes to the loop. Called for each batch."""
        self._marks = marks = {}
        for _, watched in self._watched.values():
            for parameter in watched:
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
        return [parameter for _, watched in self._watched.values() for parameter in watched]

    def _has_changed(self, parameter: Any) -> bool:
        gradient = parameter.grad
        mark = self._marks.get(id(parameter))
        if gradient is None or mark is None:
            return gradient is not mark
        is_same = mark[0]() is gradient
        return not is_same or gradient._version != mark[1]

    def _changed(self) -> list[Any]:
        """Return parameters whose gradient changed since the batch in hand came.

        Where none that is watched has a gradient, they tell nothing: then all that have one may have changed.
        """
        found: list[Any] = []
        for optimizer, watched in list(self._watched.values()):  # a finaliser may ask, in any thread
            tell = any(p.grad is not None or id(p) in self._marks for p in watched)
            found += filter(self._has_changed, watched) if tell else trained(optimizer())
        return [parameter for parameter in found if parameter.grad is not None]

    def abandon(self) -> None:
        """Note what the batch in hand has changed, as its iterator is collected: the loop may scale or clip
        what is gathered before the pass is ended. For finalisers: takes no lock, and never raises."""
        if self._watched:
            self._abandoned_with = self._changed()

    def _of_batch_in_hand(self) -> _Kept:
        if not (self._watched and self._batches.has_in_hand):
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


def calling(method: Callable[[], None]) -> Callable[[Any], None]:
    """Return a hook of parameters that calls a method, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def comes(gradient: Any) -> None:
        alive = reference()
        if alive is not None:
            alive()

    return comes
