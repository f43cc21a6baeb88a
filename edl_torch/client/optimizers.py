"""Optimizers whose steps decide when a batch has been trained on.

It tells an optimizer's steps on batches from those on none, and holds no optimizer alive. It does not know
torch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import numpy.typing as npt

from edl_torch.client.elastic import ElasticSession
from edl_torch.client.neighbours import sessions
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.engines import EngineSteps, hides_gradients, is_engine

WATCHED = 8  # parameters of an optimizer whose gradients are looked at
HOOKED = 2  # that say when a gradient comes
LOOKED_AT = 4  # whose values are
PLACES = 256  # of each of these
_CHECKPOINT = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


class SteppingOptimizer(Protocol):
    """What `attach` needs: torch.optim.Optimizer has it, and adapters give it to what has not."""

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call `hook(optimizer, args, kwargs)` after each step."""


class SteppingScaler(Protocol):
    """What `attach` needs of a scaler: torch.amp.GradScaler has it."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless its gradients overflowed."""


@dataclass(slots=True)
class _Attached:
    optimizer: weakref.ref[Any]
    watched: list[Any]  # parameters whose gradients are looked at for each batch
    hook: Any = None
    before: Any = None  # the hook before a step
    steps: int = 0
    scaler: weakref.ref[Any] | None = None
    marks: list[Any] = field(default_factory=list)  # the hooks of parameters
    looks: list[_Look] = field(default_factory=list)  # at some parameters
    left: list[_Seen] | None = None  # what these were after the last step, where nothing else may write them

    def remove(self) -> None:
        """Take the hooks off."""
        for mark in self.marks:
            mark.remove()
        self.hook.remove()
        if self.before is not None:
            self.before.remove()


_Seen = tuple[int, int, bytes | None]


