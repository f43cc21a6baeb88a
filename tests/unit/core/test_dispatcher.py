"""Calls of several trainers on one master, with numbers for time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    Grant,
    LeaseAnswer,
    LeaseCall,
    PassState,
    RegisterAnswer,
    RegisterCall,
    Registration,
    ReportAnswer,
    ReportCall,
)
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump
from edl_torch.errors import (
    DatasetConflict,
    InvalidArgument,
    StaleLease,
    TokenError,
    TooManyBadRecords,
    UnknownDataset,
)
from edl_torch.shard import Source, TaskType

TRAINING = Registration(name="training", sources=(Source(name="a", count=16),), records_per_shard=8)


class Trainer:
    """One session's calls, numbered."""

    def __init__(self, dispatcher: Dispatcher, session: str, batch_size: int = 4, now: float = 0.0) -> None:
        self.dispatcher = dispatcher
        self.session = session
        self.batch_size = batch_size
        self.now = now
        self.requests = 0
        self.lineage = 1

    def register(self, registration: Registration = TRAINING) -> RegisterAnswer:
        call = RegisterCall(
            session=self.session,
            worker_id=f"worker-{self.session}",
            batch_size=self.batch_size,
            registration=registration,
        )
        answer = self.dispatcher.register(call, self.now)
        self.lineage = answer.lineage
        return answer

    def lease_call(self, dataset: str = "training", count: int = 1, **change: Any) -> LeaseCall:
        self.requests += 1
        call = LeaseCall(
            session=self.session,
            dataset=dataset,
            lineage=self.lineage,
            request=self.requests,
            epoch=NEW_PASS,
            count=count,
        )
        return replace(call, **change)

    def lease(self, dataset: str = "training", count: int = 1, **change: Any) -> LeaseAnswer:
        return self.dispatcher.lease(self.lease_call(dataset, count, **change), self.now)

    def report_call(self, *outcomes: Failure | Acknowledgement | GiveBack, **change: Any) -> ReportCall:
        self.requests += 1
        call = ReportCall(
            session=self.session,
            dataset="training",
            lineage=self.lineage,
            request=self.requests,
            failures=tuple(o for o in outcomes if isinstance(o, Failure)),
            acknowledgements=tuple(o for o in outcomes if isinstance(o, Acknowledgement)),
            give_backs=tuple(o for o in outcomes if isinstance(o, GiveBack)),
        )
        return replace(call, **change)

    def report(self, *outcomes: Failure | Acknowledgement | GiveBack, **change: Any) -> ReportAnswer:
        return self.dispatcher.report(self.report_call(*outcomes, **change), self.now)


def whole(grant: Grant) -> Acknowledgement:
    return Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(ledger_id="L1", lease_timeout_s=30.0, grace_s=1.0)


@pytest.fixture
def a(dispatcher: Dispatcher) -> Trainer:
    trainer = Trainer(dispatcher, "a")
    trainer.register()
    return trainer


# Registering


def test_the_first_description_makes_the_dataset_and_a_name_alone_joins_it(dispatcher: Dispatcher) -> None:
    made = Trainer(dispatcher, "a").register()
    joined = Trainer(dispatcher, "b", batch_size=9).register(Registration(name="training"))
    assert joined == made
    assert (made.ledger, made.lineage, made.epoch, made.spec.size) == ("L1", 1, 0, 16)
    assert dispatcher.dataset_status("training").trainers == 2


