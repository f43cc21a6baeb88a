"""How much each batch counts, so that unequal ranks together give the mean over all their records.

A loss that is weighed by its denominator is a sum; sums of batches and ranks add up, and gradients are then
divided by what all denominators add up to. Of a batch that counts for nothing every gradient is exactly 0.

A rank that has no batch while others have steps on a padding batch: a real one seen before, so that every
layer can compute it, which must leave no trace in the model. `Weights` masks its loss, `Statistics` puts
running statistics back. Where batches come from is not known here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from edl_torch.client.peers import Ballot, Doing, Peers
from edl_torch.data.gradient_windows import GradientWindow, GradientWindows
from edl_torch.errors import InvalidArgument
from edl_torch.system.user_warnings import warn_user

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
        self.are_put = False
        self._handles: list[RemovableHandle] = []
        self._open: int | None = None  # batch whose losses are masked
        self._active = False
        self._backward: int | None = None  # the last one of a loss that is not masked

    def put(self, batch: int, loss: torch.Tensor) -> None:
        """Mask backward passes of this loss."""
        self._open, self.are_put = batch, True
        self._handles += [leaf.register_prehook(self._mask) for leaf in _leaves(loss.grad_fn)]

    def remove(self) -> None:
        """Mask no more: the batch is over."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._open, self._active, self.are_put = [], None, False, False

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


# Weights ----------------------------------------------------------------------------------------------


class LoopBatches(Protocol):
    """The batches that the loop is given."""

    discarded: int  # how often one in hand failed, or was given back


class NoBatches:
    """Batches of which none ever fails or is given back."""

    discarded = 0


