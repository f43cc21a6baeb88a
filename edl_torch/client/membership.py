"""As what a trainer takes part in a dataset: the fence that every lease and report carries.

A value only; who takes part anew, and when, is the session's to decide.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The master's ledger and lineage, and the number of the `member` that this session is there.

    A session that was given up and joins again is another member. Two calls may both find that it was given
    up: the number tells the second that it has joined again.
    """

    ledger: str = ""
    lineage: int = 0
    member: int = 0


class Answered:
    """The numbers of the last lease call and report that the master answered a member; every call names them.

    So a master that has forgotten one of them is found out. Each number is written by one thread at a time.
    """

    def __init__(self) -> None:
        self._asked = (Membership(), 0)
        self._reported = (Membership(), 0)

    def leased(self, membership: Membership, request: int) -> None:
        """A lease call was answered to this member, in this lineage."""
        self._asked = (membership, request)

    def reported(self, membership: Membership, request: int) -> None:
        """A report was answered to this member, in this lineage."""
        self._reported = (membership, request)

    def of(self, membership: Membership) -> dict[str, int]:
        """What was answered to this member, in this lineage, as fields of a call."""
        (asker, asked), (reporter, reported) = self._asked, self._reported
        return {
            "asked": asked if asker == membership else 0,
            "reported": reported if reporter == membership else 0,
        }

    def __repr__(self) -> str:
        return f"<Answered asked={self._asked} reported={self._reported}>"
