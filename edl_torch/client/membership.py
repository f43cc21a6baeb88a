"""As what a trainer takes part in a dataset: the fence that every lease and report carries.

A value only; who takes part anew, and when, is the session's to decide.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The master's ledger and lineage, and how many times this session has joined.

    Two calls may both find that the session was given up: `number` tells the second that it was joined again.
    """

    ledger: str = ""
    lineage: int = 0
    number: int = 0
