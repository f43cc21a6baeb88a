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

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from edl_torch.client.model import has_place, is_uncompiled, some, uncompiled
from edl_torch.integrations.engines import hides_gradients
from edl_torch.trainer.batches import Batch, Batches
from edl_torch.trainer.trainer import Trainer

HOOKED = 2  # parameters of an optimizer that say when a gradient comes
_MORE = 8  # and as many more at most, where batches reach none of these
_OUTSIDE = -1  # torch's number of a backward pass where there is none


class Used(NamedTuple):
    """What a step of an optimizer was on."""

    before_hand: bool  # on what came before the batch in hand
    back: Sequence[Batch] = ()  # on some of batches that went back
    several: Sequence[Batch] = ()  # that it, or another with a parameter of its, had stepped on
    padding: int = 0  # on so many padding batches of which the loop has not asked what they weigh
    doubts: Collection[str] = ()  # "again", "padding", "bad": as `ModelSeen.at`


_NOTHING_ELSE = Used(before_hand=False)


class _Change(Enum):
    """What has become of the gradients of hooked parameters since they were looked at before."""

    SAME = "some is as it was, but for what backward passes have added"
    WRITTEN = "something has written into all that are there"
    OTHER = "there are others"
    GONE = "there are none"


_SAME, _WRITTEN, _OTHER, _GONE = _Change  # Python 3.11 takes as long to look one up as for a call


# A backward pass that has reached a hook: the batch in hand then, the place of the parameter that it reached
# first, which gradient that one got, and whether it adds to gradients by putting others in their place
# (create_graph=True). A tuple, as a batch waits for it.
_Begun = tuple[Batch | None, int, weakref.ref[Any] | None, bool]


# A gradient, torch's count of writes to it, and how many steps were before it was seen first
_Known = tuple[weakref.ref[Any], int, int]


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Held:
    """What the parameters of one optimizer hold, as far as those that are hooked show it."""

    optimizer: weakref.ref[Any]
    batches: list[Batch] = field(default_factory=list)  # whose gradients are there, and in no step yet
    perhaps: list[Batch] = field(default_factory=list)  # of which nobody can say that
    last: list[Batch] = field(default_factory=list)  # that were in its last step
    is_used: bool = False  # a step has used what is there, and it was not thrown away
    backwards_after_end: int = 0  # backward passes that have reached them after the end of the pass
    was_idle: bool = False  # whether its last step in this pass was on no gradient, or on 0
    # What autograd tells of the parameters that are hooked
    parameters: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)  # torch's handles
    came: list[int] = field(default_factory=list)  # the places of those that were called since `look`
    open: dict[int, _Begun] = field(default_factory=dict)  # backward passes that have not ended
    known: list[_Known | None] = field(default_factory=list)  # as `look` saw them
    steps: int = 0  # of this optimizer, as far as they used gradients
    before: list[bool] = field(default_factory=list)  # whether there was a gradient, where that is asked

    def look(self) -> _Change:
        """Return what has become of the gradients since this was asked before."""
        now, came, known = _GONE, self.came, self.known
        for place, parameter in enumerate(self.parameters):
            gradient, seen = parameter.grad, known[place]
            if gradient is None:
                known[place] = None
                continue
            version = gradient._version
            if seen is None or seen[0]() is not gradient:
                known[place] = weakref.ref(gradient), version, self.steps
                if now is _GONE:
                    now = _OTHER
                continue
            if version == seen[1] or version == seen[1] + came.count(place):
                now = _SAME
            elif now is not _SAME:
                now = _WRITTEN
            known[place] = seen[0], version, seen[2]
        came.clear()
        return now

    def is_same(self) -> bool:
        """Whether the first gradient is as it was when looked at."""
        seen = self.known[0] if self.known else None
        if seen is None or (gradient := seen[0]()) is None:
            return False
        return gradient is self.parameters[0].grad and gradient._version == seen[1]

    def are_as_seen(self) -> bool:
        """Whether all are as they were when looked at, and are not none."""
        pairs = [(p.grad, seen) for p, seen in zip(self.parameters, self.known, strict=False)]
        there = [each for each in pairs if any(one is not None for one in each)]
        return bool(there) and all(
            seen is not None and seen[0]() is gradient is not None and seen[1] == gradient._version
            for gradient, seen in there
        )

    def take_cut_off(self) -> list[Batch | None]:
        """Return the batches of backward passes that did not come to their end and have left a gradient."""
        found = []
        for batch, place, first, _ in self.open.values():
            gradient = self.parameters[place].grad
            if gradient is not None and (first is None or first() is gradient):
                found.append(batch)
        self.open.clear()
        return found

    def drop(self) -> None:
        """Note that what was there is gone."""
        self.is_used = False
        self.batches, self.perhaps = [], []

    def take_over(self, batches: Iterable[Batch], *, is_used: bool) -> None:
        """Note what another optimizer has left in gradients that are this one's now."""
        self.batches += [batch for batch in batches if batch not in self.batches]
        self.is_used |= is_used

    def doubt(self, batches: Iterable[Batch]) -> None:
        """Note that nobody can say whether these batches are in the gradients."""
        batches = list(batches)
        self.perhaps += [batch for batch in batches if batch not in self.perhaps]
        self.batches = [batch for batch in self.batches if batch not in batches]

    def is_gone(self) -> bool:
        """Whether there is no gradient, of any parameter."""
        return all(parameter.grad is None for parameter in trained(self.optimizer()))

    def is_zero(self) -> bool:
        """Whether all gradients are 0."""
        return not (_any(self.parameters) or _any(trained(self.optimizer())))


