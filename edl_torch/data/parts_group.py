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
from edl_torch.data.gloo import connect, peers_alive
from edl_torch.data.line import Line
from edl_torch.data.parts_message import Packed, Unpacking
from edl_torch.shard import Slice

FRAME_BYTES = 8 << 10  # the first message: most of what is not a large tensor fits into it
_LENGTH = struct.Struct("<q")


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
        self._lines = [Line(gloo, other) for other in others]

    def __repr__(self) -> str:
        return f"<ProcessGroupParts {self._place}/{self._size}>"

    def send(self, parcel: Parcel) -> Sending:
        """Let the followers have a parcel, and go on.

        Raises InvalidArgument, with nothing sent, for a batch with what `parts_message.Packed` refuses.
        """
        slices = [(part.epoch, part.shard, part.skip, part.limit) for part in parcel.slices]
        packed = Packed((parcel.batch, parcel.size, slices, parcel.discarded))
        message = bytearray(_LENGTH.pack(len(packed.structure)) + packed.structure)
        message += bytes(max(0, FRAME_BYTES - len(message)))
        whole = torch.frombuffer(message, dtype=torch.uint8)
        rest = whole[FRAME_BYTES:]
        with peers_alive():
            for line in self._lines:
                line.settle()
                line.send([whole[:FRAME_BYTES]])
                if rest.numel():
                    line.send([rest])
                line.send(packed.contents)
                line.expect_answer()
        return Sending(parcel, self._lines)

    def receive(self) -> Receiving:
        """Wait for the holder's next parcel, but not for the large tensors of its batch."""
        (line,) = self._lines
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        with peers_alive():
            line.settle()
            line.receive([frame])
            line.wait()
            message = frame.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(message)
            if (missing := _LENGTH.size + length - FRAME_BYTES) > 0:
                rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
                line.receive([rest])
                line.wait()
                message += rest.numpy().tobytes()
            structure = message[_LENGTH.size : _LENGTH.size + length]
            unpacking = Unpacking(structure, pin_memory=self._pin_memory)
            line.receive(unpacking.contents)
            line.expect_to_answer()
        return Receiving(unpacking, line)


class Sending:
    """A parcel on its way to the followers."""

    def __init__(self, parcel: Parcel, lines: Sequence[Line]) -> None:
        self.parcel = parcel
        self._lines = lines

    def batch(self) -> Any:
        """The batch, once it has come to the others: the loop may change it."""
        with peers_alive():
            for line in self._lines:
                line.settle()
        return self.parcel.batch


class Receiving:
    """A parcel on its way from the holder."""

    def __init__(self, unpacking: Unpacking, line: Line) -> None:
        self._unpacking = unpacking
        self._line = line
        _, size, rows, discarded = unpacking.value()
        slices = tuple([Slice(epoch=row[0], shard=row[1], skip=row[2], limit=row[3]) for row in rows])
        self.parcel = Parcel(size=size, slices=slices, discarded=discarded)

    def batch(self) -> Any:
        """The batch, when it is here."""
        with peers_alive():
            self._line.settle()
        return self._unpacking.value()[0]
