"""What a status says in numbers: parts of the whole, times to the end, shares; and all of it as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edl_torch.core.limits import printable
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.status import (
    DatasetStatus,
    Departed,
    Event,
    EventKind,
    Histogram,
    MasterStatus,
    Measures,
    Picture,
    TrainerStatus,
    plain,
    plain_frame,
)
from edl_torch.shard import TaskType

DATASET = DatasetStatus(
    dataset="training",
    ledger="L",
    lineage=1,
    task_type=TaskType.TRAINING,
    epoch=1,
    num_epochs=4,
    size=100,
    shards=10,
    shards_left=5,
    todo=40,
    leased=10,
    leases=2,
    acknowledged=140,
    quarantined=6,
    dropped=4,
    finished=False,
    trainers=2,
    rate=5.0,
)


def trainer(session: str, waited_s: float = 0.0, stepped_s: float = 0.0) -> TrainerStatus:
    measures = Measures(waited=Histogram(sum_s=waited_s), stepped=Histogram(sum_s=stepped_s))
    return TrainerStatus(
        session=session,
        worker_id=session,
        datasets=("training",),
        leased=5,
        idle_s=1.0,
        measures=measures if waited_s or stepped_s else None,
    )


def master(*trainers: TrainerStatus, **more: Any) -> MasterStatus:
    return MasterStatus(ledger="L", durable=True, datasets=(DATASET,), trainers=trainers, **more)


# Numbers ----------------------------------------------------------------------------------------------------


def test_a_dataset_is_told_by_its_outcomes() -> None:
    assert (DATASET.outcomes, DATASET.epochs_done, DATASET.total) == (150, 1, 400)
    assert (DATASET.percent, DATASET.epoch_percent) == (37.5, 50.0)
    assert (DATASET.epoch_eta_s, DATASET.eta_s) == (10.0, 50.0)


def test_of_endless_epochs_the_present_one_is_told() -> None:
    endless = replace(DATASET, num_epochs=0)
    assert (endless.total, endless.eta_s) == (None, None)
    assert (endless.percent, endless.epoch_percent, endless.epoch_eta_s) == (50.0, 50.0, 10.0)


def test_a_dataset_that_is_finished_has_all_of_it_and_no_time_left() -> None:
    finished = replace(DATASET, finished=True, rate=0.0)
    assert (finished.percent, finished.epoch_percent) == (100.0, 100.0)
    assert (finished.eta_s, finished.epoch_eta_s) == (0.0, 0.0)


def test_without_a_rate_nobody_knows_when() -> None:
    still = replace(DATASET, rate=0.0)
    assert (still.eta_s, still.epoch_eta_s) == (None, None)
    assert replace(DATASET, rate=0.5).eta_s == 500.0


def test_what_does_not_add_up_stays_within_its_bounds() -> None:
    """Masters of ElasticDL know less: sizes may be unknown, and outcomes more than they say."""
    unknown = replace(DATASET, size=0)
    assert (unknown.epochs_done, unknown.epoch_percent) == (0, 100.0)
    assert replace(DATASET, todo=200).epoch_percent == 0.0
    over = replace(DATASET, acknowledged=1000)
    assert (over.percent, over.eta_s) == (100.0, 0.0)
    assert replace(DATASET, todo=-20).epoch_eta_s == 0.0


def test_what_makes_a_batch_is_the_mean_of_all_that_were_timed() -> None:
    few = replace(trainer("few"), measures=Measures(timed=1, read_s=4.0, transform_s=1.0))
    many = replace(trainer("many"), measures=Measures(timed=3, read_s=0.0, transform_s=3.0))
    assert [(one.mean_read_s, one.mean_transform_s) for one in (few, many)] == [(4.0, 1.0), (0.0, 1.0)]
    both = master(few, many, trainer("unknown"))
    assert (both.mean_read_s, both.mean_transform_s) == (1.0, 1.0)
    assert master(trainer("unknown")).mean_read_s is None
    shown, frame = json.loads(json.dumps(plain(both))), plain_frame(both, 0)
    assert (shown["mean_read_s"], shown["trainers"][0]["measures"]["mean_read_s"]) == (1.0, 4.0)
    rows = [dict(zip(frame["trainer_columns"], row, strict=True)) for row in frame["trainers"]]
    assert [row["mean_read_s"] for row in rows] == [4.0, 0.0, None]
    assert [row["mean_transform_s"] for row in rows] == [1.0, 1.0, None]


def test_of_a_share_of_waiting_the_loops_that_were_timed_count() -> None:
    slow, quick, unknown = trainer("slow", 3.0, 1.0), trainer("quick", 0.0, 4.0), trainer("unknown")
    assert [one.waiting_share for one in (slow, quick, unknown)] == [0.75, 0.0, None]
    assert master(slow, quick, unknown).waiting_share == 3 / 8
    assert master(unknown).waiting_share is None


# As JSON has it ---------------------------------------------------------------------------------------------


BAD = tuple(
    QuarantinedRecord(epoch=0, shard=0, position=p, name="a", index=p, reason=f"record {p} of 'a': torn")
    for p in range(3)
)


def test_json_has_all_of_a_status() -> None:
    event = Event(number=1, at=2.0, kind=EventKind.JOINED, dataset="training", worker_id="w")
    gone = Departed(session="s", worker_id="w", at=3.0, died=True, why="", trained=4, slices=5, records=6)
    picture = Picture(epoch=1, waiting=(40,), lent=(10,), done=(50,), returned=(0,), quarantined=(0,))
    status = master(
        trainer("slow", 3.0, 1.0),
        trainer("unknown"),
        suspended={"training": "went back"},
        events=(event,),
        departed=(gone,),
        event_counts={"joined": 7},
    )
    status = replace(status, datasets=(replace(DATASET, quarantine=BAD, picture=picture), DATASET))
    shown = json.loads(json.dumps(plain(status)))
    assert (shown["ledger"], shown["durable"], shown["waiting_share"]) == ("L", True, 0.75)
    assert (shown["suspended"], shown["event_counts"]) == ({"training": "went back"}, {"joined": 7})
    first, second = shown["datasets"]
    assert (first["dataset"], first["task_type"], first["percent"]) == ("training", "TRAINING", 37.5)
    assert [bad["index"] for bad in first["quarantine"]] == [0, 1, 2]
    assert (first["picture"]["done"], second["picture"]) == ([50], None)
    slow, unknown = shown["trainers"]
    assert (slow["session"], slow["state"], slow["measures"]["waiting_share"]) == ("slow", "live", 0.75)
    assert (slow["measures"]["waited"]["sum_s"], slow["measures"]["stepped"]["sum_s"]) == (3.0, 1.0)
    assert unknown["measures"] is None
    assert [(e["kind"], e["line"]) for e in shown["events"]] == [("joined", "trainer w joined training")]
    assert [(d["died"], d["records"]) for d in shown["departed"]] == [(True, 6)]


def test_a_frame_of_the_page_leaves_out_what_is_much() -> None:
    status = replace(master(trainer("slow", 3.0, 1.0)), datasets=(replace(DATASET, quarantine=BAD),))
    shown = plain_frame(status, 2)
    assert [bad["index"] for bad in shown["datasets"][0]["quarantine"]] == [0, 1]
    (row,) = shown["trainers"]
    named = dict(zip(shown["trainer_columns"], row, strict=True))
    assert (named["session"], named["state"], named["waiting_share"]) == ("slow", "live", 0.75)


def test_a_frame_of_the_page_has_no_more_digits_than_it_shows() -> None:
    times = {"idle_s": 1.26, "since_progress_s": 2.26, "oldest_lease_s": 3.26}
    measures = Measures(
        waited=Histogram(sum_s=1.0), stepped=Histogram(sum_s=2.0), timed=2, read_s=0.2469134, transform_s=1e-7
    )
    one = replace(trainer("one"), pace=4.126, measures=measures, **times)  # type: ignore[arg-type]
    shown = plain_frame(master(one, trainer("untimed")), 0)
    assert [row[-8:] for row in shown["trainers"]] == [
        (4.13, 1.3, 2.3, 3.3, "live", 0.333, 0.123457, 0.0),
        (0.0, 1.0, 0.0, 0.0, "live", None, None, None),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("größe 1", "größe 1"), ("a\nb", "a\\nb"), ("\x1b[31mred", "\\x1b[31mred"), ("\u202e", "\\u202e")],
)
def test_what_would_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
