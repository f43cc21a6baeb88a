"""A position of a state that has forgotten the caller's last report is refused: its model has learnt more."""

from __future__ import annotations

import pytest
from dispatcher_kit import Trainer, first_of, whole

from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import Rows, dump, load
from edl_torch.errors import JournalWentBack


def started_on(rows: Rows) -> Dispatcher:
    found = load(rows, ledger_id="l", now=0.0, changes=Changes())
    found.begin_again(1000)
    return found


def test_a_position_without_the_last_answered_report_is_refused() -> None:
    trainer = Trainer(Dispatcher(ledger_id="l", changes=Changes()), "a")
    trainer.register()
    grant = first_of(trainer)
    before = dump(trainer.dispatcher)
    trainer.report(whole(grant), request=1)
    after = dump(trainer.dispatcher)

    trainer.dispatcher = started_on(after)
    trainer.snapshot(reported=1)
    trainer.dispatcher = started_on(before)
    with pytest.raises(JournalWentBack, match="an answer to report 1, and it answered none beyond 0"):
        trainer.snapshot(reported=1)
