"""Who waits for records of others says so: after a few seconds, then every minute."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_kit import Master, Shell

from edl_torch.core.status import MasterStatus, TrainerStatus
from edl_torch.errors import MasterUnavailable
from edl_torch.trainer.liveness import AGAIN_S, FIRST_S, WaitLogSchedule
from edl_torch.trainer.vocabulary import Call, Logged


def test_a_message_is_due_after_a_few_seconds_and_then_every_minute() -> None:
    silence = WaitLogSchedule()
    due = [waited for waited in range(140) if silence.is_due(float(waited))]
    assert due == [FIRST_S, FIRST_S + AGAIN_S, FIRST_S + 2 * AGAIN_S]
    assert repr(silence) == "<WaitLogSchedule due_s=185>"
    silence.end()
    assert not silence.is_due(4.9)
    assert silence.is_due(5.0)


class Waiting:
    """A trainer that waits while another holds all records; each call takes a second."""

    def __init__(self) -> None:
        self.master = Master()
        self.other = Shell(self.master, "other", attended=False)
        self.other.begin_plain()
        while self.other.next() is not None:
            pass
        self.shell = Shell(self.master, attended=False)
        self.shell.run(self.shell.trainer.open())
        self.running = self.shell.start(self.shell.trainer.leasing.wait_for_more())

    def wait(self, seconds: int) -> None:
        """Let so many calls end with nothing."""
        for _ in range(seconds):
            self.running.to("lease")
            self.master.now += 1.0
            assert isinstance(self.running.action, Call)
            self.running.answer(self.master.answer(self.running.action))

    @property
    def said(self) -> list[str]:
        return [fact.text for fact in self.shell.told(Logged)]


def one(session: str, *, dataset: str = "training", leased: int = 3) -> TrainerStatus:
    return TrainerStatus(
        session=session, worker_id="w", datasets=(dataset,), leased=leased, idle_s=1.0, since_progress_s=7.0
    )


def status(*trainers: TrainerStatus) -> MasterStatus:
    return MasterStatus(ledger="L", durable=False, datasets=(), trainers=trainers)


def test_a_short_wait_is_no_matter() -> None:
    waiting = Waiting()
    waiting.wait(4)
    waiting.running.to("lease")
    assert waiting.said == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            status(one("other-session"), one("s"), one("elsewhere", dataset="x"), one("idle", leased=0)),
            "heard of for the master's lease timeout: trainer 'w' (session other-se) has 3 record(s), last "
            "heard of 1 s ago, its loop last moved on 7 s ago",
        ),
        (
            status(one("a", leased=1), one("b", leased=1)),
            "moved on 7 s ago; trainer 'w' (session b) has 1 record(s), last heard of 1 s ago, its loop last "
            "moved on 7 s ago",
        ),
        (status(one("s")), ": no other trainer has any"),
        (MasterUnavailable("away"), ": the master does not say who has them"),
    ],
)
def test_a_long_wait_is_told_with_those_who_have_the_records(answer: Any, message: str) -> None:
    waiting = Waiting()
    waiting.wait(5)
    waiting.running.to("status")
    if isinstance(answer, Exception):
        waiting.running.fail(answer)
    else:
        waiting.running.answer(answer)
    (said,) = waiting.said
    assert said.startswith("dataset 'training': this trainer has waited 5 s for records, or for the end of")
    assert said.endswith(message)
    waiting.wait(59)
    waiting.running.to("lease")
    assert len(waiting.said) == 1
    waiting.wait(1)
    waiting.running.to("status")


def test_records_that_came_end_the_wait() -> None:
    waiting = Waiting()
    waiting.wait(4)
    waiting.other.run(waiting.other.trainer.plain.finish(abandoned=True))
    assert waiting.running.finish()
    assert waiting.said == []
    assert waiting.shell.trainer.leasing._waited_s == 0.0


def test_looks_that_cannot_wait_are_no_waits() -> None:
    waiting = Waiting()
    waiting.running.interrupt()
    for _ in range(3):
        looking = waiting.shell.start(waiting.shell.trainer.leasing.look_for_more())
        waiting.master.now += 10.0
        assert looking.finish() is False
    assert waiting.said == []
