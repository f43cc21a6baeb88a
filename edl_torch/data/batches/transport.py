"""Memory of batches, and how a batch travels from a loader worker to the loop.

Memory is used again when nobody holds it: new memory costs a page fault for every 4 kB. It is lent to whoever
holds a tensor over it, in this process, or in the training loop's where a loader worker has made the batch.

Small tensors travel in the message itself. torch gives each tensor a shared-memory file and hands its
descriptor over a socket, which costs more than to copy what is smaller than some 1 MB. Larger and unusual
tensors are left to torch. Two small tensors over one storage arrive as two, with the same values. Nothing
here knows what a batch is: an envelope carries any, with its ticket, and never looks inside.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from edl_torch.data.reading.sample_reading import ReadingTimes, Times
from edl_torch.data.reading.seeding import Generators
from edl_torch.errors import AccountingError
from edl_torch.trainer.vocabulary import Tally, Ticket

# Memory -------------------------------------------------------------------------------------------------


_KEPT = 8  # segments that are not held in the process that made them
_MARKS = 64  # bytes at the end of a shared segment: as often it may be on its way or held elsewhere

Bytes = npt.NDArray[np.uint8]


class Segment:
    """The memory of one tensor. Its `content` is lent while `lent` has a tensor over it."""

    is_free = True  # as far as other processes go

    def __init__(self, size: int) -> None:
        self.content: Bytes = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, let_go: Callable[[Segment], object]) -> Any:
        """Return a tensor over it. When the last one is gone `let_go` is called."""
        return _lent(self.content, shape, dtype, let_go, self)


class SharedSegment(Segment):
    """Shared memory, of which other processes are sent tensors: each clears a mark when it needs one no
    more."""

    def __init__(self, size: int) -> None:
        self._storage = torch.UntypedStorage._new_shared(size + _MARKS)  # type: ignore[no-untyped-call]
        memory = _bytes_of(self._storage)
        self.content, self._marks = memory[:size], memory[size:]
        self._marks[:] = 0
        _shared[self.content.ctypes.data] = self

    @property
    def is_free(self) -> bool:  # type: ignore[override]
        """Whether no other process has a tensor over it, or will have."""
        return not self._marks.any()

    def sent(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None:
        """Return how another process gets this tensor; None where it has been sent too often."""
        clear = np.flatnonzero(self._marks == 0)
        if not len(clear):
            return None
        self._marks[clear[0]] = 1
        return _received, (self._storage, int(clear[0]) - _MARKS, tuple(tensor.shape), tensor.dtype)


class BatchMemory:
    """Makes tensors in segments that earlier ones no longer need. Any thread may call it."""

    def __init__(self, make: Callable[[int], Segment] = Segment) -> None:
        self._make = make
        self._kept: deque[Segment] = deque(maxlen=_KEPT)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor to be filled."""
        size = math.prod(shape) * dtype.itemsize
        segment = self._free_one(size) or self._make(size)
        made: torch.Tensor = segment.tensor(shape, dtype, self._kept.append)
        return made

    def _free_one(self, size: int) -> Segment | None:
        """Take a free segment of that size. Where there is none, one of another size goes: sizes change."""
        other = None
        for _ in range(len(self._kept)):
            try:
                segment = self._kept.popleft()
            except IndexError:  # another thread was faster
                break
            if segment.is_free and len(segment.content) == size:
                if other is not None:
                    self._kept.append(other)
                return segment
            if segment.is_free and other is None:
                other = segment
            else:
                self._kept.append(segment)
        return None


def shared_segment(tensor: torch.Tensor) -> SharedSegment | None:
    """The shared segment that a plain tensor begins with, if any."""
    return _shared.get(tensor.data_ptr())


def _lent(
    content: Bytes, shape: tuple[int, ...], dtype: torch.dtype, let_go: Callable[..., object], *arguments: Any
) -> torch.Tensor:
    for _ in range(len(_moved)):
        with suppress(IndexError):  # another thread was faster
            _left(*_moved.popleft())
    lent = content.view()  # torch holds this array as long as there is a tensor over it
    tensor = torch.from_numpy(lent)
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    weakref.finalize(lent, _left, storage, let_go, arguments).atexit = False
    return tensor.view(dtype).view(shape)


