"""The ranks of a `torch.distributed` job as `Peers`: votes over gloo connections of their own.

Votes never wait behind the model's collectives, and need no accelerator. It must not know what is voted on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from edl_torch.client.peers import Ballot, Count
from edl_torch.data.lending import packed_batch, unpacked_batch
from edl_torch.errors import InvalidArgument, PeerFailed
from edl_torch.system.address import address_towards
from edl_torch.system.fresh_names import fresh_name

TIMEOUT_S = 1800.0  # as torch's own default for gloo: a rank may decode, or wait for its master, for long


def check_no_ranks() -> None:
    """Raise InvalidArgument where this process is one of several ranks."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size > 1:
        raise InvalidArgument(
            f"this process is one of {size} ranks of torch.distributed: give ElasticDataLoader "
            f"synchronous=True where they train one model together (DDP, FSDP), or synchronous=False where "
            f"each trains a model of its own"
        )


class ProcessGroupPeers:
    """The ranks of a process group; every rank of it makes one, at the same point of its program.

    Args:
        group: the ranks that train one model on different data; default: all. With model parallelism that
            is the data-parallel group.
        timeout_s: how long a rank may let the others wait.

    Raises InvalidArgument where `torch.distributed` is not initialised, PeerFailed where a rank is missing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = TIMEOUT_S) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidArgument(
                "synchronous=True needs torch.distributed: call torch.distributed.init_process_group() "
                "first, or leave synchronous out where one process trains alone"
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = dist.get_rank(group)
        self.size = len(ranks)
        self._gloo = _connect(ranks, self.rank, timeout_s)

    def __repr__(self) -> str:
        return f"<ProcessGroupPeers rank={self.rank}/{self.size}>"

    def vote(self, ballot: Ballot) -> _Vote:
        """Cast a ballot: one asynchronous all-reduce of a few numbers, and one for each rank."""
        numbers = torch.tensor(ballot.numbers(self.rank, self.size), dtype=torch.float64)
        with _peers_alive():
            return _Vote(numbers, self._gloo.allreduce([numbers]))

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return self._broadcast(text.encode(), 0).decode()

    def lend(self, batch: Any) -> Any:
        """A batch of the lowest rank that gives one (None is none), on every rank, and on its accelerator.

        It travels as `torch.load(weights_only=True)` takes it. Raises InvalidArgument, on every rank, for
        what that does not: classes that nobody has declared to be safe.
        """
        lowest = torch.tensor([self.size if batch is None else self.rank], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with _peers_alive():
            self._gloo.allreduce([lowest], options).wait()
        source = int(lowest)
        packed = packed_batch(batch) if source == self.rank else b""
        return unpacked_batch(self._broadcast(packed, source))

    def _broadcast(self, data: bytes, source: int) -> bytes:
        options = dist.BroadcastOptions()
        options.rootRank = source
        size = torch.tensor([len(data)], dtype=torch.int64)
        with _peers_alive():
            self._gloo.broadcast([size], options).wait()
            content = torch.zeros(int(size) + 1, dtype=torch.uint8)  # one more: never empty
            if source == self.rank:
                content[:-1] = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)[:-1]
            self._gloo.broadcast([content], options).wait()
        return content[:-1].numpy().tobytes()


def _connect(ranks: list[int], rank: int, timeout_s: float) -> Any:
    """Connections between the ranks, which find each other through the job's store.

    Not `new_group`: it needs the ranks outside of the group too; or else its groups' names differ where ranks
    have made unequal numbers of groups before, and it waits for ever. Nor names that a restarted job's store
    may know from ranks that are gone.
    """
    where = "edl_torch/" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    store = _get_default_store()
    with _peers_alive():
        name = fresh_name(store, where, rank, len(ranks), timeout_s)
        return _gloo(PrefixStore(f"{where}/{name}", store), rank, len(ranks), timedelta(seconds=timeout_s))


def _gloo(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> Any:
    here = _own_address(store)
    if here is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _own_address(store: Store) -> str | None:
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


class _Vote:
    def __init__(self, numbers: torch.Tensor, work: Any) -> None:
        self._numbers = numbers
        self._work = work

    def wait(self) -> Count:
        with _peers_alive():
            self._work.wait()
        return Count.of(self._numbers.tolist())


@contextmanager
def _peers_alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # as gloo says that a connection is closed or a time is up
        raise PeerFailed(
            f"another rank of this job is gone or does not answer: {exc}. Start all ranks again from the "
            "last checkpoint, as torchrun does by itself"
        ) from exc
