"""Batches on their way to other ranks, as to those that hold other parts of the same model, over gloo.

Large tensors travel as they lie in memory, beside the step that is computed; what else is in a batch goes
ahead of them, as bytes. Nothing in the bytes is run: they name only plain values, and classes that every rank
has declared to be safe. When a batch has been trained on is not known here.
"""

from __future__ import annotations

import codecs
import collections
import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.serialization import get_safe_globals

from edl_torch.client.peers import BroadcastBatch
from edl_torch.data.ranks.gloo import ReliablePair, connect, peers_alive
from edl_torch.errors import InvalidArgument
from edl_torch.shard import Slice

# A value, taken apart and put together ----------------------------------------------------------------

PROTOCOL = 4  # of pickle; 5, from Python 3.14 on the default, names a function for arrays that is not known
IN_STRUCTURE_BYTES = 2 << 10  # a tensor of so much costs less in the bytes than as a message of its own

_KNOWN: list[Any] = [
    *(bytes, set, frozenset, range, slice, codecs.encode),
    *(collections.OrderedDict, torch.Size, torch.device),
    *(np.ndarray, np.dtype),
    *(value.__reduce__()[0] for value in (np.zeros(()), np.float32())),  # what makes arrays and scalars
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]


class _Described(NamedTuple):
    """A tensor without its content, or with it where that is small."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    content: bytes | None


class Packed:
    """A value as `structure`, and `contents`: the large tensors in it, as uint8 tensors of one dimension.

    Raises InvalidArgument for a value with what is not sent.
    """

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(value)
            _Unpickler(io.BytesIO(file.getvalue()), pickler.tensors).load()
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as exc:
            raise InvalidArgument(
                f"other ranks need batches of this rank, for padding or for their parts of the model, and "
                f"this loader's cannot be sent: they hold {exc}. Tensors, numpy arrays, numbers, strings, "
                f"bytes, None, and lists, tuples and dicts of them are sent, and classes that every rank "
                f"gives to torch.serialization.add_safe_globals()"
            ) from exc
        tensors = [(tensor, _content(tensor)) for tensor in pickler.tensors]
        self.contents = [content for _, content in tensors if content.nbytes > IN_STRUCTURE_BYTES]
        described = [tuple(_described(tensor, content)) for tensor, content in tensors]
        self.structure = pickle.dumps(described, PROTOCOL) + file.getvalue()


class Unpacking:
    """A value that comes as the `structure` of a `Packed`; `contents` are to be filled with that one's."""

    def __init__(self, structure: bytes, *, pin_memory: bool) -> None:
        file = io.BytesIO(structure)
        described = [_Described(*row) for row in _Unpickler(file, []).load()]
        self._value = file.read()
        self._tensors = [(each, _tensor(each, pin_memory=pin_memory)) for each in described]
        self.contents = [_content(tensor) for each, tensor in self._tensors if each.content is None]

    def value(self) -> Any:
        """The value; its large tensors are as far filled as `contents` are. One that was on an accelerator is
        copied to this rank's."""
        tensors = [tensor.to(each.device) for each, tensor in self._tensors]
        return _Unpickler(io.BytesIO(self._value), tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor; called for everything. One that is there twice is sent once."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            if not _is_sent(obj):
                raise pickle.PicklingError(f"a {type(obj).__name__} that is no dense tensor of torch's own")
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]

    def find_class(self, module: str, name: str) -> Any:
        """What the bytes may name."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        for known in (*_KNOWN, *get_safe_globals()):
            found, path = known if isinstance(known, tuple) else (known, None)
            if (path or f"{found.__module__}.{found.__qualname__}") == f"{module}.{name}":
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")


def _is_sent(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return type(tensor) is torch.Tensor and is_dense


def _content(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _described(tensor: torch.Tensor, content: torch.Tensor) -> _Described:
    small = content.numpy().tobytes() if content.nbytes <= IN_STRUCTURE_BYTES else None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Described(dtype, tuple(tensor.shape), tensor.device.type, small)


def _tensor(described: _Described, *, pin_memory: bool) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, described.dtype)
    tensor = torch.empty(described.shape, dtype=dtype, device="cpu", pin_memory=pin_memory)
    if described.content:
        _content(tensor).copy_(torch.frombuffer(bytearray(described.content), dtype=torch.uint8))
    return tensor


# On the way -------------------------------------------------------------------------------------------

FRAME_BYTES = 8 << 10  # the first message: most of what is not a large tensor fits into it
_LENGTH = struct.Struct("<q")


def send(pairs: Sequence[ReliablePair], packed: Packed) -> None:
    """Begin to send a value to other ranks; each will say when it has all of it (`ReliablePair.settle`)."""
    message = bytearray(_LENGTH.pack(len(packed.structure)) + packed.structure)
    message += bytes(max(0, FRAME_BYTES - len(message)))
    whole = torch.frombuffer(message, dtype=torch.uint8)
    rest = whole[FRAME_BYTES:]
    with peers_alive():
        for pair in pairs:
            pair.settle()
            pair.send([whole[:FRAME_BYTES]])
            if rest.numel():
                pair.send([rest])
            pair.send(packed.contents)
            pair.expect_answer()


def receive(pair: ReliablePair, *, pin_memory: bool) -> Unpacking:
    """Wait for what another rank sends, but not for its large tensors: these are here when it is settled."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
    with peers_alive():
        pair.settle()
        pair.receive([frame])
        pair.wait()
        message = frame.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(message)
        if (missing := _LENGTH.size + length - FRAME_BYTES) > 0:
            rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
            pair.receive([rest])
            pair.wait()
            message += rest.numpy().tobytes()
        unpacking = Unpacking(message[_LENGTH.size : _LENGTH.size + length], pin_memory=pin_memory)
        pair.receive(unpacking.contents)
        pair.expect_to_answer()
    return unpacking


