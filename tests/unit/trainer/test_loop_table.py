"""The table of loops, against the pure trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from loop_table import BATCH, SHARD, Batch, Row, TabledLoop, rows
from trainer_kit import DATASET, Master, Shell

from edl_torch.core.calls import Grant
from edl_torch.testing.fake_master import Outcomes
from edl_torch.trainer.vocabulary import Evidence, Reporting, Run, Ticket


class PureLoop(TabledLoop):
    """It reads by itself, as a `DataLoader` without workers does."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.master = Master(records=row.batches * BATCH, shard=SHARD, num_epochs=row.epochs)
        self.shell = Shell(self.master, batch_size=BATCH, lookahead=row.lookahead, attended=False)
        self.warned = self.shell.warnings
        self._optimizers: dict[str, int] = {}
        self._number = 0
        self._reads = False
        self._grant: Grant | None = None
        self._grants: dict[int, Grant] = {}
        self._read = 0

    @property
    def outcomes(self) -> Outcomes:
        return self.master.outcomes

    def flush(self) -> None:
        self.shell.run(self.shell.trainer.reporter.flush())

    def held(self) -> int:
        return self.shell.state.inflight.records

    def is_finished(self) -> bool:
        return bool(self.master.dispatcher.dataset_status(DATASET).finished)

    def open(self) -> None:
        self._number = self.shell.run(self.shell.trainer.open())
        self._reads, self._grant = False, None

    def next(self) -> Batch | None:
        shell, passes = self.shell, self.shell.elastic
        if not passes.is_open(self._number):
            self.open()
        assert shell.run(passes.request(self._number))
        while True:
            if not self._reads and not shell.run(passes.more_to_read()):
                self.leave()
                return None
            ticket = self._draw()
            self._reads = ticket is not None
            if ticket is not None and shell.run(passes.hand(ticket)):
                return self.records(ticket)

    def _draw(self) -> Ticket | None:
        """Draw the positions of the next batch, as a collated batch has them; None where no lease is left."""
        runs, missing = [], BATCH
        while missing:
            if self._grant is None or self._read == self._grant.slice.stop:
                self._grant = self.shell.next(number=self._number)
                if self._grant is None:
                    break
                self._read = self._grant.slice.skip
                self._grants[self._grant.task] = self._grant
            stop = min(self._read + missing, self._grant.slice.stop)
            runs.append((self._grant.task, self._read, stop))
            missing -= stop - self._read
            self._read = stop
        return tuple(runs) or None

    def records(self, ticket: Iterable[Run]) -> Batch:
        plan = self.shell.state.registered.plan
        assert plan is not None
        slices = [(self._grants[task].slice, range(first, after)) for task, first, after in ticket]
        return frozenset(
            (cut.epoch, *plan.locate(cut.epoch, cut.shard, place))
            for cut, places in slices
            for place in places
        )

    def leave(self) -> None:
        self.shell.run(self.shell.elastic.close(self._number))
        self.shell.run(self.shell.elastic.warnings.of_what_went_back())

    def do(self, word: str, optimizer: str) -> None:
        shell, passes = self.shell, self.shell.elastic
        match word:
            case "attach":
                self._optimizers[optimizer] = shell.state.batches.attach(optimizer or "SGD")
            case "step":
                shell.run(passes.stepped(self._optimizers[optimizer]))
            case "detach":
                shell.run(passes.detach(self._optimizers.pop(optimizer)))
            case "report":
                shell.report()
            case "fail":
                shell.run(shell.trainer.fail_batch(None, "NaN"))
            case "token":
                shell.run(shell.trainer.position.snapshot())
            case "back" | "window":
                shell.run(passes.give_back(window=word == "window"))
            case "pass":
                shell.run(passes.passed_on())
            case _:
                raise ValueError(f"{word!r} is no word")


@rows
def test_what_a_loop_does_decides_what_becomes_of_its_batches(row: Row) -> None:
    PureLoop(row).run()


@pytest.mark.parametrize(
    ("script", "ways", "returned"),
    [
        ("a b leave", [Evidence.NEXT], "b"),
        ("a token", [Evidence.TOKEN], ""),
        ("a report", [Evidence.REPORT], ""),
        ("attach a step token b token", [Evidence.STEP], ""),
        ("attach attach:slow a step detach:slow", [Evidence.STEP], ""),
        ("attach a step b c d e f g h . .", [Evidence.STEP, Evidence.UNSTEPPED], ""),
        ("a b back", [Evidence.NEXT], "b"),
        ("attach a b back", [], ""),
        ("attach a b leave", [], ""),
        ("attach attach:slow a step leave", [], "a"),
        ("attach attach:slow a step b leave", [], ""),
    ],
)
def test_it_is_told_how_a_batch_came_to_count_and_what_went_back_that_a_model_may_have_learnt(
    script: str, ways: list[Evidence], returned: str
) -> None:
    loop = PureLoop(Row(script=script))
    for word in script.split():
        loop.do_word(word)
    told = loop.shell.told(Reporting)
    assert [fact.way for fact in told if fact.acknowledgements] == ways
    runs: list[Run] = [run for fact in told for run in fact.returned]
    assert Counter(loop.records(runs)) == sum((loop.named[name] for name in returned), Counter())
