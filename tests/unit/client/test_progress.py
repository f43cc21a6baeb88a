"""How far a dataset is, and how long a trainer waits for it, for people and loggers."""

from __future__ import annotations

from dataclasses import replace

from edl_torch.client.progress import Progress
from edl_torch.core.calls import DatasetStatus
from edl_torch.core.measures import Histogram, Measures
from edl_torch.shard import TaskType

STATUS = DatasetStatus(
    dataset="d",
    ledger="l",
    lineage=1,
    task_type=TaskType.TRAINING,
    epoch=0,
    num_epochs=2,
    size=500,
    shards=10,
    shards_left=10,
    todo=500,
    leased=0,
    leases=0,
    acknowledged=0,
    quarantined=0,
    dropped=0,
    finished=False,
    trainers=3,
)
MEASURES = Measures(batches=5, waited=Histogram(sum_s=1.0), stepped=Histogram(sum_s=3.0))


def test_progress_has_the_masters_counts_and_what_this_trainer_measured() -> None:
    progress = Progress.of(replace(STATUS, acknowledged=200, quarantined=30, dropped=20, rate=25.0), MEASURES)
    assert (progress.outcomes, progress.total, progress.percent, progress.eta_s) == (250, 1000, 25.0, 30.0)
    assert progress.measures is MEASURES
    assert progress.waiting_share == 0.25


def test_a_dict_for_loggers_has_numbers_alone_and_no_unknown_ones() -> None:
    first = Progress.of(STATUS, Measures()).as_dict()
    second = Progress.of(replace(STATUS, acknowledged=200, rate=25.0), MEASURES).as_dict()
    assert second.keys() - first.keys() == {"data/eta_s", "data/waiting_share"}
    assert (second["data/records"], second["data/percent"], second["data/records_per_s"]) == (200, 20.0, 25.0)
    assert second["data/waiting_share"] == 0.25
    assert all(type(value) is float for value in (first | second).values())
