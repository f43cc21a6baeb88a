"""A model that counts how often it learnt each record, and what the audit says of loops that trained it.

At a rate of 1 each record adds 1 to its own weight. Nothing here asks the loader.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Verdict, audit
from edl_torch.cli.main import main
from edl_torch.cli.verdict_words import inexact, undecided

RECORDS, BATCH = 48, 4

Loop = Callable[[Any, "Counts", Any], Any]  # of a loader, a model and its optimizer

each_attachment = pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])


class Counts(nn.Module):
    """A layer below what counts and one above learn nothing. It may fail in the middle of a backward pass."""

    def __init__(self, records: int = RECORDS) -> None:
        super().__init__()
        self.below = nn.Parameter(torch.zeros(records))
        self.learnt = nn.Parameter(torch.zeros(records))
        self.above = nn.Parameter(torch.zeros(1))
        self.fails = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        deep = (self.below - self.below.detach())[batch]  # 0, with a gradient
        if self.fails:
            deep = Fails.apply(deep)
        middle = deep - self.learnt[batch]
        return middle.sum() + (self.above - self.above.detach()).sum()

    def has_each(self, times: int = 1) -> bool:
        """Whether it has learnt each record so often."""
        return bool((self.learnt.detach() == times).all())

    @property
    def total(self) -> int:
        """How many records it has learnt, each as often as it has."""
        return int(self.learnt.detach().sum())


class Fails(torch.autograd.Function):
    """Passes on its input, and fails in the middle of a backward pass."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise MemoryError("in the middle")


class Keeps:
    """A model that keeps which values it was trained on, and a parameter that moves with each step."""

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.learnt: Counter[float] = Counter()

    def step(self, batch: Any) -> None:
        values = torch.as_tensor(batch).double().reshape(-1, 1)
        self.optimizer.zero_grad()
        self.module(values.float()).square().mean().backward()
        self.optimizer.step()
        self.learnt.update(values.flatten().tolist())

    def run(self, batches: ElasticDataLoader, most: int = 1 << 30) -> None:
        """Train on all epochs, or so many batches of them."""
        for _ in batches.epochs():
            for batch in batches:
                self.step(batch)
                most -= 1
                if not most:
                    return

    def state(self) -> Any:
        """What a checkpoint has of it."""
        return copy.deepcopy((self.module.state_dict(), self.learnt))

    def load(self, state: Any) -> None:
        self.module.load_state_dict(state[0])
        self.learnt = state[1].copy()


def sgd(*parameters: nn.Parameter | nn.Module) -> torch.optim.SGD:
    """An optimizer of these, and of all that modules have."""
    each = (one.parameters() if isinstance(one, nn.Module) else [one] for one in parameters)
    return torch.optim.SGD([*chain.from_iterable(each)], lr=1.0)


def learn(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


def loader_of(folder: Path | None, records: int = RECORDS, **options: Any) -> ElasticDataLoader:
    options = {"batch_size": BATCH, "num_epochs": 1, "shuffle": True, "records_per_shard": BATCH, **options}
    return ElasticDataLoader(torch.arange(records), audit_dir=folder, **options)


def verdict_of(folder: Path) -> Verdict:
    (verdict,) = audit([folder])
    return verdict


def judged(
    folder: Path,
    loop: Loop,
    *,
    attach: bool = True,
    word: str = "",
    optimizer_of: Callable[[Counts], Any] = sgd,
    **options: Any,
) -> tuple[Counts, Verdict]:
    """Run a loop over all epochs. The model, and the verdict."""
    model = Counts()
    optimizer = optimizer_of(model)
    with loader_of(folder, **options) as loader:
        if attach:
            loader.attach(optimizer, one_model=word)
        for _ in loader.epochs():
            loop(loader, model, optimizer)
    return model, verdict_of(folder)


def by_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status of an audit, and what `--json` says of the only dataset."""
    capsys.readouterr()
    status = main(["audit", "--json", str(folder)])
    (said,) = json.loads(capsys.readouterr().out)["datasets"]
    return status, said


def lacks(verdict: Verdict) -> list[str]:
    """What there is to say against it."""
    return [*undecided(verdict), *inexact(verdict)]
