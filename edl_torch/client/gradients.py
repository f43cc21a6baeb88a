"""Which batches are in the gradients of the attached optimizers' parameters, as far as some of them show it.

Autograd says it: two parameters of each optimizer, the first and the last, have a hook that is called when a
gradient was added to theirs, and the first call in a backward pass asks to be told when this has come to its
end. Then the batch in hand is added to the optimizer's record, and what became of the gradient meanwhile says
whether earlier batches are still in it. A pass that was cut off leaves a part of a gradient: *perhaps* its
batch is in a step. Where no hook was called, gradients that the loop has set by hand are looked for.

What is found is returned, and the session tells the trainer; but a batch is marked here. Nothing here holds
an optimizer or a gradient alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from edl_torch.client.model import has_place, some
from edl_torch.integrations.engines import hides_gradients
from edl_torch.trainer.batches import Batch, Batches
from edl_torch.trainer.trainer import Trainer

HOOKED = 2  # parameters of an optimizer that say when a gradient comes
_MORE = 8  # and as many more at most, where batches reach none of these
_OUTSIDE = -1  # torch's number of a backward pass where there is none


class Used(NamedTuple):
    """What a step of an optimizer was on."""

    again: bool  # on gradients that an earlier step had used
    back: list[Batch]  # on some of batches that went back
    several: list[Batch]  # that it, or another with a parameter of its, had stepped on
    padding: int = 0  # on so many padding batches of which the loop has not asked what they weigh


class _Change(Enum):
    """What has become of the gradients of hooked parameters since they were looked at before."""

    SAME = "some is as it was, but for what backward passes have added"
    WRITTEN = "something has written into all that are there"
    OTHER = "there are others"
    GONE = "there are none"


class _Begun(NamedTuple):
    """A backward pass that has reached a hook."""

    batch: Batch | None  # in hand then
    place: int  # of the parameter that it reached first
    gradient: weakref.ref[Any] | None  # which that one got
    has_graph: bool  # create_graph=True: it adds to gradients by putting others in their place


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Held:
    """What the parameters of one optimizer hold, as far as some of them show it."""

    optimizer: weakref.ref[Any]
    hooked: list[Any] = field(default_factory=list)  # parameters that say when a gradient has come
    hooks: list[Any] = field(default_factory=list)  # torch's handles of that
    came: list[int] = field(default_factory=list)  # which of them were called since `look`
    # Backward passes that have not ended
    open: dict[int, _Begun] = field(default_factory=dict)
    known: list[tuple[weakref.ref[Any], int] | None] = field(default_factory=list)  # as `look` saw them
    batches: list[Batch] = field(default_factory=list)  # whose gradients are there, and in no step yet
    perhaps: list[Batch] = field(default_factory=list)  # of which nobody can say that
    last: list[Batch] = field(default_factory=list)  # that were in its last step
    before: list[bool] = field(
        default_factory=list
    )  # where ranks reduce: whether a gradient was there before
    tells: bool = False  # whether the hooks were called for the newest batch
    is_used: bool = False  # whether a step has used what is there, and no backward pass came since
    again: bool = False  # whether a backward pass has added to gradients that a step has used

    def look(self) -> _Change:
        """Return what has become of the gradients since this was asked before."""
        now = _Change.GONE
        for place, parameter in enumerate(self.hooked):
            gradient, known = parameter.grad, self.known[place]
            if gradient is None:
                self.known[place] = None
                continue
            version = gradient._version
            if known is None or known[0]() is not gradient:
                self.known[place] = weakref.ref(gradient), version
                now = _Change.OTHER if now is _Change.GONE else now
            elif version == known[1]:
                now = _Change.SAME
            else:
                if version == known[1] + self.came.count(place):
                    now = _Change.SAME
                elif now is not _Change.SAME:
                    now = _Change.WRITTEN
                self.known[place] = known[0], version
        if self.came:
            self.came.clear()
        return now

    def is_same(self) -> bool:
        """Whether the first gradient that is hooked is as it was when looked at."""
        known = self.known[0] if self.known else None
        return (
            known is not None
            and (gradient := known[0]()) is not None
            and (gradient is self.hooked[0].grad and gradient._version == known[1])
        )

    def drop(self) -> None:
        """Note that what was there is gone."""
        self.batches, self.perhaps, self.again, self.is_used = [], [], False, False

    def doubt(self, batches: Iterable[Batch]) -> None:
        """Note that nobody can say whether these batches are in the gradients."""
        batches = list(batches)
        self.perhaps += [batch for batch in batches if batch not in self.perhaps]
        self.batches = [batch for batch in self.batches if batch not in batches]

    def is_zero(self) -> bool:
        """Whether all gradients are 0."""
        return not (_any(self.hooked) or _any(trained(self.optimizer())))


class Gradients:
    """Those of one session's attached optimizers."""

    def __init__(self, trainer: Trainer) -> None:
        self.reduced = False
        self._batches = trainer.state.batches
        self._held: dict[int, _Held] = {}  # by the optimizer's number
        # Of the optimizer that was detached last: its parameters, which this does not keep alive, and batches
        self._former: tuple[list[weakref.ref[Any]], list[Batch], bool] = [], [], False

    def __repr__(self) -> str:
        return f"<Gradients of {[type(optimizer).__name__ for optimizer in self.optimizers()]}>"

    # Optimizers -------------------------------------------------------------------------------------------

    def watch(self, number: int, optimizer: Any, *, has_in_hand: bool = False) -> None:
        """Hook parameters of an optimizer, which may have gradients of the batch in hand.

        What is in the gradients of parameters that it has from another optimizer stays there.
        """
        held, parameters = _Held(weakref.ref(optimizer)), trained(optimizer)
        mine = {id(parameter) for parameter in parameters if parameter.grad is not None}
        former, left, was_used = self._former
        others = [(trained(o.optimizer()), o.batches, o.is_used) for o in self._held.values()]
        for theirs, batches, is_used in [*others, ([parameter() for parameter in former], left, was_used)]:
            if not mine.isdisjoint(map(id, theirs)):
                held.batches += [batch for batch in batches if batch not in held.batches]
                held.is_used |= is_used
        self._held[number], self._former = held, ([], [], False)
        self._hook(held, some([*filter(has_place, parameters)], HOOKED))
        if self.reduced:
            self._look_before(held)
        if has_in_hand:
            self._add(held)
        self.look()

    def _hook(self, held: _Held, parameters: list[Any]) -> None:
        """Hear when gradients come to these parameters."""
        listen = _listening(weakref.WeakMethod(self._arrived), held, self._batches)
        for parameter in parameters:
            held.hooks.append(parameter.register_post_accumulate_grad_hook(listen(len(held.hooked))))
            held.hooked.append(parameter)
            held.known.append(None)
        held.look()

    def reduce(self) -> None:
        """Note that ranks reduce gradients, and may put others in their place."""
        if not self.reduced:
            self.reduced = True
            for held in self._held.values():
                self._look_before(held)

    def _look_before(self, held: _Held) -> None:
        """Look at a gradient before another is added: afterwards it may be one of all ranks'."""
        for parameter in held.hooked[:1]:
            held.hooks.append(parameter.register_hook(_looking(weakref.ref(parameter), held.before)))

    def forget(self, number: int) -> None:
        """Look at parameters of an optimizer no more."""
        held = self._held.pop(number, None)
        if held is not None:
            parameters = [weakref.ref(parameter) for parameter in trained(held.optimizer())]
            self._former = parameters, held.batches, held.is_used
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

    # Gradients come ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """See whether gradients of all attached optimizers can be seen: then a batch without is in doubt."""
        self._batches.sees = bool(self._parameters())

    def _arrived(self, held: _Held, has_graph: bool = False) -> None:
        """Note that a backward pass has added gradients of the batch in hand to some that are hooked."""
        came = held.came[:]
        now = held.look()
        if now is _Change.GONE or not any(held.known[place] for place in came):
            return  # a step inside of this pass has used them
        if held.before:  # ranks have put theirs in the place of what has come
            now = _Change.SAME if any(held.before) else _Change.OTHER
            held.before.clear()
        if now is _Change.OTHER and not self._batches.ended:  # a wrapper may hold what is in hand then
            if has_graph:
                held.doubt(held.batches)
            else:
                held.drop()
        elif now is _Change.WRITTEN and not held.is_used:
            held.doubt(held.batches)
        elif now is _Change.SAME and held.is_used:
            held.again = True
        held.tells = True
        self._add(held)

    def _add(self, held: _Held) -> None:
        """Note that a gradient of the batch in hand is in an optimizer's parameters."""
        batches = self._batches
        batches.in_doubt = held.is_used = False
        found = batches.in_training() if batches.ended else filter(None, [batches.in_hand])
        for batch in found:
            if batch.given_back is not None and not self.reduced:  # ranks go on in step, with a loss of 0
                batch = batch.given_back
            if batch not in held.batches:
                held.batches.append(batch)

    def mark(self) -> None:
        """Note what is there as a batch comes to the loop. Called for each batch."""
        for held in self._held.values():
            if held.batches or held.perhaps or held.open or not held.tells:
                self._refresh(held)
            held.tells = False

    def _refresh(self, held: _Held) -> _Change:
        """Note what has become of gradients since a backward pass or a step."""
        self._close(held)
        now = held.look()
        if now is _Change.SAME or not (held.batches or held.perhaps or held.is_used):
            return now
        if now is _Change.GONE:
            if all(parameter.grad is None for parameter in trained(held.optimizer())):
                held.drop()
        elif held.is_zero():
            held.drop()
        elif now is _Change.OTHER and not self.reduced:
            held.doubt(held.batches)  # which the loop has put there
        return now

    def _close(self, held: _Held) -> None:
        """Note the gradients that backward passes have left which did not come to their end."""
        if held.open and _graph_task() == _OUTSIDE:
            for begun in list(held.open.values()):
                gradient = held.hooked[begun.place].grad
                if gradient is not None and (begun.gradient is None or begun.gradient() is gradient):
                    held.doubt([*filter(None, [begun.batch]), *self._batches.in_training()[1:]])
            held.open.clear()

    # The batch in hand ------------------------------------------------------------------------------------

    def see(self) -> None:
        """Look for a gradient of the batch in hand where no hook was called for it."""
        for held in self._held.values():
            self._look_at(held, self._refresh(held))

    def _look_at(self, held: _Held, now: _Change) -> None:
        """Look for a gradient of the batch in hand in one optimizer's parameters, as `look` found them.

        The loop may have put one there by hand: nobody knows what else is in it. Or it came to parameters
        that have no hook, while those that have one were set to None.
        """
        if self._batches.in_hand in held.perhaps:
            return
        if now is _Change.OTHER and _any(held.hooked):
            if not self.reduced:
                held.doubt(held.batches)
            self._add(held)
        elif now is _Change.GONE and not held.batches:
            found = [parameter for parameter in trained(held.optimizer()) if parameter.grad is not None]
            if found:
                self._add(held)
                more = [*filter(has_place, found)][: HOOKED + _MORE - len(held.hooked)]
                self._hook(held, more)

    def has_in_hand(self, number: int) -> bool:
        """Whether an optimizer's step may be on the batch in hand: without any gradient nothing tells."""
        held, in_hand = self._held[number], self._batches.in_hand
        if not self._batches.sees or all(parameter.grad is None for parameter in held.hooked):
            return True
        return in_hand in held.batches or in_hand in held.last

    def gathered(self, number: int) -> bool:
        """Whether an optimizer's parameters have gradients of batches before the one in hand, and none of
        that was seen: then a step is on those."""
        batches = self._batches
        return batches.in_doubt and any(batch in batches.unfinished for batch in self._held[number].batches)

    # Steps ------------------------------------------------------------------------------------------------

    def use(self, number: int, *, skipped: bool) -> Used:
        """Note a step of an optimizer, or one that a scaler skips, on what its gradients hold."""
        held, batches = self._held[number], self._batches
        if held.came:
            self._arrived(held)  # it steps inside of a backward pass
        if held.open:
            self._close(held)
        now = _Change.SAME if held.is_same() else held.look()
        if now is not _Change.SAME and not skipped and self._is_gone(held, now):
            held.drop()
            return Used(False, [], [])
        if batches.sees and batches.in_hand not in held.batches:
            self._look_at(held, now)
        if now is _Change.OTHER and not self.reduced:
            held.doubt([batch for batch in held.batches if batch is not batches.in_hand])
        for batch in held.batches:
            batch.used = True
        back = [batch for batch in (*held.batches, *held.perhaps) if batch.went_back]
        if skipped:
            held.batches, held.perhaps = [], []
            return Used(False, back, [])
        several = [batch for batch in held.batches if batch in held.last or self._has_learnt(held, batch)]
        padding = batches.take_unweighed([*held.batches, *held.perhaps]) if batches.unweighed else 0
        again = (held.again or held.is_used) and now is not _Change.OTHER and _any(held.hooked)
        held.last, held.batches, held.perhaps = held.batches or held.last, [], []
        held.again, held.is_used = False, True
        return Used(again, back, several, padding)

    def _has_learnt(self, held: _Held, batch: Batch) -> bool:
        """Whether the last step of another optimizer that trains a parameter of this one was on a batch."""
        others = [other for other in self._held.values() if other is not held and batch in other.last]
        if not others:
            return False
        mine = {id(parameter) for parameter in trained(held.optimizer()) if parameter.grad is not None}
        return any(not mine.isdisjoint(map(id, trained(other.optimizer()))) for other in others)

    def _is_gone(self, held: _Held, now: _Change) -> bool:
        """Whether an optimizer steps on no gradient, or on 0, where it can be seen.

        What is 0 is seen in this machine's memory alone, and where something has written it after the
        backward pass: an accelerator would have to be waited for at each step.
        """
        if not self._batches.sees or now is _Change.SAME:
            return False
        if now is _Change.GONE:
            return all(parameter.grad is None for parameter in trained(held.optimizer()))
        return not held.is_used and held.is_zero()

    # Passes -----------------------------------------------------------------------------------------------

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


