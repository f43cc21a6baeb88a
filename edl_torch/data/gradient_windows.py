"""Windows of gradient accumulation: the batches that are in the gradients of some parameters.

It knows what was backpropagated and when gradients were scaled, and decides nothing about losses.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, MutableMapping
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from edl_torch.errors import InvalidArgument

REMEMBERED = 256  # batches of a window that may be backpropagated once more without counting twice


class GradientWindow:
    """The batches that are in the gradients of some parameters, since these were last scaled.

    A batch counts once, however many losses of it are backpropagated.
    """

    def __init__(self, parameters: Collection[nn.Parameter] = ()) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        # FSDP gathers gradients that it has not reduced elsewhere than in `grad`.
        self._looks = bool(parameters) and not any(hasattr(p, "full_tensor") for p in parameters)
        self._backward: int | None = None  # the last one
        self.clear()

    def clear(self) -> None:
        """Forget all batches: none is in the gradients."""
        self._before = 0.0
        self._counts: dict[int, float] = {}
        self.kinds: set[str] = set()  # how batches were weighed: by "records" or "count"
        self._conflict = ""

    @property
    def total(self) -> float:
        """The sum of the batches' denominators."""
        return math.fsum((self._before, *self._counts.values()))

    def __contains__(self, batch: int) -> bool:
        return batch in self._counts

    def check(self) -> None:
        """Raise InvalidArgument where one factor cannot make these gradients a mean."""
        if self._conflict:
            raise InvalidArgument(self._conflict)

    def add(self, batch: int, count: float, kind: str, backward: int) -> None:
        """A loss of `batch` is being backpropagated, in the backward pass with that number."""
        if self._looks and backward != self._backward and self._empty:
            self.clear()  # zero_grad() threw away what was there
        self._backward = backward
        known = self._counts.setdefault(batch, count)
        if known != count:
            self._conflict = (
                f"one batch was weighed by {known:g} and by {count:g}: losses of a batch for one optimizer "
                f"need the same denominator. Divide each by it, add them up, and weigh() the sum"
            )
        if count:
            self.kinds.add(kind)
        if len(self._counts) > REMEMBERED:
            self._before += self._counts.pop(next(iter(self._counts)))

    @property
    def _empty(self) -> bool:
        alive = (reference() for reference in self._parameters)
        return all(parameter is None or parameter.grad is None for parameter in alive)

    def discard(self, batch: int) -> None:
        """A batch was not trained on after all."""
        self._counts.pop(batch, None)

    def copy_for(self, parameters: Collection[nn.Parameter]) -> GradientWindow:
        """The same batches, in the gradients of others."""
        other = GradientWindow(parameters)
        other._before, other._counts, other.kinds = self._before, dict(self._counts), set(self.kinds)
        other._conflict, other._backward = self._conflict, self._backward
        return other


class GradientWindows:
    """A window for the parameters of each optimizer.

    One that is attached has its own from then on, any other from the first time that its gradients are
    scaled.
    """

    def __init__(self) -> None:
        self._of: MutableMapping[nn.Parameter, GradientWindow] = WeakTensorKeyDictionary()
        self._last: WeakKeyDictionary[torch.optim.Optimizer, GradientWindow] = WeakKeyDictionary()
        self._known: WeakSet[GradientWindow] = WeakSet()  # those of parameters
        self.clear()

    def clear(self) -> None:
        """Forget all batches of all windows. Parameters stay known."""
        for window in self._known:
            window.clear()
        # Batches since gradients were last scaled, for parameters not known yet.
        self._fresh = GradientWindow()
        self._scaled = False
        self._lossy = False  # whether batches have left it

    def add(self, batch: int, count: float, kind: str, backward: int) -> None:
        """A loss of `batch` is being backpropagated."""
        if self._scaled and batch not in self._fresh:
            self._lossy = self._lossy or bool(self._fresh.total)
            self._fresh.clear()
            self._scaled = False
        for window in (self._fresh, *self._known):
            window.add(batch, count, kind, backward)

    def discard(self, batch: int) -> None:
        """A batch was not trained on after all."""
        for window in (self._fresh, *self._known):
            window.discard(batch)

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameters of an optimizer a window, unless they have one."""
        if optimizer not in self._last:
            parameters = parameters_of(optimizer)
            window = GradientWindow(parameters) if self._scaled else self._fresh.copy_for(parameters)
            self._set(optimizer, window, [p for p in parameters if p not in self._of])

    def _set(
        self, optimizer: torch.optim.Optimizer, window: GradientWindow, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._last[optimizer] = window
        self._known.add(window)
        for parameter in parameters:
            self._of[parameter] = window

    def of(
        self, optimizers: Iterable[torch.optim.Optimizer]
    ) -> list[tuple[GradientWindow, list[nn.Parameter]]]:
        """Every window of these optimizers, with the parameters that it is of. Raises InvalidArgument."""
        found: dict[int, tuple[GradientWindow, dict[int, nn.Parameter]]] = {}
        for optimizer in optimizers:
            self._complete(optimizer)
            for parameter in parameters_of(optimizer):
                window = self._of[parameter]
                _, parameters = found.setdefault(id(window), (window, {}))
                parameters[id(parameter)] = parameter
        for window, _ in found.values():
            window.check()
        return [(window, list(parameters.values())) for window, parameters in found.values()]

    def _complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every parameter of an optimizer a window: that of the optimizer where it has one."""
        new = [parameter for parameter in parameters_of(optimizer) if parameter not in self._of]
        window = self._last.get(optimizer)
        if window is None:
            if self._lossy and any(parameter.grad is not None for parameter in new):
                raise InvalidArgument(
                    f"the gradients of this {type(optimizer).__name__} are scaled for the first time, after "
                    f"others' have been: nothing says which batches are in them. Call "
                    f"loader.attach(optimizer) before the first batch that it learns from"
                )
            window = self._fresh.copy_for(new)
        self._set(optimizer, window, new)

    def scaled(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """The gradients of these optimizers were scaled: their next windows begin."""
        self._scaled = True
        done: set[int] = set()
        for optimizer in optimizers:
            parameters = [p for p in parameters_of(optimizer) if id(p) not in done]
            done |= {id(parameter) for parameter in parameters}
            self._set(optimizer, GradientWindow(parameters), parameters)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
