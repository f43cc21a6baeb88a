"""Datasets and sessions are registered; what calls may not be larger than."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from core_kit import TRAINING, Trainer

from edl_torch.core.calls import (
    Failure,
    Fence,
    GiveBack,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import LeaseRequest, Quota
from edl_torch.core.limits import MESSAGE_BYTES, REASON_CHARS, Limits, shortened
from edl_torch.core.registration import differences, identity, new_spec, reconcile
from edl_torch.errors import (
    DatasetConflict,
    InvalidArgument,
    LimitExceeded,
    UnknownDataset,
)
from edl_torch.fingerprint import Fingerprint
from edl_torch.shard import Component, DatasetSpec, MixtureWeights, Source, TaskType

SOURCES = (Source(name="a", count=20), Source(name="b", start=3, count=5))
SPEC = DatasetSpec(name="training", sources=SOURCES, records_per_shard=8)
SAME = Registration(name="training", sources=SOURCES, records_per_shard=8, seed=0, shuffle=False)


def test_what_is_not_given_takes_its_default() -> None:
    spec = new_spec(Registration(name="training", sources=SOURCES), batch_size=4)
    assert spec == replace(SPEC, records_per_shard=32, shuffle_in_shard=None)


@pytest.mark.parametrize("turn", [0, -2, 2, True, 2**62 + 1])
def test_records_that_take_turns_are_one_or_more_and_those_of_no_mixture_one(turn: int) -> None:
    asked = Registration(name="training", sources=SOURCES, turn=turn)
    with pytest.raises(InvalidArgument, match="turn is"):
        new_spec(asked, batch_size=4)
    with pytest.raises(InvalidArgument, match="turn is"):
        reconcile(replace(SPEC, records_per_shard=32), asked, alone=True)
    web = Component(name="web", sources=SOURCES, records_per_shard=0)
    if turn != 2:
        with pytest.raises(InvalidArgument, match="turn is"):
            new_spec(replace(asked, sources=(), components=(web,)), 4)


def test_what_is_given_is_taken() -> None:
    given = Registration(
        name="evaluation",
        sources=SOURCES,
        records_per_shard=5,
        seed=3,
        shuffle=True,
        shuffle_shards=True,
        shuffle_in_shard=True,
        task_type=TaskType.EVALUATION,
        num_epochs=0,
        epoch_barrier=False,
        max_bad_records=2,
        shuffle_window=3,
        fingerprint=Fingerprint.given("v1").encode(),
    )
    spec = new_spec(given, batch_size=4)
    assert all(getattr(spec, name) == getattr(given, name) for name in given.given)


@pytest.mark.parametrize(
    ("sources", "named"), [((), r"0 source\(s\) \(none\)"), ((Source(name="list", count=0),), r"\('list'\)")]
)
def test_a_dataset_without_records_is_refused(sources: tuple[Source, ...], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"size is 0 records in .*{named}, so there is nothing to read"):
        new_spec(Registration(name="training", sources=sources), batch_size=4)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"records_per_shard": 4}, "records_per_shard: registered 8, asked 4"),
        ({"seed": 7}, "seed: registered 0, asked 7"),
        ({"shuffle": True}, "shuffle: registered False, asked True"),
        ({"shuffle_shards": True}, "shuffle_shards: registered False, asked True"),
        ({"shuffle_in_shard": True}, "shuffle_in_shard: registered False, asked True"),
        ({"shuffle_window": 4}, "shuffle_window: registered 1, asked 4"),
        ({"sources": SOURCES[:1]}, r"num_sources: registered 2, asked 1; size: registered 25, asked 20"),
        ({"sources": SOURCES[::-1]}, r"sources \(digest"),
    ],
)
def test_another_identity_is_a_conflict_that_names_the_field(
    change: dict[str, Any], named: str, alone: bool
) -> None:
    with pytest.raises(DatasetConflict, match=named):
        reconcile(SPEC, replace(SAME, **change), alone=alone)


@pytest.mark.parametrize(
    "change",
    [{"task_type": TaskType.PREDICTION}, {"num_epochs": 5}, {"epoch_barrier": False}, {"max_bad_records": 3}],
)
def test_options_change_only_while_nobody_else_takes_part(change: dict[str, Any]) -> None:
    (field,) = change
    assert reconcile(SPEC, replace(SAME, **change), alone=True) == replace(SPEC, **change)
    with pytest.raises(DatasetConflict, match=f"{field}: registered"):
        reconcile(SPEC, replace(SAME, **change), alone=False)


@pytest.mark.parametrize("said", [True, False, None])
def test_the_first_trainer_says_whether_shards_are_shuffled_inside(said: bool | None) -> None:
    left_open = replace(SPEC, shuffle_in_shard=None)
    spec = reconcile(left_open, replace(SAME, shuffle_in_shard=said), alone=True)
    assert spec.shuffle_in_shard is bool(said)


def test_the_first_trainer_says_the_window_that_was_left_open() -> None:
    left_open = replace(SPEC, shuffle_in_shard=None)
    spec = reconcile(left_open, replace(SAME, shuffle_in_shard=True, shuffle_window=4), alone=True)
    assert (spec.shuffle_in_shard, spec.shuffle_window) == (True, 4)
    with pytest.raises(DatasetConflict, match="shuffle_window: registered 4, asked 5"):
        reconcile(spec, replace(SAME, shuffle_window=5), alone=True)


def test_who_comes_with_other_data_is_told_how_the_job_goes_on_with_them() -> None:
    fewer = replace(SAME, sources=SOURCES[:1])
    with pytest.raises(
        DatasetConflict, match=r'another --state.*load the checkpoint with data_changed="new_epoch"'
    ):
        reconcile(SPEC, fewer, alone=True)
    with pytest.raises(DatasetConflict) as raised:
        reconcile(SPEC, replace(SAME, seed=7), alone=True)
    assert "data_changed" not in str(raised.value)


# Who joins a dataset, with which description, and what may still be changed of it ---------------------------


def test_data_that_differ_are_told_from_the_older_ones_on_and_their_digest_says_no_more() -> None:
    one, other = ({"size": 3, "fingerprint": Fingerprint.given(v).encode()} for v in ("v1", "v2"))
    assert differences(one, other) == ["data: fingerprint 'v1' then, 'v2' now"]
    assert differences(one, other, asked_is_older=True) == differences(other, one)
    assert differences({"size": 3, "sources": "x"}, {"size": 4, "sources": "y"}) == [
        "size: registered 3, asked 4"
    ]
    (line,) = differences({"size": 3, "sources": "x"}, {"size": 3, "sources": "y"})
    assert line.startswith("sources")


def test_a_component_more_is_a_difference_unless_it_may_have_joined_and_a_mixture_is_no_other_dataset() -> (
    None
):
    both, one = ({"components": {name: {"size": 3} for name in names}} for names in ("ab", "a"))
    assert differences(both, one) == ["component 'b': registered alone"]
    assert differences(both, one, may_change=True) == ["component 'b': registered alone"]
    assert differences(one, both) == ["component 'b': asked alone"]
    assert differences(one, both, may_change=True) == []
    assert differences(one, {}) == ["components: registered alone"]
    assert differences({}, one) == ["components: asked alone"]


def test_the_seed_of_a_component_is_its_mixtures() -> None:
    component = Component(name="c", sources=SOURCES, records_per_shard=4, shuffle_window=1)
    weights = (MixtureWeights(start=0, parts=(1,)),)
    one, other = (
        replace(SPEC, components=(component,), weights=weights, shuffle_in_shard=False, seed=seed)
        for seed in (0, 1)
    )
    assert differences(identity(one), identity(other)) == ["seed: registered 0, asked 1"]
    larger = replace(other, seed=0, components=(replace(component, records_per_shard=8),))
    assert differences(identity(one), identity(larger)) == [
        "component 'c': records_per_shard: registered 4, asked 8"
    ]


def test_a_name_that_nobody_described_is_unknown(dispatcher: Dispatcher) -> None:
    with pytest.raises(UnknownDataset, match="reader"):
        Trainer(dispatcher, "a").register(Registration(name="training"))
    assert dispatcher.status(0.0).datasets == ()
    with pytest.raises(UnknownDataset):
        dispatcher.token("training")


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_records(dispatcher: Dispatcher, batch_size: int) -> None:
    with pytest.raises(InvalidArgument, match="batch_size"):
        Trainer(dispatcher, "a", batch_size=batch_size).register()


# Fewer epochs


def with_epochs(count: int) -> Registration:
    return replace(TRAINING, num_epochs=count)


def test_a_dataset_of_the_command_line_has_shards_of_eight_records(dispatcher: Dispatcher) -> None:
    """Nobody has said yet how large batches are."""
    dispatcher.define(replace(TRAINING, records_per_shard=None))
    assert dispatcher.dataset_status("training").shards == 2


def test_what_the_command_line_says_otherwise_is_told_and_does_not_count(dispatcher: Dispatcher) -> None:
    assert dispatcher.define(with_epochs(3)) == []
    assert dispatcher.define(with_epochs(3)) == []
    assert dispatcher.define(with_epochs(5)) == ["num_epochs: registered 3, asked 5"]
    assert dispatcher.dataset_status("training").num_epochs == 3
    with pytest.raises(DatasetConflict, match="seed"):
        dispatcher.define(replace(TRAINING, seed=9))


# Sizes of leases near the end, as numbers: half of a share, no more than was shown, whole batches -----------


def limit(
    *,
    share: float = 400.0,
    share_now: float | None = None,
    held: int = 0,
    shown: int = 1000,
    waiting: int = 10_000,
    sessions: int = 2,
    ahead: bool = False,
) -> int:
    request = LeaseRequest("s", 0, 1, 10, ahead)
    quota = Quota(share, share if share_now is None else share_now, held, shown, request, sessions)
    return quota.limit(waiting)


@pytest.mark.parametrize(
    ("state", "records"),
    [
        ({}, 200),  # half of its share
        ({"held": 100}, 150),  # half of what is left of it
        ({"held": 390}, 10),  # one batch, where less is left
        ({"shown": 30}, 60),  # twice what it has shown
        ({"shown": 30, "held": 20}, 40),  # less what it holds
        ({"shown": 0}, 10),
        ({"waiting": 480}, 120),  # what waits, over twice the sessions
        ({"waiting": 480, "sessions": 3}, 80),
        ({"share": 199.0}, 90),  # whole batches
    ],
)
def test_a_lease_is_the_smallest_of_three_limits_in_whole_batches(
    state: dict[str, float], records: int
) -> None:
    assert limit(**state) == records  # type: ignore[arg-type]
    assert limit(**state, ahead=True, share_now=1000.0) == records  # type: ignore[arg-type]


@pytest.mark.parametrize(("held", "records"), [(0, 200), (95, 150), (96, 0), (100, 0)])
def test_who_reads_ahead_gets_nothing_more_once_it_holds_its_share(held: int, records: int) -> None:
    assert limit(held=held, share_now=100.0, ahead=True) == records
    assert limit(held=held, share_now=100.0) > 0


# Limits of what a master keeps: what is allowed is taken, one more is refused and named ---------------------


MOST = 4
SMALL = Limits(**{field.name: MOST for field in fields(Limits)})
FENCE = Fence(ledger="l", lineage=1, member=1)


def register(
    *, session: str = "s", worker: str = "w", name: str = "d", sources: tuple[str, ...] | None = ("a",)
) -> RegisterCall:
    found = None if sources is None else tuple(Source(name=each, count=1) for each in sources)
    registration = Registration(name=name, sources=found)
    return RegisterCall(session=session, worker_id=worker, batch_size=1, registration=registration)


def check_register(datasets: int = 1, sessions: int = 1, **parts: Any) -> None:
    SMALL.check_register(register(**parts), datasets=datasets, sessions=sessions)


def check_lease(count: int) -> None:
    SMALL.check_lease(LeaseCall(session="s", dataset="d", fence=FENCE, request=1, epoch=0, count=count))


def check_quarantine(records: int, size: int) -> None:
    SMALL.check_quarantine("d", records=records, size=size)


CHECKS: dict[str, Callable[[int], object]] = {
    "datasets": lambda n: check_register(datasets=n),
    "trainers": lambda n: check_register(sessions=n),
    "bytes of session": lambda n: check_register(session="x" * n),
    "bytes of worker_id": lambda n: check_register(worker="x" * n),
    "bytes of dataset": lambda n: check_register(name="x" * n),
    "sources of a dataset": lambda n: check_register(sources=("x",) * n),
    "bytes of a source's name": lambda n: check_register(sources=("y", "x" * n, "z")),
    "leases a call": check_lease,
    "slices of a token": SMALL.check_slices,
    "outcomes in one call": lambda n: SMALL.check_entries("outcomes", n),
    "trainers' streams": lambda n: SMALL.check_stream("s", streams=n),
    "records of 'd' in quarantine": lambda n: check_quarantine(n, 1),
    "bytes of a token for records of 'd' in quarantine": lambda n: check_quarantine(1, n),
    "bytes of a token": lambda n: SMALL.check_token("x" * n),
}


@pytest.mark.parametrize("what", CHECKS)
def test_as_much_as_is_allowed_is_taken_and_one_more_is_refused(what: str) -> None:
    CHECKS[what](MOST)
    with pytest.raises(LimitExceeded, match=f"5 {what}: this master takes 4 at most; "):
        CHECKS[what](MOST + 1)


def test_a_stream_of_a_session_with_a_long_name_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="5 bytes of session"):
        SMALL.check_stream("x" * 5, streams=1)


def test_names_are_counted_in_bytes() -> None:
    check_register(session="éé")
    with pytest.raises(LimitExceeded, match="6 bytes of session"):
        check_register(session="ééé")


def test_a_dataset_that_is_known_is_named_without_sources() -> None:
    check_register(sources=None)
    replace(SMALL, source_name_bytes=0).check_register(register(sources=None), datasets=1, sessions=1)


def test_reasons_are_kept_in_short() -> None:
    failures = [Failure(task=n, attempt=1, position=0, reason="x" * n) for n in (MOST, MOST + 1)]
    call = ReportCall(session="s", dataset="d", fence=FENCE, request=1, failures=tuple(failures))
    assert [failure.reason for failure in SMALL.with_short_reasons(call).failures] == ["xxxx", "xxxx…"]
    assert shortened("x" * REASON_CHARS) == "x" * REASON_CHARS


def test_slices_and_remainders_of_a_token_count_together() -> None:
    trainer = Trainer(Dispatcher(ledger_id="L", limits=Limits(token_slices=2)), "s")
    trainer.register()
    lent = trainer.lease(count=2).grants
    trainer.report(GiveBack(task=lent[0].task, attempt=1, start=lent[0].slice.stop - 1, remainder=True))
    with pytest.raises(LimitExceeded, match="3 slices of a token: this master takes 2"):
        trainer.restore(trainer.snapshot())


def test_a_token_fits_into_a_message_and_what_is_bad_into_half_of_it() -> None:
    limits = Limits()
    assert limits.token_bytes == MESSAGE_BYTES - 4096
    assert limits.quarantine_bytes == MESSAGE_BYTES // 2
    assert MESSAGE_BYTES == 64 * 2**20
