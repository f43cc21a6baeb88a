"""Passes whose steps several trainers take together: one that has no batch steps on a padding batch.

Every step of synchronous ranks is taken by all of them, or by none. The vote on a step is cast before the
step ahead of it is computed, so that it costs no time; in the same way a batch leaves the rank that reads it
for others. Nothing here waits for the master while any rank has a batch, or knows how votes and batches
travel.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any

from edl_torch.client.peers import Ballot, BroadcastBatch, Count, Delivery, Doing, Parts, Vote, together
from edl_torch.core.calls import NEW_PASS
from edl_torch.data.batches.transport import Envelope
from edl_torch.data.loop.loader_pass import LoaderPass, PassSetup
from edl_torch.errors import InvalidArgument, PeerFailed, StaleLease
from edl_torch.trainer.vocabulary import Procedure, Ticket


class SteppingPass(LoaderPass):
    """The iterator of a trainer that others wait for at each step."""

    _stepped = False

    def __init__(self, setup: PassSetup, epoch: int) -> None:
        self._padding = setup.padding
        self._statistics = setup.statistics
        super().__init__(setup, epoch)

    def __next__(self) -> Any:
        self._statistics.let_go()
        self._weights.warn_of_padding()
        return super().__next__()

    def _pad(self) -> Any:
        """Return a padding batch, and note that the loop gets one."""
        self._session.do(self._passes.pad)
        self._statistics.keep()
        return self._padding.batch()

    @property
    def _is_over(self) -> bool:
        return self._session.do(lambda: self._passes.is_over)

    def close(self) -> None:
        self._statistics.let_go()
        super().close()


FIRST_WAIT_S = 1.0  # a trainer that never had a batch has none to pad with


class PaddedPass(SteppingPass):
    """The iterator of one that is no rank among others."""

    def _step(self) -> tuple[Any, int]:
        envelope = None
        while envelope is None:
            envelope = self._pull(self._more_to_read, self._passes.hand)
            if envelope is None and self._is_over:
                raise StopIteration
            if envelope is None and self._padding.made:
                self._stepped = True
                return self._pad(), 0
        self._stepped = True
        self._padding.keep(envelope.batch)
        return envelope.batch, envelope.size

    def _more_to_read(self) -> bool:
        wait_s = 0.0 if self._padding.made else FIRST_WAIT_S
        more = self._session.run(self._passes.look_for_more(wait_s))
        if not more and not self._stepped and self._is_over:
            self._session.run(self._passes.settle_stuck())
        return more


# Synchronous ranks --------------------------------------------------------------------------------------


PATIENCE_S = 1.0  # rank 0's, where no rank has a batch and the epoch is not over


class LockstepPass(SteppingPass):
    """The iterator of a synchronous rank."""

    def __init__(self, setup: PassSetup, epoch: int) -> None:
        lockstep = setup.session.lockstep
        if lockstep is None:
            raise InvalidArgument("the session has no peers: make the loader with synchronous=True")
        self._position = setup.position
        self._lockstep = lockstep
        self._peers = lockstep.peers
        self._notice = setup.notice
        self._pulled: Pulled | None = None  # the batch that this rank has for the next step
        self._error: Exception | None = None
        self._vote: Vote | None = None
        super().__init__(setup, epoch)

    def _open(self) -> int:
        """All ranks read the epoch that rank 0 sees."""
        mine = self._epoch
        epoch = self._position.epoch_of_all(self._lockstep) if mine == NEW_PASS else mine
        return self._session.open(epoch)

    def _step(self) -> tuple[Any, int]:
        if self._vote is None:
            self._cast()
        count = self._agree()
        if count is None:
            raise StopIteration
        step = self._take(count)
        self._cast()
        return step

    def _cast(self, wait_s: float = 0.0) -> None:
        """Vote on the next step: has this rank a batch? Waits for its own decoding only."""
        self._pulled = self._error = None
        try:
            self._pulled = self._next_batch(wait_s)
            self._session.do(self._session.trainer.state.check)
        except Exception as exc:  # noqa: BLE001  raised in the next step, when all ranks know of it
            self._error = exc
        mine = self._pulled
        self._vote = self._peers.vote(
            Ballot(
                doing=Doing.STEP,
                batches=int(mine is not None),
                bare=int(mine is None and not self._padding.made),
                failed=int(self._error is not None),
                verdict=int(self._peers.rank == 0 and (self._lockstep.finished or self._is_over)),
                preempted=int(self._notice.came),
            )
        )

    def _next_batch(self, wait_s: float) -> Pulled | None:
        """This rank's batch for the next step; None where there is none now."""
        if self._lockstep.finished:
            return None
        return self._pull(lambda: self._session.run(self._passes.look_for_more(wait_s)), self._promise)

    def _promise(self, ticket: Ticket) -> Procedure[bool]:
        # The report of the step before travels while this one is computed: if it is refused, the job ends.
        return self._passes.promise(ticket, unanswered=1)

    def _agree(self) -> Count | None:
        """The votes on the step that is due; None when the epoch is over."""
        while True:
            vote, self._vote = self._vote, None
            if vote is None:
                raise InvalidArgument("no vote is under way")
            count = self._stopwatch.wait_for_ranks(vote.wait)
            if count.preempted:
                self._notice.agree()
            if self._error is not None:
                raise self._error
            count.check()
            if count.batches:
                return count
            if count.verdict:
                self._end()
                return None
            # All have told the master what they trained on, and none has a batch: rank 0 waits for its word.
            self._cast(PATIENCE_S if self._peers.rank == 0 else 0.0)

    def _end(self) -> None:
        if not self._stepped:
            together(self._peers, Doing.END, lambda: self._session.run(self._passes.settle_stuck()), str)
        self._position.agree_on_end(self._lockstep)

    def _take(self, count: Count) -> tuple[Any, int]:
        """This rank's batch of the step and its records, or a padding batch and 0."""
        mine = self._pulled
        batch = None if mine is None else mine.batch
        if mine is not None:
            self._padding.keep(batch)
        if count.bare:
            lent = self._peers.lend(batch)
            self._padding.keep(lent)
        self._stepped = True
        if mine is None:
            return self._pad(), 0
        if not self._session.do(self._passes.deliver, mine.ticket):
            raise StaleLease(
                "a batch was lost between the ranks' agreement on a step and the step itself: this rank was "
                "cut off from the master. Start all ranks again from the last checkpoint"
            )
        return batch, mine.size

    def close(self) -> None:
        """End the pass. The vote under way is counted first: the other ranks have cast theirs."""
        vote, self._vote = self._vote, None
        try:
            super().close()
        finally:
            if vote is not None:
                with suppress(PeerFailed):  # whoever votes next hears of it
                    vote.wait()


# Ranks that hold one model in parts: one of them reads, and all get its batches -------------------------


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


Pulled = Envelope | InParts
