"""Fences for calls that a test writes by hand, and a trainer of few words for tests that need a position.

A fence is what a registration was answered with: ledger, lineage and member.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edl_torch.core.calls import (
    Fence,
    MasterApi,
    ProgressCall,
    RegisterCall,
    Registration,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.status import DatasetStatus


def fence(dispatcher: Dispatcher, session: str, lineage: int = 1) -> Fence:
    """The fence of a session as the dispatcher has it; of no member where it does not know the session."""
    known = dispatcher.members.get(session)
    member = 0 if known is None else known.number
    return Fence(ledger=dispatcher.ledger_id, lineage=lineage, member=member)


def fenced(fence: Fence, options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a call: `options`, in which a part of the fence may be another one."""
    own = {name: options[name] for name in ("ledger", "lineage", "member") if name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    return {"fence": replace(fence, **own), **rest}


class Onlooker:
    """A session that joins a dataset which is known, reads nothing, and saves and restores its position."""

    def __init__(self, master: MasterApi, dataset: str, session: str = "onlooker") -> None:
        self._master = master
        call = RegisterCall(
            session=session, worker_id=session, batch_size=1, registration=Registration(name=dataset)
        )
        self.fence = master.call(call).fence
        self._named = {"session": session, "dataset": dataset}
        self._restores = 0

    def snapshot(self) -> str:
        return self._master.call(SnapshotCall(**self._named, fence=self.fence))

    def progress(self) -> DatasetStatus:
        return self._master.call(ProgressCall(**self._named, fence=self.fence))

    def restore(self, token: str | None) -> int:
        self._restores += 1
        call = RestoreCall(**self._named, fence=self.fence, request=self._restores, token=token)
        self.fence = replace(self.fence, lineage=self._master.call(call))
        return self.fence.lineage
