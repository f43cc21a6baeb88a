"""What is in the gradients of one optimizer's parameters.

Autograd says it: two parameters of each optimizer, the first and the last, have a hook that is called when a
gradient was added to theirs, and the first call in a backward pass asks to be told when this has come to its
end. Then the batch in hand is among those *gathered*. What became of the gradient meanwhile says whether the
earlier ones are still in it; where nobody can say that, or a pass was cut off, they are *unsure*.

Nothing here holds an optimizer or a gradient alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from edl_torch.client.leftovers import Leftover, is_not_0, leave
from edl_torch.client.model import has_place, is_uncompiled, uncompiled
from edl_torch.trainer.batches import Batch, Batches

HOOKED = 2  # parameters of an optimizer that say when a gradient comes
_MORE = 8  # and as many more at most, where batches reach none of these
_OUTSIDE = -1  # torch's number of a backward pass where there is none


class Change(Enum):
    """What has become of the gradients of hooked parameters since they were looked at before."""

    SAME = "some is as it was, but for what backward passes have added"
    WRITTEN = "something has written into all that are there"
    OTHER = "there are others"
    GONE = "there are none"


_SAME, _WRITTEN, _OTHER, _GONE = Change  # Python 3.11 takes as long to look one up as for a call


# A backward pass that has reached a hook: the batch in hand then, whether it adds to gradients by putting
# others in their place (create_graph=True), whether there was a gradient before it, at each place where that
# was asked, and the places that have what it added. A tuple, as a batch waits for it.
_Begun = tuple[Batch | None, bool, list[bool], set[int]]


# A gradient, torch's count of writes to it, and how many steps were before it was seen first
_Known = tuple[weakref.ref[Any], int, int]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Watched:
    """What the gradients of one optimizer's parameters hold, as far as those that are hooked show it."""

    optimizer: weakref.ref[Any]
    batches: Batches
    gathered: list[Batch] = field(default_factory=list)  # whose gradients are there, and in no step yet
    unsure: list[Batch] = field(default_factory=list)  # of which nobody can say that
    last: list[Batch] = field(default_factory=list)  # that were in its last step
    is_used: bool = False  # a step has used what is there, and it was not thrown away
    is_strange: bool = (
        False  # something else is there: it came while no batch was in hand, or nobody knows how
    )
    has_heard: bool = False  # a backward pass was heard of: the loop does not write all gradients by hand
    backwards_after_end: int = 0  # backward passes that have reached them after the end of the pass
    was_idle: bool = False  # whether its last step in this pass was on no gradient, or on 0
    steps: int = 0  # of this optimizer, as far as they used gradients
    is_reduced: bool = False  # ranks reduce gradients, and may put others in their place
    # What autograd tells of the parameters that are hooked
    parameters: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)  # torch's handles
    came: list[int] = field(default_factory=list)  # the places of those that were called since `look`
    open: dict[int, _Begun] = field(default_factory=dict)  # backward passes that have not ended
    known: list[_Known | None] = field(default_factory=list)  # as `look` saw them
    # By place, what was seen before the next is added: whether one was there, and whether this one teaches
    # anything. `torch.autograd.grad` adds none.
    before: dict[int, tuple[bool | None, bool]] = field(default_factory=dict)

    # Hooks ------------------------------------------------------------------------------------------------

    def hook(self, parameters: Iterable[Any]) -> None:
        """Hear when gradients come to these parameters, and look at what comes, and at what is there, before
        it is added.

        Afterwards it may be of all ranks, and nobody can say what a loop has written into what was there.
        """
        listen = _listening(self)
        for place, parameter in enumerate(parameters, len(self.parameters)):
            self.hooks.append(parameter.register_post_accumulate_grad_hook(listen(place)))
            self.hooks.append(parameter.register_hook(_looking(self, place)))
            self.parameters.append(parameter)
            self.known.append(None)
        self.look()

    def hook_shared(self, parameters: Iterable[Any]) -> None:
        """Hear of one at least of these parameters, which another optimizer steps on, too."""
        places = {id(parameter): parameter for parameter in parameters if has_place(parameter)}
        if places.keys().isdisjoint(map(id, self.parameters)) and len(self.parameters) < HOOKED + _MORE:
            self.refresh()
            self.hook([*places.values()][:1])

    def _was_there(self, place: int) -> bool | None:
        """Whether a gradient is there to which a backward pass is about to add; None where others tell that.

        Values are looked at where ranks reduce, where nobody tells what a wrapper passes on, and where
        something has written to what is gathered, or to what a pass that failed has left; and to what a step
        has used, or of what the loop has put there, but on an accelerator, which would have to be waited for.
        """
        parameter, seen, batches = self.parameters[place], self.known[place], self.batches
        gradient = None if seen is None else seen[0]()
        if self.is_reduced or (batches.ended and not batches.is_told):
            return is_any([parameter])
        if parameter.grad is None:
            return None
        if seen is None or gradient is None or gradient is not parameter.grad:
            return self._is_strange_there(parameter.grad)
        if gradient._version in (seen[1], seen[1] + self.came.count(place)):
            return True
        is_asked = self.gathered or self.unsure or (self.is_used and gradient.device.type == "cpu")
        has_failed = len(self.open) > (_graph_task() in self.open)
        return is_not_0(gradient) if is_asked or has_failed else None

    def _is_strange_there(self, gradient: Any) -> bool | None:
        """Whether the loop has put something else than 0 there: nobody knows of which batches it is."""
        if gradient.device.type != "cpu" or not is_not_0(gradient):
            return None
        self.doubt(self.gathered)
        self.is_strange = True
        return True

    def leave(self, of: weakref.ref[Any]) -> None:
        """Hear of gradients no more; what is in them is left over by these `Gradients`."""
        self.refresh()
        for hook in self.hooks:
            hook.remove()
        if not (self.gathered or self.unsure or self.is_used or self.is_strange) or self.is_zero():
            return
        for parameter, seen in zip(self.parameters, self.known, strict=True):
            if seen is not None and parameter.requires_grad:
                is_used = self.is_strange or (self.is_used and seen[2] < self.steps)
                leave([parameter], of, self.gathered, self.unsure, is_used=is_used)

    # Gradients come, and go -------------------------------------------------------------------------------

    def look(self) -> Change:
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

    def came_to(self, place: int, begun: _Begun) -> None:
        """Note what was seen before a backward pass has added a gradient at this place."""
        if (seen := self.before.pop(place, None)) is None:
            return
        was_there, teaches = seen
        if was_there is not None:
            begun[2].append(was_there)
        if teaches and (hand := self.batches.in_hand) is not None:
            hand.has_learnt = True

    def arrived(self) -> None:
        """Note that a backward pass has added gradients of the batch in hand to some that are hooked."""
        now = self.look()
        if now is _GONE:
            return  # a step inside of this pass has used them
        self.has_heard, has_graph = True, False
        if (begun := self.open.get(_graph_task())) is not None:
            has_graph, before = begun[1:3]
            if before:
                now = _SAME if now is _SAME or any(before) else _OTHER
                before.clear()
        if now is _OTHER and not has_graph:
            self.drop()
        elif now is not _SAME and self.gathered:
            self.doubt(self.gathered)
        elif now is not _SAME:
            self.is_used = self.is_strange = False  # as by `zero_grad(set_to_none=False)`
        self.add()

    def add(self) -> None:
        """Note that a gradient of the batch in hand is in the parameters.

        One that went back, or was reported as bad, may have a loss of 0: so ranks go on in step.
        """
        batches = self.batches
        batches.in_doubt = self.was_idle = False  # the loop hides no gradients
        batch = batches.in_hand
        self.backwards_after_end += batches.ended
        if batches.ended and (ahead := batches.read_to_the_end()):  # a wrapper holds them
            batch = next((one for one in ahead if one not in self.last), ahead[-1])
        if batch is None:
            self.is_strange = True
            return
        if batch.instead_of is not None and (batch.has_learnt or not self.parameters):
            batch = batch.instead_of
        if batch not in self.gathered:
            self.gathered.append(batch)

    def refresh(self) -> Change:
        """Note what has become of gradients since a backward pass or a step."""
        self.close()
        now = self.look()
        if now is _SAME or not (self.gathered or self.unsure or self.is_used or self.is_strange):
            return now
        if self.is_gone() if now is _GONE else self.is_zero():
            self.drop()
        elif now is _OTHER and not self.is_reduced:
            self.doubt(self.gathered)  # which the loop has put there
        return now

    def close(self) -> None:
        """Note the gradients that backward passes have left which did not come to their end."""
        if not self.open or _graph_task() != _OUTSIDE:
            return
        found = [batch for batch, *_, reached in self.open.values() if any(map(self._is_there, reached))]
        self.open.clear()
        if found:
            self.doubt([*filter(None, found), *self.batches.read_to_the_end()])

    def _is_there(self, place: int) -> bool:
        gradient = self.parameters[place].grad
        return gradient is not None and is_not_0(gradient)

    def look_at_what_is_new(self, now: Change) -> None:
        """Look for a gradient of the batch in hand where no hook was called for it.

        The loop may have put one there by hand: nobody knows what else is in it. It may have added to what is
        there by hand. Or gradients came to parameters that have no hook, while those that have one were set
        to None. A loop of backward passes that writes into what earlier batches have left clips it, before it
        steps on that.
        """
        hand = self.batches.in_hand
        if hand in self.unsure:
            return
        if self.has_heard and (self.gathered or self.unsure):
            return  # `refresh` has noted another gradient in the place of one
        if now is _WRITTEN and self.batches.has_in_hand and is_any(self.parameters):
            self.doubt([*filter(None, [hand])])
        elif now is _OTHER and is_any(self.parameters):
            if not self.is_reduced:
                self.doubt(self.gathered)
            self.is_used = self.is_strange = False
            self.add()
        elif now is _GONE and not self.gathered:
            found = [parameter for parameter in trained(self.optimizer()) if parameter.grad is not None]
            if found:
                self.is_used = self.is_strange = False
                self.add()
                self.hook([*filter(has_place, found)][: HOOKED + _MORE - len(self.parameters)])

    # What is known of them --------------------------------------------------------------------------------

    def drop(self) -> None:
        """Note that what was there is gone."""
        self.is_used = self.is_strange = False
        self.gathered, self.unsure = [], []

    def doubt(self, batches: Iterable[Batch]) -> None:
        """Note that nobody can say whether these batches are in the gradients."""
        batches = list(batches)
        self.unsure += [batch for batch in batches if batch not in self.unsure]
        self.gathered = [batch for batch in self.gathered if batch not in batches]

    def take_over(self, other: Watched | Leftover) -> None:
        """Note what is in gradients that are this optimizer's now."""
        self.gathered += [batch for batch in other.gathered if batch not in self.gathered]
        self.unsure += [batch for batch in other.unsure if batch not in self.unsure]
        self.is_used |= other.is_used

    def is_same(self) -> bool:
        """Whether the first gradient is as it was when looked at."""
        seen = self.known[0] if self.known else None
        if seen is None or (gradient := seen[0]()) is None:
            return False
        return gradient is self.parameters[0].grad and gradient._version == seen[1]

    def has_stepped_on(self, parameters: Collection[int]) -> bool:
        """Whether its last step was on what is in the gradient of a parameter with one of these ids."""
        return any(
            id(parameter) in parameters
            and seen is not None
            and seen[0]() is (gradient := parameter.grad) is not None
            and (gradient._version == seen[1] and seen[2] < self.steps)
            for parameter, seen in zip(self.parameters, self.known, strict=True)
        )

    def are_as_seen(self) -> bool:
        """Whether all are as they were when looked at, and are not none."""
        pairs = [(p.grad, seen) for p, seen in zip(self.parameters, self.known, strict=False)]
        there = [each for each in pairs if any(one is not None for one in each)]
        return bool(there) and all(
            seen is not None and seen[0]() is gradient is not None and seen[1] == gradient._version
            for gradient, seen in there
        )

    def is_gone(self) -> bool:
        """Whether there is no gradient, of any parameter."""
        return all(parameter.grad is None for parameter in trained(self.optimizer()))

    def is_zero(self) -> bool:
        """Whether all gradients are 0."""
        return not (is_any(self.parameters) or is_any(trained(self.optimizer())))


