"""How far a dataset is and how fast it goes on, of looks one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl_torch.client.progress import Pace, Progress
from edl_torch.core.calls import DatasetStatus
from edl_torch.core.measures import Histogram, Measures
from edl_torch.shard import TaskType
from edl_torch.testing import FakeClock

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


def look(pace: Pace, acknowledged: int, lineage: int = 1) -> Progress:
    return pace.progress(replace(STATUS, acknowledged=acknowledged, lineage=lineage), MEASURES)


def test_a_first_look_has_all_but_a_rate() -> None:
    status = replace(STATUS, acknowledged=200, quarantined=30, dropped=20)
    progress = Pace().progress(status, MEASURES)
    assert (progress.n, progress.total, progress.percent) == (250, 1000, 25.0)
    assert (progress.rate, progress.eta_s) == (None, None)
    assert progress.waiting_share == 0.25
    assert progress.acknowledged == 200


def test_rate_and_time_that_is_left() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    look(pace, 0)
    clock.advance(10.0)
    progress = look(pace, 200)
    assert (progress.rate, progress.eta_s) == (20.0, 40.0)


def test_the_rate_is_that_of_the_last_minute_however_often_one_looks() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    for second in range(0, 1000, 2):
        look(pace, second)  # 1 record a second
        clock.advance(2.0)
    assert look(pace, 1000).rate == pytest.approx(1.0)
    for tenth in range(1, 1000):
        clock.advance(0.1)
        progress = look(pace, 1000 + tenth)
    assert progress.rate == pytest.approx(10.0)
    assert len(pace._looks) < 70
    assert repr(pace) == f"<Pace looks={len(pace._looks)}>"


def test_a_restore_begins_a_new_rate() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    look(pace, 400)
    clock.advance(10.0)
    assert look(pace, 100, lineage=2).rate is None
    clock.advance(10.0)
    assert look(pace, 150, lineage=2).rate == 5.0


def test_endless_epochs_have_no_end() -> None:
    progress = Pace().progress(replace(STATUS, num_epochs=0, acknowledged=5), Measures())
    assert (progress.n, progress.total, progress.percent, progress.eta_s) == (5, None, None, None)


def test_a_dict_for_loggers_has_numbers_alone_and_no_unknown_ones() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    first = look(pace, 0).as_dict()
    clock.advance(10.0)
    second = look(pace, 200).as_dict()
    assert second.keys() - first.keys() == {"data/records_per_s", "data/eta_s"}
    assert second["data/percent"] == 20.0
    assert second["data/waiting_share"] == 0.25
    assert all(type(value) is float for value in second.values())
