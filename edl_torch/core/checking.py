"""Check that a report can be applied as a whole: each part, as if those before it were applied already.

Nothing is changed. Leases that are not the session's are no error here: the answer lists them as stale.
"""

from __future__ import annotations

from collections.abc import Iterable

from edl_torch.core.calls import Failure, ReportCall
from edl_torch.core.lease import Lease
from edl_torch.core.leases import Leases
from edl_torch.core.span import pass_over


def check_report(leases: Leases, call: ReportCall) -> None:
    """Raise InvalidArgument if a part of it, applied in the order of the call, would."""
    session = call.session
    ahead: dict[int, int] = {}  # task -> where the acknowledged prefix will end
    bad: dict[int, set[int]] = {}
    for failure in call.failures:
        lease = leases.live(session, failure.task, failure.attempt)
        if lease is not None:
            lease.check_failure(failure.position)
            bad.setdefault(failure.task, set()).add(failure.position)
    for done in call.acknowledgements:
        lease = leases.live(session, done.task, done.attempt)
        if lease is not None:
            lease.check_acknowledgement(done.upto)
            ahead[done.task] = max(done.upto, ahead.get(done.task, lease.done))
    for back in call.give_backs:
        lease = leases.live(session, back.task, back.attempt)
        if lease is not None:
            holes = lease.holes | bad.get(back.task, set())
            reached = pass_over(ahead.get(back.task, lease.done), holes)
            if reached < lease.stop:  # else it has ended by then, and there is nothing to give back
                lease.check_give_back(back.start, reached)


def new_failures(
    leases: Leases, session: str, failures: Iterable[Failure]
) -> Iterable[tuple[Lease, int, str]]:
    """Return lease, position and reason of each record that these would put into quarantine anew."""
    new: dict[tuple[int, int], tuple[Lease, int, str]] = {}
    for failure in failures:
        lease = leases.live(session, failure.task, failure.attempt)
        if lease is not None and lease.is_open(failure.position):
            new.setdefault((failure.task, failure.position), (lease, failure.position, failure.reason))
    return new.values()
