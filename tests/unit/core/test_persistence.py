"""What a start from rows costs: as much for each lease in flight, however many there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from dispatcher_kit import Trainer, whole

from edl_torch.core.calls import Registration
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import Rows, dump, load
from edl_torch.shard import Source

DATA = Registration(name="d", sources=(Source(name="", count=10**9),), records_per_shard=8)


def calls_in(work: Callable[[], object]) -> int:
    """Calls of functions, Python's own and others."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def rows_of(leases: int) -> Rows:
    """So many leases in flight, of sessions that have 500 each; as many were reported before them."""
    dispatcher = Dispatcher(ledger_id="l")
    for number in range(leases // 500):
        trainer = Trainer(dispatcher, f"s{number}")
        trainer.register(DATA)
        for _ in range(5):
            done = trainer.lease("d", count=100).grants
            trainer.lease("d", count=100)
            trainer.report(*map(whole, done), dataset="d")
    assert dispatcher.dataset_status("d").leases == leases
    return dump(dispatcher)


def test_a_start_costs_the_same_for_each_lease_in_flight() -> None:
    few, many = rows_of(1000), rows_of(8000)
    assert len(many) < 8 * len(few) < 1000, "what was done with before is in no row"

    def start(rows: Rows) -> int:
        return calls_in(lambda: load(rows, ledger_id="l", now=0.0))

    assert start(many) < 8 * start(few)
