"""Protocols of other projects: each is a row of DOORS and a room that nothing else names.

A master of ours answers their clients on its port, beside our own calls; a trainer of ours uses their master
where `EDL_MASTER_PROTOCOL` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from edl_torch.core.calls import MasterApi
    from edl_torch.master.host import MasterHost

OURS = "edl_torch"
DOORS = {"elasticdl": "edl_torch.elasticdl"}  # name to module: a `Door`


class Servicer(Protocol):
    """Answers to a protocol's clients. `start` and `close` run on the server's loop."""

    @property
    def service(self) -> str:
        """The service's full name; its health is told beside ours."""

    def add_to(self, server: Any) -> None:
        """Add the calls to a `grpc.aio.Server`."""

    def start(self) -> None:
        """Begin to watch deadlines; the host must have started."""

    async def close(self) -> None:
        """End what `start` began."""


MakeServicer = Callable[["MasterHost"], Servicer]


class Door(Protocol):
    """All that the rest of the package knows of a protocol."""

    DURATIONS: Mapping[str, tuple[float, str]]  # options of `edl-torch master`: seconds by default, and help

    def make_servicer(self, options: Mapping[str, Any]) -> MakeServicer:
        """Return what serves its clients, by the command line's options; one that is missing has its default.

        Raises InvalidArgument for a value that cannot be used.
        """

    def connect(self, address: str, timeout_s: float) -> MasterApi:
        """Return a client for a master that speaks it; the environment says which worker this is."""


def door(name: str) -> Door:
    """Return the door of a protocol that is in DOORS."""
    return cast(Door, import_module(DOORS[name]))


def servicers(options: Mapping[str, Any]) -> tuple[MakeServicer, ...]:
    """Return what serves the clients of all protocols."""
    return tuple(door(name).make_servicer(options) for name in DOORS)
