"""A listener to the liveness of a session that somebody plays by hand, without a `DataShardService`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edl_torch.client.liveness import LivenessFeed
from edl_torch.trainer.liveness import Liveness


class Listening(LivenessFeed):
    """What `MasterApi.attend` takes. Heartbeats name `member`; `wanted` hears that others wait."""

    def __init__(self, member: int, wanted: Callable[[str], object] | None = None) -> None:
        self.liveness = Liveness()
        self.liveness.member = member
        self._hears = wanted
        super().__init__(self.liveness, threading.Condition(), self._heard)

    def _heard(self, dataset: str) -> None:
        if self._hears is not None:
            self._hears(dataset)
