"""Gradients that loops have left in parameters, whose next optimizer or loader is not known yet.

A loop that failed may be tried again by another optimizer, or with another loader of this process.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, compress, starmap
from operator import call
from typing import Any

from edl_torch.client.model import uncompiled
from edl_torch.system.processes import OfThisProcess
from edl_torch.trainer.batches import Batch


class Leftover:
    """What the loops of one session have left in a parameter's gradient.

    The parameter's hook keeps it. It is called before another gradient is added, and sees whether the loop
    has thrown away what was left: then it goes, and this with it.
    """

    def __init__(self, parameter: Any, of: weakref.ref[Any]) -> None:
        self.of = of  # the `Gradients` whose batches these are
        self.gathered: list[Batch] = []
        self.unsure: list[Batch] = []
        self.is_used = False  # a step has used it, and it was not thrown away
        self._parameter, self._gradient = weakref.ref(parameter), weakref.ref(parameter.grad)
        self._version = parameter.grad._version  # torch's count of writes, but for those of backward passes
        self._is_added_to = False
        self._hook = parameter.register_hook(uncompiled(self._comes))
        _leftovers.add(self)

    @property
    def parameter(self) -> int:
        """The id of its parameter, which it does not keep alive."""
        return id(self._parameter())

    def add(self, gathered: Collection[Batch], unsure: Collection[Batch], *, is_used: bool) -> None:
        """Note that these batches are in it, too."""
        self.gathered += [batch for batch in gathered if batch not in self.gathered]
        self.unsure += [batch for batch in unsure if batch not in self.unsure]
        self.is_used |= is_used

    def is_of(self, parameters: Collection[int], *, is_reduced: bool = False) -> bool:
        """Whether it is there still, in a parameter with one of these ids.

        Ranks that have reduced it, with what was added to it, may have put another gradient in its place.
        """
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None or id(parameter) not in parameters:
            return False
        left = self._gradient()
        if left is None or left is not gradient:
            return is_reduced and self._is_added_to
        return left._version == self._version or is_not_0(left)

    def _comes(self, added: Any) -> None:
        if (parameter := self._parameter()) is not None and self.is_of({id(parameter)}):
            self._version, self._is_added_to = parameter.grad._version + 1, True
        else:
            self._hook.remove()


# Of this process: a loop that is tried again may have another loader.
_leftovers: OfThisProcess[Leftover] = OfThisProcess()


def leftovers(parameters: Collection[int], *, is_reduced: bool) -> list[Leftover]:
    """Return what loops have left in the gradients of parameters with these ids."""
    return [left for left in _leftovers.alive() if left.is_of(parameters, is_reduced=is_reduced)]


def leave(
    parameters: Iterable[Any],
    of: weakref.ref[Any],
    gathered: Collection[Batch],
    unsure: Collection[Batch] = (),
    *,
    is_used: bool = False,
) -> None:
    """Note that these batches of some `Gradients` are in the gradients of parameters, with what an earlier
    attempt has left there."""
    known = {left.parameter: left for left in _leftovers.alive() if left.of == of}
    for parameter in parameters:
        left = known.get(id(parameter))
        if left is None or not left.is_of({id(parameter)}):
            left = Leftover(parameter, of)
        left.add(gathered, unsure, is_used=is_used)


def leave_all(of: weakref.ref[Any], batches: Collection[Batch]) -> None:
    """Note that these batches are in all gradients of this process, as a loop was left before any step.

    Which of them an optimizer trains, its first step shows.
    """
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        leaves = [one for one in _all_tensors() if one.is_leaf and one.requires_grad]
        found = [one for one in leaves if type(one.grad) is torch.Tensor and one.grad.device.type != "meta"]
    leave([parameter for parameter in found if is_not_0(parameter.grad)], of, batches)


def _all_tensors() -> list[Any]:
    """Return all tensors of this process.

    One call in C takes all objects, picks those and lets the others go: no other thread runs meanwhile. Among
    them are tuples that are still being made, and who makes one fails where somebody else has it.
    """
    import torch

    kinds, new = {id(torch.Tensor)}, [torch.Tensor]  # a class may have no hash
    while new:
        new = [kind for parent in new for kind in type.__subclasses__(parent) if id(kind) not in kinds]
        kinds.update(map(id, new))
    every: list[list[Any]] = []
    found: list[Any] = []

    def each() -> Iterator[Any]:
        return chain(chain.from_iterable(every), [None])  # at that one it has let go of the list before

    steps: list[Callable[[], None]] = [
        partial(every.extend, starmap(gc.get_objects, [()])),
        partial(found.extend, compress(each(), map(kinds.__contains__, map(id, map(type, each()))))),
        every.clear,
    ]
    deque(map(call, steps), maxlen=0)
    return found


def is_not_0(gradient: Any) -> bool:
    """Whether a gradient is not 0. On an accelerator this waits for it, but in a CUDA graph."""
    import torch

    if gradient.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    return bool(gradient.any())
