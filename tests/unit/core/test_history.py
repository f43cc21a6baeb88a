"""What a master remembers for people: events, trainers that have gone, rates, ages of leases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_kit import Trainer, first_of, whole

from edl_torch.core.calls import Failure, GiveBack, Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.history import DEPARTED, EVENTS, MARKS, History
from edl_torch.core.status import NAME_CHARS, DatasetStatus, EventKind, TrainerState, TrainerStatus
from edl_torch.shard import Source

BIG = Registration(name="training", sources=(Source(name="a", count=10_000),), records_per_shard=8)


class Job:
    """A master, its trainers, and a clock of its own that began at 1,000 s of 1970."""

    def __init__(self, *names: str, registration: Registration = BIG, **options: Any) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(ledger_id="L", **options)
        self.dispatcher.history.set_wall(0.0, 1000.0)
        self.trainers = {name: Trainer(self.dispatcher, name) for name in names}
        for trainer in self.trainers.values():
            trainer.register(registration)

    def at(self, now: float) -> None:
        self.now = now
        for trainer in self.trainers.values():
            trainer.now = now

    def train(self, name: str, leases: int = 1) -> None:
        for _ in range(leases):
            self.trainers[name].report(whole(first_of(self.trainers[name])))

    @property
    def dataset(self) -> DatasetStatus:
        (dataset,) = self.dispatcher.status(self.now).datasets
        return dataset

    def seen(self, name: str) -> TrainerStatus:
        return next(t for t in self.dispatcher.status(self.now).trainers if t.session == name)

    @property
    def lines(self) -> list[str]:
        return [event.line for event in self.dispatcher.status(self.now).events]


def test_a_rate_is_of_the_last_seconds() -> None:
    job = Job("a")
    for second in range(40):
        job.at(float(second))
        job.train("a", 2 if second < 20 else 4)
    job.at(40.0)
    assert job.dataset.rate == pytest.approx(32.0, rel=0.1)
    assert job.seen("a").pace == pytest.approx(32.0, rel=0.1)
    job.at(400.0)
    assert job.dataset.rate < 2


def test_the_end_is_told_by_the_rate() -> None:
    job = Job("a")
    for second in range(20):
        job.at(float(second))
        job.train("a", 5)
    dataset = job.dataset
    assert dataset.rate > 0
    assert dataset.eta_s == pytest.approx((10_000 - 800) / dataset.rate)
    assert dataset.epoch_eta_s == dataset.eta_s  # of one epoch
    assert dataset.percent == pytest.approx(8.0)
    assert dataset.epochs_done == 0


def test_a_dead_trainer_is_remembered_with_what_went_back() -> None:
    job = Job("a", "b")
    job.at(5.0)
    job.train("a")
    first_of(job.trainers["a"])
    job.dispatcher.members.stream_broke("a", 6.0)
    assert job.seen("a").state is TrainerState.STREAM_GONE
    job.dispatcher.expire(7.0)
    (gone,) = job.dispatcher.status(7.0).departed
    assert (gone.session, gone.worker_id, gone.at) == ("a", "worker-a", 1007.0)
    assert (gone.died, gone.trained, gone.slices, gone.records) == (True, 8, 1, 8)
    assert job.lines[-1] == (
        "trainer worker-a died: its connection broke and did not come back within 1 s; "
        "8 records in 1 slice went back"
    )
    job.at(7.0)
    dataset = job.dataset
    assert (dataset.returned_slices, dataset.returned_records, dataset.given_back) == (1, 8, 0)


def test_one_that_leaves_did_not_die() -> None:
    job = Job("a")
    job.dispatcher.leave("a", 1, 3.0)
    (gone,) = job.dispatcher.status(4.0).departed
    assert (gone.died, gone.why, gone.at) == (False, "", 1003.0)
    assert job.lines[-1] == "trainer worker-a left; it held no records"


def test_what_trainers_give_back_themselves_is_counted_apart() -> None:
    job = Job("a")
    grant = first_of(job.trainers["a"])
    job.trainers["a"].report(GiveBack(task=grant.task, attempt=grant.attempt, start=5))
    assert (job.dataset.given_back, job.dataset.returned_records) == (3, 0)


def test_a_stalled_trainer_is_seen_as_such_until_it_moves_on() -> None:
    job = Job("a", progress_timeout_s=10.0)
    first_of(job.trainers["a"])
    job.dispatcher.heartbeat("a", 1, 11.0, 0)
    job.dispatcher.expire(11.0)
    job.at(12.0)
    assert job.seen("a").state is TrainerState.STALLED
    assert job.lines[-1] == (
        "trainer worker-a stalled: its loop did not move on for 10 s; 8 records in 1 slice went back"
    )
    assert job.dataset.returned_records == 8
    job.dispatcher.heartbeat("a", 1, 13.0, 1)
    assert job.seen("a").state is TrainerState.LIVE


def test_who_trains_at_less_than_half_of_the_median_is_slow() -> None:
    job = Job("a", "b", "c")
    for second in range(30):
        job.at(float(second))
        for name, leases in (("a", 5), ("b", 5), ("c", 2)):
            job.train(name, leases)
    for trainer in job.trainers.values():
        first_of(trainer)
    assert [job.seen(name).slow for name in "abc"] == [False, False, True]


def test_who_holds_nothing_or_has_just_come_is_not_slow() -> None:
    job = Job("a", "b", "c", "idle")
    for second in range(30):
        job.at(float(second))
        for name, leases in (("a", 4), ("b", 4), ("c", 2)):
            job.train(name, leases)
    late = job.trainers["late"] = Trainer(job.dispatcher, "late", now=29.0)
    late.register(BIG)
    job.at(38.9)
    for name in ("a", "b", "c", "late"):
        first_of(job.trainers[name])
    assert [job.seen(name).slow for name in ("a", "c", "idle", "late")] == [False, False, False, False]
    job.at(39.0)
    assert job.seen("late").slow


def test_a_lease_has_an_age_to_a_second() -> None:
    job = Job("a", "b")
    for second in range(30):
        job.at(float(second))
        job.train("b")
        if second == 10:
            first_of(job.trainers["a"])
    job.at(30.0)
    assert job.seen("a").oldest_lease_s == pytest.approx(20.0, abs=1.0)
    assert job.seen("a").leases == 1
    assert job.seen("b").oldest_lease_s == 0.0


def test_a_lease_from_before_the_first_mark_is_as_old_as_that_at_least() -> None:
    job = Job("a", "b")
    first_of(job.trainers["a"])
    for second in range(1, MARKS + 10):
        job.at(float(second))
        job.train("b")
    job.at(MARKS + 10.0)
    assert job.seen("a").oldest_lease_s == MARKS - 1


def test_epochs_and_the_end_are_events() -> None:
    job = Job(
        "a",
        registration=Registration(
            name="training", sources=(Source(name="a", count=16),), records_per_shard=8, num_epochs=2
        ),
    )
    while not job.dataset.finished:
        job.train("a")
    assert job.lines[1:] == [
        "trainer worker-a joined training",
        "training: epoch 0 of 2 over",
        "training: epoch 1 of 2 over",
        "training finished: 32 records trained on, 0 quarantined, 0 dropped",
    ]


def test_bad_records_and_checkpoints_that_repeat_are_one_event() -> None:
    job = Job("a", registration=replace(BIG, max_bad_records=10))
    grant = first_of(job.trainers["a"])
    for position in (0, 1):
        failure = Failure(task=grant.task, attempt=grant.attempt, position=position, reason="torn")
        job.trainers["a"].report(failure)
    for _ in range(3):
        job.trainers["a"].snapshot()
    assert job.lines[-2:] == [
        "training: 2 records quarantined: record 1 of 'a': torn",
        "training: 3 checkpoints, the last by trainer worker-a",
    ]
    assert job.dispatcher.status(0.0).event_counts["quarantined"] == 2
    assert job.dataset.checkpoints == 3


def test_what_repeats_late_or_elsewhere_is_an_event_of_its_own() -> None:
    history = History()
    for now, dataset in ((0.0, "a"), (59.9, "a"), (119.8, "a"), (179.8, "a"), (180.0, "b"), (181.0, "a")):
        history.add(EventKind.CHECKPOINT, now, dataset=dataset)
    history.add(EventKind.JOINED, 181.0, dataset="a")
    history.add(EventKind.JOINED, 181.0, dataset="a")
    assert [event.count for event in history.events] == [3, 1, 1, 1, 1, 1]
    assert history.latest == 8


def test_calls_of_a_new_second_look_at_all() -> None:
    job = Job("a")
    ticks = []
    for now, act in ((0.0, job.train), (0.9, job.train), (1.0, job.train), (1.9, job.train)):
        job.at(now)
        act("a")
        ticks.append(job.dispatcher.history.next_tick)
    grant = first_of(job.trainers["a"])
    job.at(2.0)
    job.trainers["a"].report(whole(grant))
    ticks.append(job.dispatcher.history.next_tick)
    assert ticks == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_look_tells_what_has_ended_since_the_last_one_and_a_restore_ends_nothing() -> None:
    registration = Registration(name="training", sources=(Source(name="a", count=8),), num_epochs=2)
    job = Job("a", registration=registration)
    looks = [job.dispatcher.epoch_ends(0.0)]
    while not job.dataset.finished:
        job.train("a")
        looks.append(job.dispatcher.epoch_ends(0.0))
    job.dispatcher.go_back("training", None)
    looks += [job.dispatcher.epoch_ends(0.0), job.dispatcher.epoch_ends(0.0)]
    assert [[end.epoch for end in ends] for ends in looks] == [[], [], [0], [], [1, None], [], []]


def test_the_master_starts_once_whatever_its_clock_is_set_to() -> None:
    job = Job()
    job.dispatcher.history.set_wall(10.0, 2000.0)
    status = job.dispatcher.status(11.0)
    assert (status.started_at, status.time) == (1000.0, 2001.0)
    assert job.lines == ["the master started"]


def test_a_picture_of_much_is_drawn_anew_when_that_has_paid_for_itself() -> None:
    job = Job("a")
    ledger = job.dispatcher.find_ledger("training")
    assert ledger is not None
    watch = job.dispatcher.history.watch(ledger, 0.0)
    assert watch.picture(1.0) is not watch.picture(1.0)
    assert len(job.trainers["a"].lease(count=1200).grants) == 1200
    drawn = watch.picture(1.0)  # 200 slices more than are drawn at once, of 2,000 a second
    assert watch.picture(1.09) is drawn
    assert watch.picture(1.11) is not drawn
    assert watch.picture(0.5) is not watch.picture(0.4)


def test_a_restore_is_an_event_and_begins_the_rates_anew() -> None:
    job = Job("a")
    job.at(1.0)
    token = job.trainers["a"].snapshot()
    job.train("a", 5)
    job.at(2.0)
    job.trainers["a"].restore(token)
    assert job.lines[-1] == "training went back to a checkpoint of 0 records"
    dataset = job.dataset
    assert (dataset.restores, dataset.lineage, dataset.rate) == (1, 2, 0.0)


def test_a_suspension_is_an_event() -> None:
    job = Job("a")
    job.dispatcher.rollback.suspend("the disk lies")
    job.dispatcher.epoch_ends(1.0)
    assert any(line.startswith("training suspended: ") for line in job.lines)
    job.dispatcher.epoch_ends(2.0)
    assert job.dispatcher.history.counts[EventKind.SUSPENDED] == 1
    job.dispatcher.go_back("training", None)
    job.dispatcher.epoch_ends(3.0)
    job.dispatcher.rollback.suspend("again")
    job.dispatcher.epoch_ends(4.0)
    assert job.dispatcher.history.counts[EventKind.SUSPENDED] == 2


def test_all_of_it_is_bounded() -> None:
    job = Job()
    for number in range(EVENTS + 10):
        trainer = Trainer(job.dispatcher, f"{number}" + "x" * 900)
        trainer.register()
        job.dispatcher.leave(trainer.session, trainer.member, 1.0)
    status = job.dispatcher.status(1.0)
    assert len(status.events) == EVENTS
    assert len(status.departed) == DEPARTED
    assert max(len(event.worker_id) for event in status.events) <= NAME_CHARS + 1
    assert max(len(gone.session) for gone in status.departed) <= NAME_CHARS + 1
    assert status.event_counts["joined"] == EVENTS + 10
