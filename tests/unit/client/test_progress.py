"""How far a dataset is, and what its trainer has measured, for people and loggers."""

from __future__ import annotations

from dataclasses import replace

from statuses import dataset_status

from edl_torch.client.service import Progress
from edl_torch.core.status import Histogram, Measures

STATUS = dataset_status("d", size=500, shards=10, trainers=3)
MEASURES = Measures(batches=5, waited=Histogram(sum_s=1.0), stepped=Histogram(sum_s=3.0))


def test_progress_counts_all_outcomes_of_all_epochs() -> None:
    status = replace(STATUS, acknowledged=200, quarantined=30, dropped=20, rate=50.0)
    progress = Progress.of(status, MEASURES)
    assert (progress.n, progress.total, progress.percent) == (250, 1000, 25.0)
    assert (progress.rate, progress.eta_s) == (50.0, 15.0)
    assert progress.waiting_share == 0.25
    assert progress.acknowledged == 200


def test_printed_it_says_how_far_the_job_is() -> None:
    progress = Progress.of(replace(STATUS, acknowledged=240, quarantined=10, rate=50.0), MEASURES)
    assert str(progress) == (
        "<Progress 'd' epoch=0 records=250/1000 quarantined=10 percent=25.0 rate=50.0/s trainers=3>"
    )
    endless = Progress.of(replace(STATUS, num_epochs=0), MEASURES)
    assert str(endless) == "<Progress 'd' epoch=0 records=0/endless percent=0.0 rate=0.0/s trainers=3>"


def test_endless_epochs_have_no_end() -> None:
    progress = Progress.of(replace(STATUS, num_epochs=0, acknowledged=5, rate=5.0), Measures())
    assert (progress.n, progress.total, progress.eta_s) == (5, None, None)


def test_a_dict_for_loggers_has_numbers_alone_and_no_unknown_ones() -> None:
    still = Progress.of(replace(STATUS, acknowledged=200), MEASURES).as_dict()
    moving = Progress.of(replace(STATUS, acknowledged=200, rate=20.0), MEASURES).as_dict()
    assert moving.keys() - still.keys() == {"data/eta_s"}
    assert moving["data/percent"] == 20.0
    assert moving["data/waiting_share"] == 0.25
    timed = Progress.of(STATUS, replace(MEASURES, timed=2, read_s=3.0, transform_s=1.0)).as_dict()
    assert (timed["data/mean_read_s"], timed["data/mean_transform_s"]) == (1.5, 0.5)
    assert all(type(value) is float for value in moving.values())
