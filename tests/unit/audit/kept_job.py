"""A job as in `audited_job`, whose master's state can be written to a journal."""

from __future__ import annotations

from pathlib import Path

from audited_job import BATCH, SPEC, Job, Trainer
from fences import fence

from edl_torch.core import persistence
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.journal import Journal, encoded
from edl_torch.shard import DatasetSpec


class KeptJob(Job):
    """`state` is the folder of the journal, which stays open, as under a live master, until `close()`."""

    def __init__(self, folder: Path, spec: DatasetSpec = SPEC, trainers: int = 2) -> None:
        self.state = folder / "state"
        self.journal = Journal(self.state)
        super().__init__(folder / "audit", spec, trainers)

    def open_ledger(self) -> None:
        self.ledger_id = self.journal.ledger_id
        self.dispatcher = Dispatcher(ledger_id=self.ledger_id)
        self.ledger = self.dispatcher.add(self.spec)

    def join(self, trainer: Trainer) -> None:
        member = self.dispatcher.members.enter(trainer.session, "host", 0.0)
        member.datasets.add(self.spec.name)
        super().join(trainer)

    def take_over(self, place: int) -> None:
        """The master gives up a trainer that was killed."""
        session = self.trainers[place].session
        self.dispatcher.leave(session, fence(self.dispatcher, session).member)

    def cut_off(self, place: int, *, heard: bool) -> None:
        """A trainer is killed between its report of a batch of `BATCH` records and the answer."""
        self.train(self.trainers[place], answered=False, heard=heard)

    def keep(self) -> None:
        """Write the state as it is now."""
        rows = persistence.dump(self.dispatcher)
        gone = dict.fromkeys(set(self.journal.read()) - set(rows))
        self.journal.write(encoded({**rows, **gone}))

    def close(self) -> None:
        self.journal.close()


__all__ = ["BATCH", "SPEC", "KeptJob"]