# What autograd calls ------------------------------------------------------------------------------------


def _listening(
    arrived: weakref.WeakMethod[Callable[[_Held, bool], None]], held: _Held, batches: Batches
) -> Callable[[int], Callable[[Any], None]]:
    """Return what makes the hook of the parameter at a place: it notes each gradient, and asks once in each
    backward pass to hear of its end. It keeps neither parameters nor gradients alive."""
    import torch
    from torch.autograd import Variable

    graph_task, when_it_ends = torch._C._current_graph_task_id, Variable._execution_engine.queue_callback
    has_graph, begun, came, one = torch.is_grad_enabled, held.open, held.came, weakref.ref(held)

    def ended() -> None:
        ending = begun.pop(graph_task(), None)
        arrive, alive = arrived(), one()
        if arrive is not None and alive is not None and came:  # else a step inside of the pass has noted it
            arrive(alive, ending is not None and ending.has_graph)

    def listen(place: int) -> Callable[[Any], None]:
        def comes(parameter: Any) -> None:
            task = graph_task()
            if task not in begun:
                gradient = parameter.grad
                known = None if gradient is None else weakref.ref(gradient)
                begun[task] = _Begun(batches.in_hand, place, known, has_graph())
                when_it_ends(ended)
            came.append(place)

        return comes

    return listen


def _looking(parameter: weakref.ref[Any], before: list[bool]) -> Callable[[Any], None]:
    """Return a hook that notes whether a parameter's gradient is not 0 before another is added."""

    def looks(gradient: Any) -> None:
        alive = parameter()
        if alive is not None:
            before.append(_any([alive]))

    return looks


def _graph_task() -> int:
    """Return torch's number of the backward pass that runs in this thread."""
    import torch

    return torch._C._current_graph_task_id()
