"""Batches that are lent are data: nothing in them is run."""

from __future__ import annotations

import os
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from edl_torch.data.batches.lent_batch import packed_batch, unpacked_batch
from edl_torch.errors import InvalidArgument


@dataclass
class Declared:
    """A batch class that every rank has declared to be safe."""

    x: torch.Tensor


Undeclared = namedtuple("Undeclared", "x y")


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": [1, 2.5, "s", b"b", b"", None, True, (1,), {2}]},
        np.arange(4),
        np.zeros(0),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["x", None], dtype=object),
        [np.float32(3), np.bool_(True), range(3)],
    ],
    ids=repr,
)
def test_plain_values_and_arrays_come_back(batch: Any) -> None:
    assert repr(unpacked_batch(packed_batch(batch))) == repr(batch)


def test_tensors_come_back() -> None:
    assert torch.equal(unpacked_batch(packed_batch(torch.arange(3))), torch.arange(3))


def test_what_the_user_has_declared_stays_declared() -> None:
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([np.ndarray])
    try:
        packed_batch(np.arange(3))
        assert np.ndarray in torch.serialization.get_safe_globals()
        assert slice not in torch.serialization.get_safe_globals()
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_a_class_that_was_declared_comes_back() -> None:
    with torch.serialization.safe_globals([Declared]):
        assert unpacked_batch(packed_batch(Declared(torch.arange(3)))).x.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("batch", "named"), [(Undeclared(1, 2), "Undeclared"), (lambda: 3, "lambda"), ([Harmful()], "mkdir")]
)
def test_what_is_not_data_is_refused_by_name(
    batch: Any, named: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InvalidArgument, match=rf"^a rank that never had a batch needs one of .*{named}.*add_safe_globals"
    ):
        unpacked_batch(packed_batch(batch))
    assert os.listdir() == []
