"""How a trainer's session takes part in its dataset: registered at first use, anew once it was given up.

It decides as which member the session speaks; what that makes void is forgotten by those who hold it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from edl_torch.audit.log import Audit
from edl_torch.client.description import Description
from edl_torch.client.membership import Answered
from edl_torch.client.port import MasterPort
from edl_torch.client.threads import SYSTEM, Threads
from edl_torch.core.calls import Fence, FencedCall, RegisterAnswer, RegisterCall, Registration
from edl_torch.core.plan import Plan
from edl_torch.core.rollback import went_back
from edl_torch.errors import JournalWentBack, StaleLease, UnknownDataset

C = TypeVar("C", bound=FencedCall)

log = logging.getLogger("edl_torch.client")


class Joining:
    """One session's part in one dataset.

    `on_gone` is called when all that was held is void, `on_member` with each new membership, which makes void
    what was held before, and `on_first` once, after the session has joined for the first time.
    """

    def __init__(
        self,
        master: MasterPort,
        session: str,
        description: Description,
        audit: Audit,
        *,
        on_gone: Callable[[], None],
        on_member: Callable[[Fence], None],
        on_first: Callable[[], None],
        threads: Threads = SYSTEM,
        answered: Answered | None = None,
    ) -> None:
        self._master = master
        self._session = session
        self._description = description
        self._audit = audit
        self._answered = answered or Answered()
        self._on_gone = on_gone
        self._on_member = on_member
        self._on_first = on_first
        self._joining = threads.lock()
        self._plan: Plan | None = None
        self._membership = Fence()

    def __repr__(self) -> str:
        return f"<Joining {self._description.name!r} {self._membership}>"

    @property
    def joined(self) -> bool:
        """Whether the dataset is registered."""
        return self._plan is not None

    @property
    def membership(self) -> Fence:
        """As what the session takes part now."""
        return self._membership

    def call(self, kind: type[C], membership: Fence, **more: Any) -> C:
        """A call of that member, with the rest of its fields in `more`."""
        return kind(
            session=self._session,
            dataset=self._description.name,
            fence=membership,
            **self._answered.of(membership),
            **more,
        )

    def plan(self) -> Plan:
        """The dataset as registered; registers it at first use."""
        with self._joining:
            if self._plan is None:
                answer = self._register()
                self._plan = Plan(answer.spec)
                self._follow_answer(answer)
                self._note_joined(answer)
                self._on_first()
            return self._plan

    def again(self, lost: Fence) -> None:
        """The master gave this member up: take part anew, where no other call has found it out before.

        Raises StaleLease when the master is another one by now, or the dataset went back to a checkpoint, and
        JournalWentBack when the master has forgotten that it gave this member up.
        """
        with self._joining:
            self._present(lost)
            if lost != self._membership:
                return
            self._on_gone()
            try:
                answer = self._register_as(self._description.by_name())
            except UnknownDataset as exc:
                raise StaleLease(self._forgotten("does not know this dataset")) from exc
            if answer.fence.ledger != lost.ledger:
                raise StaleLease(self._forgotten(f"keeps ledger {answer.fence.ledger}, not {lost.ledger}"))
            if answer.fence.member == lost.member:
                raise JournalWentBack(
                    went_back(f"member {lost.member} of {self._description.name!r} was given up, and is back")
                )
            if answer.fence.lineage != lost.lineage:
                raise StaleLease(
                    f"{self._description.name!r} was taken back to a checkpoint by another trainer: "
                    f"this one's leases are void. Start it again from the newest checkpoint"
                )
            self._follow_answer(answer)
            self._note_joined(answer)

    def _present(self, lost: Fence) -> None:
        """Tell the master all that it has answered to a member which it gave up. Raises JournalWentBack.

        The call that found this out may have been a repeat, and then does not name what was answered since.
        """
        try:
            self._master.progress(self.call(FencedCall, lost))
        except JournalWentBack:
            raise
        except StaleLease as error:
            log.debug("member %d of session %s: %s", lost.member, self._session, error)

    def follow(self, lineage: int) -> None:
        """This trainer took the dataset back to a token, which opened `lineage`."""
        with self._joining:
            self._follow(replace(self._membership, lineage=lineage))

    def move(self, lineage: int) -> None:
        """Another rank of this trainer's job took the dataset back to a token, which opened `lineage`."""
        self.follow(lineage)
        self._audit.joined(
            self.plan().spec,
            ledger=self._membership.ledger,
            lineage=lineage,
            batch_size=self._description.batch_size,
            member=self._membership.member,
        )

    def _follow_answer(self, answer: RegisterAnswer) -> None:
        self._follow(answer.fence)

    def _follow(self, membership: Fence) -> None:
        self._membership = membership
        self._on_member(membership)

    def _register(self) -> RegisterAnswer:
        sources = self._description.sources()
        if sources is not None:
            return self._register_as(self._description.in_full(sources))
        try:
            return self._register_as(self._description.by_name())
        except UnknownDataset:
            sources = self._description.fallback_sources()
            if sources is None:
                raise
        return self._register_as(self._description.in_full(sources))

    def _register_as(self, registration: Registration) -> RegisterAnswer:
        return self._master.register(
            RegisterCall(
                session=self._session,
                worker_id=self._master.worker_id,
                batch_size=self._description.batch_size,
                registration=registration,
            )
        )

    def _note_joined(self, answer: RegisterAnswer) -> None:
        self._audit.joined(
            answer.spec,
            ledger=answer.fence.ledger,
            lineage=answer.fence.lineage,
            batch_size=self._description.batch_size,
            member=answer.fence.member,
        )

    def _forgotten(self, what: str) -> str:
        return (
            f"the master of {self._description.name!r} is another one than before, it {what}: this trainer's "
            f"leases are void. Restart all trainers from one checkpoint (load_state_dict), or from the "
            f"beginning; a master with `--state DIR` survives its own restart"
        )
