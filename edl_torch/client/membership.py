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
