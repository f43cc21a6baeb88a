"""Final state of each dataset, from the master's journal.

A trainer that was killed between its report and the answer cannot know whether it was heard. The master
wrote down what it heard before it answered, so its state says.
"""

from __future__ import annotations

from collections.abc import Iterator

from edl_torch.audit.chain import FinalWord
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.errors import AuditError


def final_words(dispatcher: Dispatcher) -> dict[str, FinalWord]:
    """Return the final state of each dataset, by name. Raises AuditError where its journal went back."""
    if dispatcher.suspended:
        names = ", ".join(map(repr, sorted(dispatcher.suspended)))
        raise AuditError(
            f"the master's journal is older than what its trainers were told, and {names} is suspended: "
            f"audit the job once that has been restored from a checkpoint"
        )
    return {
        ledger.spec.name: FinalWord(
            token=ledger.snapshot().encode(),
            settled=dict(_settled(ledger)),
            ledger=dispatcher.ledger_id,
            lineage=ledger.lineage,
        )
        for ledger in dispatcher.ledgers
    }


def _settled(ledger: ShardLedger) -> Iterator[tuple[tuple[int, int], int]]:
    """How far each lease is acknowledged of which the master still knows: those that live or just ended."""
    for task in ledger.tasks:
        lease = ledger.lease_of(task)
        if lease is not None:
            yield (task, lease.attempt), lease.done
    for session in ledger.participants.sessions:
        for task, attempt in ledger.leases.ended(session).items():
            yield (task, attempt), ledger.spec.records_per_shard  # to wherever it ended
