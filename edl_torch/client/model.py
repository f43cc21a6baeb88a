"""Samples of a session's model, from which the audit shows afterwards whether several trainers had one.

The model is the parameters of the attached optimizers. A sample has values at places that their shapes alone
decide, so that replicas look at the same ones, and weighted sums over all values, in which the few places
show that a sparse model has learnt. Ranks that hold shards see the places in their own, and no sums. torch is
imported when the first sample is taken, and nothing here communicates with other ranks.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import platform
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edl_torch.trainer.vocabulary import ModelSeen

if TYPE_CHECKING:
    import torch

PLACES = 256  # of all parameters together, and as many sums at most
_COLUMNS = 1024
_ADDING = 1e-12  # of a sum in 64 bits, of any dtype: of 10**8 values 4e-15 by the number of threads
_KEPT = 2  # parameters whose values are compared between steps

_GONE = -1, -1, None  # in the place of what a parameter has that exists no more
_UNSEEN = ""  # the shape of a model that cannot be looked at

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

log = logging.getLogger("edl_torch.audit")


class Model:
    """What a session's attached optimizers train.

    `steps` counts theirs since the session began, or went back to a token. `word` is the user's, on why
    trainers whose parameters differ have one model all the same.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.word = ""
        self.is_due = True  # it is looked at before the next step
        self.doubts: set[str] = set()  # what was written down in this lineage
        self._kept: dict[int, _Kept] = {}  # by the optimizer's number
        self._left: ModelSeen | None = None  # all that a step has left, where that was looked at
        self._number = 0
        self._known: list[
            weakref.ref[Any]
        ] = []  # its parameters, also those that only earlier optimizers had
        self._is_trained = False  # it has stepped
        self._went_on = False  # by steps of another loader's optimizer, since the last one
        self._places: tuple[object, _Places] | None = None

    def __repr__(self) -> str:
        return f"<Model {self._number} steps={self.steps}>"

    def stepped(self) -> bool:
        """Note a step of an attached optimizer. Returns whether to look at the model: seldom, and ever less
        often."""
        self.steps += 1
        self._is_trained, self._went_on = True, False
        return not self.steps & (self.steps - 1)

    def changed(self, word: str = "") -> None:
        """Note that the model may be another one, or that the user says why it is one."""
        self.is_due, self.word = True, word or self.word

    def restored(self) -> None:
        """Note that the data went back to a token: another model may be loaded, and steps count anew."""
        self.steps = 0
        self.is_due = True
        self.doubts.clear()
        for kept in self._kept.values():
            kept.forget()
        self._left = None
        self._number, self._is_trained, self._went_on = 0, False, False

    # Writes between steps ---------------------------------------------------------------------------------

    def watch(self, number: int, parameters: Sequence[Any]) -> None:
        """Watch parameters of an optimizer, in the place of those that are no more."""
        self._kept = {other: kept for other, kept in self._kept.items() if kept.is_alive}
        self._kept[number] = _Kept(parameters)

    def step_begins(self, number: int) -> None:
        """Note what an optimizer is about to step on."""
        if number in self._kept:
            self._kept[number].begin()

    def step_ended(
        self, number: int, optimizer: Any, attached: Collection[int], *, trains: bool
    ) -> bool | None:
        """Note what a step has left. Returns whether it has moved any parameter; None where that is not seen.

        What it shares with another optimizer that one's next step notes anew, if it is attached still.
        """
        shared = self._shared(optimizer) if len(self._kept) > 1 else {}
        for other in shared.keys() - {number}:
            self._kept[other].forget()
            if other not in attached:
                del self._kept[other]
        return self._kept[number].keep() if trains and number in self._kept else None

    def left_out_the_first(self, number: int) -> bool:
        """Note that a step of an optimizer was to train. Returns whether it has left out its first ones."""
        return number in self._kept and self._kept[number].trained()

    def stepped_elsewhere(self, optimizer: Any, *, in_this_thread: bool) -> None:
        """Note a step of an optimizer of another loader. One of another thread may go on writing."""
        self._left = None
        its = {id(parameter) for parameter in _parameters([optimizer])}
        self._went_on |= any(id(reference()) in its for reference in self._known)
        for kept in self._shared(optimizer).values():
            if in_this_thread:
                kept.keep()
            else:
                kept.forget()

    def was_written(self, optimizer: Any = None) -> bool:
        """Whether something wrote parameters since the last step; of those of one optimizer, or of all. It is
        said once."""
        looked_at = self._kept if optimizer is None else self._shared(optimizer)
        written = [kept for kept in looked_at.values() if kept.was_written()]
        for kept in written:
            kept.forget()
        return bool(written)

    @property
    def was_seen(self) -> bool:
        """Whether all that a step has left was looked at, and not compared since."""
        return self._left is not None

    def is_another(self, optimizers: Iterable[Any]) -> bool:
        """Whether it is not what the last step left: some of it replaced, or written where all was looked at.

        Sums may differ by the order of adding.
        """
        if self.is_due:  # what was loaded between passes has its own samples
            return self.was_replaced(optimizers)
        left, self._left = self._left, None
        if left is None or left.steps != self.steps:
            return False
        now = self.look("begin", optimizers)
        if now is None or (now.number, now.shape) != (left.number, left.shape):
            return False
        sums, others = (np.frombuffer(seen.sums, dtype="<f8") for seen in (left, now))
        return left.values != now.values or not np.allclose(sums, others, rtol=_ADDING, atol=0.0)

    def _shared(self, optimizer: Any) -> dict[int, _Kept]:
        """What is watched of this optimizer's parameters, also for others."""
        parameters = _parameters([optimizer])
        return {number: kept for number, kept in self._kept.items() if kept.shares(parameters)}

    @property
    def has_others_in_place(self) -> bool:
        """Whether parameters are now other than the last step left them."""
        return any(kept.was_written() for kept in self._kept.values())

    def was_replaced(self, optimizers: Iterable[Any]) -> bool:
        """Whether some trained parameters are no more, and these optimizers have others of them: a layer was
        put in the place of one that had learnt."""
        known = [reference() for reference in self._known] if self._is_trained else []
        mine = {id(parameter) for parameter in _parameters(optimizers)} if None in known else ()
        return any(id(parameter) in mine for parameter in known)

    def look(self, at: str, optimizers: Iterable[Any]) -> ModelSeen | None:
        """Return what the parameters of these optimizers are now; None where there is nothing to look at, and
        `at` is no doubt: those may be gone whose parameters were written.

        Where another loader's steps have gone on with it, that is no change between passes.
        """
        parameters = _parameters(optimizers)
        if not parameters and not self.word and at not in self.doubts:
            return None
        self.is_due = self.is_due and at != "begin"
        if parameters:
            parameters = self._with_earlier(parameters)
        shapes = tuple((tuple(p.shape), str(p.dtype), str(p.device)) for p in parameters)
        shape, sharded, eps, values, sums = _UNSEEN, False, 0.0, b"", b""
        try:
            if self._places is None or self._places[0] != shapes:
                self._places = shapes, _Places(parameters)
            places = self._places[1]
            seen, totals = places.look(parameters)
        except (RuntimeError, TypeError, ValueError) as exc:
            # A kind of tensor that torch cannot index or add up must not end a job: it shows nothing.
            log.warning(
                "the model cannot be looked at, so the audit cannot compare it: %s",
                str(exc).partition("\n")[0],
            )
        else:
            shape, sharded, eps = places.digest, places.sharded, places.eps
            values, sums = seen.astype("<f4").tobytes(), totals.astype("<f8").tobytes()
        found = ModelSeen(
            at="step" if self._went_on and self.steps and at in ("begin", "end") else at,
            steps=self.steps,
            number=self._number,
            shape=shape,
            sharded=sharded,
            eps=eps,
            processor=_processor(parameters),
            values=values,
            sums=sums,
            word=self.word,
        )
        if at == "step":
            self._left = found
        return found

    def _with_earlier(self, parameters: list[Any]) -> list[Any]:
        """Return these parameters, and those that earlier optimizers have trained: a layer that is frozen now
        is of the model. Counts another model where none of the parameters that were trained is among these.
        """
        known = {id(p): p for reference in self._known if (p := reference()) is not None}
        mine = {id(parameter): parameter for parameter in parameters}
        if self._known and known.keys().isdisjoint(mine):
            self._number += self._is_trained
            self._is_trained = False
            known = {}
        # In the order of an optimizer that has all of them
        every = [*(known | mine if mine.keys() <= known.keys() else mine | known).values()]
        self._known = [weakref.ref(parameter) for parameter in every]
        return every


