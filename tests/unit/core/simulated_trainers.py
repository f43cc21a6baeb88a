"""Trainers reduced to what the ledger sees of them: they fetch, train, hold back and wait as real ones do."""

from __future__ import annotations

from collections.abc import Sequence

from edl_torch.core.calls import NEW_PASS, Grant, PassState
from edl_torch.core.ledger import ShardLedger

Drawn = tuple[Grant, int]  # one record: its lease and position
PATIENCE = 50  # rounds without an outcome after which the trainers are taken to be stuck


class SimulatedTrainer:
    """One trainer. `hold_back` batches are in its loop and not stepped on when it has handed on all it has.

    An elastic one tells the ledger that it is drained and waits for the verdict; a plain one acknowledges
    all it holds before it waits.
    """

    def __init__(
        self,
        ledger: ShardLedger,
        name: str,
        batch_size: int,
        *,
        elastic: bool = True,
        drop_last: bool = False,
        hold_back: int = 0,
        held: Sequence[tuple[Grant, Sequence[int]]] = (),
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.batch_size = batch_size
        self.elastic = elastic
        self.drop_last = drop_last
        self.hold_back = hold_back if elastic else 0
        self.drawn: list[Drawn] = [(grant, position) for grant, positions in held for position in positions]
        self.loop: list[list[Drawn]] = []  # batches handed to the loop
        self.trained: list[tuple[int, int, int]] = []
        self.epoch = NEW_PASS
        self.read = 0
        self.ended = False

    def step(self) -> None:
        """One look at the ledger, and what follows from it."""
        if self.ended:
            return
        if self._ask(drained=False):
            self._train_whole_batches()
            return
        self._train()
        if self.elastic and not self.ended:
            self._ask(drained=True)
            holds = bool(self.loop or self.drawn)
            if self.epoch == NEW_PASS and not self.drawn and holds:
                self._end_pass()

    def _ask(self, *, drained: bool) -> bool:
        epoch, state, grants = self.ledger.lease(self.name, epoch=self.epoch, count=2, drained=drained)
        self.epoch = epoch
        self.read += len(grants)
        for grant in grants:
            self.drawn += [(grant, position) for position in range(grant.slice.skip, grant.slice.stop)]
        if state is PassState.FINISHED:
            self._train()
            self._step(0)
            self.ended = True
        elif state is PassState.EPOCH_OVER:
            self._train()
            self._end_pass()
        return bool(grants)

    def _end_pass(self) -> None:
        if not self.read:
            self._step(0)  # a pass without a batch: the loop has nothing to wait for
        self.epoch, self.read = NEW_PASS, 0

    def _train_whole_batches(self) -> None:
        while len(self.drawn) >= self.batch_size:
            self._hand(self.batch_size)
        self._step(self.hold_back)

    def _train(self) -> None:
        self._train_whole_batches()
        if self.drawn and self.drop_last:
            self._return_remainder()
        elif self.drawn:
            self._hand(len(self.drawn))
        self._step(self.hold_back)

    def _hand(self, count: int) -> None:
        self.loop.append(self.drawn[:count])
        del self.drawn[:count]

    def _return_remainder(self) -> None:
        first: dict[int, Drawn] = {}
        for grant, position in self.drawn:
            first.setdefault(grant.task, (grant, position))
        for grant, position in first.values():
            self.ledger.give_back(self.name, grant.task, grant.attempt, position, remainder=True)
        self.drawn.clear()

    def _step(self, keep: int) -> None:
        done = self.loop[: len(self.loop) - keep]
        del self.loop[: len(done)]
        for batch in done:
            for grant, position in batch:
                self.ledger.acknowledge(self.name, grant.task, grant.attempt, position + 1, start=position)
                self.trained.append((grant.slice.epoch, grant.slice.shard, position))


def run_to_the_end(ledger: ShardLedger, trainers: Sequence[SimulatedTrainer]) -> list[tuple[int, int, int]]:
    """Let all trainers take turns until the job is finished. Returns what they trained on.

    Raises AssertionError when they wait for each other.
    """
    idle_rounds, before = 0, -1
    while not all(trainer.ended for trainer in trainers):
        for trainer in trainers:
            trainer.step()
        outcomes = ledger.acknowledged + ledger.dropped + len(ledger.quarantine)
        idle_rounds = 0 if outcomes != before else idle_rounds + 1
        before = outcomes
        assert idle_rounds < PATIENCE, f"stuck: {ledger!r} {ledger.snapshot()!r}"
    assert ledger.finished
    return [record for trainer in trainers for record in trainer.trained]
