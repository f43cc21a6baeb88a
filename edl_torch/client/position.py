"""A session's position in its dataset, taken and gone back to alone or together with other ranks."""

from __future__ import annotations

from collections.abc import Callable

from edl_torch.client.peers import Doing, FollowedMaster, Lockstep, Peers, together
from edl_torch.client.session import Session
from edl_torch.core.codec import from_object, object_of
from edl_torch.core.status import DatasetStatus
from edl_torch.core.token import Token
from edl_torch.errors import InvalidArgument, Unsupported
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.position import FIRST_LINEAGE


class SessionPosition:
    """One session's position: that of a trainer alone, or of a rank among those of `session.lockstep`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pure = session.trainer.position
        self.was_used = False  # a token was taken or loaded, or epochs were gone through

    def __repr__(self) -> str:
        return f"<SessionPosition {self._session.description.name!r} {self._session.lockstep or 'alone'}>"

    def progress(self) -> DatasetStatus:
        """The dataset's progress. Raises StaleLease when this trainer is not part of its history any more."""
        return self._session.run(self._pure.progress())

    def snapshot(self) -> str:
        """Acknowledge what the loop is done with, the batch in hand included, and take the token.

        Synchronous ranks do it together, and get one token.
        """
        self.was_used = True
        model = self._session.model
        self._session.see_model("swapped" if model is not None and model.has_others_in_place else "token")
        self._session.see_data(for_token=True)
        if self._session.lockstep is None:
            return self._session.run(self._pure.snapshot())
        return self._snapshot_together(self._session.lockstep)

    def restore(self, token: str | None) -> None:
        """Go back to a token; what is in flight is thrown away. Synchronous ranks do it together."""
        self.was_used = True
        self._session.see_model("end")
        self._session.end_abandoned()
        if self._session.lockstep is not None:
            self._restore_together(self._session.lockstep, token)
        else:
            self._adopt(token)
            self._session.run(self._pure.restore(token))
        if self._session.model is not None:
            self._session.model.restored()
            self._session.see_model("restored")  # parameters may be added before the first step

    def _adopt(self, token: str | None) -> None:
        if token is not None and not self._session.joined:
            self._session.description.adopt(Token.decode(token))

    # Together with other ranks ------------------------------------------------------------------------------

    def synchronise(self, peers: Peers) -> None:
        """From now on this session steps, saves and goes back together with `peers`."""
        master = self._session.master
        if not master.keeps_ledger:
            raise Unsupported(
                f"synchronous ranks need an edl_torch master: {master!r} tells no end of an epoch"
            )
        if self._session.lockstep is not None and self._session.lockstep.peers is not peers:
            raise InvalidArgument(
                "a DataShardService serves one synchronous loader: make one service for each"
            )
        if self._session.lockstep is None and peers.parts is not None and not peers.parts.holds:
            self._session.follow()
        self._session.lockstep = Lockstep(peers, self._session.description.name)
        self._session.gradients.reduce()

    def begin_together(self, lockstep: Lockstep) -> None:
        """Let ranks that have loaded nothing begin at the beginning, where nobody else was at the data.

        Elsewhere they still have to load a position: the data may be anywhere.
        """
        if lockstep.begun:
            return

        def is_untouched() -> bool:
            return _is_untouched(self.progress(), lockstep.peers.coordinates)

        self._share_plan(lockstep, Doing.BEGIN, lambda: None)
        if together(lockstep.peers, Doing.BEGIN, self._session.plan, is_untouched):
            lockstep.agreed(finished=False)

    def _share_plan(self, lockstep: Lockstep, doing: Doing, prepare: Callable[[], object]) -> None:
        """Let ranks without leases know what those with leases have registered."""
        session = self._session
        if lockstep.peers.parts is None:
            return

        def register() -> None:
            prepare()
            if lockstep.holds_leases:
                session.plan()

        told = together(lockstep.peers, doing, register, lambda: object_of(session.plan().spec))
        spec = from_object(DatasetSpec, told)
        if isinstance(session.master, FollowedMaster):
            session.master.spec = spec
            session.do(session.trainer.registrar.heard, spec)

    def epoch_of_all(self, lockstep: Lockstep) -> int:
        """The epoch that the next pass of all ranks reads, as rank 0 sees it."""
        self.begin_together(lockstep)

        peers = lockstep.peers
        return together(peers, Doing.BEGIN, lambda: lockstep.finished, lambda: self.progress().epoch)

    def done_in_epoch(self) -> int:
        """Return records of the epoch of the next pass that it does not bring: they have an outcome, or are
        gathered here for a step. Synchronous ranks ask together."""
        session, lockstep = self._session, self._session.lockstep

        def ask() -> int:
            status = self.progress()
            gathered = session.do(lambda: session.trainer.state.batches.records) if lockstep is None else 0
            return min(status.size, max(0, status.outcomes + gathered - status.epoch * status.size))

        if lockstep is not None:
            self.begin_together(lockstep)
            return together(lockstep.peers, Doing.BEGIN, session.flush, ask)
        session.plan()
        session.flush()
        return ask()

    def agree_on_end(self, lockstep: Lockstep) -> None:
        """All ranks learn whether the master has every record of every epoch accounted for."""

        def settle() -> None:
            self._session.flush()
            self._session.do(self._session.trainer.state.check)

        finished = together(lockstep.peers, Doing.END, settle, lambda: self.progress().finished)
        lockstep.agreed(finished=finished)

    def agree_again(self) -> None:
        """Synchronous ranks agree anew on what they did not find finished at the end of a pass.

        Behind a wrapper that reads ahead they agree at that end first, and train on the last batches then.
        """
        lockstep = self._session.lockstep
        if lockstep is not None and lockstep.begun and not lockstep.finished:
            self.agree_on_end(lockstep)

    def _snapshot_together(self, lockstep: Lockstep) -> str:
        session = self._session
        if not lockstep.begun:  # as on every rank
            beginning = together(
                lockstep.peers, Doing.SAVE, lambda: None, lambda: session.run(self._pure.beginning())
            )
            if beginning:
                session.description.told = True
                return beginning
        token = together(
            lockstep.peers,
            Doing.SAVE,
            lambda: session.run(self._pure.settle()),
            lambda: session.run(self._pure.take_token()),
        )
        if lockstep.peers.rank:
            session.do(self._pure.note_taken, token)  # each rank's log says what came before it
        return token

    def _restore_together(self, lockstep: Lockstep, token: str | None) -> None:
        session, registrar = self._session, self._session.trainer.registrar
        lockstep.same_on_all(Doing.RESTORE, token or "", "the token")

        def prepare() -> None:
            self._adopt(token)
            session.run(self._pure.prepare_restore())

        self._share_plan(lockstep, Doing.RESTORE, lambda: self._adopt(token))

        def take_back() -> int:
            return session.run(self._pure.take_back_to(token))

        lineage = together(lockstep.peers, Doing.RESTORE, prepare, take_back)
        session.do(registrar.join if lockstep.peers.rank else registrar.enter, lineage)
        session.do(self._pure.restored)
        self.agree_on_end(lockstep)


def _is_untouched(status: DatasetStatus, trainers: int) -> bool:
    """Return whether the data are at their beginning, and only so many trainers take part."""
    outcomes = status.acknowledged + status.quarantined + status.dropped
    first = status.lineage == FIRST_LINEAGE and status.epoch == 0
    return first and not outcomes and not status.leased and status.trainers == trainers
