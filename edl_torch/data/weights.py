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
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from edl_torch.client.peers import Ballot, Doing, Peers
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


# Windows of gradient accumulation: the batches that are in the gradients of some parameters -------------

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


# Weights ----------------------------------------------------------------------------------------------


class Discards(Protocol):
    """Says how often a batch in hand failed, or was given back."""

    discarded: int


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
        batches: Discards | None = None,
        weighs_padding: Callable[[bool], object] = bool,
    ) -> None:
        self._peers = peers
        self._attached = attached
        self._batches: Any = batches or SimpleNamespace(discarded=0)  # never, where nobody says so
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
