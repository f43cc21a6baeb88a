"""A trainer that others have replaced: whatever it asks from then on is refused, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loader_kit import elastic, flat, take, trainer

from edl_torch import DataShardService, ShardedDataset
from edl_torch.errors import StaleLease
from edl_torch.testing import FakeMaster

COUNTS = {"a": 40}
Loop = tuple[DataShardService, ShardedDataset]

ASKS: dict[str, Callable[[DataShardService], Any]] = {
    "finished": lambda service: service.finished,
    "epoch": lambda service: service.epoch,
    "progress": lambda service: service.progress(),
    "state_dict": lambda service: service.state_dict(),
    "load_state_dict": lambda service: service.load_state_dict(None),
}


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(lease_timeout_s=30.0)


@pytest.fixture(params=[True, False], ids=["embedded", "remote"])
def zombie(fake: FakeMaster, request: pytest.FixtureRequest) -> Iterator[Loop]:
    """It has trained on two batches, and its loop stands in the second one."""
    with trainer(fake, COUNTS, in_process=request.param) as (service, dataset):
        loop = iter(elastic(dataset))
        take(loop, 2)
        service.session.flush()
        yield service, dataset


def replaced(fake: FakeMaster, *, given_up: bool) -> Iterator[Loop]:
    """Its replacement went back to the beginning."""
    if given_up:
        fake.clock.advance(31.0)
        assert fake.expire()
    with trainer(fake, COUNTS) as (service, dataset):
        service.load_state_dict(None)
        yield service, dataset


@pytest.mark.parametrize("given_up", [False, True], ids=["still known", "given up"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_whatever_a_superseded_trainer_asks_is_refused_and_its_replacement_goes_on(
    fake: FakeMaster, zombie: Loop, ask: Callable[[DataShardService], Any], given_up: bool
) -> None:
    replacements = replaced(fake, given_up=given_up)
    service, dataset = next(replacements)
    loop = iter(elastic(dataset))
    seen = flat(take(loop, 1))
    for _ in range(2):  # it stays refused
        with pytest.raises(StaleLease, match="checkpoint"):
            ask(zombie[0])
    seen += flat(take(loop, 100))
    assert sorted(seen) == list(range(40))
    assert service.finished
    next(replacements, None)


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_a_trainer_of_another_ledger_is_refused(
    fake: FakeMaster, zombie: Loop, ask: Callable[[DataShardService], Any]
) -> None:
    """The master was started again without a journal, and another trainer has registered the dataset."""
    other = FakeMaster()
    other._dispatcher.ledger_id = "other"
    zombie[0].session.master._local = other._local  # type: ignore[attr-defined]
    with trainer(other, COUNTS) as (service, _):
        assert not service.finished
        # The thread that fetches leases may find it out first, and throw away what the model has learnt.
        with pytest.raises(StaleLease, match=r"keeps ledger other, not fake|come again"):
            ask(zombie[0])


def test_a_position_is_not_given_to_a_model_that_learnt_what_comes_again(fake: FakeMaster) -> None:
    """Stopped between a step and its acknowledgement, and given up meanwhile: nobody has restored."""
    with trainer(fake, COUNTS) as (service, dataset):
        token = service.state_dict()
        loop = iter(elastic(dataset))
        take(loop, 1)
        fake.clock.advance(31.0)
        assert fake.expire()
        for _ in range(2):
            with pytest.raises(StaleLease, match=r"1 lease.*come again.*last checkpoint"):
                service.state_dict()
        service.load_state_dict(token)
        assert service.state_dict() == token


def test_a_session_that_was_given_up_and_lost_nothing_saves_as_before(fake: FakeMaster) -> None:
    with trainer(fake, COUNTS) as (service, dataset):
        take(iter(elastic(dataset)), 2)
        first = service.state_dict()
        fake.clock.advance(31.0)
        fake.expire()
        assert service.state_dict() == first
        assert not service.finished


def test_a_master_that_was_another_one_when_the_checkpoint_was_read_is_not_called_a_trainer(
    fake: FakeMaster,
) -> None:
    with trainer(fake, COUNTS) as (service, _):
        service.size  # noqa: B018  the dataset is known
    with trainer(fake, COUNTS) as (service, _):
        session = service.session
        session.run(session.trainer.position.note_history())
        other = FakeMaster()
        other._dispatcher.ledger_id = "other"
        service.session.master._local = other._local  # type: ignore[attr-defined]
        with pytest.raises(StaleLease, match=r"another master.*ledger other, not fake.*newest checkpoint"):
            service.load_state_dict(None)
