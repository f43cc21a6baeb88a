"""Engines that step by themselves, DeepSpeed's: told from optimizers, and with an optimizer's hooks.

It imports nothing of DeepSpeed's. `integrations.deepspeed` is the adapter; an engine may be attached without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from edl_torch.errors import InvalidArgument

Hook = Callable[[Any, Any, Mapping[str, Any]], None]


def is_engine(optimizer: Any) -> bool:
    """Return whether it is a whole engine, which gathers, scales and steps."""
    return all(hasattr(optimizer, name) for name in ("step", "global_steps", "gradient_accumulation_steps"))


def hides_gradients(optimizer: Any) -> bool:
    """Return whether it is an engine, or one of its optimizers, in whatever wrappers: they hide gradients."""
    while optimizer is not None:
        if is_engine(optimizer) or type(optimizer).__module__.startswith("deepspeed."):
            return True
        optimizer = getattr(optimizer, "optimizer", None)
    return False


def check_not_hidden(*optimizers: Any) -> None:
    """Raise InvalidArgument where gradients cannot be scaled from outside."""
    if any(map(hides_gradients, optimizers)):
        raise InvalidArgument(
            "scale_gradients() does not reach the gradients of a DeepSpeed engine: train on "
            "prepare(engine, loader) of edl_torch.integrations.deepspeed, and leave weigh() and "
            "scale_gradients() out"
        )


def check_steps(engine: Any) -> None:
    """Raise InvalidArgument for an engine whose steps nobody sees."""
    if hasattr(engine, "train_batch"):
        raise InvalidArgument(
            f"attach() takes no {type(engine).__name__}: a pipeline engine of DeepSpeed's reads and steps "
            f"inside of train_batch(), and says nothing of its steps. Use an engine without pipeline "
            f"parallelism"
        )


class EngineSteps:
    """Steps of an engine, with the hooks that a torch optimizer has.

    The engine counts them in `global_steps`: at the end of each accumulation, also where it skips the
    optimizer's step for an overflow.
    """

    def __init__(self, engine: Any) -> None:
        check_steps(engine)
        self._engine = weakref.ref(engine)
        self._before: Hook = _nothing
        self._after: Hook = _nothing
        self._is_first = "step" not in vars(engine)
        step = engine.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._before(engine, args, {})
            steps = engine.global_steps
            result = step(*args, **kwargs)
            if engine.global_steps != steps:
                self._after(engine, args, {})
            return result

        self._watched = weakref.ref(watched)
        engine.step = watched

    def register_step_pre_hook(self, hook: Hook) -> EngineSteps:
        """Call `hook` before each micro-batch's step."""
        self._before = hook
        return self

    def register_step_post_hook(self, hook: Hook) -> EngineSteps:
        """Call `hook` when the engine is done with an accumulation."""
        self._after = hook
        return self

    def remove(self) -> None:
        """Let the engine step unwatched, but for others that watch it."""
        self._before = self._after = _nothing
        engine, watched = self._engine(), self._watched()
        if (
            engine is not None
            and watched is not None
            and self._is_first
            and vars(engine).get("step") is watched
        ):
            del engine.step


def _nothing(engine: Any, args: Any, named: Mapping[str, Any]) -> None:
    return