def test_a_name_that_nobody_described_is_unknown(dispatcher: Dispatcher) -> None:
    with pytest.raises(UnknownDataset):
        Trainer(dispatcher, "a").register(Registration(name="training"))
    assert dispatcher.status(0.0).datasets == ()
    with pytest.raises(UnknownDataset):
        dispatcher.snapshot("training")


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_records(dispatcher: Dispatcher, batch_size: int) -> None:
    with pytest.raises(InvalidArgument, match="batch_size"):
        Trainer(dispatcher, "a", batch_size=batch_size).register()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sources": (Source(name="a", count=17),)}, "size: registered 16, asked 17"),
        ({"records_per_shard": 4}, "records_per_shard: registered 8, asked 4"),
        ({"seed": 3}, "seed: registered 0, asked 3"),
        ({"shuffle": True}, "shuffle: registered False"),
        ({"shuffle_shards": True}, "shuffle_shards: registered False"),
        ({"shuffle_in_shard": True}, "shuffle_in_shard: registered False"),
        ({"num_epochs": 2}, "num_epochs: registered 1, asked 2"),
        ({"epoch_barrier": False}, "epoch_barrier: registered True"),
        ({"max_bad_records": 1}, "max_bad_records: registered 0, asked 1"),
        ({"task_type": TaskType.EVALUATION}, "task_type: registered"),
    ],
)
def test_another_description_is_a_conflict_and_does_not_join(
    dispatcher: Dispatcher, a: Trainer, change: dict[str, Any], named: str
) -> None:
    b = Trainer(dispatcher, "b")
    with pytest.raises(DatasetConflict, match=named):
        b.register(replace(TRAINING, **change))
    assert dispatcher.dataset_status("training").trainers == 1
    with pytest.raises(StaleLease):
        b.lease()


def test_who_uses_a_dataset_alone_may_change_its_options(dispatcher: Dispatcher, a: Trainer) -> None:
    assert a.register(replace(TRAINING, num_epochs=3)).spec.num_epochs == 3


def test_more_epochs_may_follow_when_the_job_is_finished(dispatcher: Dispatcher, a: Trainer) -> None:
    a.report(*map(whole, a.lease(count=9).grants))
    assert a.lease().state is PassState.FINISHED
    a.register(replace(TRAINING, num_epochs=2))
    assert a.lease().grants[0].slice.epoch == 1


def test_in_shard_shuffling_is_settled_by_the_first_trainer(dispatcher: Dispatcher) -> None:
    dispatcher.define(TRAINING, batch_size=4)
    assert Trainer(dispatcher, "a").register(Registration(name="training")).spec.shuffle_in_shard is False
    with pytest.raises(DatasetConflict, match="shuffle_in_shard: registered False, asked True"):
        Trainer(dispatcher, "b").register(Registration(name="training", shuffle_in_shard=True))


def test_a_dataset_may_be_defined_twice_alike(dispatcher: Dispatcher) -> None:
    dispatcher.define(TRAINING)
    dispatcher.define(TRAINING)
    with pytest.raises(DatasetConflict):
        dispatcher.define(replace(TRAINING, seed=5))


def test_a_huge_dataset_registers_at_once(dispatcher: Dispatcher) -> None:
    huge = replace(TRAINING, sources=(Source(name="a", count=10**12),), shuffle=True, shuffle_shards=True)
    b = Trainer(dispatcher, "b")
    b.register(replace(huge, name="huge"))
    assert b.lease("huge").grants[0].slice.limit == 8


# Leases


def test_a_repeated_lease_call_gets_the_answer_that_it_got(dispatcher: Dispatcher, a: Trainer) -> None:
    call = a.lease_call()
    first = dispatcher.lease(call, 0.0)
    assert dispatcher.lease(call, 1.0) == first
    assert dispatcher.dataset_status("training").leases == 1
    assert a.lease().grants[0].task != first.grants[0].task


def test_an_older_lease_call_than_the_last_is_stale(dispatcher: Dispatcher, a: Trainer) -> None:
    early = a.lease_call()
    a.lease()
    with pytest.raises(StaleLease, match="followed by 2"):
        dispatcher.lease(early, 0.0)


