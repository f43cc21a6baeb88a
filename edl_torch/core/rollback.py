"""Whether a call proves that this state is older than what its caller was told: the journal went back.

A trainer counts its calls without gaps, and a state counts every name that it gives. So a call that names
more than the state has given comes from a later state, which is lost. It must not know what is done then.
"""

from __future__ import annotations

from edl_torch.core.calls import (
    Acknowledgement,
    ConfirmCall,
    Failure,
    FencedCall,
    GiveBack,
    HeldLease,
    LeaseCall,
    ReportCall,
    SnapshotCall,
)
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import Member, Members

NAMED = Failure | Acknowledgement | GiveBack | HeldLease


def evidence(call: FencedCall, members: Members, ledger: ShardLedger | None) -> str:
    """Both numbers, in words, where the call names one that was never given; '' where it proves nothing.

    The call is of this master's ledger. `ledger` is its dataset's, None where there is none of the name. What
    is of an older lineage proves nothing: a restore has made it void, whatever was lost before.
    """
    if ledger is not None and call.lineage != ledger.lineage:
        ahead = call.lineage > ledger.lineage
        return f"lineage {call.lineage}, and it has none beyond {ledger.lineage}" if ahead else ""
    member = members.get(call.session)
    if member is None or member.number != call.member:
        if members.may_have_given(call.member):
            return ""
        return f"member {call.member}, and it never gave that number; its next one is {members.next_number}"
    if call.dataset not in member.lent:
        return ""  # it takes no part: refused, whatever it names
    if isinstance(call, LeaseCall):
        return _beyond("lease request", call.request, member.asked(call.dataset) + 1)
    if isinstance(call, ReportCall):
        next_request = member.reports.get(call.dataset, 0) + 1
        return _beyond("report", call.request, next_request) or _never_lent(call, member)
    if isinstance(call, ConfirmCall):
        return _never_lent(call, member)
    if isinstance(call, SnapshotCall):
        last = member.reports.get(call.dataset, 0)
        ahead = call.reported > last
        return f"an answer to report {call.reported}, and it answered none beyond {last}" if ahead else ""
    return ""


def _beyond(what: str, number: int, following: int) -> str:
    return f"{what} {number}, and the next one would be {following}" if number > following else ""


def _never_lent(call: ReportCall | ConfirmCall, member: Member) -> str:
    last = member.lent[call.dataset]
    parts: tuple[tuple[NAMED, ...], ...] = (
        (call.leases,)
        if isinstance(call, ConfirmCall)
        else (call.acknowledgements, call.failures, call.give_backs)
    )
    for named in parts:
        for item in named:
            if item.task > last:
                return f"task {item.task}, and it has lent this trainer none beyond {last}"
    return ""


def went_back(why: str) -> str:
    """What trainers and people are told."""
    return (
        f"the master's journal is older than what its trainers were told: {why}. Nothing is lent until the "
        f"dataset is restored: start all trainers again from one checkpoint (load_state_dict, "
        f"load_checkpoint), or from the beginning (load_state_dict(None)). Or start the master once with "
        f"--accept-older-journal: it goes on from the journal, and lends again what that has forgotten"
    )