# What a gradient is -------------------------------------------------------------------------------------


def trained(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains.

    None of DeepSpeed's engines, and none in parts: nobody sees their gradients here.
    """
    return [p for p in parameters_of(optimizer) if p.requires_grad and not is_in_parts(p)]


def is_in_parts(parameter: Any) -> bool:
    """Whether it is a shard whose gradient is put there after a backward pass, without a call of a hook:
    FSDP2's, and FSDP1's where the module keeps its original parameters."""
    if hasattr(parameter, "full_tensor"):
        return True
    return hasattr(parameter, "_fsdp_flattened") and not getattr(parameter, "_is_flat_param", False)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return all that an optimizer has."""
    found = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    return [parameter for parameter in found if hasattr(parameter, "requires_grad")]


def is_any(parameters: Iterable[Any]) -> bool:
    """Whether a gradient of some parameters is not 0; what is not in the CPU's memory counts as such."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return any(gradient.device.type != "cpu" or bool(gradient.any()) for gradient in gradients)


def are_there(parameters: Iterable[Any]) -> bool:
    """Whether there are gradients that `zero_grad()` has not thrown away.

    One that was never written to is none that `zero_grad(set_to_none=False)` has made 0.
    """
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return any(not gradient._version or bool(gradient.any()) for gradient in gradients)


# What autograd calls ------------------------------------------------------------------------------------


def _listening(watched: Watched) -> Callable[[int], Callable[[Any], None]]:
    """Return what makes the hook of the parameter at a place: it notes each gradient, and asks once in each
    backward pass to hear of its end. It keeps neither parameters nor gradients alive."""
    import torch
    from torch.autograd import Variable

    graph_task, when_it_ends = torch._C._current_graph_task_id, Variable._execution_engine.queue_callback
    has_graph, batches, begun, came = torch.is_grad_enabled, watched.batches, watched.open, watched.came
    before = watched.before
    one = weakref.ref(watched)
    ours = [is_uncompiled(module) for module in (__name__, type(batches).__module__)]
    leave_alone = (lambda hook: hook) if all(ours) else uncompiled

    def ended() -> None:
        if came and (alive := one()) is not None:  # else a step inside of the pass has noted it
            alive.arrived()
        begun.pop(graph_task(), None)

    at_the_end = leave_alone(ended)

    def listen(place: int) -> Callable[[Any], None]:
        def comes(parameter: Any) -> None:
            task = graph_task()
            if (mine := begun.get(task)) is None:
                mine = begun[task] = batches.in_hand, has_graph(), [], set()
                when_it_ends(at_the_end)
            if parameter.grad is not None:  # else an optimizer has stepped on it
                mine[3].add(place)
            if before and (alive := one()) is not None:
                alive.came_to(place, mine)
            came.append(place)

        return leave_alone(comes)

    return listen


def _looking(watched: Watched, place: int) -> Callable[[Any], None]:
    """Return a hook of what comes to the parameter at a place: before it is added, and before other ranks'
    is."""
    from torch.utils.hooks import unserializable_hook

    one, batches = weakref.ref(watched), watched.batches
    ours = [is_uncompiled(module) for module in (__name__, type(batches).__module__)]

    def looks(gradient: Any) -> None:
        if (alive := one()) is None:
            return
        for *_, reached in [*alive.open.values()]:  # another device's thread may begin a pass meanwhile
            if place in reached and not alive._is_there(place):
                reached.discard(place)  # by a pass that failed; the loop has thrown it away
        hand = batches.in_hand
        teaches = hand is not None and hand.counts_not != "" and _is_finite_and_not_0(gradient)
        alive.before[place] = alive._was_there(place), teaches

    if not all(ours):
        return uncompiled(looks)
    return unserializable_hook(looks)  # type: ignore[no-untyped-call, no-any-return]


def _is_finite_and_not_0(gradient: Any) -> bool:
    """What is not finite is masked after the hook, by `loader.weigh`, or ruins the model."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any() and values.isfinite().all())


def _graph_task() -> int:
    """Return torch's number of the backward pass that runs in this thread."""
    import torch

    return torch._C._current_graph_task_id()
