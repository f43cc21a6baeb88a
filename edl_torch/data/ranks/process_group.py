"""The ranks of a `torch.distributed` job as `Peers`: votes over gloo connections of their own.

Votes never wait behind the model's collectives, and need no accelerator. It must not know what is voted on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from edl_torch.client.peers import Ballot, Count
from edl_torch.data.ranks.gloo import ReliablePair, connect, peers_alive
from edl_torch.data.ranks.parts_group import Packed, ProcessGroupParts, receive, send
from edl_torch.errors import InvalidArgument

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def peers_over(mesh: DeviceMesh, dp: str | Sequence[str], *, pin_memory: bool) -> ProcessGroupPeers:
    """The ranks of a device mesh, which read different data over its dimensions `dp`."""
    _check_initialised("mesh=…")
    return ProcessGroupPeers(parts=parts_of(mesh, dp, dist.get_world_size()), pin_memory=pin_memory)


def _check_initialised(argument: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            f"{argument} needs torch.distributed: call torch.distributed.init_process_group() "
            "first, or leave it out where one process trains alone"
        )


class ProcessGroupPeers:
    """The ranks of a process group; every rank of it makes one, at the same point of its program.

    Args:
        group: the ranks that train one model on different data; default: all.
        timeout_s: how long a rank may let the others wait.
        parts: of all ranks of the job, the lists of those that hold one model in parts, as `parts_of` finds
            them; None where each rank has the whole model.
        pin_memory: whether ranks that get batches of others pin them.

    Raises InvalidArgument where `torch.distributed` is not initialised, PeerFailed where a rank is missing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        parts: Sequence[list[int]] | None = None,
        pin_memory: bool = False,
    ) -> None:
        _check_initialised("synchronous=True")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = dist.get_rank(group)
        self.size = len(ranks)
        self._gloo = connect(ranks, self.rank, timeout_s)
        self.coordinates = self.size if parts is None else len(parts)
        self._pairs: list[ReliablePair] = []  # of the last batch that was lent: they send after the call
        self.parts: ProcessGroupParts | None = None
        for mine in parts or ():
            if self.rank in mine:
                self.parts = ProcessGroupParts(mine, self.rank, timeout_s, pin_memory=pin_memory)

    def __repr__(self) -> str:
        return f"<ProcessGroupPeers rank={self.rank}/{self.size}>"

    def vote(self, ballot: Ballot) -> _Vote:
        """Cast a ballot: one asynchronous all-reduce of a few numbers, and one for each rank."""
        numbers = torch.tensor(ballot.numbers(self.rank, self.size), dtype=torch.float64, device="cpu")
        with peers_alive():
            return _Vote(numbers, self._gloo.allreduce([numbers]))

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        data, options = text.encode(), dist.BroadcastOptions()  # from rank 0
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        with peers_alive():
            self._gloo.broadcast([size], options).wait()
            content = torch.zeros(int(size) + 1, dtype=torch.uint8, device="cpu")  # one more: never empty
            if self.rank == 0:
                content = torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)
            self._gloo.broadcast([content], options).wait()
        return content[:-1].numpy().tobytes().decode()

    def lend(self, batch: Any) -> Any:
        """A batch of the lowest rank that gives one (None is none), on every rank, and on its accelerator.

        Raises InvalidArgument, on every rank, for a batch with what `Packed` refuses.
        """
        lowest = torch.tensor([self.size if batch is None else self.rank], dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with peers_alive():
            self._gloo.allreduce([lowest], options).wait()
        source, refused = int(lowest), ""
        others = [rank for rank in range(self.size) if rank != self.rank] if source == self.rank else [source]
        self._pairs = [ReliablePair(self._gloo, other) for other in others]
        if source == self.rank:
            try:
                packed = Packed((batch, ""))
            except InvalidArgument as exc:
                packed = Packed((None, refused := str(exc)))
            send(self._pairs, packed)
        else:
            unpacking = receive(self._pairs[0], pin_memory=False)
        with peers_alive():
            for pair in self._pairs:
                pair.settle()
        if source != self.rank:
            batch, refused = unpacking.value()
        if refused:
            raise InvalidArgument(refused)
        return batch


class _Vote:
    def __init__(self, numbers: torch.Tensor, work: Any) -> None:
        self._numbers = numbers
        self._work = work

    def wait(self) -> Count:
        with peers_alive():
            self._work.wait()
        return Count.of(self._numbers.tolist())


# Which ranks of a device mesh train on the same batches -------------------------------------------------


def parts_of(mesh: DeviceMesh, dp: str | Sequence[str], world_size: int) -> list[list[int]] | None:
    """The ranks at each coordinate of the dimensions `dp`, which hold one model in parts.

    None where each rank has a coordinate of its own, and so the whole model. Raises InvalidArgument for a
    mesh that does not hold all ranks once, and for names that it has not.
    """
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(world_size)):
        raise InvalidArgument(
            f"mesh= must hold all {world_size} ranks of the job, each once, and this one holds ranks "
            f"{sorted(ranks)}: give the mesh that init_device_mesh() made, not a part of it"
        )
    dimensions = _dimensions(mesh, dp)
    if len(dimensions) == mesh.ndim:
        return None
    others = [dimension for dimension in range(mesh.ndim) if dimension not in dimensions]
    each = math.prod(mesh.mesh.shape[dimension] for dimension in others)
    parts = mesh.mesh.permute(*dimensions, *others).reshape(-1, each).tolist()
    return None if each == 1 else [sorted(row) for row in parts]


def _dimensions(mesh: DeviceMesh, dp: str | Sequence[str]) -> list[int]:
    named = [dp] if isinstance(dp, str) else list(dp)
    if not named:
        raise InvalidArgument(
            "dp=() names no dimension: give those of mesh= over which ranks read different data. Where all "
            "ranks hold one model in parts, give the mesh a first dimension of size 1"
        )
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim > 1:
        raise InvalidArgument(
            "mesh= has no names for its dimensions: give init_device_mesh() mesh_dim_names, such as "
            "('dp', 'tp')"
        )
    if mesh.ndim == 1 and (names is None or named == ["dp"]):
        return [0]
    unknown = [name for name in named if name not in (names or ())]
    if unknown:
        raise InvalidArgument(
            f"dp={dp!r}: mesh= has no dimension {', '.join(map(repr, unknown))}, but "
            f"{', '.join(map(repr, names or ()))}. Name those over which ranks read different data; of a "
            f"flattened one, those that it is made of"
        )
    if len(set(named)) < len(named):
        raise InvalidArgument(f"dp={dp!r} names a dimension twice")
    return [list(names or ()).index(name) for name in named]
