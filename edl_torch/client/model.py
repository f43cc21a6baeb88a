"""Samples of a session's model, from which the audit shows afterwards whether several trainers had one.

The model is the parameters of the attached optimizers. A sample has values at places that their shapes alone
decide, so that replicas look at the same ones, and weighted sums over all values, in which the few places
show that a sparse model has learnt. Ranks that hold shards see the places in their own. torch is imported
when the first sample is taken, and nothing here communicates with other ranks.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edl_torch.trainer.facts import ModelSeen

if TYPE_CHECKING:
    import torch

PLACES = 256  # of all parameters together, and as many sums at most
_COLUMNS = 1024

Floats = npt.NDArray[np.float32]


class Model:
    """What a session's attached optimizers train.

    `steps` counts theirs since the session began, or went back to a token. `word` is the user's, on why
    trainers whose parameters differ have one model all the same.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.word = ""
        self.is_due = True  # it is looked at before the next step
        self._number = 0
        self._known: list[weakref.ref[Any]] = []  # its parameters when it was last looked at
        self._is_trained = False  # it has stepped
        self._places: tuple[object, _Places] | None = None

    def __repr__(self) -> str:
        return f"<Model {self._number} steps={self.steps}>"

    def stepped(self) -> bool:
        """Note a step of an attached optimizer. Returns whether to look at the model: seldom, and ever less
        often."""
        self.steps += 1
        self._is_trained = True
        return not self.steps & (self.steps - 1)

    def restored(self) -> None:
        """Note that the data went back to a token: another model may be loaded, and steps count anew."""
        self.steps = 0
        self.is_due = True
        self._known, self._number, self._is_trained = [], 0, False

    def look(self, at: str, optimizers: Iterable[Any]) -> ModelSeen | None:
        """Return what the parameters of these optimizers are now; None where there is nothing to look at."""
        import torch

        # The hook of a compiled step is compiled, with all that it calls.
        look: Any = torch.compiler.disable(self._look)  # type: ignore[no-untyped-call]
        return look(at, optimizers)  # type: ignore[no-any-return]

    def _look(self, at: str, optimizers: Iterable[Any]) -> ModelSeen | None:
        parameters = _parameters(optimizers)
        if not parameters and not self.word:
            return None
        self.is_due = self.is_due and at != "begin"
        self._recognise(parameters)
        shapes = tuple((tuple(p.shape), str(p.dtype), str(p.device)) for p in parameters)
        if self._places is None or self._places[0] != shapes:
            self._places = shapes, _Places(parameters)
        places = self._places[1]
        values, sums = places.look(parameters)
        return ModelSeen(
            at=at,
            steps=self.steps,
            number=self._number,
            shape=places.digest,
            sharded=places.sharded,
            eps=places.eps,
            values=values.astype("<f4").tobytes(),
            sums=sums.astype("<f4").tobytes(),
            word=self.word,
        )

    def _recognise(self, parameters: Sequence[Any]) -> None:
        """Count another model where none of the parameters of the one that was trained is among these."""
        known = {id(p) for reference in self._known if (p := reference()) is not None}
        if self._known and not any(id(parameter) in known for parameter in parameters):
            self._number += self._is_trained
            self._is_trained = False
        self._known = [weakref.ref(parameter) for parameter in parameters]


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
    return [parameter for parameter in found.values() if parameter.device.type != "meta"]


class _Places:
    """Where parameters of some shapes are looked at."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        import torch

        self._torch = torch
        shapes = [tuple(_whole(parameter)) for parameter in parameters]
        self._opaque = {n for n, parameter in enumerate(parameters) if _is_opaque(parameter)}
        self.sharded = bool(self._opaque) or any(_is_in_parts(parameter) for parameter in parameters)
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

    def look(self, parameters: Sequence[torch.Tensor]) -> tuple[Floats, Floats]:
        """Return the values at the places, NaN for those of other ranks' shards; and sums, none of shards."""
        values = np.full(self._size, np.nan, dtype=np.float32)
        found: dict[object, list[tuple[npt.NDArray[np.int64], torch.Tensor]]] = {}
        with self._torch.no_grad():
            for number, numbers, index in self._picks:
                tensor = _local(parameters[number])
                picked = _real(tensor[index] if index else tensor.reshape(1))
                found.setdefault(picked.device, []).append((numbers, picked.reshape(-1)))
            for parts in found.values():
                together = self._torch.cat([picked for _, picked in parts]).cpu().numpy()
                # NaN says that a place is not here: a parameter that is NaN becomes the largest number.
                numbers = np.concatenate([numbers for numbers, _ in parts])
                values[numbers] = np.nan_to_num(together, nan=float(np.finfo(np.float32).max))
            sums = [] if self.sharded else [self._sum(parameter) for parameter in parameters]
        totals = np.zeros(min(len(sums), PLACES), dtype=np.float32)
        for device in {total.device for total in sums}:
            here = [number for number, total in enumerate(sums) if total.device == device]
            found_here = self._torch.stack([sums[number] for number in here]).cpu().numpy()
            np.add.at(totals, np.array(here) % PLACES, np.nan_to_num(found_here))
        return values, totals

    def _sum(self, parameter: torch.Tensor) -> torch.Tensor:
        """A sum of all values, each weighted by its place, without a copy of them."""
        flat = parameter.detach().reshape(-1)
        rows = flat.numel() // _COLUMNS
        table, rest = flat[: rows * _COLUMNS].view(rows, _COLUMNS), _real(flat[rows * _COLUMNS :])
        total = rest @ self._weighing(rest)
        if rows:
            kind = self._torch.float32 if table.dtype.is_floating_point else None
            down, across = _real(table.sum(0, dtype=kind)), _real(table.sum(1, dtype=kind))
            total = total + down @ self._weighing(down) + across @ self._weighing(across)
        return total

    def _weighing(self, like: torch.Tensor) -> torch.Tensor:
        """Weights between 0.5 and 1.5, which any trainer finds the same."""
        device, length = like.device, like.numel()
        known = self._weights.get(device)
        if known is None or known.numel() < length:
            numbers = np.random.default_rng(0).random(max(length, _COLUMNS), dtype=np.float32)
            known = self._weights[device] = self._torch.as_tensor(numbers + np.float32(0.5), device=device)
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
    return (tensor.real if tensor.dtype.is_complex else tensor).float()


# Shards -------------------------------------------------------------------------------------------------


def _whole(parameter: Any) -> Sequence[int]:
    """The shape of a parameter over all ranks, as far as it says."""
    return _local(parameter).shape if _is_opaque(parameter) else parameter.shape  # type: ignore[no-any-return]


def _local(parameter: Any) -> Any:
    """The part of a parameter that this rank has, which is all of it where it is not sharded."""
    shard = getattr(parameter, "ds_tensor", None)  # of DeepSpeed's third stage
    if shard is not None:
        return shard
    parameter = parameter.detach()
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _is_opaque(parameter: Any) -> bool:
    """Whether a parameter is a part of something, and does not say which: FSDP1's and DeepSpeed's."""
    flat = getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False)
    return bool(flat) or hasattr(parameter, "ds_tensor")


def _is_in_parts(parameter: Any) -> bool:
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def _offsets(parameter: Any) -> Sequence[int] | None:
    """Where this rank's part of a parameter begins; None where that cannot be told."""
    if not _is_in_parts(parameter):
        return [0] * parameter.dim()
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
