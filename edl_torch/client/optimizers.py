"""Optimizers whose steps decide when a batch has been trained on.

It tells an optimizer's steps on batches from those on none, and holds no optimizer alive. It does not know
torch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

from edl_torch.client.elastic import ElasticSession
from edl_torch.errors import InvalidArgument

WATCHED = 8  # parameters of an optimizer whose gradients are looked at
_CHECKPOINT = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


class SteppingOptimizer(Protocol):
    """What `attach` needs: torch.optim.Optimizer has it. (An engine of DeepSpeed's has steps to watch.)"""

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call `hook(optimizer, args, kwargs)` after each step."""


class SteppingScaler(Protocol):
    """What `attach` needs of a scaler: torch.amp.GradScaler has it."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless its gradients overflowed."""


@dataclass(slots=True)
class _Attached:
    optimizer: weakref.ref[Any]
    watched: list[Any]  # parameters whose gradients are looked at
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

    def __init__(self, passes: ElasticSession) -> None:
        self._passes = passes
        self._attached: dict[int, _Attached] = {}
        self._marks: dict[int, tuple[Any, int]] = {}  # a parameter's gradient, as the batch in hand came
        self._gone: list[Any] = []  # references to those that do not exist any more; written by finalisers

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
                    marks[id(parameter)] = gradient, gradient._version

    def _changed(self) -> Iterator[tuple[Any, Any]]:
        for attached in list(self._attached.values()):  # a finaliser may ask, in any thread
            for parameter in attached.watched:
                gradient = parameter.grad
                marked, version = self._marks.get(id(parameter), (None, 0))
                if gradient is not marked or (gradient is not None and gradient._version != version):
                    yield parameter, gradient

    def changed(self) -> list[tuple[Any, Any]]:
        """Return watched parameters whose gradient changed since `mark`, with it."""
        return [(p, gradient) for p, gradient in self._changed() if gradient is not None]

    def unchanged(self) -> bool:
        """Whether there are gradients, and all are as they were at `mark`."""
        return bool(self._marks) and next(self._changed(), None) is None

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
        register: Any = getattr(optimizer, "register_step_post_hook", None)
        if _is_engine(optimizer):
            if hasattr(optimizer, "train_batch"):
                raise InvalidArgument(
                    f"attach() takes no {type(optimizer).__name__}: a pipeline engine of DeepSpeed's reads "
                    f"and steps inside of train_batch(), and says nothing of its steps. Use an engine "
                    f"without pipeline parallelism"
                )
            register = partial(_EngineSteps, optimizer, self._passes.about_to_step)
        if register is None:
            raise InvalidArgument(
                f"attach() takes a torch.optim.Optimizer, not {type(optimizer).__name__}: without one, "
                f"leave it out"
            )
        number = self._passes.attach(type(optimizer).__name__)
        self._passes.gradients = self
        attached = _Attached(weakref.ref(optimizer, self._gone.append), _smallest(optimizer))
        torch: Any = sys.modules.get("torch")

        def trains(named: Mapping[str, Any]) -> bool:
            return not (_is_captured(torch) or ("closure" in named and _makes_state(named)))

        def about_to_step(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
            if trains(named):
                self._passes.about_to_step()

        def stepped(optimizer: Any, arguments: Any, named: Mapping[str, Any]) -> None:
            if self._gone:
                self._let_go()
            if not trains(named):
                return
            # A `GradScaler` leaves here, for the time of the step, whether it found an overflow and a fused
            # optimizer skips the step. On an accelerator this waits for it, as the scaler does for others.
            found = getattr(optimizer, "found_inf", None)
            if found is None or not bool(found):
                attached.steps += 1
                self._passes.stepped(number)

        attached.hook = register(stepped)
        before: Any = getattr(optimizer, "register_step_pre_hook", None)
        if before is not None and self._passes.is_audited:
            attached.before = before(about_to_step)
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
            if mine and attached.steps == before:
                attached.steps += 1
                self._passes.stepped(number)
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


def _smallest(optimizer: Any) -> list[Any]:
    """Return some small parameters of an optimizer: their gradients may be kept, and are looked at quickly.

    None of DeepSpeed's engines, and none in parts: nobody sees their gradients here.
    """
    groups = getattr(optimizer, "param_groups", ())
    trained = [p for group in groups for p in group["params"] if getattr(p, "requires_grad", False)]
    return sorted([p for p in trained if not hasattr(p, "full_tensor")], key=lambda p: p.numel())[:WATCHED]


def _is_engine(optimizer: Any) -> bool:
    return all(hasattr(optimizer, name) for name in ("step", "global_steps", "gradient_accumulation_steps"))


def is_deepspeeds(optimizer: Any) -> bool:
    """Return whether it is an engine of DeepSpeed's, or one of its optimizers, in whatever wrappers."""
    while optimizer is not None:
        if _is_engine(optimizer) or type(optimizer).__module__.startswith("deepspeed."):
            return True
        optimizer = getattr(optimizer, "optimizer", None)
    return False


class _EngineSteps:
    """Calls a hook when a DeepSpeed engine is done with its micro-batches.

    The engine counts that in `global_steps`: at the end of each accumulation, also where it skips the
    optimizer's step for an overflow.
    """

    def __init__(
        self,
        engine: Any,
        about_to_step: Callable[[], None],
        hook: Callable[[Any, Any, Mapping[str, Any]], None],
    ) -> None:
        self._engine = weakref.ref(engine)
        self._is_watching = True
        self._is_first = "step" not in vars(engine)
        step = engine.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_watching:
                about_to_step()
            before = engine.global_steps
            result = step(*args, **kwargs)
            if self._is_watching and engine.global_steps != before:
                hook(engine, args, {})
            return result

        self._watched = weakref.ref(watched)
        engine.step = watched

    def remove(self) -> None:
        """Let the engine step unwatched, but for others that watch it."""
        self._is_watching = False
        engine = self._engine()
        if engine is not None and self._is_first and vars(engine)["step"] is self._watched():
            del engine.step


def _that_steps(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers, as Accelerate's and DeepSpeed's, which name it `optimizer`.

    A whole engine of DeepSpeed's steps by itself: its optimizer steps once for each group of parameters.
    """
    while hasattr(optimizer, "zero_grad") and not _is_engine(optimizer):
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
