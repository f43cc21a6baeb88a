"""What trainers write down with `audit_dir=` proves what was trained on, and shows what was not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.audit.verdict import Verdict, audit
from edl_torch.cli.main import main
from edl_torch.errors import AuditError
from edl_torch.readers import MapDatasetReader
from edl_torch.testing import FakeMaster, Fault

NUMBERS = MapDatasetReader(range(400))


def service(master: FakeMaster, folder: Path, *, in_process: bool) -> DataShardService:
    return DataShardService(
        10, master.connect(in_process=in_process), reader=NUMBERS, num_epochs=2, seed=3, audit_dir=folder
    )


def verdict(folder: Path) -> Verdict:
    (found,) = audit([folder])
    return found


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_a_job_that_went_back_to_a_checkpoint_is_proven(tmp_path: Path, in_process: bool) -> None:
    master = FakeMaster()
    master.faults.plan("report", None, Fault.LOSE_ANSWER, Fault.LOSE_CALL, Fault.REPEAT)
    with service(master, tmp_path, in_process=in_process) as first:
        loader = ElasticDataLoader(ShardedDataset(first, NUMBERS, shuffle=True))
        for number, _ in enumerate(loader):
            if number == 12:
                checkpoint = first.state_dict()
            if number == 20:
                break
    with service(master, tmp_path, in_process=in_process) as second:
        second.load_state_dict(checkpoint)
        loader = ElasticDataLoader(ShardedDataset(second, NUMBERS, shuffle=True))
        while not second.finished:
            for _ in loader:
                pass
    found = verdict(tmp_path)
    assert found.delivered, found.findings
    assert found.acknowledged == 800
    assert main(["audit", str(tmp_path)]) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
def test_what_a_full_disk_has_no_room_for_is_not_acknowledged(tmp_path: Path, in_process: bool) -> None:
    master = FakeMaster()
    first = service(master, tmp_path, in_process=in_process)
    batches = iter(ElasticDataLoader(ShardedDataset(first, NUMBERS)))
    next(batches)
    log = first.session._audit
    assert log is not None
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log._file)
    with pytest.raises(AuditError, match="No space left"):
        list(batches)
    with pytest.raises(AuditError, match="No space left"):
        first.close()
    with service(master, tmp_path, in_process=in_process) as second:
        loader = ElasticDataLoader(ShardedDataset(second, NUMBERS))
        while not second.finished:
            for _ in loader:
                pass
    found = verdict(tmp_path)
    assert found.delivered, found.findings


def test_records_without_an_acknowledgement_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    master = FakeMaster()
    with service(master, tmp_path, in_process=True) as trainer:
        loader = ElasticDataLoader(ShardedDataset(trainer, NUMBERS))
        while not trainer.finished:
            for _ in loader:
                pass
    assert verdict(tmp_path).delivered
    (log,) = tmp_path.glob("*.audit")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(line for line in lines if not line.startswith(b"1 2 ")))  # epoch 1, shard 2
    assert main(["audit", str(tmp_path)]) == 1
    assert "epoch 1: records 160 to 239 of 'range'" in capsys.readouterr().out


def test_a_dead_trainers_leases_are_proven_by_those_who_took_them_over(tmp_path: Path) -> None:
    master = FakeMaster()
    doomed = service(master, tmp_path, in_process=True)
    batches = iter(ElasticDataLoader(ShardedDataset(doomed, NUMBERS)))
    for _ in range(5):
        next(batches)  # four trained on, one in hand
    master.break_stream(doomed.session.id)
    master.clock.advance(5)
    master.expire()
    with service(master, tmp_path, in_process=True) as heir:
        loader = ElasticDataLoader(ShardedDataset(heir, NUMBERS))
        while not heir.finished:
            for _ in loader:
                pass
    found = verdict(tmp_path)
    assert found.delivered, found.findings
    assert found.acknowledged == 800
    doomed.close()
