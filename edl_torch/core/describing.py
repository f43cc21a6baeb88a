"""What is told of a ledger: its state for people and programs, as a value. Changes and decides nothing."""

from __future__ import annotations

from edl_torch.core.calls import DatasetStatus, QuarantinedRecord
from edl_torch.core.ledger import ShardLedger


def describe(ledger: ShardLedger, ledger_id: str, quarantine: tuple[QuarantinedRecord, ...]) -> DatasetStatus:
    """A ledger's state for people, with what is to be shown of its quarantine."""
    spec = ledger.spec
    return DatasetStatus(
        dataset=spec.name,
        ledger=ledger_id,
        lineage=ledger.lineage,
        task_type=spec.task_type,
        epoch=ledger.epoch,
        num_epochs=spec.num_epochs,
        size=ledger.plan.size,
        shards=ledger.plan.num_shards,
        shards_left=ledger.shards_left,
        todo=ledger.todo,
        leased=ledger.leased_records,
        leases=len(ledger.leases),
        acknowledged=ledger.acknowledged,
        quarantined=len(ledger.quarantine),
        dropped=ledger.dropped,
        finished=ledger.finished,
        trainers=ledger.trainers,
        failure=ledger.failure,
        quarantine=quarantine,
    )
