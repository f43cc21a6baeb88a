"""Records become rows and objects that JSON has, and come back the same."""

from __future__ import annotations

import json

import pytest

from edl_torch.core.calls import Grant, LeaseAnswer, PassState
from edl_torch.core.codec import from_object, from_row, object_of, row_of
from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.shard import DatasetSpec, Slice, Source, TaskType
from edl_torch.trainer.vocabulary import ModelSeen

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
BAD = QuarantinedRecord(epoch=0, shard=1, position=2, name="a", index=3, reason="torn")
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


@pytest.mark.parametrize("record", [SPEC, GRANT, ANSWER, BAD, MODEL], ids=lambda one: type(one).__name__)
def test_a_record_is_the_same_after_json(record):
    assert from_row(type(record), json.loads(json.dumps(row_of(record)))) == record


@pytest.mark.parametrize("record", [SPEC, ANSWER, BAD, MODEL], ids=lambda one: type(one).__name__)
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
    ],
    ids=["short", "long", "no member", "short inside", "no rows", "nothing", "no base64"],
)
def test_what_is_no_row_is_refused(kind, row):
    with pytest.raises((ValueError, TypeError, KeyError)):
        from_row(kind, row)


def test_an_object_without_a_field_is_refused():
    values = object_of(SPEC)
    del values["seed"]
    with pytest.raises(KeyError):
        from_object(DatasetSpec, values)
