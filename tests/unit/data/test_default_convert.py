"""Samples become batches: tensors, collate functions, and what is left alone."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from edl_torch.data.batches import convert
from edl_torch.data.batches.convert import to_batch, to_tensors
from edl_torch.data.batches.transport import (
    IN_MESSAGE_BYTES,
    Envelope,
    IterationSetup,
    TicketedCollate,
    shared_segment,
)
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.testing.check_reader import records_equal
from edl_torch.trainer.vocabulary import Tally


class Pair(NamedTuple):
    left: Any
    right: Any


class Constant(IterableDataset[Any]):
    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __iter__(self) -> Any:
        return iter([self.sample] * 4)


KINDS = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "l", "q"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_arrays_of_any_two_kinds_become_what_torch_makes_of_them(kind: str, other: str) -> None:
    samples = [np.array([1, 0]).astype(kind), np.array([3, 200]).astype(other)]
    try:
        torchs = default_collate(samples)
    except RuntimeError:  # of kinds that torch cannot bring together
        return
    assert records_equal(to_batch(samples), torchs)


@pytest.mark.parametrize(
    "samples", [[(1, 2), (1, 2, 3)], [[1], [1, 2]], [{"x": [1]}, {"x": [1, 2]}]], ids=str
)
def test_samples_of_other_lengths_are_refused_with_a_remedy(samples: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="of equal size") as caught:
        to_batch(samples, components="'a', 'b'")
    lengths, components = caught.value.__notes__
    assert "lengths" in lengths
    assert "samples of 'a', 'b'" in components


class Level(enum.IntEnum):
    LOW = 1


class Celsius(float):
    """A number that is a float, and more."""


NUMBERS: list[list[Any]] = [
    [1, 2, 3],
    [-(2**63), 2**63 - 1],
    [True, False],
    [1, True],
    [True, 7],
    [1, 2.5],
    [2.5, 1],
    [Level.LOW, 2],
    [2, Level.LOW],
    [0.1, -0.0, float("inf")],
    [Celsius(1.5), 2.5],
    [2.5, Celsius(1.5)],
    [np.float64(0.1), 2.5],
    [0.1, np.float64(2.5)],
    [np.int8(3), 4],
    [4, np.int8(3)],
    [4, torch.tensor(True)],
    [4, torch.tensor(2.5)],
    [0.5, torch.tensor(True)],
    [0.5, 2**70],
]
ARRAYS = [
    np.array(1.5),
    np.zeros((0, 3)),
    np.zeros((2, 0, 1)),
    np.arange(6.0).reshape(2, 3).T,
    np.zeros(1 << 17),
]
MASKED = np.ma.masked_array([1.0, 2.0], [True, False])  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "samples",
    [
        *NUMBERS,
        *([(number, str(number)) for number in numbers] for numbers in NUMBERS),
        *([array, array + 1] for array in ARRAYS),
        *([[MASKED, np.ones(2)], [np.ones(2), MASKED], [np.array(1.5), 2.1]]),
        *([[(), ()], [(1, 2), [3, 4]], [((1, 2), 3), ((4, 5), 6)]]),
        [torch.arange(3.0)] * 3,
        [torch.zeros(IN_MESSAGE_BYTES // 8)] * 3,
        [(np.zeros(2), 3, "name")] * 3,
        [Pair(torch.ones(2), 1.5)] * 3,
        [{"a": [1, 2], "b": torch.tensor(True), "c": b"x"}] * 3,
    ],
    ids=lambda samples: repr(samples)[:40],
)
def test_a_batch_is_what_torch_makes(samples: list[Any]) -> None:
    ours, torchs = to_batch(samples), default_collate(samples)
    assert type(ours) is type(torchs)
    assert records_equal(ours, torchs)
    assert not isinstance(ours, torch.Tensor) or ours.is_contiguous()


def test_a_batch_of_numbers_is_where_tensors_are_made() -> None:
    with torch.device("meta"):
        assert [column.device.type for column in to_batch([(1, 0.5), (2, 1.5)])] == ["meta", "meta"]
        assert to_batch([np.ones(2), np.ones(2)]).device == default_collate([np.ones(2), np.ones(2)]).device


@pytest.mark.parametrize(
    "samples",
    [
        [2**63, 1],
        [1, None],
        [1, "a"],
        [1, np.bool_(True)],
        [0.5, "a"],
        [0.5, 2**2000],
        [(1, 2), (1,)],
        [(1,), (1, 2)],
        [(1, (2,)), (1, (2, 3))],
        [(1,), 1],
        [np.zeros(2, ">f4"), np.zeros(2, ">f4")],
        [np.array(["a"]), np.array(["b"])],
        [np.array([None]), np.array([None])],
        [np.array(["2024-02-29"], "M8[D]")],
    ],
    ids=str,
)
def test_what_torch_refuses_to_collate_is_refused_in_its_words(samples: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError, OverflowError)) as torchs:
        default_collate(samples)
    with pytest.raises(type(torchs.value)) as ours:
        to_batch(samples)
    assert str(ours.value) == str(torchs.value)


def test_a_batch_of_arrays_owns_its_memory() -> None:
    array = np.zeros(3)
    to_batch([array])[0, 1] = 5
    assert array[1] == 0


def test_small_batches_take_no_shared_memory_in_a_worker():
    half = IN_MESSAGE_BYTES // 2  # of a batch that is just small enough
    small, large = np.ones(half, np.uint8), np.ones(half + 1, np.uint8)
    for sample, shared in (
        (torch.from_numpy(small), False),
        (torch.from_numpy(large), True),
        (small, False),
        (large, True),
    ):
        loader = DataLoader(
            Constant(sample),
            2,
            num_workers=1,
            collate_fn=_is_shared,
            multiprocessing_context="fork",
        )
        assert list(loader) == [shared] * 2


def _is_shared(samples: list[Any]) -> bool:
    return shared_segment(to_batch(samples)) is not None


def test_a_users_own_entry_in_torchs_table_is_kept(monkeypatch):
    from torch.utils.data._utils import collate

    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: "own")
    monkeypatch.setitem(collate.default_collate_fn_map, complex, lambda batch, *, collate_fn_map: sum(batch))
    monkeypatch.setitem(collate.default_collate_fn_map, np.ndarray, lambda batch, *, collate_fn_map: "array")
    monkeypatch.setitem(collate.default_collate_fn_map, int, lambda batch, *, collate_fn_map: "int")
    monkeypatch.setitem(collate.default_collate_fn_map, float, lambda batch, *, collate_fn_map: "float")
    assert to_batch([(1, 0.5)]) == ["int", "float"]
    monkeypatch.setitem(collate.default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: "tuple")
    assert to_batch([(1, 0.5)]) == "tuple"
    assert to_batch([torch.ones(2)]) == "own"
    assert to_batch([np.ones(2)]) == "array"
    assert to_batch([1j, 2j]) == 3j


@pytest.mark.parametrize("kind", ["?", "u1", "u2", "u4", "u8", "i2", "f2", "f4", "f8", "c8", ">i4", ">f8"])
def test_columns_of_numbers_become_tensors(kind):
    array = np.array([[0, 1], [1, 0]]).astype(kind)
    found = to_tensors({"x": array, "y": (array, [array])})
    for tensor in (found["x"], found["y"][0], found["y"][1][0]):
        assert tensor.numpy().dtype == array.dtype.newbyteorder("=")
        assert tensor.tolist() == array.tolist()


def test_columns_are_not_copied():
    array = np.zeros(3)
    to_tensors([array])[0][1] = 5
    assert array[1] == 5
    number, same = np.zeros(()), np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))
    for column in (number, same):
        tensor = to_tensors(column)
        column[...] = 5
        assert (tensor == 5).all()


def test_read_only_and_reversed_columns_are_copied_in_silence():
    array = np.arange(3)
    array.flags.writeable = False
    to_tensors(array)[0] = 9
    assert array[0] == 0
    assert to_tensors(np.arange(4)[::-1]).tolist() == [3, 2, 1, 0]


def test_a_field_of_a_structured_array_is_copied_where_its_numbers_stand_at_no_tensors_distance() -> None:
    rows = np.array([(1, 2), (3, 4)], "i4, i1")
    assert to_tensors([rows["f0"], rows["f1"]])[0].tolist() == [1, 3]
    assert to_tensors(rows["f1"]).tolist() == [2, 4]


def test_what_torch_cannot_hold_stays_an_array():
    batch = {
        "date": np.array(["2024-02-29"], "M8[D]"),
        "span": np.array([3], "m8[s]"),
        "text": np.array(["a", None], dtype=object),
        "fixed": np.array(["ab"]),
    }
    found = to_tensors(batch)
    assert all(found[name] is batch[name] for name in batch)


@pytest.mark.parametrize("height", [2, IN_MESSAGE_BYTES], ids=["small", "large"])
def test_samples_of_unequal_shapes_are_an_error_that_says_what_to_do(height: int) -> None:
    images = [(np.zeros((height, 3), np.uint8), 0), (np.zeros((height, 4), np.uint8), 1)]
    with pytest.raises(
        InvalidArgument, match=rf"\[{height}, 3\] and \[{height}, 4\].*resize.*collate_fn=list"
    ):
        to_batch(images)


@pytest.mark.parametrize("other", [(3,), (1, 2), (2, 1)], ids=["lengths", "shapes", "dimensions"])
def test_arrays_of_unequal_shapes_are_named_whatever_differs(other: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"the shapes \[2\] and \[\d"):
        to_batch([np.zeros(2), np.zeros(other)])


def test_other_failures_of_torch_stay_its_own() -> None:
    with pytest.raises(RuntimeError, match=r"[Ss]parse") as raised:
        to_batch([torch.ones(2), torch.ones(2).to_sparse()])
    assert not isinstance(raised.value, InvalidArgument)


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_worker_stacks_large_plain_tensors_in_memory_that_it_shares(
    plain: bool, in_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []

    def new_batch(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(shape)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(convert, "get_worker_info", lambda: object() if in_worker else None)
    monkeypatch.setattr(convert, "new_batch", new_batch)
    tensors = [torch.full((IN_MESSAGE_BYTES // 4,), float(n)) for n in range(2)]
    if not plain:
        tensors[1].requires_grad_()
    assert torch.equal(to_batch(tensors), torch.stack(tensors))
    assert made == [(2, IN_MESSAGE_BYTES // 4)] * (plain and in_worker)


# The envelope around a batch: it carries the ticket and leaves the batch alone ------------------------------


def ticketed(collate: Any, tally: Tally) -> TicketedCollate:
    return TicketedCollate(collate, IterationSetup(columnar=False, list_size=0, tally=tally), batched=True)


class Couple(NamedTuple):
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
    [torch.tensor([1]), [torch.tensor([1]), "x"], {"a": torch.tensor([1])}, Couple(torch.tensor([1]), "x")],
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
    setup = IterationSetup(columnar=False, list_size=0)
    generators = setup.generators
    generators.seeded(lambda record: torch.rand(1))(7, 11)
    assert generators.lent is not None
    setup.tally.start(1, 0)[2] = 1
    collate = TicketedCollate(lambda samples: torch.rand(3).tolist(), setup, batched=True)
    assert collate([7]).batch == expected
    assert generators.lent is None
