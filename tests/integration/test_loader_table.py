"""The table of loops, against a real `ElasticDataLoader` with torch's loader, its workers and optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from loader_kit import SafeReader, elastic, numbers, trainer
from loop_table import BATCH, SHARD, TABLE, Batch, Row, TabledLoop

from edl_torch.testing import FakeMaster
from edl_torch.testing.fake_master import Outcomes


class RealLoop(TabledLoop):
    """It iterates a loader, and makes a backward pass on each batch."""

    sees_gradients = True

    def __init__(self, row: Row, stack: ExitStack, *, in_process: bool, **options: int) -> None:
        super().__init__(row)
        self._said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", UserWarning)
        self.fake = FakeMaster()
        self.service, dataset = stack.enter_context(
            trainer(
                self.fake,
                SafeReader({"a": row.batches * BATCH}),
                batch_size=BATCH,
                in_process=in_process,
                records_per_shard=SHARD,
                num_epochs=row.epochs,
                lookahead="manual" if row.lookahead is None else row.lookahead,
                max_bad_records=row.batches * BATCH,
            )
        )
        self.loader = elastic(dataset, **options)
        self._iterator: Iterator[Any] | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    @property
    def outcomes(self) -> Outcomes:
        return self.fake.outcomes["training"]

    def flush(self) -> None:
        self.service.session.flush()
        self.warned[:] = [str(said.message) for said in self._said if said.category is UserWarning]

    def held(self) -> int:
        return self.service.record_count

    def is_finished(self) -> bool:
        return self.service.finished

    def open(self) -> None:
        self._iterator = iter(self.loader)

    def next(self) -> Batch | None:
        if self._iterator is None:
            self.open()
        assert self._iterator is not None
        for batch in self._iterator:
            if self.row.lookahead is not None:
                self._learn()
            epoch = self.service.session.passes.epoch
            return frozenset((epoch, "a", number) for number in numbers(batch))
        self.leave()
        return None

    def leave(self) -> None:
        self._iterator = None

    def _learn(self) -> None:
        for optimizer in self._optimizers.values():
            learn(optimizer)

    def do(self, word: str, optimizer: str) -> None:
        match word:
            case "attach":
                self._optimizers[optimizer] = made = named(optimizer or "SGD")
                self.service.attach(made)
            case "step":
                stepping = self._optimizers[optimizer]
                if stepping.param_groups[0]["params"][0].grad is None:
                    learn(stepping)
                stepping.step()
                stepping.zero_grad()
            case "detach":
                self.service.detach(self._optimizers.pop(optimizer))
            case "report":
                self.service.report_batch_done()
            case "fail":
                self.service.report_batch_done(err_msg="NaN")
            case "token":
                self.service.state_dict()
            case "back" | "window":
                self.loader.give_back(window=word == "window")
            case "pass":
                self.loader.passed_on()
                self._learn()
            case _:
                raise ValueError(f"{word!r} is no word")


def named(name: str) -> torch.optim.Optimizer:
    """Return an optimizer of a class of this name."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    made: torch.optim.Optimizer = type(name, (torch.optim.SGD,), {})([parameter], lr=0.1)
    return made


def learn(optimizer: torch.optim.Optimizer) -> None:
    """Make a backward pass."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.sum().backward()


SETUPS: dict[str, tuple[bool, dict[str, int]]] = {
    "embedded": (True, {}),
    "remote": (False, {}),
    "remote, 2 workers": (False, {"num_workers": 2}),
    "embedded, 2 threads": (True, {"num_threads": 2}),
}


def all_rows() -> Iterator[Any]:
    """Each row of the table with each setup; three of four with workers or threads by night."""
    for setup, (in_process, options) in SETUPS.items():
        for number, (name, row) in enumerate(TABLE.items()):
            marks = [pytest.mark.long] if options and number % 4 else []
            yield pytest.param(row, in_process, options, id=f"{name}-{setup}".replace(" ", "_"), marks=marks)


@pytest.mark.usefixtures("quick_questions")
@pytest.mark.parametrize(("row", "in_process", "options"), list(all_rows()))
def test_what_a_loop_does_decides_what_becomes_of_its_batches(
    row: Row, in_process: bool, options: dict[str, int]
) -> None:
    with ExitStack() as stack:
        RealLoop(row, stack, in_process=in_process, **options).run()
