"""Loops that fail after a backward pass, or in it, and are tried again: the gradient is there still.

Who throws it away first has one model, which learns each record once. Who adds to it learns a batch twice.
The oracle is the model, which counts how often it learnt each record.
"""

from __future__ import annotations

from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cases
from learning_kit import Counts, loader_of, sgd, verdict_of

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Outcome


class By(Enum):
    """What is new in the second attempt."""

    NOTHING = "the loop"
    OPTIMIZER = "another optimizer"
    LOADER = "another loader"
    BOTH = "both"


class Zeroes(Enum):
    """When a loop throws its gradients away."""

    LAST = "after the step"
    TO_NONE = "first, by None"
    TO_0 = "first, by 0"


class Attempts:
    """A model, and the loop that trains it."""

    def __init__(self, parts: int, clips: bool, zeroes: Zeroes, in_it: bool) -> None:
        self.model = Counts()
        self.parts, self.clips, self.zeroes, self.in_it = parts, clips, zeroes, in_it

    def run(self, loader: ElasticDataLoader, optimizer: Any, fails_at: int = -1) -> None:
        """Train on all batches, or up to the backward pass of one."""
        for number, batch in enumerate(loader):
            if self.zeroes is not Zeroes.LAST:
                optimizer.zero_grad(set_to_none=self.zeroes is Zeroes.TO_NONE)
            for part in batch.chunk(self.parts):
                self.model.fails = self.in_it and number == fails_at
                try:
                    self.model(part).backward()
                except MemoryError:
                    self.model.fails = False
                    return
                if self.clips:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e12)
            if number == fails_at:
                return
            optimizer.step()
            if self.zeroes is Zeroes.LAST:
                optimizer.zero_grad()


def try_twice(folder: Path, attempts: Attempts, by: By, fails_at: int, *, attaches: bool) -> None:
    def new_optimizer(loader: ElasticDataLoader, old: Any = None) -> Any:
        if attaches and old is not None:
            loader.detach(old)
        optimizer = sgd(attempts.model)
        if attaches:
            loader.attach(optimizer)
        return optimizer

    with loader_of(folder) as loader:
        optimizer = new_optimizer(loader)
        attempts.run(loader, optimizer, fails_at)
        if by in (By.NOTHING, By.OPTIMIZER):
            if by is By.OPTIMIZER:
                old, optimizer = optimizer if attaches else None, None  # else nobody has it any more
                optimizer = new_optimizer(loader, old)
            attempts.run(loader, optimizer)
            return
        token = loader.state_dict()
    with loader_of(folder) as loader:
        if by is By.BOTH:
            optimizer = new_optimizer(loader)
        elif attaches:
            loader.attach(optimizer)
        loader.load_state_dict(token)
        attempts.run(loader, optimizer)


ONCE, IN_PARTS = (1, False), (2, True)
EVERY = [*product(By, [True, False], [0, 5], product([1, 2], [True, False]), Zeroes, [True, False])]
QUICK = [
    *product(By, [True, False], [5], [IN_PARTS], [Zeroes.LAST], [False]),
    *product([By.OPTIMIZER, By.LOADER], [True, False], [5], [ONCE], [Zeroes.LAST], [True]),
    (By.OPTIMIZER, True, 0, ONCE, Zeroes.LAST, True),
    *product([By.BOTH], [False], [0], [ONCE, IN_PARTS], [Zeroes.LAST], [False]),
    *product(By, [True, False], [0], [IN_PARTS], [Zeroes.TO_0], [False]),
    *product([By.OPTIMIZER], [False], [5], [ONCE], Zeroes, [False]),
]


@pytest.mark.filterwarnings("ignore:an optimizer stepped on gradients:UserWarning")
@cases("by,attaches,fails_at,way,zeroes,in_it", QUICK, EVERY)
def test_a_loop_that_is_tried_again_is_proven_where_it_learns_each_record_once(
    by: By,
    attaches: bool,
    fails_at: int,
    way: tuple[int, bool],
    zeroes: Zeroes,
    in_it: bool,
    tmp_path: Path,
) -> None:
    """The backward pass of batch `fails_at` is its last one, or fails `in_it`."""
    attempts = Attempts(*way, zeroes, in_it)
    try_twice(tmp_path, attempts, by, fails_at, attaches=attaches)
    assert attempts.model.has_each() == (zeroes is not Zeroes.LAST)
    assert (verdict_of(tmp_path).outcome is Outcome.PROVEN) == attempts.model.has_each()
