"""One epoch of a synchronous rank: every step is taken by all ranks, or by none.

The vote on a step is cast before the step ahead of it is computed, so that it costs no time. Nothing here
waits for the master while any rank has a batch; it does not know how votes travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from edl_torch.client.lockstep import Lockstep
from edl_torch.client.peers import Ballot, Count, Doing, Peers, Vote, together
from edl_torch.client.position import SessionPosition
from edl_torch.client.session import Session
from edl_torch.core.calls import NEW_PASS
from edl_torch.data.loop.inner_loader import InnerLoader
from edl_torch.data.loop.notice import Notice
from edl_torch.data.loop.stepping_pass import SteppingPass
from edl_torch.data.padding import PaddingBatch, Statistics
from edl_torch.data.weights import Weights
from edl_torch.errors import InvalidArgument, PeerFailed, StaleLease
from edl_torch.trainer.vocabulary import Ticket

PATIENCE_S = 1.0  # rank 0's, where no rank has a batch and the epoch is not over


class Pulled(Protocol):
    """A batch that a rank has for the next step."""

    @property
    def batch(self) -> Any:
        """What the loop gets."""

    @property
    def ticket(self) -> Ticket:
        """The positions that it holds."""

    @property
    def size(self) -> int:
        """Its records."""


class LockstepPass(SteppingPass):
    """The iterator. `notice` is the loader's and outlives it."""

    def __init__(
        self,
        loader: InnerLoader,
        session: Session,
        whole_batch: int | None,
        weights: Weights,
        position: SessionPosition,
        *,
        padding: PaddingBatch,
        statistics: Statistics,
        notice: Notice,
        epoch: int,
    ) -> None:
        lockstep = session.lockstep
        if lockstep is None:
            raise InvalidArgument("the session has no peers: make the loader with synchronous=True")
        self._position = position
        self._lockstep: Lockstep = lockstep
        self._peers: Peers = lockstep.peers
        self._notice = notice
        self._pulled: Pulled | None = None
        self._error: Exception | None = None
        self._vote: Vote | None = None
        super().__init__(
            loader, session, whole_batch, weights, padding=padding, statistics=statistics, epoch=epoch
        )

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
                batches=int(self._lockstep.holds_leases and mine is not None),
                bare=int(self._lockstep.holds_leases and mine is None and not self._padding.made),
                failed=int(self._error is not None),
                verdict=int(self._peers.rank == 0 and (self._lockstep.finished or self._is_over)),
                preempted=int(self._notice.came),
            )
        )

    def _next_batch(self, wait_s: float) -> Pulled | None:
        """This rank's batch for the next step; None where there is none now."""
        return None if self._lockstep.finished else self._pull(self._look(wait_s), self._promise)

    def _promise(self, ticket: Ticket) -> bool:
        # The report of the step before travels while this one is computed: if it is refused, the job ends.
        return self._session.run(self._passes.promise(ticket, unanswered=1))

    def _look(self, wait_s: float) -> Callable[[], bool]:
        return lambda: self._session.run(self._passes.look_for_more(wait_s))

    def _agree(self) -> Count | None:
        """The votes on the step that is due; None when the epoch is over."""
        while True:
            count = self._counted()
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

    def _counted(self) -> Count:
        vote, self._vote = self._vote, None
        if vote is None:
            raise InvalidArgument("no vote is under way")
        count = self._stopwatch.wait_for_ranks(vote.wait)
        if count.preempted:
            self._notice.agree()
        return count

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
        if not self._is_told:
            self._weights.step(mine.size)
        if not self._session.deliver(mine.ticket):
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
                _drain(vote)


def _drain(vote: Vote) -> None:
    try:
        vote.wait()
    except PeerFailed:
        return  # whoever votes next hears of it
