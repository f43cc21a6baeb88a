"""Batches on their way to ranks that hold other parts of the same model, over gloo connections of their own.

Tensors travel as they are, beside the step that is computed; what else is in a batch goes ahead of them. It
must not know when a batch has been trained on.

gloo does not notice that a rank is gone whose message has come, or left, in part: its wait lasts until its
time is up. A small message that is waited for fails at once. So one follows what is sent, and one comes back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from edl_torch.client.peers import Parcel
from edl_torch.data.gloo import connect, peers_alive
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
        gloo = connect(ranks, self._place, timeout_s)
        others = range(1, self._size) if self.holds else range(1)
        self._lines = [_Line(gloo, other) for other in others]

    def __repr__(self) -> str:
        return f"<ProcessGroupParts {self._place}/{self._size}>"

    def send(self, parcel: Parcel) -> Sending:
        """Let the followers have a parcel, and go on.

        Raises InvalidArgument, with nothing sent, for a batch with what is not sent; see `sending.Packed`.
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
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        with peers_alive():
            line.settle()
            line.receive([frame])
            line.wait()
            message = frame.numpy().tobytes()
            (length,) = _LENGTH.unpack_from(message)
            if (missing := _LENGTH.size + length - FRAME_BYTES) > 0:
                rest = torch.empty(missing, dtype=torch.uint8)
                line.receive([rest])
                line.wait()
                message += rest.numpy().tobytes()
            structure = message[_LENGTH.size : _LENGTH.size + length]
            unpacking = Unpacking(structure, pin_memory=self._pin_memory)
            line.receive(unpacking.contents)
            line.expect_to_answer()
        return Receiving(unpacking, line)


class _Line:
    """Messages between the holder and one follower. Both know of each what comes next."""

    def __init__(self, gloo: Any, other: int) -> None:
        self._gloo = gloo
        self._other = other
        self._tag = 0
        self._mark = torch.zeros(1, dtype=torch.uint8)
        self._sent: list[Any] = []  # torch gives up a message whose work nobody keeps
        self._marks: list[Any] = []  # to be waited for first
        self._coming: list[Any] = []
        self._answers = False  # whether the other rank waits to hear that all has come

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors, and the mark behind them."""
        for tensor in (*tensors, self._mark):
            self._sent.append(self._gloo.send([tensor], self._other, self._next_tag()))

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive as many."""
        for tensor in tensors:
            self._coming.append(self._gloo.recv([tensor], self._other, self._next_tag()))
        mark = torch.empty_like(self._mark)
        self._marks.append(self._gloo.recv([mark], self._other, self._next_tag()))

    def expect_answer(self) -> None:
        """The other rank will say that all has come."""
        self.receive([])

    def expect_to_answer(self) -> None:
        """`settle` is to say that all has come."""
        self._answers = True

    def wait(self) -> None:
        """Wait for all that was begun to receive."""
        if not self._marks:
            return
        for works in (self._marks, self._coming):
            while works:
                works.pop(0).wait()
        self._sent.clear()  # the other rank sends its mark when it has all of it

    def settle(self) -> None:
        """Wait until all that was sent, or comes, is there."""
        self.wait()
        if self._answers:
            self._answers = False
            self.send([])

    def _next_tag(self) -> int:
        self._tag += 1
        return self._tag


class Sending:
    """A parcel on its way to the followers."""

    def __init__(self, parcel: Parcel, lines: Sequence[_Line]) -> None:
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

    def __init__(self, unpacking: Unpacking, line: _Line) -> None:
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