def _left(storage: StorageWeakRef, let_go: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Let the memory go if all tensors are gone.

    Else torch has moved them, to share them with another process: arrays made of them before, and what
    another thread computes, still read it."""
    if storage.expired():  # type: ignore[no-untyped-call]
        let_go(*arguments)
    else:
        _moved.append((storage, let_go, arguments))


def _bytes_of(storage: torch.UntypedStorage) -> Bytes:
    content: Bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return content


def _received(
    storage: torch.UntypedStorage, mark: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    memory = _bytes_of(storage)
    content = memory[: math.prod(shape) * dtype.itemsize]
    return _lent(content, shape, dtype, _clear, memory, mark, _forks)


def _clear(memory: Bytes, mark: int, forks: int) -> None:
    if forks == _forks:
        memory[mark] = 0


def _forked() -> None:
    """What this process holds a child holds too, who knows how long: it is never given back."""
    global _forks
    _forks += 1


_shared: weakref.WeakValueDictionary[int, SharedSegment] = weakref.WeakValueDictionary()  # by address
_moved: deque[tuple[Any, ...]] = deque()  # arguments of `_left`, for when the tensors are gone
_forks = 0
# Between the first and the last of these other threads run: what they let go, or get, the child may have too.
os.register_at_fork(before=_forked, after_in_parent=_forked, after_in_child=_forked)


# Messages -----------------------------------------------------------------------------------------------


IN_MESSAGE_BYTES = 512 << 10


def is_small(nbytes: int) -> bool:
    """Whether a tensor of so many bytes, or a batch of small ones, travels in the message itself."""
    return nbytes <= IN_MESSAGE_BYTES


def packed(batch: Any) -> bytes:
    """The batch as a message to another process of this machine, which `unpacked` reads once."""
    buffer = io.BytesIO()
    _BatchPickler(buffer, 5).dump(batch)
    return buffer.getvalue()


def unpacked(message: bytes) -> Any:
    """The batch; its tensors own their memory, or share it with the sender as torch has it."""
    return pickle.loads(message)


class _BatchPickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        """Called for whatever is no plain Python value; the memo of `pickle` keeps one object one."""
        if isinstance(obj, torch.Tensor) and is_plain(obj):
            segment = shared_segment(obj)
            if segment is not None and (sent := segment.sent(obj)) is not None:
                return sent
            if _is_small_by_itself(obj):
                content = bytearray(obj.reshape(-1).view(torch.uint8).numpy())
                return _tensor, (content, obj.dtype, tuple(obj.shape))
        return NotImplemented


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a copy of its bytes cannot be told from it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided  # first: other layouts have no answer to what follows
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


def new_batch(shape: tuple[int, ...], dtype: torch.dtype, memory: BatchMemory | None = None) -> torch.Tensor:
    """Return a tensor to be filled, in `memory` if given.

    In a loader worker it lies in shared memory, and is sent without a copy.
    """
    if get_worker_info() is not None:
        memory = _of_worker
    return torch.empty(shape, dtype=dtype, device="cpu") if memory is None else memory.tensor(shape, dtype)


def _is_small_by_itself(tensor: torch.Tensor) -> bool:
    """Whether a plain one may travel in a message: it is no part of a storage that others may see."""
    return (
        tensor.nbytes > 0
        and is_small(tensor.nbytes)
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.untyped_storage().is_shared()
    )


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


_of_worker = BatchMemory(SharedSegment)


# With a ticket beside it ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Envelope:
    """A user's batch, the positions that it holds, how many these are, and how long reading took if timed."""

    batch: Any
    ticket: Ticket
    size: int
    times: Times | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (packed(self.batch), self.ticket, self.size, self.times)

    def pin_memory(self, device: Any = None) -> Envelope:
        """What torch's pinning thread calls: the batch is pinned as torch would, the ticket kept."""
        self.batch = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]
        return self


def _opened(message: bytes, ticket: Ticket, size: int, times: Times | None) -> Envelope:
    return Envelope(unpacked(message), ticket, size, times)


@dataclass(slots=True)
class Collated:
    """A batch of `size` samples that was collated where they were read."""

    batch: Any
    size: int


Collate = Callable[[list[Any], Any], Any]  # of samples, and the `Rows` of the batch in which they may lie


@dataclass(slots=True, kw_only=True, eq=False)
class IterationSetup:
    """How an iteration over a dataset yields samples, and what counts them.

    The dataset and its `TicketedCollate` share one, in a loader worker too: torch forks both, or sends both
    in one pickle.

    Attributes:
        columnar: the reader makes the batches.
        list_size: samples in a list; 0 where they come one by one.
        collate: makes batches of lists where they are read, in several threads too; None where the user's own
            function does, in the thread that iterates.
        threads: how many read; 0 where the thread that iterates does.
        ahead: batches that threads may be ahead.
    """

    columnar: bool
    list_size: int
    collate: Collate | None = None
    threads: int = 0
    ahead: int = 0
    generators: Generators = field(default_factory=partial(Generators, after_each=False))
    tally: Tally = field(default_factory=Tally)
    times: ReadingTimes = field(default_factory=ReadingTimes)


class TicketedCollate:
    """The user's `collate_fn`, with the count of drawn positions and their times taken *before* it is called.

    `batched` says that it is called with a list of samples, whose number must agree with the count. The
    generators of random numbers that were lent to the records are put back first.
    """

    def __init__(self, collate: Callable[[Any], Any], setup: IterationSetup, *, batched: bool) -> None:
        self._collate = collate
        self._tally, self._times, self._generators = setup.tally, setup.times, setup.generators
        self._batched = batched

    def __call__(self, samples: Any) -> Envelope:
        if self._generators.lent is not None:  # a call less for each batch
            self._generators.put_back()
        ticket, size = self._tally.take()
        times = self._times.take() if self._times.timing else None
        made = type(samples) is Collated
        count = samples.size if made else len(samples) if self._batched else size
        if size != count:
            raise AccountingError(
                f"a batch of {count} samples was drawn from {size} positions: "
                f"something between ShardedDataset and the loader adds or drops samples; do it in "
                f"`transform` or `collate_fn` instead"
            )
        return Envelope(samples.batch if made else self._collate(samples), ticket, size, times)
