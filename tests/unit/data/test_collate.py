"""The envelope around a batch: it carries the ticket and leaves the batch alone."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from edl_torch.data.batches.collate import Envelope, TicketedCollate
from edl_torch.data.reading.sample_reading import ReadingTimes
from edl_torch.data.reading.seeding import Generators
from edl_torch.errors import AccountingError
from edl_torch.trainer.vocabulary import Tally


def ticketed(collate: Any, tally: Tally) -> TicketedCollate:
    return TicketedCollate(collate, tally, ReadingTimes(), Generators(after_each=False), batched=True)


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


class OwnBatch:
    """A type of the user's with a `pin_memory` of its own, which torch calls."""

    def __init__(self) -> None:
        self.pinned = False

    def pin_memory(self) -> OwnBatch:
        self.pinned = True
        return self


@pytest.fixture
def _pinning_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self + 100)


@pytest.mark.usefixtures("_pinning_marks")
@pytest.mark.parametrize(
    "batch",
    [torch.tensor([1]), [torch.tensor([1]), "x"], {"a": torch.tensor([1])}, Pair(torch.tensor([1]), "x")],
    ids=["tensor", "list", "dict", "namedtuple"],
)
def test_torch_pins_what_is_inside(batch: Any) -> None:
    envelope = pin_memory(Envelope(batch, ((1, 0, 4),), 4))
    assert isinstance(envelope, Envelope)
    assert envelope.ticket == ((1, 0, 4),)
    assert type(envelope.batch) is type(batch)
    inside = (
        envelope.batch if isinstance(envelope.batch, torch.Tensor) else next(iter(values(envelope.batch)))
    )
    assert int(inside) == 101


def values(batch: Any) -> Any:
    return batch.values() if isinstance(batch, dict) else batch


def test_a_batch_that_pins_itself_is_asked_to() -> None:
    assert pin_memory(Envelope(OwnBatch(), (), 0)).batch.pinned


def test_an_envelope_is_pickled_with_batch_and_ticket() -> None:
    envelope = pickle.loads(pickle.dumps(Envelope(Pair(torch.tensor([1]), "x"), ((1, 0, 4),), 4)))
    assert envelope.ticket == ((1, 0, 4),)
    assert envelope.batch.right == "x"


def test_the_ticket_is_cut_before_the_users_collate_runs() -> None:
    tally = Tally()
    run = tally.start(1, 0)

    def collate(samples: list[int]) -> list[int]:
        run[2] += 1  # a collate that draws by itself
        return samples

    run[2] = 2
    assert ticketed(collate, tally)([7, 8]).ticket == ((1, 0, 2),)


@pytest.mark.parametrize("samples", [[7], [7, 8, 9]])
def test_samples_and_positions_must_agree(samples: list[int]) -> None:
    tally = Tally()
    tally.start(1, 0)[2] = 2
    with pytest.raises(AccountingError, match=f"{len(samples)} samples was drawn from 2 positions"):
        ticketed(list, tally)(samples)


def test_a_failing_collate_does_not_leave_its_positions_to_the_next_batch() -> None:
    tally = Tally()
    run = tally.start(1, 0)
    run[2] = 2

    def fail(samples: list[int]) -> list[int]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ticketed(fail, tally)([1, 2])
    run[2] = 4
    assert ticketed(list, tally)([3, 4]).ticket == ((1, 2, 4),)


def test_random_numbers_that_were_lent_to_records_are_put_back_before_the_users_collate_draws() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    generators, tally = Generators(after_each=False), Tally()
    generators.seeded(lambda record: torch.rand(1))(7, 11)
    assert generators.lent is not None
    tally.start(1, 0)[2] = 1
    collate = TicketedCollate(
        lambda samples: torch.rand(3).tolist(), tally, ReadingTimes(), generators, batched=True
    )
    assert collate([7]).batch == expected
    assert generators.lent is None