class _Kept:
    """Values of some parameters as a step has left them, which nothing but the next one should change.

    In this machine's memory the values are compared, so that what was put back is no change, and what torch
    does not count (`.data`) is one; elsewhere what torch counts is. Of a parameter in shards it is this
    rank's.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        kept = some([one for one in parameters if has_place(one) and not _wraps_others(one)], _KEPT)
        self._parameters = [weakref.ref(parameter) for parameter in kept]
        self._places = [-1] * len(kept)
        self._views: list[npt.NDArray[Any] | None] = [None] * len(kept)
        self._left: list[tuple[int, int, bytes | None]] | None = None
        self._had_gradient = False  # the first one, before the step
        self._is_counted = False  # whether torch has counted a step's writes
        self._is_idle = False  # the last step has written nothing, and none before it that torch has counted
        self._was_idle = False  # so it was after a step that was to train

    def shares(self, parameters: Sequence[Any]) -> bool:
        """Whether some of these are among its own."""
        mine = {id(parameter) for reference in self._parameters if (parameter := reference()) is not None}
        return any(id(parameter) in mine for parameter in parameters)

    @property
    def is_alive(self) -> bool:
        """Whether some of its parameters still exist."""
        return any(reference() is not None for reference in self._parameters)

    def begin(self) -> None:
        """Note the values before a step, where they are not those that the last one left."""
        if self._left is None:
            self._left = self._now()
        first = self._parameters[0]() if self._parameters else None
        self._had_gradient = first is not None and first.grad is not None

    def keep(self) -> bool | None:
        """Note the values: a step has ended. Returns whether it has moved any by a gradient; None where that
        is not seen.

        torch must have counted what a step before has written: it does not count fused steps, nor `.data`.
        Values do not tell, as a rate may be 0, or too small for bfloat16.
        """
        before, self._left, self._is_idle = self._left, self._now(), False
        if not before:
            return None
        moved = before[0][0] != self._left[0][0]  # the first alone, as a rule: a batch waits for it
        if moved or any(one[0] != other[0] for one, other in zip(before, self._left, strict=True)):
            self._is_counted = True
            return self._had_gradient or None
        if any(getattr(reference(), "grad", None) is None for reference in self._parameters):
            return None
        self._is_idle = not self._is_counted and before == self._left and all(one[2] for one in before)
        return False if self._is_counted else None

    def trained(self) -> bool:
        """Note that the step was to train. Returns whether the first ones were none, which a step that torch
        counts shows."""
        self._was_idle |= self._is_idle
        return self._was_idle and self._is_counted

    def forget(self) -> None:
        """Let the parameters change."""
        self._left = None

    def was_written(self) -> bool:
        """Whether a parameter was written since, and not put back."""
        if self._left is None or self._left == (now := self._now()):
            return False
        written = any(
            one[2] != other[2] if one[2] is not None and other[2] is not None else one != other
            for one, other in zip(self._left, now, strict=True)
            if other != _GONE
        )
        if not written:
            self._left = now  # the next step adds to these counts
        return written

    def _now(self) -> list[tuple[int, int, bytes | None]]:
        """Of each parameter torch's count of writes, its place, and values."""
        found: list[tuple[int, int, bytes | None]] = []
        for number, reference in enumerate(self._parameters):
            parameter = reference()
            if parameter is None:
                self._places[number], self._views[number] = -1, None
                found.append(_GONE)
                continue
            local = _here(parameter)
            place = local.data_ptr()
            if place != self._places[number]:
                self._places[number], self._views[number] = place, _view(local)
            view = self._views[number]
            found.append((local._version, place, None if view is None else view.tobytes()))
        return found


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that `torch.compile` leaves alone, with all that it calls, where it compiles a step; and
    of which pickle does not warn, that a tensor is saved without it."""
    import torch
    from torch.utils.hooks import unserializable_hook

    return unserializable_hook(torch.compiler.disable(hook))  # type: ignore[no-untyped-call, no-any-return]


@functools.cache
def is_uncompiled(module: str) -> bool:
    """Have `torch.compile` leave the functions of a module alone, where it can be told so. Returns whether.

    `uncompiled` makes each call 1 µs longer, which is as much as torch takes to call a hook.
    """
    from torch._dynamo import trace_rules

    leave_alone = getattr(trace_rules, "add", None)
    if leave_alone is not None:
        leave_alone(module)
    return leave_alone is not None


def some(parameters: list[Any], most: int) -> list[Any]:
    """Return some of a model's parameters, from its first to its last: heads and experts take turns, and what
    lies before them learns from each batch."""
    last, count = len(parameters) - 1, min(most, len(parameters))
    return [parameters[number * last // max(1, count - 1)] for number in range(count)]


def has_place(parameter: Any) -> bool:
    """Whether a parameter has values in one piece of memory, as sparse and lazy ones have not."""
    return not _is_empty(parameter) and str(parameter.layout) == "torch.strided"


def _here(parameter: Any) -> Any:
    """The shard of a parameter that this rank has, or the parameter. `to_local` takes 100 times as long."""
    return getattr(parameter, "_local_tensor", parameter)


def _wraps_others(parameter: Any) -> bool:
    """Whether a parameter has no memory of its own here, as one in 8 bits beside its scales."""
    return hasattr(_here(parameter), "__tensor_flatten__")


def _view(parameter: Any) -> npt.NDArray[Any] | None:
    """Return a view of some values of a parameter, which follows what is written there."""
    if parameter.device.type != "cpu" or not parameter.numel():
        return None
    import torch

    strides = parameter.stride()
    # In the order of its memory, which `channels_last` does not say first to last
    tensor = parameter.detach().permute(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    if not tensor.is_contiguous():
        return None
    values: npt.NDArray[Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return values.view(f"V{parameter.element_size()}")[:: -(-parameter.numel() // PLACES)]


def _parameters(optimizers: Iterable[Any]) -> list[Any]:
    """Return the parameters of optimizers, of engines of DeepSpeed's those of the module, each once."""
    found: dict[int, Any] = {}
    for optimizer in optimizers:
        module = getattr(optimizer, "module", None)
        if module is not None and hasattr(module, "parameters"):
            found |= {id(parameter): parameter for parameter in module.parameters()}
        else:
            groups = getattr(optimizer, "param_groups", ())
            found |= {id(parameter): parameter for group in groups for parameter in group["params"]}
    return [parameter for parameter in found.values() if not _is_empty(parameter)]


