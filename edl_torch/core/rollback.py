"""Whether a call proves that this state is older than what its caller was told: the journal went back.

A trainer names the last numbers that it was given and answered, and a state knows every one that it gave and
answered. So one that it does not know comes from a later state, which is lost. It must not know what is done
then.
"""

from __future__ import annotations

from edl_torch.core.calls import FencedCall
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import Members


def evidence(call: FencedCall, members: Members, ledger: ShardLedger | None) -> str:
    """Both numbers, in words, where the call names one that was never given; '' where it proves nothing.

    The call is of this master's ledger. `ledger` is its dataset's, None where there is none of the name. What
    is of an older lineage proves nothing: a restore has made it void, whatever was lost before.
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
        known = members.unheard.get(fence.member, {}).get(call.dataset)
        if known is None:
            return ""  # it was given up, and had proved before that it knew no more
        asked, reported = known
    else:
        asked, reported = member.asked(call.dataset), member.reports.get(call.dataset, 0)
    return _beyond("the answer to lease call", call.asked, asked) or _beyond(
        "the answer to report", call.reported, reported
    )


def _beyond(what: str, named: int, known: int) -> str:
    return f"{what} {named}, and the journal knows none beyond {known}" if named > known else ""


def went_back(why: str) -> str:
    """What trainers and people are told."""
    return (
        f"the master's journal is older than what its trainers were told: {why}. Nothing is lent until the "
        f"dataset is restored: start all trainers again from one checkpoint (load_state_dict, "
        f"load_checkpoint), or from the beginning (load_state_dict(None)). Or start the master once with "
        f"--accept-older-journal: it goes on from the journal, and lends again what that has forgotten"
    )
