"""Handling of tasks that an ElasticDL worker reports as failed.

The report does not say which record it was. A task of several batches is handed out again as its two halves,
so that the bad batch is found; a single batch that failed `ATTEMPTS` times goes to quarantine, record by
record. Deaths and timeouts are no failures and are not counted. The counts are kept in memory: a restart of
the master grants further attempts and loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl_torch.core.calls import Failure, GiveBack
from edl_torch.core.lease import Lease

ATTEMPTS = 3
REASON_CHARACTERS = 500

_Key = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Report on a failed task: every record of it is in one of the two."""

    failures: tuple[Failure, ...] = ()
    give_backs: tuple[GiveBack, ...] = ()


class Failures:
    """Counts of failures of single batches."""

    def __init__(self) -> None:
        self._counts: dict[_Key, int] = {}

    def __repr__(self) -> str:
        return f"<Failures batches={len(self._counts)}>"

    def outcome(self, dataset: str, lease: Lease, batch_size: int, why: str) -> Outcome:
        """Return what to do with the rest of a lease after a failed attempt."""
        records = lease.stop - lease.done
        if records > batch_size:
            middle = lease.done + batch_size * -(-records // (2 * batch_size))
            return Outcome(give_backs=(_back(lease, middle), _back(lease, lease.done)))
        key = _key(dataset, lease)
        count = self._counts.get(key, 0) + 1
        if count < ATTEMPTS:
            self._counts[key] = count
            return Outcome(give_backs=(_back(lease, lease.done),))
        self._counts.pop(key, None)
        reason = f"{count} attempts at its batch failed; the last: {why[:REASON_CHARACTERS]}"
        positions = range(lease.done, lease.stop)
        return Outcome(
            failures=tuple(
                Failure(task=lease.task, attempt=lease.attempt, position=position, reason=reason)
                for position in positions
            )
        )

    def forget(self, dataset: str, lease: Lease) -> None:
        """Forget the failures of a lease that was trained on."""
        self._counts.pop(_key(dataset, lease), None)


def _key(dataset: str, lease: Lease) -> _Key:
    return dataset, lease.epoch, lease.shard, lease.done, lease.stop


def _back(lease: Lease, start: int) -> GiveBack:
    return GiveBack(task=lease.task, attempt=lease.attempt, start=start)
