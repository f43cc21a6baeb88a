"""Epochs of ranks that hold one model in parts: one of them reads, and all get its batches.

They step like all synchronous ranks. A batch leaves the rank that reads it before the step ahead of it is
computed, and so does not keep the others waiting. It does not know how batches travel.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from edl_torch.client.peers import BroadcastBatch, Delivery, Parts
from edl_torch.data.loop.lockstep_pass import LockstepPass, Pulled
from edl_torch.errors import InvalidArgument, PeerFailed
from edl_torch.trainer.vocabulary import Ticket


class PartsPass(LockstepPass):
    """The iterator of the rank that reads (the holder), or of one that follows it."""

    @cached_property
    def _parts(self) -> Parts:
        if self._peers.parts is None:
            raise InvalidArgument("each rank has the whole model: it reads for itself")
        return self._peers.parts

    def _next_batch(self, wait_s: float) -> Pulled | None:
        return self._read_for_all(wait_s) if self._parts.holds else self._follow()

    def _read_for_all(self, wait_s: float) -> Pulled | None:
        sent = False
        try:
            mine = super()._next_batch(wait_s)
            delivery = self._parts.send(self._broadcast(mine))
            sent = True
            return None if mine is None else InParts(delivery, mine.ticket)
        finally:
            if not sent:  # the followers wait for a broadcast, and hear in the vote what is wrong
                self._parts.send(self._broadcast(None))

    def _broadcast(self, mine: Pulled | None) -> BroadcastBatch:
        discarded = self._passes.discarded
        if mine is None:
            return BroadcastBatch(discarded=discarded)
        slices = self._session.do(self._passes.shares, mine.ticket)
        return BroadcastBatch(batch=mine.batch, size=mine.size, slices=slices, discarded=discarded)

    def _follow(self) -> Pulled | None:
        delivery = self._parts.receive()
        broadcast = delivery.broadcast
        if broadcast.discarded != self._passes.discarded:
            raise PeerFailed(
                "ranks that hold one model in parts are not at the same point: on some of them, and not on "
                "all, the loop reported the batch in hand as failed, or gave it back. All make the same "
                "calls. Start all ranks again from the last checkpoint, as torchrun does by itself"
            )
        if not broadcast.size:
            self._session.do(self._passes.follow_to_the_end)
            return None
        return InParts(delivery, self._session.do(self._passes.follow, broadcast.slices))


class InParts:
    """A batch on its way from the holder to those that follow it, as either has it."""

    def __init__(self, delivery: Delivery, ticket: Ticket) -> None:
        self._delivery = delivery
        self.ticket = ticket
        self.size = delivery.broadcast.size

    def __repr__(self) -> str:
        return f"<InParts size={self.size}>"

    @cached_property
    def batch(self) -> Any:
        """The batch, once it is here, or has left."""
        return self._delivery.batch()
