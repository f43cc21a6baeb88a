"""Which ranks of a device mesh hold one model in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from edl_torch.data.ranks.process_group import parts_of
from edl_torch.errors import InvalidArgument


@dataclass
class Mesh:
    """What is asked of torch's, whose making needs all ranks."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None
    first: int = 0

    @property
    def mesh(self) -> torch.Tensor:
        return torch.arange(self.first, self.first + math.prod(self.shape)).reshape(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)


def parts(mesh: Any, dp: Any = "dp", world_size: int | None = None) -> list[list[int]] | None:
    return parts_of(mesh, dp, math.prod(mesh.shape) if world_size is None else world_size)


def test_ranks_at_one_coordinate_hold_one_model() -> None:
    assert parts(Mesh((2, 2), ("dp", "tp"))) == [[0, 1], [2, 3]]
    assert parts(Mesh((2, 2), ("tp", "dp"))) == [[0, 2], [1, 3]]
    assert parts(Mesh((1, 3), ("dp", "tp"))) == [[0, 1, 2]]


def test_dp_may_be_several_dimensions_anywhere() -> None:
    mesh = Mesh((2, 2, 2), ("pp", "replicate", "shard"))
    assert parts(mesh, ("replicate", "shard")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert parts(mesh, "replicate") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_each_rank_has_the_whole_model_where_no_dimension_is_left() -> None:
    assert parts(Mesh((2, 2), ("replicate", "shard")), ("replicate", "shard")) is None
    assert parts(Mesh((4,), ("dp",))) is None
    assert parts(Mesh((4,), ("shard",))) is None
    assert parts(Mesh((4,))) is None
    assert parts(Mesh((4, 1), ("dp", "tp"))) is None


@pytest.mark.parametrize(
    ("mesh", "dp", "words"),
    [
        (Mesh((2, 2), ("data", "tp")), "dp", "no dimension 'dp', but 'data', 'tp'"),
        (Mesh((2, 2), ("dp", "tp")), ("dp", "cp"), "no dimension 'cp'"),
        (Mesh((4,), ("tp",)), "data", "no dimension 'data', but 'tp'"),
        (Mesh((2, 2), ("dp", "tp")), (), "names no dimension"),
        (Mesh((2, 2), ("dp", "tp")), ("dp", "dp"), "twice"),
        (Mesh((2, 2)), "dp", "no names for its dimensions"),
    ],
)
def test_names_that_the_mesh_has_not_are_refused(mesh: Mesh, dp: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parts(mesh, dp)


@pytest.mark.parametrize(("first", "world_size"), [(0, 8), (4, 8), (0, 2)])
def test_a_mesh_that_is_not_over_all_ranks_is_refused(first: int, world_size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"all {world_size} ranks of the job"):
        parts(Mesh((2, 2), ("dp", "tp"), first), world_size=world_size)


def test_the_dimension_of_a_mesh_without_names_is_that_of_the_data() -> None:
    assert parts(Mesh((1,))) is None
    assert parts(Mesh((4,), ("tp",)), "dp") is None
    assert parts(Mesh((4,), ("tp",)), ("dp",)) is None
