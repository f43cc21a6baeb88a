"""A name that only the ranks which are there now know, agreed upon in a store that outlives them.

A store of torchrun's agents keeps what ranks of an earlier incarnation wrote, their addresses above all: who
reads those waits for the dead. It must not know what the name is for.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from edl_torch.errors import PeerFailed

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOK_S = 0.01


def fresh_name(store: Store, where: str, rank: int, size: int, timeout_s: float) -> str:
    """A name that the `size` ranks which call this at the same point share, and no others ever had.

    Each rank but the first shows a number that it has drawn. The first answers each number with its own,
    which is the name, and says go once all have taken it. So every rank has heard from a living one.

    Args:
        store: of all ranks, and of those before them.
        where: of this agreement in the store; other agreements have other places.
        rank: this rank, from 0.
        size: number of ranks.
        timeout_s: how long a rank may let the others wait.

    Raises PeerFailed when time is up.
    """
    mine = uuid.uuid4().hex
    if size == 1:
        return mine
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _lead(store, where, size, mine, deadline)
    return _follow(store, where, rank, mine, deadline)


def _lead(store: Store, where: str, size: int, mine: str, deadline: float) -> str:
    answered: dict[int, bytes] = {}
    while (joined := store.add(f"{where}/joined/{mine}", 0)) < size - 1:
        for rank in range(1, size):
            number = _value_of(store, f"{where}/shown by {rank}")
            if number is not None and answered.get(rank) != number:
                store.set(f"{where}/answer/{number.decode()}", mine)
                answered[rank] = number
        _rest(deadline, f"{size - 1 - joined} of {size} ranks did not come")
    store.set(f"{where}/go/{mine}", "1")
    return mine


def _follow(store: Store, where: str, rank: int, mine: str, deadline: float) -> str:
    store.set(f"{where}/shown by {rank}", mine)
    joined = ""
    while True:
        answer = _value_of(store, f"{where}/answer/{mine}")
        if answer is not None and answer.decode() != joined:
            joined = answer.decode()  # a second answer: the first was of a rank 0 that is gone
            store.add(f"{where}/joined/{joined}", 1)
        if joined and _value_of(store, f"{where}/go/{joined}") is not None:
            return joined
        _rest(deadline, f"rank {rank} of this job heard nothing of rank 0")


def _value_of(store: Store, key: str) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _rest(deadline: float, what: str) -> None:
    if time.monotonic() >= deadline:
        raise PeerFailed(
            f"{what}. With torchrun on several nodes, agents may give out different stores after one of them "
            "has left: give all of them TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in their environment"
        )
    time.sleep(LOOK_S)
