"""Ranks agree on a name in a store that is full of what earlier ones left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from edl_torch.errors import PeerFailed
from edl_torch.system.fresh_names import fresh_name
from edl_torch.testing import wait_until

TIMEOUT_S = 20.0


@pytest.fixture
def store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


class Ranks:
    """Ranks in threads; `names` of those that have one."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.names: dict[int, str] = {}
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, size: int, after: Callable[[], object] = lambda: None) -> None:
        def run() -> None:
            after()
            self.names[rank] = fresh_name(self.store, "place", rank, size, TIMEOUT_S)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def agreed(self) -> str:
        for thread in self.threads:
            thread.join(TIMEOUT_S + 5)
        assert len(self.names) == len(self.threads), "a rank hangs"
        (name,) = set(self.names.values())
        return name


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_one_name_and_another_one_each_time(store: dist.HashStore, size: int) -> None:
    names = []
    for _ in range(3):
        ranks = Ranks(store)
        for rank in reversed(range(size)):
            ranks.start(rank, size)
        names.append(ranks.agreed())
    assert len(set(names)) == 3


def test_ranks_that_died_at_any_point_do_not_mislead_the_next(store: dist.HashStore) -> None:
    # Of an incarnation of three, rank 2 died before it came: the others were killed while they waited.
    for rank in (0, 1):
        with pytest.raises(PeerFailed):
            fresh_name(store, "place", rank, 3, 0.05)
    assert Ranks(store).threads == []
    for size in (2, 3, 2):
        ranks = Ranks(store)
        for rank in range(size):
            ranks.start(rank, size)
        ranks.agreed()


def test_a_new_rank_that_an_old_first_rank_answered_follows_the_new_one(store: dist.HashStore) -> None:
    old = threading.Thread(target=lambda: _lead_in_vain(store), daemon=True)
    old.start()
    ranks = Ranks(store)
    ranks.start(1, 2)
    ranks_of_old_answered = lambda: store.num_keys() >= 3  # noqa: E731
    wait_until(ranks_of_old_answered, timeout_s=5)
    old.join(10)
    ranks.start(0, 2)
    ranks.agreed()


def _lead_in_vain(store: dist.Store) -> None:
    with pytest.raises(PeerFailed):
        fresh_name(store, "place", 0, 3, 1.0)  # it waits for a third rank, which is gone


def test_a_rank_alone_is_told_what_may_be_wrong(store: dist.HashStore) -> None:
    with pytest.raises(PeerFailed, match=r"2 of 3 ranks.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        fresh_name(store, "place", 0, 3, 0.05)
    with pytest.raises(PeerFailed, match=r"rank 2 .* heard nothing of rank 0"):
        fresh_name(store, "elsewhere", 2, 3, 0.05)