def _is_empty(parameter: Any) -> bool:
    """Whether a parameter has no values yet, as a lazy module's before its first batch."""
    from torch.nn.parameter import is_lazy

    return is_lazy(parameter) or parameter.device.type == "meta"


def _processor(parameters: Sequence[Any]) -> str:
    """What computes: two that are equal here get equal bits from equal parameters and gradients."""
    import torch

    found = {"cuda": set[str](), "cpu": set[str]()}
    for device in {parameter.device for parameter in parameters}:
        if device.type == "cuda":
            found["cuda"].add(torch.cuda.get_device_name(device))
        else:
            found["cpu"].add(device.type)
    capability = torch.backends.cpu.get_cpu_capability()
    names = [*sorted(found["cuda"]), *sorted(found["cpu"])]
    return " ".join([*names, platform.machine(), capability, str(torch.get_num_threads()), torch.__version__])


class _Places:
    """Where parameters of some shapes are looked at."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        import torch

        self._torch = torch
        shapes = [tuple(_whole(parameter)) for parameter in parameters]
        self._opaque = {n for n, parameter in enumerate(parameters) if _is_opaque(parameter)}
        self._sharded = self._opaque | {n for n, one in enumerate(parameters) if _is_in_parts(one)}
        self.sharded = bool(self._sharded)
        said = repr(shapes) + (_rank() if self._opaque else "")
        self.digest = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        floating = [p.dtype for p in parameters if p.dtype.is_floating_point or p.dtype.is_complex]
        self.eps = max((torch.finfo(dtype).eps for dtype in floating), default=0.0)
        self._at = _choose([math.prod(shape) for shape in shapes], self.digest)
        # For each parameter that is looked at: the numbers of its values among all, and where they are.
        self._picks: list[tuple[int, npt.NDArray[np.int64], tuple[torch.Tensor, ...]]] = []
        first = 0
        for number, flat in self._at:
            numbers = np.arange(first, first + len(flat))
            first += len(flat)
            where = np.array(np.unravel_index(flat, shapes[number])).reshape(len(shapes[number]), len(flat))
            parameter = parameters[number]
            if number not in self._opaque:
                offsets = _offsets(parameter)
                if offsets is None:
                    continue
                where = where - np.array(offsets, dtype=np.int64).reshape(-1, 1)
                local = np.array(_local(parameter).shape, dtype=np.int64).reshape(-1, 1)
                here = ((where >= 0) & (where < local)).all(axis=0)
                numbers, where = numbers[here], where[:, here]
            if len(numbers):
                device = _local(parameter).device
                index = tuple(torch.as_tensor(axis, device=device) for axis in where)
                self._picks.append((number, numbers, index))
        self._size = first
        self._weights: dict[object, torch.Tensor] = {}

    def look(self, parameters: Sequence[torch.Tensor]) -> tuple[Floats, Doubles]:
        """Return the values at the places, NaN for those of other ranks' shards; and sums, 0 of shards."""
        values = np.full(self._size, np.nan, dtype=np.float32)
        found: dict[object, list[tuple[npt.NDArray[np.int64], torch.Tensor]]] = {}
        with self._torch.no_grad():
            for number, numbers, index in self._picks:
                tensor = _local(parameters[number])
                picked = _real(tensor[index])
                found.setdefault(picked.device, []).append((numbers, picked.reshape(-1)))
            for parts in found.values():
                together = self._torch.cat([picked for _, picked in parts]).float().cpu().numpy()
                # NaN says that a place is not here: a parameter that is NaN becomes the largest number.
                numbers = np.concatenate([numbers for numbers, _ in parts])
                values[numbers] = np.nan_to_num(together, nan=float(np.finfo(np.float32).max))
            sums = {n: self._sum(parameters[n]) for n in range(len(parameters)) if n not in self._sharded}
        totals = np.zeros(min(len(parameters), PLACES), dtype=np.float64)
        for device in {total.device for total in sums.values()}:
            here = [number for number, total in sums.items() if total.device == device]
            found_here = self._torch.stack([sums[number] for number in here]).cpu().numpy()
            np.add.at(totals, np.array(here) % PLACES, np.nan_to_num(found_here))
        return values, totals

    def _sum(self, parameter: torch.Tensor) -> torch.Tensor:
        """A sum of all values, each weighted by its place, without a copy of them."""
        flat = _local(parameter).reshape(-1)
        rows = flat.numel() // _COLUMNS
        # In twice the precision, so that the order of adding, which threads decide, is not seen.
        precise = self._torch.float32 if flat.device.type == "mps" else self._torch.float64
        table, rest = flat[: rows * _COLUMNS].view(rows, _COLUMNS), _real(flat[rows * _COLUMNS :]).to(precise)
        total = rest @ self._weighing(rest)
        if rows:
            kind = precise if table.dtype.is_floating_point else None
            down, across = (_real(table.sum(axis, dtype=kind)).to(precise) for axis in (0, 1))
            total = total + down @ self._weighing(down) + across @ self._weighing(across)
        return total

    def _weighing(self, like: torch.Tensor) -> torch.Tensor:
        """Weights between 0.5 and 1.5, which any trainer finds the same."""
        device, length = like.device, like.numel()
        known = self._weights.get(device)
        if known is None or known.numel() < length:
            numbers = np.random.default_rng(0).random(max(length, _COLUMNS)) + 0.5
            known = self._torch.as_tensor(numbers, dtype=like.dtype, device=device)
            self._weights[device] = known
        return known[:length]


