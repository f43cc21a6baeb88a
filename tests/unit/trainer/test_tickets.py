"""Positions drawn, cut into the tickets of batches."""

from __future__ import annotations

from edl_torch.trainer.vocabulary import Tally, ticket_size


def test_tally_cuts_a_ticket_out_of_several_leases() -> None:
    tally = Tally()
    tally.start(1, 8)[2] = 10
    run = tally.start(2, 0)
    run[2] = 2
    ticket = tally.take()
    assert ticket == ((1, 8, 10), (2, 0, 2))
    assert ticket_size(ticket) == 4
    run[2] = 5
    assert tally.take() == ((2, 2, 5),)
    assert tally.take() == ()
    run[2] = 6
    tally.clear()
    assert tally.take() == ()
