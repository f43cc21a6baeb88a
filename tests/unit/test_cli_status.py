"""What `edl-torch status` shows of a dataset."""

from __future__ import annotations

import json

import pytest
from statuses import dataset_status, master_status, trainer_status

from edl_torch.cli import status
from edl_torch.cli.main import INTERRUPTED, main
from edl_torch.cli.status import as_json, as_table, epoch_of, of_data
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import Histogram, MasterStatus, Measures
from edl_torch.errors import MasterUnavailable


def bad(index: int, epoch: int, reason: str) -> QuarantinedRecord:
    return QuarantinedRecord(epoch=epoch, shard=0, position=index, name="a", index=index, reason=reason)


def table_of(*quarantine: QuarantinedRecord) -> list[str]:
    dataset = dataset_status(num_epochs=9, size=100, quarantined=len(quarantine), quarantine=quarantine)
    return as_table(master_status(datasets=(dataset,))).splitlines()


def test_a_bad_record_has_one_line_whatever_epochs_met_it() -> None:
    lines = table_of(bad(3, 0, "torn"), bad(4, 0, "empty"), bad(3, 1, "torn"), bad(3, 2, "torn"))
    assert [line.split() for line in lines[-3:]] == [
        ["BAD", "RECORD", "INDEX", "MET", "IN", "REASON"],
        ["a", "3", "0,1,2", "torn"],
        ["a", "4", "0", "empty"],
    ]


def test_epochs_are_counted_from_zero_as_loops_count_them() -> None:
    heading, row = table_of()[-2:]
    place = heading.index("EPOCH")
    assert row[place:].startswith("0 of 9  ")
    assert (epoch_of(2, 3), epoch_of(3, 3), epoch_of(4, 0)) == ("2 of 3", "3 of 3", "4, endless")


def test_a_reason_does_not_repeat_the_records_name() -> None:
    line = table_of(bad(3, 0, "record 3 of 'a': OSError: torn"))[-1]
    assert line.split() == ["a", "3", "0", "OSError:", "torn"]


def test_a_long_quarantine_says_how_many_records_are_not_shown() -> None:
    lines = table_of(*(bad(index, epoch, "torn") for epoch in (0, 1) for index in range(23)))
    assert len([line for line in lines if "torn" in line]) == 20
    assert lines[-1] == "… and 3 more: see --json"


class RestartedMaster:
    """A client whose master is away at its second look, and that is interrupted at its fourth."""

    def __init__(self) -> None:
        self._answers: list[MasterStatus | BaseException] = [
            master_status(),
            MasterUnavailable("no answer\x1b"),
            master_status(),
            KeyboardInterrupt(),
        ]

    def __enter__(self) -> RestartedMaster:
        return self

    def __exit__(self, *_: object) -> None: ...

    def status(self) -> MasterStatus:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_who_watches_is_told_that_the_master_is_away_and_sees_it_come_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "client_of", lambda options: RestartedMaster())
    assert main(["status", "--watch", "0.001"]) == INTERRUPTED
    out, err = capsys.readouterr()
    assert out.count("no dataset yet") == 2
    assert err == "no answer\\x1b - trying again\n"


def test_each_trainer_says_what_a_batch_takes() -> None:
    measures = Measures(
        waited=Histogram(sum_s=1.0), stepped=Histogram(sum_s=1.0), timed=4, read_s=1.0, transform_s=0.1
    )
    unknown = trainer_status("v")
    lines = as_table(master_status(trainers=(trainer_status(measures=measures), unknown))).splitlines()
    heading = next(line for line in lines if "TRAINER" in line)
    place = heading.index("READ")
    shown = [line[place:].split()[:4] for line in lines[lines.index(heading) + 1 :][:2]]
    assert shown == [["250", "ms", "25", "ms"], ["-", "-", "1.0", "s"]]
    assert lines[-1] == "waited for data 50 % of the time; a batch is read in 250 ms, transformed in 25 ms"
    assert of_data(master_status(trainers=(unknown,))) is None


def test_json_has_what_each_trainer_measured_and_the_share_of_waiting() -> None:
    measured = Measures(batches=2, waited=Histogram(sum_s=1.0), stepped=Histogram(sum_s=3.0))
    trainers = tuple(trainer_status(measures=measures) for measures in (measured, None))
    status = master_status(trainers=trainers)
    first, second = (trainer["measures"] for trainer in json.loads(as_json(status))["trainers"])
    assert (first["batches"], first["waited"]["sum_s"], first["waiting_share"]) == (2, 1.0, 0.25)
    assert second is None
