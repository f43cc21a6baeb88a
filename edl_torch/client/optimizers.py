"""Optimizers whose steps decide when a batch has been trained on.

It tells an optimizer's steps on batches from those on none, and holds no optimizer alive. It does not know
torch, but for its hook of all optimizers. One that steps while the loop has a batch of this loader alone in
hand, and has a gradient, attaches itself, unless one is attached: what the loop trains by is known then.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import getpid
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from edl_torch.client.model import some, uncompiled
from edl_torch.client.session import Session
from edl_torch.client.watched import HOOKED, parameters_of, trained
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.engines import EngineSteps, is_engine

log = logging.getLogger("edl_torch.client")

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
    hook: Any = None
    before: Any = None  # the hook before a step
    steps: int = 0
    scaler: weakref.ref[Any] | None = None

    def remove(self) -> None:
        """Take the hooks off."""
        self.hook.remove()
        if self.before is not None:
            self.before.remove()


class Optimizers:
    """The attached optimizers of one session. One that is not referenced elsewhere any more is detached."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pid = getpid()  # a forked child that steps trains its copy of the model
        self._attached: dict[int, _Attached] = {}
        self._gone: list[Any] = []  # references to those that do not exist any more; written by finalisers
        self._mine = 0  # the id of the one that stepped last
        self._stepping = 0  # of the one that is in its step, which may call that of another inside
        # Of optimizers that are not attached: the batch in hand when a gradient last came to one of theirs
        self._others: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []  # of their parameters, and those of all optimizers
        self._detached: weakref.WeakSet[Any] = weakref.WeakSet()  # which shall not attach themselves again

    def __repr__(self) -> str:
        alive = self._session.gradients.optimizers()
        return f"<Optimizers {[type(optimizer).__name__ for optimizer in alive]}>"

    # Attaching --------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hear of the steps of all optimizers."""
        from torch.optim import optimizer as torchs

        if not self._hooks:
            self._session.trainer.state.batches.hears_steps = True
            self._hooks.append(torchs.register_optimizer_step_pre_hook(_told(self._any_steps)))
            self._hooks.append(torchs.register_optimizer_step_post_hook(_told(self._any_stepped)))

    def attach(
        self, optimizer: SteppingOptimizer, scaler: SteppingScaler | None = None, one_model: str = ""
    ) -> None:
        """Let steps of this optimizer decide from now on, and those that the scaler skips.

        `one_model` is the user's word on why trainers whose parameters differ have one model.
        """
        if not isinstance(one_model, str):
            raise InvalidArgument(
                f"one_model says how the trainers' models become one, as 'averaged every 16 steps': "
                f"{one_model!r} is no text"
            )
        optimizer = _that_steps(optimizer)
        self._model_changed(one_model)
        number = self._number_of(optimizer)
        if number is None:
            number = self._attach(optimizer)
            if self._session.model is not None:
                self.listen()
        self._session.trainer.state.batches.insists = True
        if scaler is not None:
            self._watch(number, scaler)

    def _model_changed(self, word: str = "") -> None:
        if self._session.model is not None:
            self._session.model.changed(word)

    def _attach(self, optimizer: Any, *, insists: bool = True) -> int:
        session = self._session
        steps: Any = EngineSteps(optimizer) if is_engine(optimizer) else optimizer
        register: Any = getattr(steps, "register_step_post_hook", None)
        if register is None:
            found, remedy = type(optimizer).__name__, "leave the call out where nothing steps"
            if callable(getattr(optimizer, "parameters", None)):
                remedy = "give the one that trains this model, as loader.attach(optimizer)"
            elif (own := getattr(optimizer, "optimizer", None)) is not None:
                remedy = f"give its own, the {type(own).__name__}, as loader.attach(scheduler.optimizer)"
            elif isinstance(optimizer, list | tuple):
                remedy = "call it once for each"
            raise InvalidArgument(f"attach() takes a torch.optim.Optimizer, not {found}: {remedy}")
        if _is_torchs(optimizer) and not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise InvalidArgument(
                f"{type(optimizer).__name__} tells of no step, as it has not called Optimizer.__init__(): "
                f"call that in its __init__, or give attach() the optimizer that it wraps"
            )
        batches = session.trainer.state.batches
        if insists:
            session.gradients.leave(batches.unclear)
        number = session.do(batches.attach, type(optimizer).__name__, insists)
        session.gradients.watch(number, optimizer, has_in_hand=not insists)
        attached = _Attached(weakref.ref(optimizer, self._gone.append))
        if session.model is not None:
            session.model.changed()
            parameters = parameters_of(optimizer)
            session.model.watch(number, [parameter for parameter in parameters if parameter.requires_grad])
            if session.model.was_replaced([optimizer]):
                session.doubt("written")

        def about_to_step(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
            if getpid() != self._pid:
                return
            self._stepping = id(optimizer)
            if _trains(named):
                session.look_for_writes()
                session.about_to_step()
                if session.model is not None:
                    session.model.step_begins(number)

        def stepped(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
            if getpid() != self._pid:
                return
            if self._gone:
                self._let_go()
            self._mine, self._stepping = id(optimizer), 0
            trains, moved = _trains(named), None
            if session.model is not None:
                moved = session.model.step_ended(number, optimizer, self._attached, trains=trains)
            if trains and not _overflowed(optimizer):
                attached.steps += 1
                session.stepped(number, moved=moved)
                if session.model is not None and session.model.left_out_the_first(number):
                    session.doubt("left out")

        attached.hook = register(uncompiled(stepped))
        before: Any = getattr(steps, "register_step_pre_hook", None)
        if before is not None and session.model is not None:
            attached.before = before(uncompiled(about_to_step))
        self._attached[number] = attached
        self._let_go()
        return number

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
            if mine and attached.steps == before and getpid() == self._pid:
                attached.steps += 1
                self._session.stepped(number, skipped=True)
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
        self._detached.add(_that_steps(optimizer))
        self._forget(number)
        self._model_changed()
        self._session.run(self._session.passes.detach(number))

    def close(self) -> None:
        """Take the hooks off."""
        for number, attached in self._attached.items():
            attached.remove()
            self._forget(number)
        self._attached.clear()
        while self._hooks:
            self._hooks.pop().remove()

    # What else trains, or writes parameters -----------------------------------------------------------------

    def _forget(self, number: int) -> None:
        """Look at gradients of an optimizer no more; at its parameters until another one steps on them."""
        self._session.gradients.forget(number)

    def _any_steps(self, optimizer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Attach an optimizer that is about to step on the batch in hand, where none is attached.

        Its parameters have a gradient, or get it inside of the step, from a closure.
        """
        if self._gone:
            self._let_go()
        session = self._session
        batches = session.trainer.state.batches
        is_others = self._number_of(optimizer) is None and session.loop_thread == get_ident()
        if session.model is not None and is_others and session.is_attached_elsewhere(optimizer):
            session.look_for_writes(optimizer)
        reached, hand = self._others.get(optimizer) if is_others else None, batches.in_hand
        if reached is not None and not trained(optimizer) and _trains(named):
            reached[0] = hand.number if hand is not None else 0  # no hook of shards tells when
        if self._attached or not _trains(named):
            return
        has_closure = callable(named.get("closure", arguments[1] if len(arguments) > 1 else None))
        came_before = reached is not None and hand is not None and reached[0] != hand.number
        trains = has_closure or (not came_before and _has_gradients(optimizer))
        if trains and session.has_the_batch and optimizer not in self._detached:
            self._attach(optimizer, insists=False)
            name, dataset = type(optimizer).__name__, session.description.name
            log.info("dataset=%s optimizer=%s steps on its batches, which count at its steps", dataset, name)
        elif batches.hears_steps:
            session.do(session.passes.count_without_steps)

    def _any_stepped(self, optimizer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note an optimizer that is not attached, and steps on batches of this loader."""
        if self._mine == id(optimizer) or self._is_inside(optimizer) or _overflowed(optimizer):
            return
        if self._session.is_attached_elsewhere(optimizer):
            if self._session.model is not None:
                in_this_thread = self._session.loop_thread == get_ident()
                self._session.model.stepped_elsewhere(optimizer, in_this_thread=in_this_thread)
                is_mine = in_this_thread or not self._session.loop_thread
                if is_mine and self._session.gradients.used_elsewhere(optimizer):
                    self._session.doubt("again")
            return
        batches = self._session.trainer.state.batches
        is_unknown = not self._attached and optimizer not in self._detached
        if is_unknown and self._session.has_padding and _trains(named) and _has_gradients(optimizer):
            self._session.do(self._session.passes.learnt_from_padding, batches.take_unweighed([]))
        reached = self._others.get(optimizer)
        if reached is None:
            reached = self._others[optimizer] = [0]

            def comes(gradient: Any, reached: list[int] = reached) -> None:
                reached[0] = batches.in_hand.number if batches.in_hand is not None else 0

            self._hooks += [p.register_hook(comes) for p in some(trained(optimizer), HOOKED)]
            hand = batches.in_hand
            if hand and (batches.insists or hand.used_by) and self._session.gradients.has_in_hand(optimizer):
                self._session.doubt("unattached")
        elif reached[0] and batches.in_hand is not None and reached[0] == batches.in_hand.number:
            self._session.doubt("unattached")
            if batches.unfinished and batches.unfinished[0] is not batches.in_hand and not batches.insists:
                self._replace_by(optimizer)

    def _replace_by(self, optimizer: Any) -> None:
        """Attach an optimizer that has stepped in the place of those that attached themselves, and did not
        step on the batch before this one."""
        for number in list(self._attached):
            self._attached.pop(number).remove()
            self._forget(number)
            self._session.do(self._session.trainer.state.batches.detach, number)
        self._session.stepped(self._attach(optimizer, insists=False))

    def _is_inside(self, optimizer: Any) -> bool:
        """Whether it is the optimizer of an attached engine, or of an attached one that is in its step."""
        return any(
            _that_steps(getattr(one, "optimizer", None)) is optimizer
            if is_engine(one)
            else id(one) == self._stepping and getattr(one, "optim", None) is optimizer
            for one in self._session.gradients.optimizers()
        )

    def _number_of(self, optimizer: Any) -> int | None:
        for number, attached in self._attached.items():
            if attached.optimizer() is optimizer:
                return number
        return None

    def _let_go(self) -> None:
        """Detach optimizers that do not exist any more, but for the last where one was asked for: some step
        has to decide."""
        self._gone.clear()
        batches = self._session.trainer.state.batches
        dead = [number for number, attached in self._attached.items() if attached.optimizer() is None]
        for number in dead:
            if len(self._attached) > 1 or not batches.insists:
                del self._attached[number]
                self._forget(number)
                self._session.do(batches.gone, number)


def _is_torchs(optimizer: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(optimizer, Optimizer)


def _that_steps(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers, as Accelerate's and DeepSpeed's, which name it `optimizer`.

    A whole engine of DeepSpeed's steps by itself: its optimizer steps once for each group of parameters.
    """
    while hasattr(optimizer, "zero_grad") and not is_engine(optimizer):
        # `PostLocalSGDOptimizer` is a torch.optim.Optimizer by name alone: it has no hooks
        has_hooks = hasattr(optimizer, "_optimizer_step_post_hooks") or not hasattr(optimizer, "optim")
        inner = getattr(optimizer, "optimizer" if has_hooks else "optim", None)
        if not hasattr(inner, "zero_grad"):
            break
        optimizer = inner
    return optimizer


def _told(method: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]) -> Callable[..., None]:
    """Return a hook of this process's optimizers that calls a method, and does not keep its object alive."""
    from torch._compile import _disable_dynamo

    reference, pid = weakref.WeakMethod(method), getpid()

    def told(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        alive = reference()
        if alive is not None and getpid() == pid:
            alive(optimizer, arguments, named)

    return _disable_dynamo(told)  # torch's compiler is imported by the first step, and by no loader


def _has_gradients(optimizer: Any) -> bool:
    return any(
        parameter.grad is not None for parameter in parameters_of(optimizer) if parameter.requires_grad
    )


def _overflowed(optimizer: Any) -> bool:
    """Whether a fused optimizer was called and skips the step: a `GradScaler` leaves with it, for that time,
    whether it found an overflow. On an accelerator this waits for it, as the scaler does for others."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _trains(named: Mapping[str, Any]) -> bool:
    """Whether a step, of which these are the named arguments, trains."""
    return not (_is_captured() or ("closure" in named and _makes_state(named)))


def _is_captured() -> bool:
    """Whether a step only goes into a CUDA graph: it trains when that is replayed."""
    torch: Any = sys.modules.get("torch")
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
