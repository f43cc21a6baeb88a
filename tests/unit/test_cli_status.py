"""What `edl-torch status` shows of a dataset."""

from __future__ import annotations

from edl_torch.cli.status import as_table
from edl_torch.core.calls import DatasetStatus, MasterStatus, QuarantinedRecord
from edl_torch.shard import TaskType


def bad(index: int, epoch: int, reason: str) -> QuarantinedRecord:
    return QuarantinedRecord(epoch=epoch, shard=0, position=index, name="a", index=index, reason=reason)


def table_of(*quarantine: QuarantinedRecord) -> list[str]:
    names = ("shards", "shards_left", "todo", "leased", "leases", "acknowledged", "dropped")
    dataset = DatasetStatus(
        dataset="training",
        ledger="l",
        lineage=1,
        task_type=TaskType.TRAINING,
        epoch=0,
        num_epochs=9,
        size=100,
        quarantined=len(quarantine),
        finished=False,
        trainers=0,
        quarantine=quarantine,
        **dict.fromkeys(names, 0),
    )
    return as_table(MasterStatus(ledger="l", durable=False, datasets=(dataset,), trainers=())).splitlines()


def test_a_bad_record_has_one_line_whatever_epochs_met_it() -> None:
    lines = table_of(bad(3, 0, "torn"), bad(4, 0, "empty"), bad(3, 1, "torn"), bad(3, 2, "torn"))
    assert [line.split() for line in lines[-3:]] == [
        ["BAD", "RECORD", "INDEX", "EPOCHS", "REASON"],
        ["a", "3", "0,1,2", "torn"],
        ["a", "4", "0", "empty"],
    ]


def test_a_reason_does_not_repeat_the_records_name() -> None:
    line = table_of(bad(3, 0, "record 3 of 'a': OSError: torn"))[-1]
    assert line.split() == ["a", "3", "0", "OSError:", "torn"]


def test_a_long_quarantine_says_how_many_records_are_not_shown() -> None:
    lines = table_of(*(bad(index, epoch, "torn") for epoch in (0, 1) for index in range(23)))
    assert len([line for line in lines if "torn" in line]) == 20
    assert lines[-1] == "… and 3 more: see --json"
