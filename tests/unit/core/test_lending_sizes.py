"""Sizes of leases near the end, as numbers: half of a share, no more than was shown, whole batches."""

from __future__ import annotations

import pytest

from edl_torch.core.leases import LeaseRequest, Quota


def limit(
    *,
    share: float = 400.0,
    share_now: float | None = None,
    held: int = 0,
    shown: int = 1000,
    waiting: int = 10_000,
    sessions: int = 2,
    ahead: bool = False,
) -> int:
    request = LeaseRequest("s", 0, 1, 10, ahead)
    quota = Quota(share, share if share_now is None else share_now, held, shown, request, sessions)
    return quota.limit(waiting)


@pytest.mark.parametrize(
    ("state", "records"),
    [
        ({}, 200),  # half of its share
        ({"held": 100}, 150),  # half of what is left of it
        ({"held": 390}, 10),  # one batch, where less is left
        ({"shown": 30}, 60),  # twice what it has shown
        ({"shown": 30, "held": 20}, 40),  # less what it holds
        ({"shown": 0}, 10),
        ({"waiting": 480}, 120),  # what waits, over twice the sessions
        ({"waiting": 480, "sessions": 3}, 80),
        ({"share": 199.0}, 90),  # whole batches
    ],
)
def test_a_lease_is_the_smallest_of_three_limits_in_whole_batches(
    state: dict[str, float], records: int
) -> None:
    assert limit(**state) == records  # type: ignore[arg-type]
    assert limit(**state, ahead=True, share_now=1000.0) == records  # type: ignore[arg-type]


@pytest.mark.parametrize(("held", "records"), [(0, 200), (95, 150), (96, 0), (100, 0)])
def test_who_reads_ahead_gets_nothing_more_once_it_holds_its_share(held: int, records: int) -> None:
    assert limit(held=held, share_now=100.0, ahead=True) == records
    assert limit(held=held, share_now=100.0) > 0
