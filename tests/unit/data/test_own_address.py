"""By which address a rank's votes go: the way to the store, where nobody has chosen another."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from edl_torch.data.ranks import gloo
from edl_torch.data.ranks.gloo import _own_address


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
    assert _own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == host


def test_a_store_to_which_there_is_no_way_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str, port: int) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(gloo, "address_towards", unreachable)
    assert _own_address(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)) is None


def test_a_store_that_is_no_place_leads_nowhere() -> None:
    assert _own_address(dist.HashStore()) is None


@pytest.mark.parametrize(("address", "devices"), [("127.0.0.1", ["127.0.0.1"]), (None, [])])
def test_connections_go_by_that_address(
    address: str | None, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    create = dist.ProcessGroupGloo.create_device

    def noted(hostname: str) -> object:
        made.append(hostname)
        return create(hostname=hostname)

    monkeypatch.setattr(gloo, "_own_address", lambda store: address)
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", noted)
    group = gloo._gloo(dist.PrefixStore("alone", dist.HashStore()), 0, 1, timedelta(seconds=5))
    assert (group.rank(), group.size()) == (0, 1)
    assert made == devices


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
        monkeypatch.setattr(gloo, "_own_address", lambda store, address=address: address)
        gloo._gloo("store", 1, 3, timedelta(seconds=5))  # type: ignore[arg-type]
    options = SimpleNamespace(_timeout=timedelta(seconds=5), _devices=["10.0.0.1"])
    assert made == [("store", 1, 3, timedelta(seconds=5)), ("store", 1, 3, options)]
