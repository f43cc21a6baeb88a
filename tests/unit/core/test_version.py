"""When those who wait look again: whenever they may find something, and hardly ever in vain."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import pytest
from core_kit import TRAINING, Trainer, first_of, whole
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    Grant,
    LeaseCall,
    PassState,
    Registration,
)
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.members import ASKS
from edl_torch.core.state import WAITER_S
from edl_torch.errors import EdlError
from edl_torch.shard import Source


def growth_of(dispatcher: Dispatcher, trainer: Trainer, *outcomes: Any) -> int:
    before = dispatcher.version
    trainer.report(*outcomes)
    return dispatcher.version - before


def test_only_a_change_makes_those_who_wait_look_again(dispatcher: Dispatcher, a: Trainer) -> None:
    b = Trainer(dispatcher, "b")
    b.register()
    grant = first_of(a)
    assert not growth_of(dispatcher, a)
    assert not growth_of(dispatcher, a, Acknowledgement(task=grant.task, attempt=1, upto=1))
    assert not growth_of(dispatcher, a, Acknowledgement(task=grant.task, attempt=1, upto=1))
    assert not growth_of(dispatcher, a, Acknowledgement(task=77, attempt=1, upto=1))
    assert growth_of(dispatcher, a, GiveBack(task=grant.task, attempt=1, start=3))
    assert growth_of(dispatcher, a, Acknowledgement(task=grant.task, attempt=1, upto=3))
    other = first_of(a)
    failure = Failure(task=other.task, attempt=1, position=other.slice.skip, reason="the job fails")
    assert growth_of(dispatcher, a, failure)
    before = dispatcher.version
    dispatcher.leave("a", 1)
    assert dispatcher.version > before


def test_looking_in_vain_does_not_grow_the_version_and_nothing_to_write() -> None:
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
        dispatcher.heartbeat("b", 2, 1.0)
        dispatcher.status(1.0)
        dispatcher.token("training")
    assert dispatcher.version == before
    assert not changes


@pytest.mark.parametrize("handed", [True, False])
def test_of_many_trainers_that_end_only_the_last_wakes_others(dispatcher: Dispatcher, handed: bool) -> None:
    """Else the end of an epoch with n trainers would be n * n looks."""
    registration = replace(TRAINING, sources=(Source(name="a", count=400),), records_per_shard=4)
    trainers = [Trainer(dispatcher, f"t{number}") for number in range(100)]
    for trainer in trainers:
        trainer.register(registration)
    held = [(trainer, *trainer.lease().grants) for trainer in trainers]
    before = dispatcher.version
    if handed:
        states = [trainer.lease(epoch=0, drained=True).state for trainer in trainers]
        assert states == [PassState.OPEN] * 99 + [PassState.EPOCH_OVER]
        assert 1 <= dispatcher.version - before <= 3
        before = dispatcher.version
    growth = [growth_of(dispatcher, trainer, whole(grant)) for trainer, grant in held]
    assert growth[:-1] == [0] * 99
    assert growth[-1]
    assert trainers[0].lease().state is PassState.FINISHED


def test_remainders_wake_others_once_they_fill_a_batch_of_one_that_waits(
    dispatcher: Dispatcher,
) -> None:
    registration = replace(TRAINING, sources=(Source(name="a", count=8),), records_per_shard=1)
    trainers = [Trainer(dispatcher, name, batch_size=4) for name in "abcdefgh"]
    for trainer in trainers:
        trainer.register(registration)
    held = [(trainer, *trainer.lease().grants) for trainer in trainers]
    assert dispatcher.poll(trainers[0].lease_call(epoch=0), 0.0) is None
    remainders = [GiveBack(task=grant.task, attempt=1, start=0, remainder=True) for _, grant in held]
    growth = [
        growth_of(dispatcher, trainer, remainder)
        for (trainer, _), remainder in zip(held, remainders, strict=True)
    ]
    assert growth[:3] == [0, 0, 0]
    assert growth[3]
    found = dispatcher.poll(trainers[0].lease_call(epoch=0), 0.0)
    assert found is not None
    assert sum(grant.slice.limit for grant in found.grants) == 4


def test_whether_somebody_waits_is_one_look_however_many_have_given_up(dispatcher: Dispatcher) -> None:
    """A report is answered with it: a look at each would be n * n again."""
    registration = replace(TRAINING, sources=(Source(name="a", count=4),), records_per_shard=4)
    trainers = [Trainer(dispatcher, f"t{number}") for number in range(50)]
    for trainer in trainers:
        trainer.register(registration)
    assert first_of(trainers[0])
    for trainer in trainers[1:]:
        assert trainer.lease().nothing_yet
    late = WAITER_S + 1
    assert not dispatcher.wanted("training", "t0", late)
    trainers[7].now = late
    assert trainers[7].lease().nothing_yet
    assert dispatcher.wanted("training", "t0", late)
    assert not dispatcher.wanted("training", "t7", late), "the others have asked too long ago"
    trainers[8].now = late
    assert trainers[8].lease().nothing_yet
    assert dispatcher.wanted("training", "t7", late)
    assert dispatcher.wanted("training", "t8", late)


STEPS = ASKS * 3 - 2  # so that nobody is taken to have stopped waiting, which time alone tells


class AtWork(Trainer):
    """A trainer that does anything at any time; what is refused was nothing."""

    def __init__(self, dispatcher: Dispatcher, session: str, batch_size: int) -> None:
        super().__init__(dispatcher, session, batch_size)
        self.held: list[Grant] = []

    def act(self, data: st.DataObject, registration: Registration) -> None:
        act = data.draw(st.sampled_from((self._lease, self._lease, self._report, self._report, self._other)))
        with contextlib.suppress(EdlError):
            act(data, registration)

    def _lease(self, data: st.DataObject, _: Registration) -> None:
        epoch = data.draw(st.sampled_from((NEW_PASS, 0)))
        self.held += self.lease(count=2, epoch=epoch, drained=data.draw(st.booleans())).grants

    def _report(self, data: st.DataObject, _: Registration) -> None:
        if not self.held:
            return
        place = data.draw(st.integers(0, len(self.held) - 1))
        grant = self.held[place]
        lease, cut = {"task": grant.task, "attempt": grant.attempt}, grant.slice
        at = data.draw(st.integers(cut.skip, cut.stop))
        match data.draw(st.integers(0, 4)):
            case 0:
                self.report(Failure(position=at, reason="bad", **lease))
            case 1:
                self.report(Acknowledgement(upto=at, **lease))
            case 2:
                self.report(whole(grant))
                del self.held[place]
            case remainder:
                self.report(GiveBack(start=at, remainder=remainder == 3, **lease))
                self.held[place] = replace(grant, slice=replace(cut, limit=at - cut.skip))

    def _other(self, data: st.DataObject, registration: Registration) -> None:
        if data.draw(st.booleans()):
            self.dispatcher.go_back("training", self.dispatcher.token("training"))
        else:
            self.dispatcher.leave(self.session, self.member)
            self.register(registration)
        self.held.clear()


@given(data=st.data())
def test_a_look_at_the_same_version_finds_nothing(data: st.DataObject) -> None:
    dispatcher = Dispatcher(ledger_id="l")
    registration = replace(
        TRAINING,
        sources=(Source(name="a", count=data.draw(st.integers(1, 24))),),
        records_per_shard=data.draw(st.integers(1, 8)),
        num_epochs=data.draw(st.integers(1, 2)),
        epoch_barrier=data.draw(st.booleans()),
        max_bad_records=data.draw(st.sampled_from((0, 99))),
    )
    at_work = [AtWork(dispatcher, name, data.draw(st.integers(1, 4))) for name in "ab"]
    waiter = Trainer(dispatcher, "w", data.draw(st.integers(1, 4)))
    for trainer in (*at_work, waiter):
        trainer.register(registration)
    call = waiter.lease_call(epoch=data.draw(st.sampled_from((NEW_PASS, 0))))
    seen = -1
    for _ in range(STEPS):
        data.draw(st.sampled_from(at_work)).act(data, registration)
        if dispatcher.version == seen:
            assert look(copy.deepcopy(dispatcher), call) is None, "it was not told to look again"
        elif look(dispatcher, call) is None:
            seen = dispatcher.version
        else:
            return


def look(dispatcher: Dispatcher, call: LeaseCall) -> object:
    """What the call finds, be it a refusal; None for nothing."""
    try:
        return dispatcher.poll(call, 0.0)
    except EdlError as error:
        return error
