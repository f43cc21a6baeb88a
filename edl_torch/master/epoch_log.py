"""A line in the master's log for each epoch that is over, and for each dataset that is finished."""

from __future__ import annotations

import logging
from typing import NamedTuple

from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.limits import printable

log = logging.getLogger("edl_torch.master")


class _Seen(NamedTuple):
    """How far a dataset was, and since when."""

    lineage: int
    epoch: int
    finished: bool
    since: float


class EpochLog:
    """Remembers how far each dataset was when `look` was called last."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def look(self, dispatcher: Dispatcher, now: float) -> None:
        """Log what has ended since the last look. A restore is no end, though it may leave less to do."""
        for ledger in dispatcher.ledgers:
            name = ledger.spec.name
            before, after = self._seen.get(name), _Seen(ledger.lineage, ledger.epoch, ledger.finished, now)
            if before is None or before.lineage != after.lineage:
                self._seen[name] = after
            elif before[:3] != after[:3]:
                self._seen[name] = after
                self._say(ledger, before, now)

    def _say(self, ledger: ShardLedger, before: _Seen, now: float) -> None:
        spec, epochs = ledger.spec, ledger.spec.num_epochs or "endless"
        bad = len(ledger.quarantine)
        counts = f"acknowledged={ledger.acknowledged} quarantined={bad} dropped={ledger.dropped}"
        if spec.epoch_barrier:  # without, a later epoch is read while an earlier one is not over
            last = ledger.epoch if not ledger.finished else max(before.epoch + 1, spec.num_epochs)
            for epoch in range(before.epoch, last):
                log.info(
                    "epoch over dataset=%s epoch=%d of=%s seconds=%.1f %s",
                    *(printable(spec.name), epoch, epochs, now - before.since, counts),
                )
        if ledger.finished and not before.finished:
            log.info("finished dataset=%s epochs=%s %s", printable(spec.name), epochs, counts)
