"""Who waits for remainders, and how many of them are enough; asked for each look of each of many trainers."""

from __future__ import annotations

import time

from edl_torch.core.members import ASKS, Participants


def waiting(*batch_sizes: int) -> Participants:
    """Sessions "0", "1", … that have looked once each."""
    participants = Participants()
    for number, size in enumerate(batch_sizes):
        participants.enter(str(number), size)
        participants.ask(str(number))
    return participants


def test_remainders_are_enough_for_the_smallest_batch_that_is_waited_for() -> None:
    participants = waiting(8, 4, 8)
    assert not participants.can_use(3)
    assert participants.can_use(4)
    participants.served("1")
    assert not participants.can_use(7)
    assert participants.can_use(8)


def test_while_nobody_waits_they_are_for_whoever_takes_part() -> None:
    participants = waiting(8, 4)
    participants.nobody_waits()
    assert participants.can_use(4)
    assert not participants.can_use(3)
    participants.leave("1")
    assert not participants.can_use(7)


def test_who_let_the_others_ask_often_has_stopped_waiting() -> None:
    participants = waiting(4, 8)
    for _ in range(2 * ASKS - 1):
        assert participants.can_use(4)
        participants.ask("1")
    assert not participants.can_use(7)
    participants.ask("0")
    assert participants.can_use(4)


def test_another_batch_size_counts_from_then_on() -> None:
    participants = waiting(4)
    participants.enter("0", 6)
    participants.ask("0")
    assert not participants.can_use(5)
    assert participants.can_use(6)
    participants.leave("0")
    assert participants.can_use(1), "for whoever may come"
    assert repr(participants) == "<Participants n=0 waiting=0>"


def test_a_look_costs_the_same_however_many_wait() -> None:
    participants = waiting(*[8] * 10_000)
    began = time.process_time()
    for number in range(10_000):
        participants.ask(str(number))
        assert not participants.can_use(7)
    assert time.process_time() - began < 1.0  # some 10 ms; looking at each of them: seconds