class _Look:
    """A look at a parameter that costs below a microsecond: its version, its place, and, in this machine's
    memory, values of it."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._place = -1
        self._values: npt.NDArray[Any] | None = None

    def __call__(self) -> _Seen:
        parameter = self._parameter
        place = parameter.data_ptr()
        if place != self._place:
            self._place, self._values = place, _values_of(parameter)
        values = self._values
        return parameter._version, place, None if values is None else values.tobytes()


def _values_of(parameter: Any) -> npt.NDArray[Any] | None:
    """Return a view of some values of a parameter, which follows what is written there."""
    if parameter.device.type != "cpu" or not parameter.is_contiguous() or not parameter.numel():
        return None
    import torch

    values: npt.NDArray[Any] = parameter.detach().reshape(-1).view(torch.uint8).numpy()
    size = parameter.element_size()
    return values.view(f"V{size}")[:: -(-parameter.numel() // PLACES)]


def _was_written(before: _Seen, now: _Seen) -> bool:
    """Whether a parameter was written, and not put back."""
    if before[2] is not None and now[2] is not None:
        return before[2] != now[2]
    return before[:2] != now[:2]


class Optimizers:
    """The attached optimizers of one session. One that is not referenced elsewhere any more is detached."""

    def __init__(self, passes: ElasticSession) -> None:
        self._passes = passes
        self._attached: dict[int, _Attached] = {}
        # Of a parameter its gradient, which this does not keep alive, as the batch in hand came
        self._marks: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._gone: list[Any] = []  # references to those that do not exist any more; written by finalisers
        self._mine = 0  # which one of them stepped last
        self._backward = -1  # the backward pass that reached a parameter last
        # Of optimizers that are not attached: the batch in hand when a gradient last came to one of theirs
        self._others: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []  # of these, and the one of all optimizers

    def __repr__(self) -> str:
        return f"<Optimizers {[type(optimizer).__name__ for optimizer in self.alive()]}>"

    def alive(self) -> list[Any]:
        """Every attached optimizer that still exists."""
        found = (attached.optimizer() for attached in self._attached.values())
        return [optimizer for optimizer in found if optimizer is not None]

    # Gradients --------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Note what gradients are in place, as a batch comes to the loop. Called for each batch."""
        self._marks = marks = {}
        for attached in self._attached.values():
            for parameter in attached.watched:
                gradient = parameter.grad
                if gradient is not None:
                    marks[id(parameter)] = weakref.ref(gradient), gradient._version

    def _changed(self, parameters: list[Any]) -> list[Any]:
        return [parameter for parameter in parameters if self._has_changed(parameter)]

    def _has_changed(self, parameter: Any) -> bool:
        gradient = parameter.grad
        mark = self._marks.get(id(parameter))
        if gradient is None or mark is None:
            return gradient is not mark
        is_same = mark[0]() is gradient
        return not is_same or gradient._version != mark[1]

    def changed(self) -> list[Any]:
        """Return parameters whose gradient changed since `mark`.

        Where none that is watched has a gradient, they tell nothing: then all that have one may have changed.
        """
        found: list[Any] = []
        for attached in list(self._attached.values()):  # a finaliser may ask, in any thread
            tell = any(p.grad is not None or id(p) in self._marks for p in attached.watched)
            found += self._changed(attached.watched) if tell else _trained(attached.optimizer())
        return [parameter for parameter in found if parameter.grad is not None]

    def unchanged(self) -> bool:
        """Whether there are gradients, and all are as they were at `mark`."""
        return bool(self._marks) and not any(self._changed(a.watched) for a in self._attached.values())

    def came(self) -> bool:
        """Whether a gradient came since `mark`, as far as can be seen now."""
        return bool(self.changed()) or any(
            p.grad is not None
            for attached in self._attached.values()
            if all(watched.grad is None for watched in attached.watched)  # what others have came after that
            for p in _trained(attached.optimizer())
        )

    def _comes(self) -> None:
        """Note a backward pass as it reaches the first parameter, before it changes the gradient."""
        backward = sys.modules["torch"]._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            is_first = not any(p.grad is not None for a in self._attached.values() for p in a.watched)
            self._passes.gradient_comes(is_first=is_first)

    def all(self) -> list[Any]:
        """Return all parameters; none where the gradients of some cannot be seen."""
        optimizers = self.alive()
        hidden = any(hasattr(p, "full_tensor") for o in optimizers for p in _parameters(o)) or any(
            hides_gradients(optimizer) for optimizer in optimizers
        )
        return [] if hidden else [p for optimizer in optimizers for p in _trained(optimizer)]

    # Attaching --------------------------------------------------------------------------------------------

    def attach(
        self, optimizer: SteppingOptimizer, scaler: SteppingScaler | None = None, one_model: str = ""
    ) -> None:
        """Let steps of this optimizer decide from now on, and those that the scaler skips.

        `one_model` is the user's word on why trainers whose parameters differ have one model.
        """
        optimizer = _that_steps(optimizer)
        self._passes.model_changed(one_model)
        number = self._number_of(optimizer)
        if number is None:
            number = self._attach(optimizer)
        if scaler is not None:
            self._watch(number, scaler)

    def _attach(self, optimizer: Any) -> int:
        steps: Any = EngineSteps(optimizer) if is_engine(optimizer) else optimizer
        register: Any = getattr(steps, "register_step_post_hook", None)
        if register is None:
            raise InvalidArgument(
                f"attach() takes a torch.optim.Optimizer, not {type(optimizer).__name__}: without one, "
                f"leave it out"
            )
        number = self._passes.attach(type(optimizer).__name__)
        self._passes.gradients = self
        attached = _Attached(weakref.ref(optimizer, self._gone.append), _some(_trained(optimizer), WATCHED))
        torch: Any = sys.modules.get("torch")
        comes = _through(self)
        there = [parameter for parameter in attached.watched if _has_place(parameter)]
        attached.marks = [parameter.register_hook(comes) for parameter in _some(there, HOOKED)]
        if self._passes.is_audited:
            attached.looks = [_Look(parameter) for parameter in _some(there, LOOKED_AT)]

        def trains(named: Mapping[str, Any]) -> bool:
            return not (_is_captured(torch) or ("closure" in named and _makes_state(named)))

        def about_to_step(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
            if trains(named):
                if self._passes.model_is_due:
                    self._forget_looks()
                elif (before := attached.left) is not None:
                    now = [look() for look in attached.looks]
                    if any(map(_was_written, before, now)):
                        self._passes.doubt("written")
                self._passes.about_to_step()

        def stepped(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
            if self._gone:
                self._let_go()
            self._mine, attached.left = id(optimizer), None
            if not trains(named):
                return
            # A `GradScaler` leaves here, for the time of the step, whether it found an overflow and a fused
            # optimizer skips the step. On an accelerator this waits for it, as the scaler does for others.
            found = getattr(optimizer, "found_inf", None)
            if found is None or not bool(found):
                attached.steps += 1
                self._passes.stepped(number)
            attached.left = [look() for look in attached.looks]
            if len(self._attached) > 1:
                self._forget_shared(attached)

        attached.hook = register(stepped)
        before: Any = getattr(steps, "register_step_pre_hook", None)
        if before is not None and self._passes.is_audited:
            attached.before = before(about_to_step)
        self._attached[number] = attached
        self._let_go()
        self._passes.look_for_gradients()
        if self._passes.is_audited and not self._hooks and torch is not None:
            from torch.optim.optimizer import register_optimizer_step_post_hook as of_all

            self._hooks.append(of_all(_stepping(self)))
        return number

    # Parameters that something else writes ------------------------------------------------------------------

    def _forget_looks(self) -> None:
        for attached in self._attached.values():
            attached.left = None

    def _forget_shared(self, stepped: _Attached) -> None:
        """Forget what other optimizers left of parameters that this one has written."""
        written = {id(p) for p in _parameters(stepped.optimizer())}
        for other in self._attached.values():
            if other is not stepped and any(id(p) in written for p in other.watched):
                other.left = None

    def _other_stepped(self, optimizer: Any) -> None:
        """Note an optimizer that is not attached, and steps on batches of this loader."""
        if self._mine == id(optimizer):
            return
        if any(optimizer in other.optimizers.alive() for other in sessions.alive()):
            self._forget_looks()
            return
        reached = self._others.get(optimizer)
        if reached is None:
            reached = self._others[optimizer] = [0]
            comes = _through(self, reached)
            there = [parameter for parameter in _trained(optimizer) if _has_place(parameter)]
            self._hooks += [parameter.register_hook(comes) for parameter in _some(there, HOOKED)]
        elif reached[0] and reached[0] == self._passes.batch_in_hand:
            self._passes.doubt("unattached")

    def _watch(self, number: int, scaler: Any) -> None:
        """Count steps that a scaler skips for an overflow, too: the loop is done with the batch."""
        attached = self._attached[number]
        if attached.scaler is not None and attached.scaler() is scaler:
            return
        attached.scaler = weakref.ref(scaler)
        step = scaler.step

        def watched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = attached.steps
            result = step(optimizer, *args, **kwargs)
            mine = self._attached.get(number) is attached and _that_steps(optimizer) is attached.optimizer()
            if mine and attached.steps == before:
                attached.steps += 1
                self._passes.stepped(number, skipped=True)
            return result

        scaler.step = watched

    def detach(self, optimizer: SteppingOptimizer) -> None:
        """Let steps of this optimizer decide no more."""
        number = self._number_of(_that_steps(optimizer))
        if number is None:
            raise InvalidArgument(
                f"this {type(optimizer).__name__} is not attached: detach() takes an optimizer that was "
                f"given to attach()"
            )
        self._attached.pop(number).remove()
        self._passes.model_changed()
        self._passes.detach(number)

    def close(self) -> None:
        """Take the hooks off."""
        for attached in self._attached.values():
            attached.remove()
        self._attached.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def _number_of(self, optimizer: Any) -> int | None:
        for number, attached in self._attached.items():
            if attached.optimizer() is optimizer:
                return number
        return None

    def _let_go(self) -> None:
        """Detach optimizers that do not exist any more, but for the last: some step has to decide."""
        self._gone.clear()
        dead = [number for number, attached in self._attached.items() if attached.optimizer() is None]
        for number in dead:
            if len(self._attached) > 1:
                del self._attached[number]
                self._passes.forget_optimizer(number)


def _trained(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer trains.

    None of DeepSpeed's engines, and none in parts: nobody sees their gradients here.
    """
    return [p for p in _parameters(optimizer) if p.requires_grad and not hasattr(p, "full_tensor")]


def _parameters(optimizer: Any) -> list[Any]:
    found = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    return [parameter for parameter in found if hasattr(parameter, "requires_grad")]


def _through(optimizers: Optimizers, reached: list[int] | None = None) -> Callable[[Any], None]:
    """Return a hook of parameters, which keeps nothing alive; one of others notes what `reached` them."""
    alive = weakref.ref(optimizers)

    def comes(gradient: Any) -> None:
        known = alive()
        if known is not None and reached is None:
            known._comes()
        elif known is not None and reached is not None:
            reached[0] = known._passes.batch_in_hand

    return comes


def _stepping(optimizers: Optimizers) -> Callable[..., None]:
    alive = weakref.ref(optimizers)

    def stepped(optimizer: Any, arguments: Any, named: Any) -> None:
        known = alive()
        if known is not None:
            known._other_stepped(optimizer)

    return stepped


def _has_place(parameter: Any) -> bool:
    """Whether a parameter has values in one piece of memory, as sparse and lazy ones have not."""
    from torch.nn.parameter import is_lazy

    return (
        not is_lazy(parameter)
        and str(parameter.layout) == "torch.strided"
        and parameter.device.type != "meta"
    )


def _some(parameters: list[Any], most: int) -> list[Any]:
    """Return some of a model's parameters, from its first to its last: heads and experts take turns, and what
    lies before them learns from each batch."""
    last, count = len(parameters) - 1, min(most, len(parameters))
    return [parameters[number * last // max(1, count - 1)] for number in range(count)]


def _that_steps(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers, as Accelerate's and DeepSpeed's, which name it `optimizer`.

    A whole engine of DeepSpeed's steps by itself: its optimizer steps once for each group of parameters.
    """
    while hasattr(optimizer, "zero_grad") and not is_engine(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not hasattr(inner, "zero_grad"):
            break
        optimizer = inner
    return optimizer


def _is_captured(torch: Any) -> bool:
    """Whether a step only goes into a CUDA graph: it trains when that is replayed."""
    if torch is None or torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def _makes_state(named: Mapping[str, Any]) -> bool:
    """Whether a step is one of `torch.distributed.checkpoint.state_dict`, which trains nothing.

    It steps an optimizer without state, at rates of 0, to see what state it makes, by `step(closure=None)`.
    A loop's own step may look the same in all but its caller.
    """
    if "closure" not in named or named["closure"] is not None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False
