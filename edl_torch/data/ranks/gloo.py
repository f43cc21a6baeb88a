"""Connections over gloo between ranks of a job, of their own: nothing waits behind the model's collectives.

It does not know what travels over them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from edl_torch.errors import PeerFailed
from edl_torch.system.address import address_towards
from edl_torch.system.fresh_names import fresh_name


def connect(ranks: list[int], rank: int, timeout_s: float) -> Any:
    """Connections between the ranks, which find each other through the job's store.

    Not `new_group`: it needs the ranks outside of the group too; or else its groups' names differ where ranks
    have made unequal numbers of groups before, and it waits for ever. Nor names that a restarted job's store
    may know from ranks that are gone.
    """
    where = "edl_torch/" + hashlib.sha256(repr(ranks).encode()).hexdigest()
    store = _get_default_store()
    with peers_alive():
        name = fresh_name(store, where, rank, len(ranks), timeout_s)
        return _gloo(PrefixStore(f"{where}/{name}", store), rank, len(ranks), timedelta(seconds=timeout_s))


def _gloo(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> Any:
    here = own_address(store)
    if here is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def own_address(store: Store) -> str | None:
    """The address that leads to the store, where all ranks meet; None: as gloo has it.

    gloo takes that of this host's name, which is often 127.0.1.1. Jobs over nccl need gloo for nothing else,
    and so have not chosen an interface for it.
    """
    env = os.environ
    on_one_host = "WORLD_SIZE" in env and env["WORLD_SIZE"] == env.get("LOCAL_WORLD_SIZE")
    if on_one_host or env.get("GLOO_SOCKET_IFNAME"):
        return None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    try:
        return str(address_towards(store.host, store.port))
    except OSError:
        return None


@contextmanager
def peers_alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # as gloo says that a connection is closed or a time is up
        raise PeerFailed(
            f"another rank of this job is gone or does not answer: {exc}. Start all ranks again from the "
            "last checkpoint, as torchrun does by itself"
        ) from exc


class ReliablePair:
    """Messages between this rank and another one. Both know of each what comes next."""

    def __init__(self, gloo: Any, other: int) -> None:
        self._gloo = gloo
        self._other = other
        self._tag = 0
        self._mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._sent: list[Any] = []  # torch gives up a message whose work nobody keeps
        self._marks: list[Any] = []  # to be waited for first
        self._coming: list[Any] = []
        self._answers = False  # whether the other rank waits to hear that all has come

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors, and the mark behind them."""
        for tensor in (*tensors, self._mark):
            self._sent.append(self._gloo.send([tensor], self._other, self._next_tag()))

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to receive as many."""
        for tensor in tensors:
            self._coming.append(self._gloo.recv([tensor], self._other, self._next_tag()))
        mark = torch.empty_like(self._mark)
        self._marks.append(self._gloo.recv([mark], self._other, self._next_tag()))

    def expect_answer(self) -> None:
        """The other rank will say that all has come."""
        self.receive([])

    def expect_to_answer(self) -> None:
        """`settle` is to say that all has come."""
        self._answers = True

    def wait(self) -> None:
        """Wait for all that was begun to receive."""
        if not self._marks:
            return
        for works in (self._marks, self._coming):
            while works:
                works.pop(0).wait()
        self._sent.clear()  # the other rank sends its mark when it has all of it

    def settle(self) -> None:
        """Wait until all that was sent, or comes, is there."""
        self.wait()
        if self._answers:
            self._answers = False
            self.send([])

    def _next_tag(self) -> int:
        self._tag += 1
        return self._tag
