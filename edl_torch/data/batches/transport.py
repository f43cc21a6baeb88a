"""How a batch travels from a loader worker to the loop: small tensors in the message itself.

torch gives each tensor a shared-memory file and hands its descriptor over a socket, which costs more than to
copy what is smaller than some 1 MB. It knows nothing of what a batch is, and leaves larger and unusual
tensors to torch. Two small tensors over one storage arrive as two, with the same values.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import get_worker_info

from edl_torch.data.batches.batch_memory import BatchMemory, SharedSegment, shared_segment

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