class Weights:
    """The records of the batch in hand, and of those that are in the gradients.

    `peers` are the ranks whose gradients the model's wrapper averages; None where one process trains alone.
    `attached` gives the optimizers whose windows begin before they are first scaled, `batches` says how often
    a batch in hand failed, or was given back. `weighs_padding` is called where the loop asks for the weight
    of a batch that counts for nothing; with True where it is to know that of all batches that it has had.
    """

    def __init__(
        self,
        peers: Peers | None = None,
        *,
        attached: Callable[[], Iterable[torch.optim.Optimizer]] = tuple,
        batches: LoopBatches | None = None,
        weighs_padding: Callable[[bool], object] = bool,
    ) -> None:
        self._peers = peers
        self._attached = attached
        self._batches = batches or NoBatches()
        self._weighs_padding = weighs_padding
        self._seen = self._batches.discarded
        self._windows = GradientWindows()
        self._batch = 0
        self._own = 0
        self._weighed = False
        self._weighs = False  # whether it ever has
        self._heeded = False  # whether the loop weighs its loss, or looks at the weight
        self._padded = False  # whether the batch in hand, or one before, was a padding batch
        self._masks = Masks()

    def __repr__(self) -> str:
        return f"<Weights own={self._own} batch={self._batch}>"

    @property
    def own(self) -> int:
        """Records of the batch in hand; 0 for a padding batch, or one that has failed."""
        self._notice_discarded()
        self._heeded = True
        if not self._own:
            self._weighs_padding(False)
        return self._own

    def step(self, own: int) -> None:
        """Note that a batch of `own` records goes to the loop."""
        if self._batches.discarded != self._seen:
            self._notice_discarded()
        if self._masks.are_put:
            self._masks.remove()
        self._batch += 1
        self._own = own
        self._padded |= not own

    def warn_of_padding(self) -> None:
        """Warn, once, a loop that has had a padding batch, and has never asked what one weighs."""
        if self._padded and not self._heeded:
            self._heeded = True
            warn_user(
                "this rank had no batch for a step that others took, and got a padding batch, which the "
                "loop has trained on like any other. Backpropagate loader.weigh(loss), which is 0 for it, "
                "and call loader.scale_gradients(optimizer) before each optimizer.step()"
            )

    def restart(self) -> None:
        """Forget all gradients: the model is another one, or as it was before."""
        self._masks.remove()
        self._seen, self._own = self._batches.discarded, 0
        self._windows.clear()

    def _notice_discarded(self) -> None:
        if (discarded := self._batches.discarded) != self._seen:
            self._seen, self._own = discarded, 0
            self._windows.discard(self._batch)

    def weigh(self, loss: torch.Tensor, count: float | torch.Tensor | None = None) -> torch.Tensor:
        """The batch's loss times its denominator: its records, or `count`. Shape and dtype are kept.

        Where that is 0 it is 0, and so is every gradient that comes of it, whatever the loss was.
        """
        self._notice_discarded()
        weight = float(self._own) if count is None else _checked(count)
        self._weighed = self._heeded = self._weighs = True
        if not self._own:
            weight = 0.0
            self._weighs_padding(False)
        # `where`, not a product: 0 times NaN is NaN. On the way back it is so again, and leaves are masked.
        weighed = (
            loss * weight if weight else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        )
        if weighed.requires_grad:
            self._watch(weighed, weight, "records" if count is None else "count")
        return weighed

    def _watch(self, weighed: torch.Tensor, weight: float, kind: str) -> None:
        """Count the batch when its loss is backpropagated: not every loop does so with every loss."""
        for optimizer in self._attached():
            self._windows.know(optimizer)
        batch, windows, masks = self._batch, self._windows, self._masks
        if not weight:
            masks.put(batch, weighed)

        def begins(gradient: torch.Tensor) -> None:
            backward = torch._C._current_graph_task_id()
            if weight:
                masks.unmasked(backward)
            else:
                masks.masked(batch, backward)
            windows.add(batch, weight, kind, backward)

        weighed.register_hook(begins)  # type: ignore[no-untyped-call]

    def scale(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make means over ranks of weighed losses' gradients the mean over all that was weighed.

        Every rank calls it, with the same optimizers: they add up what they have weighed.
        """
        self._notice_discarded()
        if self._in_parts:
            self._weighs_padding(True)  # on behalf of the last ranks of a pipeline, which alone weigh
        if self._peers is None:
            found = self._found(optimizers)
            for window, parameters in found:
                _check_kinds(len(window.kinds))
                _multiply(parameters, 1, window.total)
        else:
            self._scale_together(self._peers, optimizers)
        self._windows.scaled(optimizers)

    @property
    def _in_parts(self) -> bool:
        return self._peers is not None and self._peers.parts is not None

    def _found(
        self, optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> list[tuple[GradientWindow, list[nn.Parameter]]]:
        if self._own and not self._weighed and not self._in_parts:  # the last of a pipeline weighs
            raise InvalidArgument(
                "scale_gradients() needs weighed losses: backpropagate loader.weigh(loss), not the loss "
                "itself"
            )
        return self._windows.of(optimizers)

    def _scale_together(self, peers: Peers, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        try:
            found = self._found(optimizers)
        except InvalidArgument:
            peers.vote(Ballot(doing=Doing.SCALE, failed=1)).wait()
            raise
        for window, parameters in found:
            ballot = Ballot(
                doing=Doing.SCALE,
                by_records=int("records" in window.kinds),
                by_count=int("count" in window.kinds),
                weighs=int(self._weighs),
                weight=window.total,
            )
            count = peers.vote(ballot).wait()
            count.check()
            _check_kinds(bool(count.by_records) + bool(count.by_count))
            # Ranks that hold one model in parts weigh its loss as often as there are such that have it.
            _multiply(parameters, peers.size if peers.parts is None else count.weighs, count.weight)


def _checked(count: float | torch.Tensor) -> float:
    if isinstance(count, torch.Tensor) and count.numel() != 1:
        raise InvalidArgument(
            f"count is one number for the batch, not a tensor of shape {tuple(count.shape)}"
        )
    number = float(count)
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"count is what the loss was divided by, 0 or more, not {number}")
    return number


def _check_kinds(kinds: int) -> None:
    if kinds > 1:
        raise InvalidArgument(
            "some batches since the gradients were last scaled were weighed by their records, others by "
            "weigh(loss, count=…): these are different means. Give a count always, or never"
        )


def _multiply(parameters: Iterable[nn.Parameter], ranks: int, total: float) -> None:
    if total:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(ranks / total)


# Padding ----------------------------------------------------------------------------------------------


class PaddingBatch:
    """Keeps a copy of the first batch, and gives out copies of that: loops may change batches in place."""

    def __init__(self) -> None:
        self._batch: Any = None
        self.made = False  # whether there is one

    def keep(self, batch: Any) -> None:
        """Make one of this batch, unless there is one."""
        if not self.made:
            self._batch, self.made = copy.deepcopy(batch), True

    def batch(self) -> Any:
        """A batch to step on."""
        return copy.deepcopy(self._batch)


class Statistics:
    """Running statistics of batch norms, which a padding batch must not change.

    They are put back after its forward passes, not kept from changing in them: hooks of modules do not run in
    what `torch.compile` has made of them.
    """

    def __init__(self) -> None:
        self._norms: list[nn.Module] = []
        self._kept: list[tuple[nn.Module, str, torch.Tensor]] = []

    def watch(self, model: nn.Module) -> None:
        """Take those of `model` along. Raises InvalidArgument for layers that mix ranks."""
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        if any(isinstance(module, nn.SyncBatchNorm) for module in norms):
            raise InvalidArgument(
                "SyncBatchNorm takes padding batches into the statistics, and the gradients, of all ranks: "
                "use BatchNorm, which keeps to its rank, or a norm without batches, such as GroupNorm"
            )
        known = {id(module) for module in self._norms}
        self._norms += [norm for norm in norms if id(norm) not in known]

    def keep(self) -> None:
        """A padding batch goes to the loop."""
        self._kept = [
            (norm, name, buffer.clone()) for norm in self._norms for name, buffer in norm.named_buffers()
        ]

    def put_back(self) -> None:
        """Its forward passes are over; there may be more of them."""
        for norm, name, value in self._kept:
            # Through `data`: a backward pass that is still to come does not need what is overwritten.
            getattr(norm, name).data.copy_(value)

    def let_go(self) -> None:
        """The batch is over."""
        self.put_back()
        self._kept = []
