"""Durable dispatcher: read from a journal at the start, written to it from then on."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from edl_torch.core import persistence
from edl_torch.core.changes import Changes, Key
from edl_torch.core.printable import printable
from edl_torch.errors import EdlError, MasterStartError
from edl_torch.master.commits import GroupCommit
from edl_torch.master.journal import Journal, encoded

NAMES = 1 << 40  # of which each start skips some at random: those that a lost future may have given

log = logging.getLogger("edl_torch.master")


class DurableState:
    """Dispatcher of the journal in `folder`; every session counts as heard at `now`.

    A journal that is known to be older than what was said from it is suspended, unless it is to be accepted.
    Raises MasterStartError for a folder that cannot be used. `group_commit()` needs a running event loop.
    """

    def __init__(
        self,
        folder: Path,
        *,
        now: float,
        lease_timeout_s: float = 30.0,
        grace_s: float = 1.0,
        progress_timeout_s: float = 0.0,
        accept_older: bool = False,
    ) -> None:
        self._journal = Journal(folder)
        self._changes = Changes()
        try:
            self.dispatcher = persistence.load(
                self._journal.read(),
                ledger_id=self._journal.ledger_id,
                now=now,
                lease_timeout_s=lease_timeout_s,
                grace_s=grace_s,
                progress_timeout_s=progress_timeout_s,
                changes=self._changes,
            )
        except (LookupError, TypeError, ValueError, EdlError) as exc:
            self._journal.close()
            raise MasterStartError(
                f"the journal in {folder} is damaged ({exc!r}): give another --state folder"
            ) from exc
        self._log(folder)
        if not self._journal.is_new:
            self._begin_again(accept_older)

    def _begin_again(self, accept_older: bool) -> None:
        """What an earlier master wrote may be older than what it said."""
        self.dispatcher.rollback.begin_again(secrets.randbelow(NAMES) + 1)
        if accept_older:
            self.dispatcher.rollback.accept_older()
            log.warning(
                "--accept-older-journal: goes on from the journal as ledger=%s, all leases are void%s",
                *(self.dispatcher.ledger_id, self._journal.lost and f"; {self._journal.lost}"),
            )
        elif self._journal.lost:
            log.error("%s", self.dispatcher.rollback.suspend(self._journal.lost))
        for dataset, why in self.dispatcher.suspended.items():
            log.error("dataset=%s is suspended: %s", printable(dataset), why)

    def _log(self, folder: Path) -> None:
        ledgers = tuple(self.dispatcher.ledgers)
        log.info(
            "%s dir=%s ledger=%s datasets=%d leases=%d sessions=%d",
            *("resumed" if ledgers else "new journal", folder, self.dispatcher.ledger_id),
            *(len(ledgers), sum(len(ledger.leases) for ledger in ledgers), len(self.dispatcher.members)),
        )

    def group_commit(self) -> GroupCommit:
        """Return the group commit that a host waits for before it answers."""
        return GroupCommit(self._changes, self._collect)

    def _collect(self, keys: tuple[Key, ...]) -> Callable[[], None]:
        batch = encoded(persistence.update(self.dispatcher, keys))
        return functools.partial(self._journal.write, batch)

    def close(self) -> None:
        """Close the journal: another master may open the folder."""
        self._journal.close()

    def __repr__(self) -> str:
        return f"<DurableState {self._journal!r} {self.dispatcher!r}>"
