"""Limits of what a master keeps: what is allowed is taken, one more is refused and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from dispatcher_kit import Trainer

from edl_torch.core.calls import Failure, Fence, GiveBack, LeaseCall, RegisterCall, Registration, ReportCall
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.limits import MESSAGE_BYTES, REASON_CHARS, Limits, shortened
from edl_torch.errors import LimitExceeded
from edl_torch.shard import Source

MOST = 4
SMALL = Limits(**{field.name: MOST for field in fields(Limits)})
FENCE = Fence(ledger="l", lineage=1, member=1)


def register(
    *, session: str = "s", worker: str = "w", name: str = "d", sources: tuple[str, ...] | None = ("a",)
) -> RegisterCall:
    found = None if sources is None else tuple(Source(name=each, count=1) for each in sources)
    registration = Registration(name=name, sources=found)
    return RegisterCall(session=session, worker_id=worker, batch_size=1, registration=registration)


def check_register(datasets: int = 1, sessions: int = 1, **parts: Any) -> None:
    SMALL.check_register(register(**parts), datasets=datasets, sessions=sessions)


def check_lease(count: int) -> None:
    SMALL.check_lease(LeaseCall(session="s", dataset="d", fence=FENCE, request=1, epoch=0, count=count))


def check_quarantine(records: int, size: int) -> None:
    SMALL.check_quarantine("d", records=records, size=size)


CHECKS: dict[str, Callable[[int], object]] = {
    "datasets": lambda n: check_register(datasets=n),
    "trainers": lambda n: check_register(sessions=n),
    "bytes of session": lambda n: check_register(session="x" * n),
    "bytes of worker_id": lambda n: check_register(worker="x" * n),
    "bytes of dataset": lambda n: check_register(name="x" * n),
    "sources of a dataset": lambda n: check_register(sources=("x",) * n),
    "bytes of a source's name": lambda n: check_register(sources=("y", "x" * n, "z")),
    "leases a call": check_lease,
    "slices of a token": SMALL.check_slices,
    "outcomes in one call": lambda n: SMALL.check_entries("outcomes", n),
    "trainers' streams": lambda n: SMALL.check_stream("s", streams=n),
    "records of 'd' in quarantine": lambda n: check_quarantine(n, 1),
    "bytes of a token for records of 'd' in quarantine": lambda n: check_quarantine(1, n),
    "bytes of a token": lambda n: SMALL.check_token("x" * n),
}


@pytest.mark.parametrize("what", CHECKS)
def test_as_much_as_is_allowed_is_taken_and_one_more_is_refused(what: str) -> None:
    CHECKS[what](MOST)
    with pytest.raises(LimitExceeded, match=f"5 {what}: this master takes 4 at most; "):
        CHECKS[what](MOST + 1)


def test_a_stream_of_a_session_with_a_long_name_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="5 bytes of session"):
        SMALL.check_stream("x" * 5, streams=1)


def test_names_are_counted_in_bytes() -> None:
    check_register(session="éé")
    with pytest.raises(LimitExceeded, match="6 bytes of session"):
        check_register(session="ééé")


def test_a_dataset_that_is_known_is_named_without_sources() -> None:
    check_register(sources=None)
    replace(SMALL, source_name_bytes=0).check_register(register(sources=None), datasets=1, sessions=1)


def test_reasons_are_kept_in_short() -> None:
    failures = [Failure(task=n, attempt=1, position=0, reason="x" * n) for n in (MOST, MOST + 1)]
    call = ReportCall(session="s", dataset="d", fence=FENCE, request=1, failures=tuple(failures))
    assert [failure.reason for failure in SMALL.with_short_reasons(call).failures] == ["xxxx", "xxxx…"]
    assert shortened("x" * REASON_CHARS) == "x" * REASON_CHARS


def test_slices_and_remainders_of_a_token_count_together() -> None:
    trainer = Trainer(Dispatcher(ledger_id="L", limits=Limits(token_slices=2)), "s")
    trainer.register()
    lent = trainer.lease(count=2).grants
    trainer.report(GiveBack(task=lent[0].task, attempt=1, start=lent[0].slice.stop - 1, remainder=True))
    with pytest.raises(LimitExceeded, match="3 slices of a token: this master takes 2"):
        trainer.restore(trainer.snapshot())


def test_a_token_fits_into_a_message_and_what_is_bad_into_half_of_it() -> None:
    limits = Limits()
    assert limits.token_bytes == MESSAGE_BYTES - 4096
    assert limits.quarantine_bytes == MESSAGE_BYTES // 2
    assert MESSAGE_BYTES == 64 * 2**20
