"""Batches of a `TensorDataset` are those of a plain `DataLoader`, however they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data._utils import collate as torchs

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.data.batches.convert import tensor_rows
from edl_torch.readers import MapDatasetReader

COUNT, BATCH = 23, 5


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = (COUNT, *shape)
    return torch.arange(torch.Size(size).numel()).remainder(251).reshape(size).to(dtype)


class OwnTensor(torch.Tensor):
    """A subclass, which batches keep."""


KINDS: dict[str, Callable[[], torch.Tensor]] = {
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


def check_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert type(our) is type(their) is list
        for a, b in zip(our, their, strict=True):
            assert type(a) is type(b)
            assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
            assert (a.requires_grad, a.is_conj(), a.is_neg()) == (b.requires_grad, b.is_conj(), b.is_neg())
            if a.device.type == "cpu":
                same = a.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
                assert torch.equal(
                    same, b.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
                )


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_torchs_loader(kind: str) -> None:
    data = TensorDataset(KINDS[kind](), numbers())
    check_same(elastic(data), list(DataLoader(data, BATCH)))


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
    check_same(batches, expected)
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
    check_same(ours, list(DataLoader(data, BATCH)))


class Rows:
    """Counts how often a row is asked for, as a `TensorDataset` that is read row by row is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        read = TensorDataset.__getitem__

        def counted(data: TensorDataset, index: int) -> Any:
            self.asked += 1
            return read(data, index)

        monkeypatch.setattr(TensorDataset, "__getitem__", counted)


def test_no_row_is_made_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch)
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
    rows = Rows(monkeypatch)
    data = TensorDataset(numbers(3), numbers())
    ours = elastic(data, **arguments)
    assert rows.asked == COUNT
    expected = TensorDataset(*doubled(data.tensors)) if "transform" in arguments else data
    check_same(ours, list(DataLoader(expected, BATCH)))


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


def test_sparse_tensors_are_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="sparse tensors are not currently supported"):
        elastic(TensorDataset(numbers(3).to_sparse()))


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


@pytest.mark.parametrize("columns", [1, 70_000])
def test_a_batch_of_the_only_row(columns: int) -> None:
    only = TensorDataset(torch.arange(columns * 3, dtype=torch.float64).reshape(1, columns, 3))
    rows = tensor_rows(MapDatasetReader(only))
    assert rows is not None
    (batch,) = rows.batch([0]).batch
    assert torch.equal(batch, only.tensors[0])
