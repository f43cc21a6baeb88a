"""Batches on their way to ranks that hold other parts of the same model, over gloo connections of their own.

Tensors travel as they are, beside the step that is computed; what else is in a batch goes ahead of them. It
must not know when a batch has been trained on.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from edl_torch.client.peers import Parcel
from edl_torch.data.gloo import broadcast, connect, peers_alive
from edl_torch.data.sending import Packed, Unpacking
from edl_torch.shard import Slice

FRAME_BYTES = 8 << 10  # the first message: most of what is not a large tensor fits into it
_LENGTH = struct.Struct("<q")


class ProcessGroupParts:
    """One of the `ranks` that hold one model in parts: the lowest holds the leases, the others follow it.

    Every one of them makes it, at the same point of its program. Raises PeerFailed where one is missing.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float, *, pin_memory: bool) -> None:
        ranks = sorted(ranks)
        self.holds = rank == ranks[0]
        self._place = ranks.index(rank)
        self._size = len(ranks)
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._gloo = connect(ranks, self._place, timeout_s)

    def __repr__(self) -> str:
        return f"<ProcessGroupParts {self._place}/{self._size}>"

    def send(self, parcel: Parcel) -> Sending:
        """Let the followers have a parcel, and go on.

        Raises InvalidArgument, with nothing sent, for a batch with what is not sent; see `sending.Packed`.
        """
        slices = [(part.epoch, part.shard, part.skip, part.limit) for part in parcel.slices]
        packed = Packed((parcel.batch, parcel.size, slices, parcel.taken_out))
        message = bytearray(_LENGTH.pack(len(packed.structure)) + packed.structure)
        message += bytes(max(0, FRAME_BYTES - len(message)))
        whole = torch.frombuffer(message, dtype=torch.uint8)
        parts = [whole[:FRAME_BYTES], whole[FRAME_BYTES:], *packed.contents]
        with peers_alive():
            return Sending(parcel, [broadcast(self._gloo, part, 0) for part in parts if part.numel()])

    def receive(self) -> Receiving:
        """Wait for the holder's next parcel, but not for the large tensors of its batch."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        with peers_alive():
            broadcast(self._gloo, frame, 0).wait()
            message = frame.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(message)
            if (missing := _LENGTH.size + length - FRAME_BYTES) > 0:
                rest = torch.empty(missing, dtype=torch.uint8)
                broadcast(self._gloo, rest, 0).wait()
                message += rest.numpy().tobytes()
            structure = message[_LENGTH.size : _LENGTH.size + length]
            unpacking = Unpacking(structure, pin_memory=self._pin_memory)
            return Receiving(unpacking, [broadcast(self._gloo, part, 0) for part in unpacking.contents])


class Sending:
    """A parcel on its way to the followers."""

    def __init__(self, parcel: Parcel, works: list[Any]) -> None:
        self.parcel = parcel
        self._works = works

    def batch(self) -> Any:
        """The batch, once it has left: the loop may change it."""
        _wait(self._works)
        return self.parcel.batch


class Receiving:
    """A parcel on its way from the holder."""

    def __init__(self, unpacking: Unpacking, works: list[Any]) -> None:
        self._unpacking = unpacking
        self._works = works
        _, size, rows, taken_out = unpacking.value()
        slices = tuple([Slice(epoch=row[0], shard=row[1], skip=row[2], limit=row[3]) for row in rows])
        self.parcel = Parcel(size=size, slices=slices, taken_out=taken_out)

    def batch(self) -> Any:
        """The batch, when it is here."""
        _wait(self._works)
        return self._unpacking.value()[0]


def _wait(works: list[Any]) -> None:
    with peers_alive():
        while works:
            works.pop().wait()
