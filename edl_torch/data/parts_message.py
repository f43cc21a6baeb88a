"""Values with tensors, taken apart for ranks that hold other parts of the same model, and put together there.

Large tensors travel as they lie in memory, all else as bytes. Nothing in the bytes is run: they name only
what a batch may hold that one rank lends another.
"""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any, NamedTuple

import torch
from torch.serialization import get_safe_globals

from edl_torch.data.lent_batch import PLAIN
from edl_torch.errors import InvalidArgument

PROTOCOL = 4  # of pickle; 5, from Python 3.14 on the default, names a function for arrays that is not known
IN_STRUCTURE_BYTES = 2 << 10  # a tensor of so much costs less in the bytes than as a message of its own

_KNOWN: list[Any] = [*PLAIN, collections.OrderedDict, torch.Size, torch.device]


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
                f"ranks that hold other parts of the model get the batches of this rank, and this loader's "
                f"cannot be sent: they hold {exc}. Tensors, numpy arrays, numbers, strings, bytes, None, and "
                f"lists, tuples and dicts of them are sent, and classes that every rank gives to "
                f"torch.serialization.add_safe_globals()"
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
