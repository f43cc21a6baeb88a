"""Batches whose samples are copied to their places are those that stacking makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from edl_torch.data.batches import transport
from edl_torch.data.batches.convert import Rows, to_batch
from edl_torch.data.batches.transport import BatchMemory, shared_segment
from edl_torch.errors import InvalidArgument

SIDE = 260  # four of them are more than a message


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


class Unwrapped(torch.Tensor):
    """Whatever torch makes of it is a plain tensor, as of torchvision's images."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class Kept(torch.Tensor):
    """Batches of it are of its kind."""


def tensor(n: int, *shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))).reshape(shape) % 100 + n).to(dtype)


def image(n: int) -> np.ndarray[Any, Any]:
    return tensor(n, SIDE, SIDE, 3, dtype=torch.uint8).numpy()


KINDS: dict[str, Any] = {
    "tensor": lambda n: tensor(n, 3, SIDE, SIDE),
    "array": image,
    "image and label": lambda n: (image(n), n),
    "dict": lambda n: {"x": tensor(n, SIDE, SIDE), "y": [image(n), float(n)], "name": f"record {n}"},
    "complex": lambda n: tensor(n, SIDE, SIDE).to(torch.complex64),
    "bool": lambda n: tensor(n, SIDE, 4 * SIDE) % 2 == 0,
    "unwrapped": lambda n: (tensor(n, SIDE, SIDE).as_subclass(Unwrapped), n),
    "the same twice": lambda n: [tensor(n, SIDE, SIDE)] * 2,
}
UNUSUAL: dict[str, Any] = {
    "small": lambda n: tensor(n, 3),
    "numbers": float,
    "permuted": lambda n: torch.from_numpy(image(n)).permute(2, 0, 1),
    "flipped": lambda n: image(n)[:, ::-1].copy()[::2],
    "read-only": lambda n: np.frombuffer(image(n).tobytes(), np.uint8).reshape(SIDE, SIDE, 3),
    "named tuple": lambda n: Pair(tensor(n, SIDE, SIDE), n),
    "parameter": lambda n: torch.nn.Parameter(tensor(n, SIDE, SIDE)),
    "gradient": lambda n: tensor(n, SIDE, SIDE).requires_grad_(),
    "kept": lambda n: tensor(n, SIDE, SIDE).as_subclass(Kept),
    "one is unwrapped": lambda n: tensor(n, SIDE, SIDE).as_subclass(Unwrapped if n == 2 else torch.Tensor),
    "small unwrapped": lambda n: tensor(n, 3).as_subclass(Unwrapped),
    "two dtypes": lambda n: tensor(n, SIDE, SIDE, dtype=torch.float64 if n == 2 else torch.float32),
    "other order": lambda n: dict(
        [("a", tensor(n, SIDE, SIDE)), ("b", tensor(9 + n, SIDE, SIDE))][:: 1 if n % 2 else -1]
    ),
}


def collated(make: Any, size: int = 4) -> tuple[Any, Rows]:
    rows = Rows(size, BatchMemory())
    return to_batch([rows.place(make(n), n) for n in range(size)], rows), rows


def is_whole(batch: torch.Tensor, rows: Rows) -> bool:
    """Whether it is the tensor that samples were copied to."""
    return any(batch is whole.tensor for whole in rows._wholes.values())


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        like = (
            type(left) is type(right)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.stride() == right.stride()
        )
        return like and left.requires_grad == right.requires_grad and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", [*KINDS, *UNUSUAL])
def test_the_batch_is_the_one_that_stacking_makes(kind: str) -> None:
    make = {**KINDS, **UNUSUAL}[kind]
    assert same(collated(make)[0], to_batch([make(n) for n in range(4)]))


@pytest.mark.parametrize("kind", ["tensor", "array", "bool", "unwrapped"])
def test_large_tensors_are_copied_once(kind: str) -> None:
    batch, rows = collated(KINDS[kind])
    assert is_whole(batch[0] if kind == "unwrapped" else batch, rows)


def test_a_part_of_the_rows_and_another_order_are_stacked() -> None:
    rows = Rows(4, BatchMemory())
    samples = [rows.place(tensor(n, SIDE, SIDE), n) for n in range(4)]
    for chosen in (samples[:3], samples[::-1], [*samples[:3], tensor(3, SIDE, SIDE)]):
        assert same(to_batch(chosen, rows), to_batch([sample.clone() for sample in chosen]))
        assert not is_whole(to_batch(chosen, rows), rows)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray, Unwrapped])
def test_functions_that_a_user_put_in_torchs_place_are_called(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Any]] = []

    def own(values: list[Any], *, collate_fn_map: Any = None) -> str:
        seen.append(values)
        return "own"

    monkeypatch.setitem(default_collate_fn_map, kind, own)
    make = KINDS["unwrapped"] if kind is Unwrapped else image
    assert "own" in (
        collated(make)[0],
        collated(make)[0][0],
    )  # torch makes tensors of arrays, and asks for those
    assert {len(values) for values in seen} == {4}


def test_unequal_shapes_are_refused_as_ever() -> None:
    with pytest.raises(InvalidArgument, match="which do not make one tensor"):
        collated(lambda n: tensor(n, SIDE + n, SIDE))


def test_in_a_worker_large_batches_are_made_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "get_worker_info", lambda: object())
    batch, rows = collated(KINDS["image and label"])
    assert shared_segment(batch[0]) is not None
    assert is_whole(batch[0], rows)
    assert same(batch, to_batch([KINDS["image and label"](n) for n in range(4)]))


@pytest.mark.parametrize("kind", ["O", ">f8", "M8[s]", "U4", "V8"])
def test_what_torch_has_no_type_for_stays_where_it_is(kind: str) -> None:
    value = np.zeros((SIDE, SIDE), dtype=kind)
    assert Rows(4, BatchMemory()).place(value, 0) is value


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(SIDE, 4 * SIDE).t(),
        torch.ones(SIDE, 4 * SIDE, requires_grad=True),
        torch.ones(SIDE, SIDE, dtype=torch.complex64).conj(),
        torch.ones(SIDE, 4 * SIDE)._neg_view(),
        torch.ones(SIDE, 4 * SIDE, device="meta"),
    ],
    ids=["transposed", "gradient", "conjugate", "negated", "elsewhere"],
)
def test_unusual_tensors_stay_where_they_are(value: torch.Tensor) -> None:
    assert Rows(4, BatchMemory()).place(value, 0) is value


def test_a_batch_of_one_large_sample_is_its_row() -> None:
    rows = Rows(1, BatchMemory())
    sample = rows.place(tensor(0, 2 * SIDE, 2 * SIDE), 0)
    whole = rows.whole([sample])
    assert whole is not None
    assert whole.data_ptr() == sample.data_ptr()


def test_each_of_two_large_tensors_of_a_sample_has_its_rows() -> None:
    rows = Rows(2, BatchMemory())
    samples = [rows.place((tensor(n, 2 * SIDE, SIDE), tensor(n, SIDE, 2 * SIDE)), n) for n in range(2)]
    for column in zip(*samples, strict=True):
        whole = rows.whole(list(column))
        assert whole is not None
        assert torch.equal(whole, torch.stack(column))
