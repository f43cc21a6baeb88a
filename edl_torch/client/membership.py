"""Numbers of the last calls that the master answered a member: every later call names them."""

from __future__ import annotations

from edl_torch.core.calls import Fence


class Answered:
    """The numbers of the last lease call and report that the master answered a member; every call names them.

    So a master that has forgotten one of them is found out. Each number is written by one thread at a time.
    """

    def __init__(self) -> None:
        self._asked = (Fence(), 0)
        self._reported = (Fence(), 0)

    def leased(self, membership: Fence, request: int) -> None:
        """A lease call was answered to this member, in this lineage."""
        self._asked = (membership, request)

    def reported(self, membership: Fence, request: int) -> None:
        """A report was answered to this member, in this lineage."""
        self._reported = (membership, request)

    def of(self, membership: Fence) -> dict[str, int]:
        """What was answered to this member, in this lineage, as fields of a call."""
        (asker, asked), (reporter, reported) = self._asked, self._reported
        return {
            "asked": asked if asker == membership else 0,
            "reported": reported if reporter == membership else 0,
        }

    def __repr__(self) -> str:
        return f"<Answered asked={self._asked} reported={self._reported}>"
