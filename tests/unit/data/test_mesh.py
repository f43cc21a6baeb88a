"""Which ranks of a device mesh hold one model in parts, and by which address their votes go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from edl_torch.data.ranks import gloo
from edl_torch.data.ranks.gloo import own_address
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
    assert parts(Mesh((4,))) is None, "a mesh without names has one dimension, that of the data"
    assert parts(Mesh((4,), ("tp",)), ("dp",)) is None
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


# By which address a rank's votes go: the way to the store, where nobody has chosen another ------------------


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({}, "127.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, None),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "127.0.0.1"),
        ({"WORLD_SIZE": "4"}, "127.0.0.1"),
    ],
    ids=["unknown", "chosen", "one host", "two hosts", "no torchrun"],
)
def test_it_leads_to_the_store(
    environment: Mapping[str, str], host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == host


def test_a_store_to_which_there_is_no_way_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str, port: int) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(gloo, "address_towards", unreachable)
    assert own_address(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)) is None


def test_a_store_that_is_no_place_leads_nowhere() -> None:
    assert own_address(dist.HashStore()) is None


def test_connections_have_the_time_limit_that_is_given_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    class Gloo:
        _Options = SimpleNamespace

        def __init__(self, *arguments: object) -> None:
            made.append(arguments)

        @staticmethod
        def create_device(hostname: str) -> str:
            return hostname

    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    for address in (None, "10.0.0.1"):
        monkeypatch.setattr(gloo, "own_address", lambda store, address=address: address)
        gloo._gloo("store", 1, 3, timedelta(seconds=5))  # type: ignore[arg-type]
    options = SimpleNamespace(_timeout=timedelta(seconds=5), _devices=["10.0.0.1"])
    assert made == [("store", 1, 3, timedelta(seconds=5)), ("store", 1, 3, options)]