class _Left:
    """What an optimizer that is attached no more has left in gradients of the parameters that were hooked."""

    def __init__(self, of: weakref.ref[Gradients], held: _Held) -> None:
        self.of, self.batches = of, held.batches
        pairs = zip(held.parameters, held.known, strict=True)
        # With torch's count of writes, and whether a step has used it
        self._gradients = [
            (weakref.ref(parameter), seen[0], seen[1], held.is_used and seen[2] < held.steps)
            for parameter, seen in pairs
            if seen is not None
        ]

    def in_place(self, parameters: Collection[int] | None = None) -> list[bool]:
        """Of each gradient that is in place still, of parameters with these ids: whether a step has used it.

        It was added to once at most since it was seen, and not made 0.
        """
        found = []
        for reference, gradient, count, is_used in self._gradients:
            parameter, there = reference(), gradient()
            if parameter is None or there is None or not (parameters is None or id(parameter) in parameters):
                continue
            if there is parameter.grad and there._version <= count + 1:
                found.append(is_used)
        return found


# In this process: a loop that is tried again may have another loader. Loops of several threads change them.
_left: list[_Left] = []
# All gradients as a loop was left before any step, with torch's count of writes
_left_before_any_step: list[tuple[weakref.ref[Any], int]] = []


class Gradients:
    """Those of one session's attached optimizers."""

    def __init__(self, trainer: Trainer) -> None:
        self.reduced = False
        self._has_kept = False  # all gradients, as a loop began again before any step
        self._looks_first = False  # whether gradients are looked at as they come, before they are added
        self._batches = trainer.state.batches
        self._held: dict[int, _Held] = {}  # by the optimizer's number

    def __repr__(self) -> str:
        return f"<Gradients of {[type(optimizer).__name__ for optimizer in self.optimizers()]}>"

    # Optimizers -------------------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Note all gradients of this process, as a loop was left before any step.

        Which of them an optimizer trains, and whether they are still there, its first step shows.
        """
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
            leaves = [one for one in tensors if one.is_leaf and one.requires_grad]
            gradients = [one.grad for one in leaves if one.grad is not None]
            self._has_kept = True
            _left_before_any_step[:] = [(weakref.ref(one), one._version) for one in gradients]

    def watch(
        self, number: int, optimizer: Any, unclear: Sequence[Batch] = (), *, has_in_hand: bool = False
    ) -> None:
        """Hook parameters of an optimizer, which may have gradients of the batch in hand.

        What is in the gradients of parameters that it has from another optimizer stays there; so may those
        batches that went back before any step, and are `unclear`.
        """
        held, parameters = _Held(weakref.ref(optimizer)), trained(optimizer)
        mine = {id(parameter) for parameter in parameters if parameter.grad is not None}
        left_there = {id(gradient()): count for gradient, count in (*_left_before_any_step,)}
        counts = [
            (gradient._version, left_there.get(id(gradient)))
            for parameter in parameters
            if (gradient := parameter.grad) is not None
        ]
        if unclear and any(count is not None or not self._has_kept for _, count in counts):
            held.batches += unclear
        elif any(count is not None and now <= count + 1 for now, count in counts):
            held.is_used = True  # another loader's loop was left before any step
        for other in self._held.values():
            theirs = (*trained(other.optimizer()), *other.parameters)  # it may be no more
            if not mine.isdisjoint(map(id, theirs)):
                held.take_over(other.batches, is_used=other.is_used)
        for left in (*_left,):
            if used := left.in_place(mine):
                # Of a batch of another session this one cannot tell: it is as if a step had used it.
                own = left.batches if left.of() is self else []
                held.take_over(own, is_used=any(used) or len(own) < len(left.batches))
        if (held.batches or held.is_used) and held.is_zero():  # the loop has thrown them away
            held.drop()
        elif self._batches.in_hand is None and not held.batches:  # a loop over other data has left them
            held.is_used |= _any(parameters)
        self._held[number] = held
        self._hook(held, some([*filter(has_place, parameters)], HOOKED))
        if self._looks_first or self._batches.lookahead:
            self._look_first(held)
        if has_in_hand and not held.is_zero():
            self._add(held)
        self.look()

    def _hook(self, held: _Held, parameters: list[Any]) -> None:
        """Hear when gradients come to these parameters."""
        listen = _listening(weakref.ref(self), held, self._batches)
        for parameter in parameters:
            held.hooks.append(parameter.register_post_accumulate_grad_hook(listen(len(held.parameters))))
            held.parameters.append(parameter)
            held.known.append(None)
        held.look()

    def reduce(self) -> None:
        """Note that ranks reduce gradients, and may put others in their place."""
        self.reduced = True
        self.look_first()

    def look_first(self) -> None:
        """Look at gradients as they come: the batch in hand counts for nothing, or ranks add theirs."""
        if not self._looks_first:
            self._looks_first = True
            for held in self._held.values():
                self._look_first(held)

    def _look_first(self, held: _Held) -> None:
        """Look at what comes, and at what is there, before it is added.

        Afterwards it may be of all ranks, and nobody tells when a wrapper passes on its last batches.
        """
        for parameter in [one for one in held.parameters if one.requires_grad][:1]:  # others are frozen now
            looks = _looking(weakref.ref(parameter), held.before, self._asks_before, self._batches)
            held.hooks.append(parameter.register_hook(looks))

    def _asks_before(self) -> bool:
        """Whether only the values of gradients tell whether some were there before a backward pass."""
        return self.reduced or (self._batches.ended and not self._batches.is_told)

    def forget(self, number: int) -> None:
        """Look at parameters of an optimizer no more."""
        held = self._held.pop(number, None)
        if held is not None:
            for left in [left for left in (*_left,) if not left.in_place()]:
                with suppress(ValueError):  # another loop's thread has just removed it
                    _left.remove(left)
            if (held.batches or held.is_used) and not held.is_zero():
                _left.append(_Left(weakref.ref(self), held))
            for hook in held.hooks:
                hook.remove()
        self.look()

    def optimizers(self) -> list[Any]:
        """Every attached optimizer that still exists."""
        found = (held.optimizer() for held in self._held.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def _hides(self) -> bool:
        """Whether the gradients of some optimizer cannot be seen."""
        return any(
            hides_gradients(optimizer) or any(hasattr(p, "full_tensor") for p in _parameters(optimizer))
            for optimizer in self.optimizers()
        )

    # Gradients come ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """See, as a pass begins, whether gradients of all attached optimizers can be seen: then a batch
        without is in doubt."""
        for held in self._held.values():
            held.was_idle, held.backwards_after_end = False, 0
        self._batches.sees = bool(self._held) and not self._hides()

    def _arrived(self, held: _Held, has_graph: bool = False) -> None:
        """Note that a backward pass has added gradients of the batch in hand to some that are hooked."""
        now = held.look()
        if now is _GONE:
            return  # a step inside of this pass has used them
        if held.before:
            now = _SAME if any(held.before) else _OTHER
            held.before.clear()
        if now is not _SAME:
            held.is_used = False
            if now is _OTHER and not has_graph:
                if held.batches or held.perhaps:
                    held.drop()
            elif held.batches:
                held.doubt(held.batches)
        self._add(held)

    def _add(self, held: _Held) -> None:
        """Note that a gradient of the batch in hand is in an optimizer's parameters.

        One that went back, or was reported as bad, may have a loss of 0: so ranks go on in step.
        """
        batches = self._batches
        batches.in_doubt = held.was_idle = False  # the loop hides no gradients
        batch = batches.in_hand
        held.backwards_after_end += batches.ended
        if batches.ended and (ahead := batches.read_to_the_end()):  # a wrapper holds them
            batch = next((one for one in ahead if one not in held.last), ahead[-1])
        if batch is None:
            return
        if batch.instead_of is not None and (batch.has_learnt or not self._looks_first):
            batch = batch.instead_of
        if batch not in held.batches:
            held.batches.append(batch)

    def let_go(self) -> None:
        """Note what is there as the loop lets the batch in hand go: it asks for the next, or is left."""
        in_doubt = self._batches.in_doubt
        for held in self._held.values():
            if in_doubt:
                self._look_at(held, self._refresh(held))
            elif held.batches or held.perhaps or held.open:
                self._refresh(held)

    def _refresh(self, held: _Held) -> _Change:
        """Note what has become of gradients since a backward pass or a step."""
        self._close(held)
        now = held.look()
        if now is _SAME or not (held.batches or held.perhaps or held.is_used):
            return now
        if held.is_gone() if now is _GONE else held.is_zero():
            held.drop()
        elif now is _OTHER and not self.reduced:
            held.doubt(held.batches)  # which the loop has put there
        return now

    def _close(self, held: _Held) -> None:
        """Note the gradients that backward passes have left which did not come to their end."""
        if held.open and _graph_task() == _OUTSIDE and (found := held.take_cut_off()):
            held.doubt([*filter(None, found), *self._batches.read_to_the_end()])

    def are_as_seen(self) -> bool:
        """Whether gradients are there, and all are those that were looked at last. For finalisers."""
        return all(held.are_as_seen() for held in list(self._held.values()))

    def _look_at(self, held: _Held, now: _Change) -> None:
        """Look for a gradient of the batch in hand where no hook was called for it.

        The loop may have put one there by hand: nobody knows what else is in it. It may have added to what is
        there by hand. Or gradients came to parameters that have no hook, while those that have one were set
        to None.
        """
        hand = self._batches.in_hand
        if hand in held.perhaps:
            return
        if now is _WRITTEN and self._batches.has_in_hand and _any(held.parameters):
            held.doubt([*filter(None, [hand])])
        elif now is _OTHER and _any(held.parameters):
            if not self.reduced:
                held.doubt(held.batches)
            held.is_used = False
            self._add(held)
        elif now is _GONE and not held.batches:
            found = [parameter for parameter in trained(held.optimizer()) if parameter.grad is not None]
            if found:
                held.is_used = False
                self._add(held)
                more = [*filter(has_place, found)][: HOOKED + _MORE - len(held.parameters)]
                self._hook(held, more)

    # Steps ------------------------------------------------------------------------------------------------

    def use(self, number: int, *, skipped: bool, moved: bool = True) -> Used:
        """Note a step of an optimizer, or one that a scaler skips, on what its gradients hold.

        One that has not `moved` parameters has left them there.
        """
        held, batches = self._held[number], self._batches
        if held.open:
            self._close(held)
            if held.open and held.came:
                self._arrived(held)  # it steps inside of a backward pass
        if batches.in_doubt:
            self.let_go()
        is_plain = not (batches.in_doubt or batches.ended or batches.is_told)
        before_hand = not is_plain and self._is_before_hand(number, held)
        now = _SAME if held.is_same() else held.look()
        if now is not _SAME and not skipped and self._is_gone(held, now):
            held.drop()
            held.was_idle = True
            return Used(before_hand)
        if batches.sees and batches.in_hand not in held.batches:
            self._look_at(held, now)
        if not moved:
            return Used(before_hand)
        if now is _OTHER and not self.reduced:
            held.doubt([batch for batch in held.batches if batch is not batches.in_hand])
        learnt, last, bit = held.batches, held.last, 1 << number
        used = [*learnt, *held.perhaps] if held.perhaps else learnt
        held.was_idle = not used
        back, several = [], []
        for batch in used:
            if batch.went_back:
                back.append(batch)
        for batch in learnt:
            batch.used_by |= bit
            batch.skipped_by |= bit * skipped
            if batch in last or (len(self._held) > 1 and self._has_learnt(held, batch)):
                several.append(batch)
        if skipped:
            held.batches, held.perhaps = [], []
            return Used(before_hand, back)
        padding = batches.take_unweighed(used) if batches.unweighed else 0
        doubts: set[str] = set()
        if self._looks_first:
            doubts = {batch.counts_not for batch in used if batch.has_learnt} - {"back"}
        if held.is_used and now is not _OTHER and _any(held.parameters):
            doubts.add("again")
        if padding:
            doubts.discard("padding")
        held.last, held.batches, held.perhaps = learnt or held.last, [], []
        held.is_used = True
        held.steps += 1
        if not (before_hand or back or several or padding or doubts):
            return _NOTHING_ELSE
        return Used(before_hand, back, several, padding, doubts)

    def _is_before_hand(self, number: int, held: _Held) -> bool:
        """Whether an optimizer steps now on what came before the batch in hand, as far as that can be seen.

        A step on no gradient at all is on no batch, unless all are: then the loop may hide its gradients.
        """
        batches = self._batches
        if batches.is_told and any(batches.has_stepped(number, batch) for batch in held.batches):
            return False  # it came before the wrapper passed its batch on: nobody knows which that is
        if batches.ended and batches.has_in_hand:
            if not batches.sees or batches.in_hand in held.batches or batches.in_hand in held.last:
                return False
            if batches.read_to_the_end():
                return False  # a wrapper has passed on what lies after it
            are_none = all(parameter.grad is None for parameter in held.parameters)
            return not are_none or (batches.is_told and not held.was_idle)
        if not batches.in_doubt or batches.in_hand in held.perhaps:
            return False
        if held.batches:
            return any(not batch.went_back for batch in held.batches)
        return not (held.was_idle or _are_there(trained(held.optimizer())))

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
        if not self._batches.sees or now is _SAME:
            return False
        if now is _GONE:
            return held.is_gone()
        return held.is_zero()

    # Passes -----------------------------------------------------------------------------------------------

    def left(self) -> None:
        """Note what is there as another pass is about to begin: the loop has left the last one."""
        self.let_go()
        for number, held in self._held.items():
            if not (held.batches or held.perhaps):
                self._batches.gathered_to_the_end(number, held.backwards_after_end)

    def lost(self) -> list[Batch]:
        """Return, as a pass has begun, batches gathered for a step that have left no gradient.

        Where more than one batch is read ahead, unseen, nobody can say whose gradients were in the last step.
        What another optimizer has stepped on is not lost.
        """
        if self._batches.reads_far or not (window := self._batches.untouched()):
            return []
        parameters = [parameter for optimizer in self.optimizers() for parameter in trained(optimizer)]
        return window if parameters and not (self._hides() or _are_there(parameters)) else []


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


def _are_there(parameters: Iterable[Any]) -> bool:
    """Whether there are gradients that `zero_grad()` has not thrown away.

    One that was never written to is none that `zero_grad(set_to_none=False)` has made 0.
    """
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return any(not gradient._version or bool(gradient.any()) for gradient in gradients)


# What autograd calls ------------------------------------------------------------------------------------


def _listening(
    of: weakref.ref[Gradients], held: _Held, batches: Batches
) -> Callable[[int], Callable[[Any], None]]:
    """Return what makes the hook of the parameter at a place: it notes each gradient, and asks once in each
    backward pass to hear of its end. It keeps neither parameters nor gradients alive."""
    import torch
    from torch.autograd import Variable

    graph_task, when_it_ends = torch._C._current_graph_task_id, Variable._execution_engine.queue_callback
    has_graph, begun, came, one = torch.is_grad_enabled, held.open, held.came, weakref.ref(held)
    ours = [is_uncompiled(module) for module in (__name__, type(batches).__module__)]
    leave_alone = (lambda hook: hook) if all(ours) else uncompiled

    def ended() -> None:
        ending = begun.pop(graph_task(), None)
        if came:  # else a step inside of the pass has noted it
            gradients, alive = of(), one()
            if gradients is not None and alive is not None:
                gradients._arrived(alive, ending is not None and ending[3])

    at_the_end = leave_alone(ended)

    def listen(place: int) -> Callable[[Any], None]:
        def comes(parameter: Any) -> None:
            task = graph_task()
            if task not in begun:
                gradient = parameter.grad
                known = None if gradient is None else weakref.ref(gradient)
                begun[task] = batches.in_hand, place, known, has_graph()
                when_it_ends(at_the_end)
            came.append(place)

        return leave_alone(comes)

    return listen


def _looking(
    parameter: weakref.ref[Any], before: list[bool], asks: Callable[[], bool], batches: Batches
) -> Callable[[Any], None]:
    """Return a hook of what comes to a parameter: before it is added, and before other ranks' is."""

    def looks(gradient: Any) -> None:
        alive, hand = parameter(), batches.in_hand
        if hand is not None and hand.counts_not:
            # What is not finite is masked after this, by `loader.weigh`, or ruins the model.
            hand.has_learnt |= bool(gradient.any() and gradient.isfinite().all())
        if alive is not None and asks():
            before.append(_any([alive]))

    return uncompiled(looks)


def _graph_task() -> int:
    """Return torch's number of the backward pass that runs in this thread."""
    import torch

    return torch._C._current_graph_task_id()