def test_a_look_that_finds_nothing_yet_is_not_remembered(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    held = a.lease(count=9).grants
    call = b.lease_call()
    assert dispatcher.poll(call, 0.0) is None
    a.report(GiveBack(task=held[0].task, attempt=1, start=0))
    answer = dispatcher.poll(call, 0.0)
    assert answer is not None
    assert answer.grants[0].slice == held[0].slice
    assert dispatcher.poll(call, 0.0) is answer


def test_an_answer_with_nothing_is_remembered_when_it_was_given(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    held = a.lease(count=9).grants
    call = b.lease_call()
    nothing = dispatcher.answer(call, 0.0)
    assert nothing.nothing_yet
    a.report(GiveBack(task=held[0].task, attempt=1, start=0))
    assert dispatcher.lease(call, 0.0) is nothing


@pytest.mark.parametrize("count", [0, -3])
def test_a_lease_call_asks_for_something(a: Trainer, count: int) -> None:
    with pytest.raises(InvalidArgument, match="1 slice or more"):
        a.lease(count=count)


@pytest.mark.parametrize("change", [{"ledger": "L0"}, {"lineage": 2}, {"lineage": 0}])
def test_calls_of_another_ledger_or_lineage_are_refused(
    dispatcher: Dispatcher, a: Trainer, change: dict[str, Any]
) -> None:
    (grant,) = a.lease().grants
    before = dispatcher.snapshot("training")
    with pytest.raises(StaleLease):
        a.lease(**change)
    with pytest.raises(StaleLease):
        a.report(whole(grant), **change)
    assert dispatcher.snapshot("training") == before
    assert a.lease(ledger="L1").grants


def test_a_drained_trainer_lets_the_waiting_look_again(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register(replace(TRAINING, name="other", epoch_barrier=False))
    c = Trainer(dispatcher, "c")
    c.register(replace(TRAINING, name="other", epoch_barrier=False))
    b.lease("other", count=9)
    call = c.lease_call("other", epoch=0, drained=True)
    assert dispatcher.poll(call, 0.0) is None
    version = dispatcher.version
    assert b.lease("other", epoch=0, drained=True).state is PassState.EPOCH_OVER
    assert dispatcher.version > version
    verdict = dispatcher.poll(call, 0.0)
    assert verdict is not None
    assert verdict.state is PassState.EPOCH_OVER


# Reports


def test_a_stale_lease_is_listed_and_the_rest_is_applied(dispatcher: Dispatcher, a: Trainer) -> None:
    first, second = a.lease(count=2).grants
    unknown = Acknowledgement(task=999, attempt=1, upto=1)
    assert a.report(whole(first), unknown, whole(second)).stale == (999,)
    assert dispatcher.dataset_status("training").acknowledged == first.slice.limit + second.slice.limit


def test_a_repeated_report_changes_nothing_and_is_answered_alike(dispatcher: Dispatcher) -> None:
    a = Trainer(dispatcher, "a", batch_size=8)
    a.register(replace(TRAINING, max_bad_records=1))
    first, second = a.lease(count=2).grants
    call = a.report_call(
        Failure(task=second.task, attempt=1, position=6, reason="bad"),
        whole(first),
        Acknowledgement(task=second.task, attempt=1, upto=2),
        GiveBack(task=second.task, attempt=1, start=4),
    )
    answer = dispatcher.report(call, 0.0)
    before = dispatcher.snapshot("training")
    assert dispatcher.report(call, 0.0) == answer
    assert dispatcher.snapshot("training") == before
    assert answer.stale == ()


def test_leases_are_asked_back_only_from_those_who_hold_some(dispatcher: Dispatcher, a: Trainer) -> None:
    b, c = Trainer(dispatcher, "b"), Trainer(dispatcher, "c")
    b.register()
    c.register()
    a.lease(count=9)
    assert dispatcher.asked_back("training", 0.0) == ()
    assert b.lease().nothing_yet
    assert dispatcher.asked_back("training", 0.0) == ("a",)
    assert dispatcher.asked_back("training", 60.0) == ()


def test_too_many_bad_records_fail_every_later_lease(dispatcher: Dispatcher, a: Trainer) -> None:
    (grant,) = a.lease().grants
    a.report(Failure(task=grant.task, attempt=1, position=0, reason="bad"))
    with pytest.raises(TooManyBadRecords):
        a.lease()
    assert "bad" in dispatcher.dataset_status("training").failure


def test_a_trainer_learns_that_another_waits(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    (held, *_) = a.lease(count=9).grants
    assert not a.report().wanted
    assert b.lease().nothing_yet
    assert a.report().wanted
    assert not b.report().wanted, "b itself is the one that waits"
    a.now = 60.0
    assert not a.report().wanted, "b has not asked for long"
    a.now = 0.0
    a.report(GiveBack(task=held.task, attempt=1, start=0))
    assert b.lease().grants
    assert not a.report().wanted


# Sessions


def test_a_dead_sessions_records_go_to_another(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    (grant,) = a.lease().grants
    dispatcher.heartbeat("b", 20.0)
    assert dispatcher.expire(29.9) == ()
    (released,) = dispatcher.expire(30.0)
    assert (released.session, released.worker_id, released.dataset) == ("a", "worker-a", "training")
    assert released.slices == (grant.slice,)
    assert b.lease().grants[0].slice == grant.slice
    with pytest.raises(StaleLease, match="not known"):
        a.report(whole(grant))
    assert dispatcher.dataset_status("training").acknowledged == 0


def test_a_late_acknowledgement_of_a_session_that_registered_again_is_stale(
    dispatcher: Dispatcher, a: Trainer
) -> None:
    (grant,) = a.lease().grants
    dispatcher.expire(30.0)
    a.now = 31.0
    a.register()
    before = dispatcher.snapshot("training")
    assert a.report(whole(grant)).stale == (grant.task,)
    assert dispatcher.snapshot("training") == before


def test_a_broken_stream_costs_the_leases_after_the_grace(dispatcher: Dispatcher, a: Trainer) -> None:
    a.lease()
    dispatcher.stream_opened("a", 5.0)
    dispatcher.stream_broke("a", 6.0)
    assert dispatcher.expire(6.9) == ()
    assert len(dispatcher.expire(7.0)) == 1


def test_leaving_gives_everything_back_at_once(dispatcher: Dispatcher, a: Trainer) -> None:
    a.lease(count=9)
    (released,) = dispatcher.leave("a")
    assert sum(s.limit for s in released.slices) == 16
    assert dispatcher.leave("a") == ()
    assert dispatcher.dataset_status("training").todo == 16


# Several datasets, tokens, status


def test_datasets_live_side_by_side(dispatcher: Dispatcher, a: Trainer) -> None:
    evaluation = replace(TRAINING, name="evaluation", task_type=TaskType.EVALUATION, num_epochs=2)
    a.register(evaluation)
    in_training, in_evaluation = a.lease(count=9), a.lease("evaluation", count=9)
    assert len(in_training.grants) == len(in_evaluation.grants)
    a.report(*map(whole, in_training.grants))
    training, other = dispatcher.status(0.0).datasets
    assert (training.finished, training.acknowledged) == (True, 16)
    assert (other.finished, other.leased, other.task_type) == (False, 16, TaskType.EVALUATION)
    assert {r.dataset for r in dispatcher.leave("a")} == {"evaluation", "training"}


def test_request_numbers_of_datasets_do_not_mix(dispatcher: Dispatcher, a: Trainer) -> None:
    a.register(replace(TRAINING, name="evaluation"))
    first = a.lease(request=5)
    other = a.lease("evaluation", request=5, count=2)
    assert (len(first.grants), len(other.grants)) == (1, 2)
    assert a.lease(request=5) is first


def test_a_restore_opens_a_lineage_and_old_calls_are_refused(dispatcher: Dispatcher, a: Trainer) -> None:
    token = dispatcher.snapshot("training")
    call = a.lease_call()
    (grant,) = dispatcher.lease(call, 0.0).grants
    assert dispatcher.restore("training", token) == 2
    for late in (call, a.lease_call()):
        with pytest.raises(StaleLease, match="lineage 2"):
            dispatcher.lease(late, 0.0)
    with pytest.raises(StaleLease, match="lineage 2"):
        a.report(whole(grant))
    a.lineage = 2
    assert a.report(whole(grant)).stale == (grant.task,)
    assert sum(g.slice.limit for g in a.lease(count=9).grants) == 16


def test_a_restore_of_none_is_the_beginning(dispatcher: Dispatcher, a: Trainer) -> None:
    a.report(*map(whole, a.lease(count=9).grants))
    dispatcher.restore("training", None)
    status = dispatcher.dataset_status("training")
    assert (status.todo, status.acknowledged, status.finished) == (16, 0, False)


def test_a_refused_token_opens_no_lineage(dispatcher: Dispatcher, a: Trainer) -> None:
    with pytest.raises(TokenError):
        dispatcher.restore("training", "{}")
    assert a.lease().grants


def test_status_shows_trainers_and_what_they_hold(dispatcher: Dispatcher, a: Trainer) -> None:
    (grant,) = a.lease().grants
    (trainer,) = dispatcher.status(4.0).trainers
    assert (trainer.worker_id, trainer.datasets, trainer.idle_s) == ("worker-a", ("training",), 4.0)
    assert trainer.leased == grant.slice.limit
    status = dispatcher.dataset_status("training")
    assert (status.todo, status.leased, status.leases) == (16 - trainer.leased, trainer.leased, 1)
    assert (status.shards, status.shards_left) == (2, 2)


# Lost and repeated messages


@given(data=st.data())
@settings(max_examples=60, deadline=None, print_blob=True)
def test_messages_that_are_lost_or_repeated_lose_no_record_and_lend_none_twice(data: st.DataObject) -> None:
    dispatcher = Dispatcher(ledger_id="L1")
    size = data.draw(st.integers(1, 40))
    registration = replace(
        TRAINING,
        sources=(Source(name="a", count=size),),
        num_epochs=2,
        epoch_barrier=data.draw(st.booleans()),
    )
    trainers = [Trainer(dispatcher, name, batch) for name, batch in (("a", 3), ("b", 4))]
    for trainer in trainers:
        trainer.register(registration)
    trained: list[tuple[int, int, int]] = []
    for _ in range(200):
        if dispatcher.dataset_status("training").finished:
            break
        trainer = trainers[data.draw(st.integers(0, 1))]
        call = trainer.lease_call(count=2)
        tries = data.draw(st.integers(1, 3))  # answers that were lost: the call is made again
        answer = {dispatcher.lease(call, 0.0) for _ in range(tries)}
        assert len(answer) == 1
        grants = answer.pop().grants
        report = trainer.report_call(*map(whole, grants))
        for _ in range(data.draw(st.integers(1, 3))):
            assert dispatcher.report(report, 0.0).stale == ()
        trained += [
            (g.slice.epoch, g.slice.shard, p) for g in grants for p in range(g.slice.skip, g.slice.stop)
        ]
    status = dispatcher.dataset_status("training")
    assert status.finished
    assert len(trained) == len(set(trained)) == status.acknowledged == 2 * size


# All or nothing, and whom it concerns -------------------------------------------------------------------


def photo(dispatcher: Dispatcher) -> str:
    return repr(dump(dispatcher))


def first_of(trainer: Trainer) -> Grant:
    return trainer.lease(count=1).grants[0]


BEYOND = 99


@pytest.mark.parametrize(
    "bad",
    [
        lambda g: [Failure(task=g.task, attempt=1, position=BEYOND, reason="x")],
        lambda g: [Acknowledgement(task=g.task, attempt=1, upto=BEYOND)],
        lambda g: [
            Acknowledgement(task=g.task, attempt=1, upto=3),
            GiveBack(task=g.task, attempt=1, start=2),
        ],
        lambda g: [
            Acknowledgement(task=g.task, attempt=1, upto=2),
            Failure(task=g.task, attempt=1, position=2, reason="x"),
            GiveBack(task=g.task, attempt=1, start=2),
        ],
    ],
)
def test_a_report_with_a_bad_argument_changes_nothing(dispatcher: Dispatcher, a: Trainer, bad: Any) -> None:
    good, other = a.lease(count=2).grants
    before = photo(dispatcher)
    outcomes = [Failure(task=good.task, attempt=1, position=1, reason="broken"), whole(good), *bad(other)]
    with pytest.raises(InvalidArgument):
        a.report(*outcomes)
    assert photo(dispatcher) == before
    a.report(outcomes[0], outcomes[1])
    assert dispatcher.dataset_status("training").acknowledged == good.slice.limit - 1


def test_a_report_that_ends_a_lease_twice_is_fine(dispatcher: Dispatcher, a: Trainer) -> None:
    grant = first_of(a)
    outcomes = [
        *(Failure(task=grant.task, attempt=1, position=p, reason="x") for p in range(grant.slice.limit)),
        GiveBack(task=grant.task, attempt=1, start=0),
    ]
    a.report(*outcomes)
    assert dispatcher.dataset_status("training").quarantined == grant.slice.limit


def test_only_news_makes_those_who_wait_look_again(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    grant = first_of(a)

    def news(*outcomes: Any) -> bool:
        before = dispatcher.version
        a.report(*outcomes)
        return dispatcher.version > before

    assert not news()
    assert not news(Acknowledgement(task=grant.task, attempt=1, upto=1))
    assert not news(Acknowledgement(task=grant.task, attempt=1, upto=1))
    assert not news(Acknowledgement(task=77, attempt=1, upto=1))
    assert news(GiveBack(task=grant.task, attempt=1, start=3))
    assert news(Acknowledgement(task=grant.task, attempt=1, upto=3))
    other = first_of(a)
    assert news(Failure(task=other.task, attempt=1, position=other.slice.skip, reason="the job fails"))
    before = dispatcher.version
    dispatcher.leave("a")
    assert dispatcher.version > before


def test_looking_in_vain_is_no_news_and_nothing_to_write(dispatcher: Dispatcher, a: Trainer) -> None:
    changes = Changes()
    dispatcher = Dispatcher(ledger_id="l", changes=changes)
    a, b = Trainer(dispatcher, "a"), Trainer(dispatcher, "b")
    a.register()
    b.register()
    while a.lease(count=9).grants:
        pass
    call = b.lease_call(epoch=0)
    dispatcher.poll(call, 0.0)
    changes.take()
    before = dispatcher.version
    for _ in range(5):
        assert dispatcher.poll(call, 0.0) is None
        dispatcher.heartbeat("b", 1.0)
        dispatcher.status(1.0)
        dispatcher.snapshot("training")
    assert dispatcher.version == before
    assert not changes


# Fewer epochs ---------------------------------------------------------------------------------------------


def with_epochs(count: int) -> Registration:
    return replace(TRAINING, num_epochs=count)


def test_fewer_epochs_than_have_begun_are_refused(dispatcher: Dispatcher) -> None:
    a = Trainer(dispatcher, "a")
    a.register(with_epochs(3))
    while (answer := a.lease(count=1)).epoch == 0:
        a.report(*map(whole, answer.grants))
    before = photo(dispatcher)
    with pytest.raises(
        DatasetConflict, match=r"in the middle of epoch 1: num_epochs=1 would.*num_epochs=2 or"
    ):
        a.register(with_epochs(1))
    assert photo(dispatcher) == before
    a.register(with_epochs(2))
    assert dispatcher.dataset_status("training").num_epochs == 2


def test_epochs_that_have_not_begun_may_be_left_out(dispatcher: Dispatcher) -> None:
    a = Trainer(dispatcher, "a")
    a.register(with_epochs(3))
    while dispatcher.dataset_status("training").epoch == 0:
        a.report(*map(whole, a.lease(count=9).grants))
    a.register(with_epochs(1))
    assert dispatcher.dataset_status("training").finished


def test_what_the_command_line_says_otherwise_is_told_and_does_not_count(dispatcher: Dispatcher) -> None:
    assert dispatcher.define(with_epochs(3)) == []
    assert dispatcher.define(with_epochs(3)) == []
    assert dispatcher.define(with_epochs(5)) == ["num_epochs: registered 3, asked 5"]
    assert dispatcher.dataset_status("training").num_epochs == 3
    with pytest.raises(DatasetConflict, match="seed"):
        dispatcher.define(replace(TRAINING, seed=9))