class ProcessGroupParts:
    """One of the `ranks` that hold one model in parts: the first holds the leases, the others follow it.

    Every one of them makes it, at the same point of its program. Raises PeerFailed where one is missing.
    """

    def __init__(self, ranks: list[int], rank: int, timeout_s: float, *, pin_memory: bool) -> None:
        self.holds = rank == ranks[0]
        self._place = ranks.index(rank)
        self._size = len(ranks)
        self._pin_memory = pin_memory and torch.cuda.is_available()
        gloo = connect(ranks, self._place, timeout_s)
        others = range(1, self._size) if self.holds else range(1)
        self._pairs = [ReliablePair(gloo, other) for other in others]

    def __repr__(self) -> str:
        return f"<ProcessGroupParts {self._place}/{self._size}>"

    def send(self, broadcast: BroadcastBatch) -> Sending:
        """Let the followers have a broadcast, and go on.

        Raises InvalidArgument, with nothing sent, for a batch with what `Packed` refuses.
        """
        slices = [(part.epoch, part.shard, part.skip, part.limit) for part in broadcast.slices]
        send(self._pairs, Packed((broadcast.batch, broadcast.size, slices, broadcast.discarded)))
        return Sending(broadcast, self._pairs)

    def receive(self) -> Receiving:
        """Wait for the holder's next broadcast, but not for the large tensors of its batch."""
        (pair,) = self._pairs
        return Receiving(receive(pair, pin_memory=self._pin_memory), pair)


class Sending:
    """A broadcast on its way to the followers."""

    def __init__(self, broadcast: BroadcastBatch, pairs: Sequence[ReliablePair]) -> None:
        self.broadcast = broadcast
        self._pairs = pairs

    def batch(self) -> Any:
        """The batch, once it has come to the others: the loop may change it."""
        with peers_alive():
            for pair in self._pairs:
                pair.settle()
        return self.broadcast.batch


class Receiving:
    """A broadcast on its way from the holder."""

    def __init__(self, unpacking: Unpacking, pair: ReliablePair) -> None:
        self._unpacking = unpacking
        self._pair = pair
        _, size, rows, discarded = unpacking.value()
        slices = tuple([Slice(epoch=row[0], shard=row[1], skip=row[2], limit=row[3]) for row in rows])
        self.broadcast = BroadcastBatch(size=size, slices=slices, discarded=discarded)

    def batch(self) -> Any:
        """The batch, when it is here."""
        with peers_alive():
            self._pair.settle()
        return self._unpacking.value()[0]
