"""Backward passes of batches that count for nothing: every gradient is exactly 0.

It knows autograd's graphs, and not what a batch is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from edl_torch.errors import InvalidArgument

_SEPARATELY = (
    "the loss of a padding batch was backpropagated together with that of another batch: "
    "call backward() on each batch's loader.weigh(loss) before the next batch is asked for"
)


class Masks:
    """Make all gradients exactly 0 that come of some losses, whatever is on the way.

    Hooks at the leaves of their graphs: a zero that comes in at the root does not stay one where a derivative
    is infinite, and a parameter that took no part would leave other ranks waiting for its gradient.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._open: int | None = None  # batch whose losses are masked
        self._active = False
        self._backward: int | None = None  # the last one of a loss that is not masked

    def put(self, batch: int, loss: torch.Tensor) -> None:
        """Mask backward passes of this loss."""
        self._open = batch
        self._handles += [leaf.register_prehook(self._mask) for leaf in _leaves(loss.grad_fn)]

    def remove(self) -> None:
        """Mask no more: the batch is over."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._open, self._active = [], None, False

    def masked(self, batch: int, backward: int) -> None:
        """A backward pass through a masked loss begins. Raises InvalidArgument unless it is of that batch
        alone.
        """
        if batch != self._open or backward == self._backward:
            raise InvalidArgument(_SEPARATELY)
        if not self._active:
            self._active = True
            torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def unmasked(self, backward: int) -> None:
        """Note that a backward pass through another loss begins."""
        if self._active:
            raise InvalidArgument(_SEPARATELY)
        self._backward = backward

    def _over(self) -> None:
        self._active = False

    def _mask(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        if not self._active:
            return gradients
        return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def _leaves(root: Node | None) -> Iterator[Node]:
    """The nodes of a graph that add to the gradients of leaves."""
    seen: set[Node] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node
        todo += [following for following, _ in node.next_functions]
