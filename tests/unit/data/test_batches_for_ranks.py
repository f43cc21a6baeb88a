"""Batches that are taken apart, and put together by another rank: nothing in them is run."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from edl_torch.data.ranks import parts_group as parts_message
from edl_torch.data.ranks.parts_group import IN_STRUCTURE_BYTES, Packed, Unpacking
from edl_torch.errors import InvalidArgument

Pair = namedtuple("Pair", "x y")


@dataclass
class Declared:
    """A batch class that every rank has declared to be safe."""

    x: torch.Tensor


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def travelled(value: Any) -> Any:
    packed = Packed(value)
    unpacking = Unpacking(packed.structure, pin_memory=False)
    assert [content.shape for content in unpacking.contents] == [content.shape for content in packed.contents]
    for mine, theirs in zip(unpacking.contents, packed.contents, strict=True):
        mine.copy_(theirs)
    return unpacking.value()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.randn(64, 33),
        torch.randn(64, 33).t(),
        torch.zeros(0, 3),
        torch.tensor(7.0),
        torch.rand(3000) > 0.5,
        torch.randn(4000).to(torch.bfloat16),
        torch.randn(300, dtype=torch.complex64).conj(),
        torch.randn(2, 3, 30, 30).to(memory_format=torch.channels_last),
        torch.randn(900, requires_grad=True),
    ],
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    found = travelled(tensor)
    assert found.dtype is tensor.dtype
    assert torch.equal(found, tensor)
    assert not found.requires_grad


def test_large_tensors_travel_apart() -> None:
    small = torch.arange(IN_STRUCTURE_BYTES // 4)[: IN_STRUCTURE_BYTES // 8]
    large = torch.ones(IN_STRUCTURE_BYTES + 1, dtype=torch.uint8)
    packed = Packed([small, large])
    assert small.nbytes == IN_STRUCTURE_BYTES
    assert [content.nbytes for content in packed.contents] == [large.nbytes]
    assert packed.contents[0].data_ptr() == large.data_ptr()
    found = travelled([small, large])
    assert torch.equal(found[0], small)
    assert torch.equal(found[1], large)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [1, 2.5, "s", b"b", b"", None, True, (1,), {2}], ("a", "b"): OrderedDict(a=1)},
        [torch.Size([2, 3]), torch.float16, np.int64(3), np.arange(12.0).reshape(3, 4)],
        np.arange(4),
        np.zeros(0),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["x", None], dtype=object),
        [np.float32(3), np.bool_(True), range(3)],
    ],
    ids=repr,
)
def test_plain_values_and_arrays_arrive(batch: Any) -> None:
    assert repr(travelled(batch)) == repr(batch)


class NewerPickler(pickle.Pickler):
    """Python 3.14's: its default protocol is 5."""

    def __init__(self, file: io.BytesIO, protocol: int | None = None) -> None:
        super().__init__(file, 5 if protocol is None else protocol)


def test_arrays_are_sent_by_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "Pickler", NewerPickler)
    spec = importlib.util.find_spec(parts_message.__name__)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.Unpacking(module.Packed({"x": np.arange(3)}).structure, pin_memory=False).value()
    assert found["x"].tolist() == [0, 1, 2]


def test_a_tensor_that_is_there_twice_is_sent_once() -> None:
    large = torch.ones(IN_STRUCTURE_BYTES)
    first, second = travelled([large, large])
    assert first is second


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Pair(1, 2), "test_batches_for_ranks.Pair"),
        (print, "builtins.print"),
        (torch.ones(3).to_sparse(), "no dense tensor"),
        (torch.nn.Parameter(torch.ones(3)), "a Parameter that is no dense tensor"),
        (lambda: 3, "lambda"),
        ([Harmful()], "mkdir"),
    ],
)
def test_what_is_not_sent_is_refused_where_it_is_made(
    value: Any, words: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"cannot be sent: they hold .*{words}.*add_safe_globals"):
        Packed({"x": value})
    assert os.listdir() == []


def test_classes_that_are_declared_to_be_safe_are_sent() -> None:
    with torch.serialization.safe_globals([Pair, Declared]):
        assert travelled(Pair(1, torch.ones(2))).x == 1
        assert travelled(Declared(torch.arange(3))).x.tolist() == [0, 1, 2]
