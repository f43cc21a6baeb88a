"""Journal that went back in time: what proves it, and how a state then suspends its datasets.

A trainer names the last numbers that it was given and answered, and a state knows every one that it gave and
answered. So a number that it does not know comes from a later state, which is lost.
"""

from __future__ import annotations

import hashlib
from typing import Any

from edl_torch.core.calls import FencedCall, RestoreCall
from edl_torch.core.changes import Mark
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import Members
from edl_torch.core.state import MasterState
from edl_torch.errors import JournalWentBack

LINEAGES = 1 << 20  # how far apart the numbers of lineages may be that follow each other


class Rollback:
    """Check of calls for a rollback of the journal of a state, and suspension of all datasets then."""

    def __init__(self, state: MasterState, mark: Mark) -> None:
        self._state = state
        self._mark = mark
        self._nonce = 0

    def begin_again(self, nonce: int) -> None:
        """Start on a state of before, which may have had a future that is lost.

        What that future named is not named again: `nonce` is a large random number, of this start alone.
        """
        self._nonce = nonce
        self._state.lineage_step = 1 + nonce % LINEAGES
        self._state.members.skip(nonce)
        self._mark("next", "member")
        self._mark("next", "gaps")

    def check(self, call: FencedCall[Any]) -> None:
        """Raise JournalWentBack if this state is older than what the caller was told, or known to be."""
        state = self._state
        own = call.fence.ledger == state.ledger_id
        why = state.suspended.get(call.dataset)
        if why is not None and not (isinstance(call, RestoreCall) and own):
            raise JournalWentBack(why)
        if own:
            found = evidence(call, state.members, state.find_ledger(call.dataset))
            if found:
                raise JournalWentBack(self.suspend(f"a call of session {call.session!r} names {found}"))

    def suspend(self, why: str) -> str:
        """Lend nothing of any dataset until it is restored: the state is older than what trainers were told.

        All leases and members are void at once: from now on this is another ledger. Returns the message for
        trainers.
        """
        self._become_another_ledger(why)
        reason = went_back(why)
        for ledger in self._state.ledgers:
            self._state.suspended[ledger.spec.name] = reason
            self._mark("suspended", ledger.spec.name)
        return reason

    def accept_older(self) -> None:
        """Go on from this state though it may be older than what trainers were told.

        Each dataset gets a new lineage, in another ledger. What the state has forgotten is lent again.
        """
        self._become_another_ledger("accepted")
        for ledger in self._state.ledgers:
            self._state.open_lineage(ledger, ledger.snapshot())

    def _become_another_ledger(self, why: str) -> None:
        state = self._state
        text = f"{state.ledger_id} {self._nonce} {why}"
        state.ledger_id = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]
        self._mark("ledger", "id")
        state.void_members()

    def __repr__(self) -> str:
        return f"<Rollback suspended={len(self._state.suspended)}>"


def evidence(call: FencedCall[Any], members: Members, ledger: ShardLedger | None) -> str:
    """Return the number in the call that was never given, and the known one, in words; '' for none.

    The call is of this master's ledger. `ledger` is that of its dataset, None where there is none of
    the name. A call of an older lineage proves nothing: a restore has made it void, whatever was lost before.
    """
    fence = call.fence
    if ledger is not None and fence.lineage != ledger.lineage:
        return _beyond("lineage", fence.lineage, ledger.lineage)
    member = members.get(call.session)
    if member is None or member.number != fence.member:
        if not members.may_have_given(fence.member):
            return (
                f"member {fence.member}, which the journal never gave: its next one is {members.next_number}"
            )
        known = members.departed_members.get(fence.member, {}).get(call.dataset)
        if known is None:
            return ""  # it registered since the start, or the journal has its end: nothing of it is lost
        asked, reported = known
    else:
        asked, reported = member.asked(call.dataset), member.reports.get(call.dataset, 0)
    return _beyond("the answer to lease call", call.asked, asked) or _beyond(
        "the answer to report", call.reported, reported
    )


def _beyond(what: str, named: int, known: int) -> str:
    return f"{what} {named}, and the journal knows none beyond {known}" if named > known else ""


def went_back(why: str) -> str:
    """Return the message for trainers and people."""
    return (
        f"the master's journal is older than what its trainers were told: {why}. Nothing is lent until the "
        f"dataset is restored: start all trainers again from one checkpoint (load_state_dict, "
        f"load_checkpoint), or from the beginning (load_state_dict(None)). Or start the master once with "
        f"--accept-older-journal: it goes on from the journal, and lends again what that has forgotten"
    )