def _choose(sizes: Sequence[int], seed: str) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return numbers of tensors, and places in each of them: PLACES at most, spread over all tensors."""
    tensors = [number for number, size in enumerate(sizes) if size]
    if len(tensors) > PLACES:
        tensors = [tensors[n * len(tensors) // PLACES] for n in range(PLACES)]
    shares, left = {}, PLACES
    for done, number in enumerate(sorted(tensors, key=lambda number: sizes[number])):
        shares[number] = min(sizes[number], left // (len(tensors) - done))
        left -= shares[number]
    chosen = []
    for number in tensors:
        share, size = shares[number], sizes[number]
        noise = hashlib.shake_128(f"{seed} {number}".encode()).digest(4 * share)
        inside = np.frombuffer(noise, dtype="<u4") / 2**32
        chosen.append((number, ((np.arange(share) + inside) * size / share).astype(np.int64)))
    return chosen


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.real if tensor.dtype.is_complex else tensor
    return tensor if tensor.dtype.itemsize > 1 else tensor.float()


# Shards -------------------------------------------------------------------------------------------------


def _whole(parameter: Any) -> Sequence[int]:
    """The shape of a parameter over all ranks, as far as it says."""
    return (_local(parameter).shape if _is_opaque(parameter) else parameter.shape) or (1,)


def _local(parameter: Any) -> Any:
    """The part of a parameter that this rank has, which is all of it where it is not sharded."""
    shard = getattr(parameter, "ds_tensor", None)  # of DeepSpeed's third stage
    if shard is not None:
        return shard
    parameter = parameter.detach()
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local if local.dim() else local.reshape(1)


def _is_opaque(parameter: Any) -> bool:
    """Whether a parameter is a part of something, and does not say which: FSDP1's and DeepSpeed's."""
    flat = getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)
    return bool(flat) or hasattr(parameter, "ds_tensor")


def _is_in_parts(parameter: Any) -> bool:
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def _offsets(parameter: Any) -> Sequence[int] | None:
    """Where this rank's part of a parameter begins; None where that cannot be told."""
    if not _is_in_parts(parameter):
        return [0] * len(_whole(parameter))
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # torch 2.4
        return None
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(offsets)


def _rank() -> str:
    from torch import distributed

    return f" of rank {distributed.get_rank()} of {distributed.get_world_size()}"
