"""Synchronous ranks whose data another incarnation of their job has taken back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lockstep_kit import Failed, Rank, run_ranks

from edl_torch.errors import PeerFailed, StaleLease
from edl_torch.testing import FakeMaster

ASKS: dict[str, Callable[[Rank], Any]] = {
    "state_dict": lambda rank: rank.service.state_dict(),
    "load_state_dict": lambda rank: rank.service.load_state_dict(None),
    "another pass": lambda rank: rank.train(),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_superseded_ranks_are_refused_together(ask: Callable[[Rank], Any]) -> None:
    """Between two steps: the model has what the ranks trained on, the position is the replacement's."""
    fake = FakeMaster()

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for _ in zip(range(2), rank.one_pass(), strict=False):
            pass
        rank.peers.share("")  # all have stepped
        if rank.peers.rank == 0:
            assert fake.go_back("training", None) == 3
        rank.peers.share("")
        ask(rank)

    with pytest.raises(Failed) as caught:
        run_ranks(fake, 2, work, {"n": 40})
    errors = caught.value.errors
    assert isinstance(errors[0], StaleLease)
    assert isinstance(errors[1], (StaleLease, PeerFailed))
    assert fake.dataset_status("training").acknowledged == 0
