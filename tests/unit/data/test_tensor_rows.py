"""Batches copied to their places, or cut from a `TensorDataset`, are those of a plain `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data._utils import collate as torchs
from torch.utils.data._utils.collate import default_collate_fn_map

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.data.batches.convert import Rows, tensor_rows, to_batch
from edl_torch.data.batches.transport import BatchMemory
from edl_torch.readers import MapDatasetReader

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
    """Whether they are alike in all that a loop can see."""
    if isinstance(left, torch.Tensor):
        return type(left) is type(right) and seen(left) == seen(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(same, left, right))
    return bool(left == right)


def seen(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
    plain = tensor.detach().resolve_conj().resolve_neg()
    content = b"" if tensor.is_meta else plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, flags, content


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


# Batches of a `TensorDataset` -------------------------------------------------------------------------------


COUNT, BATCH = 23, 5


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = (COUNT, *shape)
    return torch.arange(torch.Size(size).numel()).remainder(251).reshape(size).to(dtype)


class OwnTensor(torch.Tensor):
    """A subclass, which batches keep."""


TENSOR_KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "scalars": numbers,
    "rows": lambda: numbers(3),
    "half": lambda: numbers(2, dtype=torch.bfloat16),
    "bool": lambda: numbers(2, dtype=torch.bool),
    "complex": lambda: numbers(2, dtype=torch.complex64),
    "unsigned": lambda: numbers(2, dtype=torch.uint16),
    "small floats": lambda: numbers(2, dtype=torch.float8_e4m3fn),
    "no columns": lambda: numbers(0),
    "nan": lambda: torch.full((COUNT,), float("nan")),
    "transposed": lambda: numbers(4, 3).transpose(1, 2),
    "channels last": lambda: numbers(3, 2, 2).to(memory_format=torch.channels_last),
    "every other": lambda: torch.arange(2 * COUNT)[::2],
    "expanded": lambda: torch.ones(1, 3).expand(COUNT, 3),
    "with a gradient": lambda: numbers(3).requires_grad_(),
    "conjugated": lambda: numbers(2, dtype=torch.complex64).conj(),
    "negative": lambda: numbers(2, dtype=torch.complex64).conj().imag,
    "subclass": lambda: numbers(3).as_subclass(OwnTensor),
    "meta": lambda: numbers(3).to("meta"),
}


def elastic(data: Any, **arguments: Any) -> list[Any]:
    with ElasticDataLoader(data, BATCH, master_client=LocalMaster(), **arguments) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_batches_are_those_of_torchs_loader(kind: str) -> None:
    data = TensorDataset(TENSOR_KINDS[kind](), numbers())
    assert same(elastic(data), list(DataLoader(data, BATCH)))


def test_a_batch_is_nobodys_memory() -> None:
    data = TensorDataset(numbers(3))
    before = data.tensors[0].clone()
    for (batch,) in elastic(data):
        batch.fill_(-1)
    assert torch.equal(data.tensors[0], before)


@pytest.mark.parametrize("arguments", [{}, {"num_threads": 2}], ids=str)
def test_shuffled_batches_are_those_of_the_rows(arguments: dict[str, Any]) -> None:
    data = TensorDataset(numbers(3), torch.arange(COUNT))
    rows = Subset(data, range(COUNT))  # read row by row
    expected = elastic(rows, shuffle=True, seed=3, dataset_name="TensorDataset")
    batches = elastic(data, shuffle=True, seed=3, dataset_name="TensorDataset", **arguments)
    assert same(batches, expected)
    assert sorted(number for _, part in batches for number in part.tolist()) == list(range(COUNT))


def test_large_batches_are_where_the_rows_are() -> None:
    tensor = torch.ones(COUNT, 300, 300)
    rows = tensor_rows(MapDatasetReader(TensorDataset(tensor)))
    assert rows is not None
    with torch.device("meta"):
        assert rows.batch(range(8)).batch[0].device.type == "cpu"


def test_batches_of_loader_workers_are_those_of_torchs_loader() -> None:
    # The large rows travel in shared memory.
    data = TensorDataset(numbers(3), numbers(200_000))
    ours = elastic(data, num_workers=1)
    assert same(ours, list(DataLoader(data, BATCH)))


class RowsOfOne:
    """Counts how often a row is asked for, as a `TensorDataset` that is read row by row is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        read = TensorDataset.__getitem__

        def counted(data: TensorDataset, index: int) -> Any:
            self.asked += 1
            return read(data, index)

        monkeypatch.setattr(TensorDataset, "__getitem__", counted)


def test_no_row_is_made_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowsOfOne(monkeypatch)
    elastic(TensorDataset(numbers(3), numbers()), shuffle=True)
    assert not rows.asked


def doubled(row: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(2 * tensor for tensor in row)


@pytest.mark.parametrize(
    "arguments", [{"transform": doubled}, {"collate_fn": torchs.default_collate}, {"num_threads": 1}]
)
def test_a_transform_a_collate_function_and_threads_get_rows(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = RowsOfOne(monkeypatch)
    data = TensorDataset(numbers(3), numbers())
    ours = elastic(data, **arguments)
    assert rows.asked == COUNT
    expected = TensorDataset(*doubled(data.tensors)) if "transform" in arguments else data
    assert same(ours, list(DataLoader(expected, BATCH)))


def test_a_transform_that_is_set_between_two_epochs_is_called() -> None:
    with ElasticDataLoader(
        TensorDataset(numbers()), BATCH, num_epochs=2, master_client=LocalMaster()
    ) as loader:
        (before, *_), *_ = loader
        loader.dataset.transform = doubled  # type: ignore[attr-defined]
        (after, *_), *_ = loader
    assert torch.equal(after, 2 * before)


def test_a_users_own_way_to_collate_tensors_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> int:
        return len(tensors)

    monkeypatch.setitem(torchs.default_collate_fn_map, torch.Tensor, counted)
    assert elastic(TensorDataset(numbers(3))) == [[5], [5], [5], [5], [3]]


class OwnDataset(TensorDataset):
    """May do with its rows what it likes."""


class OwnReader(MapDatasetReader):
    """May do with its records what it likes."""


def test_subclasses_are_read_row_by_row() -> None:
    data = TensorDataset(numbers())
    assert tensor_rows(MapDatasetReader(data)) is not None
    assert tensor_rows(MapDatasetReader(OwnDataset(numbers()))) is None
    assert tensor_rows(OwnReader(data)) is None
    assert tensor_rows(MapDatasetReader(Subset(data, range(3)))) is None
