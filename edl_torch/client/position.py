"""Where a trainer is in its data, as a token, and the way back to one; alone, or together with other ranks.

It asks the master and tells the session's parts; it does not know torch, nor what a token holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from edl_torch.audit.log import Audit
from edl_torch.client.description import Description
from edl_torch.client.elastic_pass import ElasticPasses
from edl_torch.client.joining import Joining
from edl_torch.client.leases import LeaseSource, Mode
from edl_torch.client.lockstep import Lockstep
from edl_torch.client.peers import Doing, Peers, together
from edl_torch.client.plain_pass import PlainPasses
from edl_torch.client.port import MasterPort
from edl_torch.client.reporter import Reporter
from edl_torch.core.calls import DatasetStatus, Fence, FencedCall, RestoreCall
from edl_torch.core.token import Token
from edl_torch.errors import InvalidArgument, SessionLost, StaleLease, UnknownDataset, Unsupported

T = TypeVar("T")

FIRST_LINEAGE = 1


class Position:
    """One session's position in one dataset.

    `lockstep` is what it shares with the ranks that it steps with; None where it trains alone.
    """

    def __init__(
        self,
        master: MasterPort,
        description: Description,
        audit: Audit,
        *,
        on_lost: Callable[[Fence], None],
        joining: Joining,
        leases: LeaseSource,
        reporter: Reporter,
        plain: PlainPasses,
        elastic: ElasticPasses,
    ) -> None:
        self.lockstep: Lockstep | None = None
        self._master = master
        self._description = description
        self._audit = audit
        self._on_lost = on_lost
        self._joining = joining
        self._leases = leases
        self._reporter = reporter
        self._plain = plain
        self._elastic = elastic
        self._seen: tuple[str, int] | None = None  # ledger ('' for any) and lineage of before it registered
        self._lost = ""  # what the model has learnt from and will come again
        self._restores = 0

    def __repr__(self) -> str:
        return f"<Position {self._description.name!r} {self.lockstep or 'alone'}>"

    # Together with other ranks ------------------------------------------------------------------------------

    def synchronise(self, peers: Peers) -> None:
        """From now on this session steps, saves and goes back together with `peers`."""
        if not self._master.keeps_ledger:
            raise Unsupported(
                f"synchronous ranks need an edl_torch master: {self._master!r} tells no end of an epoch"
            )
        if self.lockstep is not None and self.lockstep.peers is not peers:
            raise InvalidArgument(
                "a DataShardService serves one synchronous loader: make one service for each"
            )
        self.lockstep = Lockstep(peers, self._description.name)

    def epoch_of_all(self, lockstep: Lockstep) -> int:
        """The epoch that the next pass of all ranks reads, as rank 0 sees it."""

        def ask() -> str:
            return str(self.progress().epoch)

        return int(together(lockstep.peers, Doing.BEGIN, lambda: lockstep.finished, ask))

    def agree_on_end(self, lockstep: Lockstep) -> None:
        """All ranks learn whether the master has every record of every epoch accounted for."""

        def ask() -> str:
            return str(int(self.progress().finished))

        def settle() -> None:
            self._reporter.flush()
            self.check()

        lockstep.agreed(finished=together(lockstep.peers, Doing.END, settle, ask) == "1")

    # Of one history with the master -------------------------------------------------------------------------

    def progress(self) -> DatasetStatus:
        """The dataset's progress. Raises StaleLease when this trainer is not part of its history any more."""
        return self._as_member(lambda member: self._master.progress(self._joining.call(FencedCall, member)))

    def _as_member(self, ask: Callable[[Fence], T]) -> T:
        """What the master answers this session, which takes part anew where it was given up meanwhile."""
        self._joining.plan()
        while True:
            member = self._joining.membership
            try:
                return ask(member)
            except SessionLost:
                self._on_lost(member)

    def lost(self, what: str) -> None:
        """Records that the model has learnt from are not counted: they will come again."""
        self._lost = self._lost or (
            f"{what} of dataset {self._description.name!r}: this trainer was cut off from the master for too "
            "long, and the records come again, here or at another trainer, though the model has learnt from "
            "them. Start again from the last checkpoint, on all ranks where there are several"
        )

    def check(self) -> None:
        """Raise StaleLease if the model and the count of what it was trained on have parted."""
        if self._lost:
            raise StaleLease(self._lost)

    # The token ----------------------------------------------------------------------------------------------

    def snapshot(self) -> str:
        """Acknowledge what the loop is done with, the batch in hand included, and take the token.

        Synchronous ranks do it together, and get one token. The token of data that nobody has asked for yet
        is their beginning, and registers nothing: a token to go back to may come next, as
        `torch.distributed.checkpoint` asks for the state before it loads one.
        """
        if self.lockstep is None:
            return self._beginning() or self._settled_token()
        return self._snapshot_together(self.lockstep)

    def _snapshot_together(self, lockstep: Lockstep) -> str:
        if not lockstep.begun:  # as on every rank
            beginning = together(lockstep.peers, Doing.SAVE, lambda: None, self._beginning)
            if beginning:
                self._description.told = True
                return beginning
        token = together(lockstep.peers, Doing.SAVE, self._settle, self._take_token)
        if lockstep.peers.rank:
            self._note_taken(token)  # each rank's log says what came before it
        return token

    def _settled_token(self) -> str:
        self._settle()
        return self._take_token()

    def _settle(self) -> None:
        self._joining.plan()
        self._elastic.settle_in_hand()
        self._reporter.flush()
        self.check()

    def _take_token(self) -> str:
        token = self._as_member(lambda member: self._master.snapshot(self._joining.call(FencedCall, member)))
        self.check()  # once more: a session that was given up just now has lost what it held
        self._note_taken(token)
        return token

    def _note_taken(self, token: str) -> None:
        exact = self._leases.mode is Mode.ELASTIC or self._plain.exact
        self._audit.snapshot(token, exact=exact, uncounted=0 if exact else self._plain.uncounted)

    def _beginning(self) -> str:
        """The token of data that no master has heard of; '' of others, and where their plan is not known."""
        if self._joining.joined or not self._master.keeps_ledger:
            return ""
        try:
            self._master.dataset_status(self._description.name)
        except UnknownDataset:
            beginning = self._description.beginning()
            return "" if beginning is None else beginning.encode()
        return ""

    # The way back -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note which history the dataset is in, before a checkpoint of it is read; registers nothing.

        A restore that finds another one is refused: what was read may be older than what others trained.
        """
        if self._joining.joined or not self._master.keeps_ledger:
            return
        try:
            found = self._master.dataset_status(self._description.name)
        except UnknownDataset:
            self._seen = ("", FIRST_LINEAGE)
        else:
            self._seen = (found.ledger, found.lineage)

    def _check_seen(self, member: Fence) -> None:
        """Raise StaleLease if the dataset went back to a checkpoint since `look`."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        ledger, lineage = seen
        if ledger not in ("", member.ledger):
            raise StaleLease(
                f"dataset {self._description.name!r} has another master since this trainer read its "
                f"checkpoint: ledger {member.ledger}, not {ledger}. Start this one again from the newest "
                f"checkpoint"
            )
        if lineage != member.lineage:
            raise StaleLease(
                f"dataset {self._description.name!r} was taken back to a checkpoint by another trainer while "
                f"this one read its own: lineage {member.lineage}, not {lineage}. Start this one again from "
                f"the newest checkpoint"
            )

    def restore(self, token: str | None) -> None:
        """Go back to a token; what is in flight is thrown away. Synchronous ranks do it together."""
        if self.lockstep is not None:
            self._restore_together(self.lockstep, token)
            return
        self._prepare_restore(token)
        self._joining.follow(self._take_back_to(token))
        self._plain.restored()
        self._lost = ""

    def _restore_together(self, lockstep: Lockstep, token: str | None) -> None:
        lockstep.same_on_all(Doing.RESTORE, token or "", "the token")
        lineage = int(
            together(
                lockstep.peers,
                Doing.RESTORE,
                lambda: self._prepare_restore(token),
                lambda: str(self._take_back_to(token)),
            )
        )
        follow = self._joining.follow if lockstep.peers.rank == 0 else self._joining.move
        follow(lineage)
        self._plain.restored()
        self._lost = ""
        self.agree_on_end(lockstep)

    def _prepare_restore(self, token: str | None) -> None:
        if token is not None and not self._joining.joined:
            self._description.follow(Token.decode(token))
        self._joining.plan()
        with suppress(StaleLease):  # of before: all that is void after this
            self._leases.close_pass()
        with suppress(StaleLease):
            self._reporter.flush()

    def _take_back_to(self, token: str | None) -> int:
        self._check_seen(self._joining.membership)
        self._restores += 1
        request = {"request": self._restores, "token": token}
        lineage = self._as_member(
            lambda member: self._master.restore(self._joining.call(RestoreCall, member, **request))
        )
        self._audit.restored(token, lineage=lineage)
        return lineage
