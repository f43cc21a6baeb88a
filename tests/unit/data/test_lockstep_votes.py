"""What a rank votes on the next step, and how long it waits for records: one rank, without the others."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from loader_kit import session_at_once

from edl_torch.client.peers import Ballot, BroadcastBatch, Count, Doing
from edl_torch.data.loop import lockstep_pass as module
from edl_torch.data.loop.lockstep_pass import PATIENCE_S, LockstepPass, PartsPass
from edl_torch.errors import BadRecord


def a_pass(**parts: Any) -> Any:
    """A pass that has these parts alone."""
    made = LockstepPass.__new__(LockstepPass)
    for name, part in parts.items():
        setattr(made, f"_{name}", part)
    return made


def cast(
    *, holds: bool, rank: int, batch: object, made: bool, finished: bool, over: bool, told: bool, fails: bool
) -> Ballot:
    ballots: list[Ballot] = []

    def check() -> None:
        if fails:
            raise BadRecord("no byte of 7")

    voting = a_pass(
        lockstep=SimpleNamespace(holds_leases=holds, finished=finished),
        peers=SimpleNamespace(rank=rank, vote=ballots.append),
        session=session_at_once(trainer=SimpleNamespace(state=SimpleNamespace(check=check))),
        padding=SimpleNamespace(made=made),
        passes=SimpleNamespace(is_over=over),
        notice=SimpleNamespace(came=told),
        next_batch=lambda wait_s: batch,
    )
    voting._cast()
    (ballot,) = ballots
    return ballot


CASES = list(product([True, False], [0, 1], ["a batch", None], *[[True, False]] * 5))


def test_a_rank_votes_for_what_it_has_and_knows() -> None:
    for holds, rank, batch, made, finished, over, told, fails in CASES:
        ballot = cast(
            holds=holds,
            rank=rank,
            batch=batch,
            made=made,
            finished=finished,
            over=over,
            told=told,
            fails=fails,
        )
        has_one = holds and batch is not None
        has_none_to_pad_with = holds and batch is None and not made
        says_that_it_is_over = rank == 0 and (finished or over)
        assert ballot == Ballot(
            doing=Doing.STEP,
            batches=has_one,
            bare=has_none_to_pad_with,
            failed=fails,
            verdict=says_that_it_is_over,
            preempted=told,
        )


@pytest.mark.parametrize(("rank", "wait_s"), [(0, PATIENCE_S), (1, 0.0)])
def test_the_first_rank_waits_for_the_master_where_no_rank_has_a_batch(rank: int, wait_s: float) -> None:
    nothing = dict.fromkeys(("bare", "failed", "preempted"), 0) | {"doing": (Doing.STEP,)}
    counts = iter([Count(batches=n, verdict=0, **nothing) for n in (0, 0, 1)])  # type: ignore[arg-type]
    waits: list[float] = []
    stepping = a_pass(
        peers=SimpleNamespace(rank=rank), counted=lambda: next(counts), error=None, cast=waits.append
    )
    assert stepping._agree().batches == 1
    assert waits == [wait_s] * 2


@pytest.mark.parametrize("stepped", [True, False])
def test_a_pass_without_a_step_settles_what_earlier_ones_left(
    stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(module, "together", lambda peers, doing, settle, ask: settle())
    ending = a_pass(
        stepped=stepped,
        peers=None,
        passes=SimpleNamespace(settle_stuck=lambda: done.append("settles")),
        session=session_at_once(),
        position=SimpleNamespace(agree_on_end=lambda lockstep: done.append("ends")),
        lockstep=None,
    )
    ending._end()
    assert done == (["ends"] if stepped else ["settles", "ends"])


def test_a_holder_that_cannot_read_sends_an_empty_broadcast() -> None:
    """Its followers wait for one, and hear in the vote what is wrong."""
    sent: list[BroadcastBatch] = []

    def fails(more: Any, take: Any) -> None:
        raise BadRecord("no byte of 7")

    holder: Any = PartsPass.__new__(PartsPass)
    holder._lockstep = SimpleNamespace(finished=False)
    holder._peers = SimpleNamespace(parts=SimpleNamespace(send=sent.append))
    holder._passes = SimpleNamespace(discarded=2)
    holder._pull = fails
    with pytest.raises(BadRecord, match="no byte of 7"):
        holder._read_for_all(0.0)
    assert sent == [BroadcastBatch(discarded=2)]


def test_a_report_may_be_unanswered_while_a_step_is_computed() -> None:
    promised: list[tuple[object, int]] = []
    voting = a_pass(
        passes=SimpleNamespace(promise=lambda ticket, unanswered: promised.append((ticket, unanswered))),
        session=session_at_once(),
    )
    voting._promise("ticket")
    assert promised == [("ticket", 1)]


@pytest.mark.parametrize("has_one", [True, False])
@pytest.mark.parametrize("bare", [0, 1])
def test_a_step_is_taken_with_a_batch_or_with_one_of_another_rank(bare: int, has_one: bool) -> None:
    kept: list[object] = []
    stepping = a_pass(
        pulled=SimpleNamespace(batch="own", size=3, ticket=()) if has_one else None,
        padding=SimpleNamespace(keep=kept.append),
        peers=SimpleNamespace(lend=lambda batch: batch or "lent"),
        pad=lambda: "padding",
        weights=SimpleNamespace(step=kept.append),
        session=session_at_once(deliver=lambda ticket: True),
        stepped=False,
    )
    assert stepping._take(SimpleNamespace(bare=bare)) == (("own", 3) if has_one else ("padding", 0))
    assert stepping._stepped
    assert kept == ["own"] * has_one + ["own" if has_one else "lent"] * bare + [3] * has_one
