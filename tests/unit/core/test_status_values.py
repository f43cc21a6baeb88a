"""The values of the core: statuses, spans, sources, and all of them as bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from core_kit import Trainer, whole
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import (
    Grant,
    LeaseAnswer,
    PassState,
    Registration,
)
from edl_torch.core.codec import from_object, from_row, object_of, row_of
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import PAGE, Span
from edl_torch.core.limits import printable
from edl_torch.core.persistence import Rows, dump, load
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.core.registration import differences, identity
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
from edl_torch.fingerprint import UNKNOWN, Fingerprint
from edl_torch.shard import DatasetSpec, MixtureWeights, Slice, Source, TaskType
from edl_torch.trainer.vocabulary import ModelSeen

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


# Records become rows and objects that JSON has, and come back the same --------------------------------------


SPEC = DatasetSpec(
    name="d",
    sources=(Source(name="a\udcff", start=2, count=3), Source(name="b", count=4)),
    records_per_shard=2,
    seed=7,
    shuffle_in_shard=None,
    task_type=TaskType.EVALUATION,
    fingerprint="whole:1",
)
GRANT = Grant(task=1, attempt=2, slice=Slice(epoch=3, shard=4, skip=5, limit=6), bundle=7)
ANSWER = LeaseAnswer(request=8, epoch=3, state=PassState.EPOCH_OVER, grants=(GRANT, GRANT))
TORN = QuarantinedRecord(epoch=0, shard=1, position=2, name="a", index=3, reason="torn")
MODEL = ModelSeen(
    at="end",
    steps=1,
    number=0,
    shape="s",
    sharded=False,
    eps=0.5,
    processor="",
    values=b"\0\xff",
    sums=b"",
    word="",
)


@pytest.mark.parametrize("record", [SPEC, GRANT, ANSWER, TORN, MODEL], ids=lambda one: type(one).__name__)
def test_a_record_is_the_same_after_json(record):
    assert from_row(type(record), json.loads(json.dumps(row_of(record)))) == record


@pytest.mark.parametrize("record", [SPEC, ANSWER, TORN, MODEL], ids=lambda one: type(one).__name__)
def test_an_object_may_have_more_than_the_record(record):
    values = json.loads(json.dumps({"event": "x", **object_of(record)}))
    assert from_object(type(record), values) == record


def test_a_row_has_the_fields_of_what_is_in_the_record_in_its_place():
    assert row_of(GRANT) == (1, 2, 3, 4, 5, 6, 7)
    assert row_of(ANSWER) == (8, 3, "EPOCH_OVER", (row_of(GRANT),) * 2, ())
    assert object_of(SPEC)["sources"] == (("a\udcff", 2, 3), ("b", 0, 4))
    assert object_of(MODEL)["values"] == "AP8="


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (Grant, (1, 2, 3, 4, 5, 6)),
        (Grant, (1, 2, 3, 4, 5, 6, 7, 8)),
        (LeaseAnswer, (8, 3, "ASLEEP", ())),
        (LeaseAnswer, (8, 3, "OPEN", ((1, 2),))),
        (LeaseAnswer, (8, 3, "OPEN", 5)),
        (Grant, None),
        (ModelSeen, ("end", 1, 0, "s", False, 0.5, "", "?", "", "")),
        (Grant, (1, 2, 3, 4, 5, 6, "7")),
        (Grant, (1, 2, 3, 4, 5, 6, True)),
        (Grant, (1, 2, 3, 4, 5, 6.0, 7)),
        (ModelSeen, ("end", 1, 0, "s", 0, 0.5, "", "AP8=", "", "")),
        (MixtureWeights, (0, [1, "2"])),
    ],
    ids=[
        *("short", "long", "no member", "short inside", "no rows", "nothing", "no base64"),
        *("text", "switch", "no whole number", "number in the place of a switch", "text among numbers"),
    ],
)
def test_what_is_no_row_is_refused(kind, row):
    with pytest.raises((ValueError, TypeError, KeyError)):
        from_row(kind, row)


def test_an_object_without_a_field_is_refused():
    values = object_of(SPEC)
    del values["seed"]
    with pytest.raises(KeyError):
        from_object(DatasetSpec, values)


def test_pages_of_leases_stay_what_rows_of_journals_are_numbered_by() -> None:
    assert PAGE == 16


# Spans against a set of positions that is worked off one by one ---------------------------------------------


STOP = 12
ranges = st.lists(st.tuples(st.integers(-1, STOP + 2), st.integers(-1, STOP + 2)), max_size=12)


@given(begin=st.integers(0, 3), ranges=ranges)
def test_a_span_is_the_set_of_its_open_positions(begin: int, ranges: list[tuple[int, int]]) -> None:
    span = Span(done=begin, stop=STOP)
    left = set(range(begin, STOP))
    for start, upto in ranges:
        closed = set(range(start, upto))
        assert span.is_open(start, upto) == (closed <= left) or not closed
        assert span.close(start, upto) == len(closed & left)
        left -= closed
        assert {p for p in range(-1, STOP + 2) if span.is_open(p, p + 1)} == left
        assert span.open_records == len(left)
        assert span.is_done == (not left)
        assert {p for a, b in span.pieces() for p in range(a, b)} == left
        assert {p for a, b in span.pieces(start) for p in range(a, b)} == {p for p in left if p >= start}
        assert {p for a, b in span.pieces(start - 2, upto) for p in range(a, b)} == {
            p for p in left if start - 2 <= p < upto
        }
        ordered = sorted(left)
        for count in range(1, len(left) + 1):
            after = span.position_after(count)
            assert {p for p in left if p < after} == set(ordered[:count])
        assert span.position_after(STOP) == span.stop
        edges = [span.done, *(edge for hole in span.holes for edge in hole)]
        assert all(edge < after for edge, after in pairwise(edges))
        assert edges[-1] <= span.stop == STOP


def test_pieces_are_as_long_as_can_be() -> None:
    span = Span(done=2, stop=9)
    span.close(4, 5)
    span.close(5, 6)
    assert list(span.pieces()) == [(2, 4), (6, 9)]


# Which two descriptions are of the same data ----------------------------------------------------------------


V1 = Fingerprint.given("v1").encode()


def of(*names: str, fingerprint: str = V1) -> dict[str, object]:
    sources = tuple(Source(name=name, count=10) for name in names)
    return identity(DatasetSpec(name="d", sources=sources, records_per_shard=5, fingerprint=fingerprint))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["/data/images"], ["../elsewhere/images2"]),
        (["/data/a.csv", "/data/b.csv"], ["old/a.csv", "old/b.csv"]),
        (["/data/x/1", "/data/y/1"], ["x/1", "y/1"]),
        (["t/p=1", "t/p=2"], ["t/p=1", "t/p=2"]),
    ],
)
def test_data_whose_fingerprint_is_known_may_lie_elsewhere(here, there):
    assert differences(of(*here), of(*there)) == []
    if here != there:
        assert len(differences(of(*here, fingerprint=UNKNOWN), of(*there))) == 1


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["/data/a.csv", "/data/b.csv"], ["/data/b.csv", "/data/a.csv"]),
        (["/data/a.csv", "/data/b.csv"], ["/data/a.csv", "/data/c.csv"]),
    ],
)
def test_files_in_another_order_or_of_other_names_are_other_data_whatever_their_user_says(here, there):
    assert [line.split(" (")[0] for line in differences(of(*here), of(*there))] == [
        "names of sources below their folder, in order"
    ]


# What a start from rows costs: as much for each lease in flight, however many there are ---------------------


DATA = Registration(name="d", sources=(Source(name="", count=10**9),), records_per_shard=8)


def calls_in(work: Callable[[], object]) -> int:
    """Calls of functions, Python's own and others."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def rows_of(leases: int) -> Rows:
    """So many leases in flight, of sessions that have 500 each; as many were reported before them."""
    dispatcher = Dispatcher(ledger_id="l")
    for number in range(leases // 500):
        trainer = Trainer(dispatcher, f"s{number}")
        trainer.register(DATA)
        for _ in range(5):
            done = trainer.lease("d", count=100).grants
            trainer.lease("d", count=100)
            trainer.report(*map(whole, done), dataset="d")
    assert dispatcher.dataset_status("d").leases == leases
    return dump(dispatcher)


def test_a_start_costs_the_same_for_each_lease_in_flight() -> None:
    few, many = rows_of(1000), rows_of(8000)
    assert len(many) < 8 * len(few) < 1000, "what was done with before is in no row"

    def start(rows: Rows) -> int:
        return calls_in(lambda: load(rows, ledger_id="l", now=0.0))

    assert start(many) < 8 * start(few)
