"""What audits say of killed trainers: by the journal of their master, and by the logs alone."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cases import cases
from master_kit import EDL, MasterProcess

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.audit.verdict import Verdict, audit
from edl_torch.errors import AuditError
from edl_torch.readers import MapDatasetReader
from edl_torch.testing import FakeMaster, wait_until

TRAINER = Path(__file__).with_name("doomed_trainer.py")
SIZE = 20  # five batches of 4, in shards of 8
BATCH = 4


@dataclass
class Job:
    """Trainers of one master, one after the other."""

    master: MasterProcess
    audit_dir: Path

    def train(self, report: int = 0, when: str = "never") -> list[int]:
        """A trainer from its start to its end; what it trained on."""
        arguments = [self.master.address, str(self.audit_dir), str(SIZE), str(report), when]
        done = preloaded.run(
            [sys.executable, "-W", "ignore", str(TRAINER), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == (-signal.SIGKILL if report else 0), done.stderr
        return [int(line) for line in done.stdout.split()]

    def audit(self, *options: str) -> tuple[int, dict[str, Any]]:
        """The command's exit status, and what it says of the only dataset."""
        done = preloaded.run(
            [*EDL, "audit", str(self.audit_dir), "--json", *options],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not done.stderr
        (said,) = json.loads(done.stdout)["datasets"]
        return done.returncode, said

    def by_journal(self, *options: str) -> tuple[int, dict[str, Any]]:
        return self.audit("--state", str(self.master.state), *options)


@pytest.fixture
def job(start_master: Callable[..., MasterProcess], tmp_path: Path) -> Job:
    return Job(start_master("--grace-s", "0.2", durable=True), tmp_path / "audit")


@cases(
    "when, heard, ended",
    [("before", 8, "killed"), ("after", 12, "stopped")],
    [
        (when, heard, ended)
        for when, heard in (("before", 8), ("after", 12))
        for ended in ("killed", "stopped", "still there")
    ],
)
def test_the_journal_says_whether_a_report_was_heard(job: Job, when: str, heard: int, ended: str) -> None:
    trained = job.train(3, when)
    assert len(trained) == 3 * BATCH
    if ended == "killed":
        job.master.kill()
    elif ended == "stopped":
        job.master.stop()
    else:  # its journal rests once it has given the dead trainer up
        client = job.master.client()
        wait_until(lambda: not client.status().trainers)
    status, said = job.by_journal("--unfinished")
    assert (status, said["verdict"]) == (2, "UNFINISHED"), said
    assert (said["acknowledged"], said["open"]) == (heard, SIZE - heard)
    _, assumed = job.audit("--unfinished")
    assert (assumed["acknowledged"], assumed["unsettled"]) == (12, 4)  # the logs alone cannot know


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_last_report_decides_whether_the_job_is_done(job: Job, when: str) -> None:
    job.train(5, when)
    status, _ = job.audit()
    assert status == 4  # by the logs all was reported, and nobody says that it was not heard
    client = job.master.client()
    wait_until(lambda: not client.status().trainers)
    status, said = job.by_journal()
    assert client.dataset_status("training").finished == (when == "after")
    if when == "after":
        assert (status, said["acknowledged"], said["lost"]) == (4, SIZE, 0)
        return
    assert (status, said["acknowledged"], said["lost"]) == (1, SIZE - BATCH, BATCH)
    assert said["findings"][0]["records"] == {"epoch": 0, "name": "", "start": 16, "end": 20}
    assert sorted(job.train()) == [16, 17, 18, 19]
    status, said = job.by_journal()
    assert (status, said["acknowledged"], said["lost"], said["doubled"]) == (4, SIZE, 0, 0)


# By the logs alone ------------------------------------------------------------------------------------------


NUMBERS = MapDatasetReader(range(400))


def service(master: FakeMaster, folder: Path, *, in_process: bool) -> DataShardService:
    return DataShardService(
        10, master.connect(in_process=in_process), reader=NUMBERS, num_epochs=2, seed=3, audit_dir=folder
    )


def verdict(folder: Path) -> Verdict:
    (found,) = audit([folder])
    return found


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
