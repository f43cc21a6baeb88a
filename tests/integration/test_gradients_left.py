"""Gradients that stay when batches go back, or go before a step comes: the audit agrees with the model.

The model counts how often it learnt each record; nothing asks the loader.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import learning_kit
import pytest
import torch
from learning_kit import sgd, verdict_of
from torch import nn

from edl_torch.audit.verdict import Outcome
from edl_torch.cli.verdict_words import headline
from edl_torch.integrations.adapter import read_ahead

RECORDS = 100
EVERY = 3  # batches make a window
AGAIN = r"stepped on gradients of 5 record\(s\) of 'training' that went back"
GONE = r"10 record\(s\) of 'training' were handed out after the last optimizer\.step\(\), and no attached"


class Counts(nn.Module):
    """At a rate of 1 each record adds 1 to its own weight."""

    def __init__(self, heads: int = 0) -> None:
        super().__init__()
        self.learnt = nn.Parameter(torch.zeros(RECORDS))
        self.heads = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(heads)])

    def forward(self, batch: torch.Tensor, head: int | None = None) -> torch.Tensor:
        loss = -self.learnt[batch].sum()
        return loss if head is None else loss + self.heads[head].sum()

    def wrong(self, epochs: int = 1) -> int:
        """Records that it did not learn as often as it should."""
        return int((self.learnt.detach().round() != epochs).sum())


def learn(model: Counts, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def loader_of(folder: Path, *optimizers: torch.optim.Optimizer, epochs: int = 1) -> Iterator[Any]:
    with learning_kit.loader_of(folder, RECORDS, num_epochs=epochs, batch_size=5) as loader:
        for optimizer in optimizers:
            loader.attach(optimizer)
        yield loader


def windows(loader: Any, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The batches; at the end of each epoch it steps on what is gathered."""
    yield from enumerate(loader)
    optimizer.step()
    optimizer.zero_grad()


def keep(parameter: nn.Parameter) -> None:
    """Leave a gradient as it is."""


def replace(parameter: nn.Parameter) -> None:
    """Average a gradient by hand, into a new tensor."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad / 1


def remove(parameter: nn.Parameter) -> None:
    """Throw a gradient away, as `zero_grad` does."""
    parameter.grad = None


def train_and_leave(folder: Path, heads: int, after: Callable[[nn.Parameter], None]) -> Counts:
    """Leave the loop once, with a window's second batch; the head of that one has no other."""
    model = Counts(heads)
    optimizer, is_first = sgd(model), True
    with loader_of(folder, optimizer) as loader:
        for _ in loader.epochs():
            for number, batch in windows(loader, optimizer):
                leaves = number == 4 and is_first
                model(batch, head=(8 if leaves else number % 8) if heads else None).backward()
                if leaves:
                    is_first = False
                    break
                if (number + 1) % EVERY == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if model.learnt.grad is not None:
                after(model.learnt)
    return model


@pytest.mark.parametrize("heads", [0, 9], ids=["one parameter", "its own head"])
@pytest.mark.parametrize("after", [keep, replace])
def test_a_window_left_after_backward_is_learnt_again(
    heads: int, after: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=AGAIN):
        model = train_and_leave(tmp_path, heads, after)
    assert model.wrong() == 5
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.returned) == (Outcome.INEXACT, 5)


def train_and_go_back(folder: Path, after: Callable[[nn.Parameter], None]) -> Counts:
    """Go back, in the tenth batch, to a checkpoint of the sixth: between are a window and a part of one."""
    model = Counts()
    optimizer, saved, went_back = sgd(model), None, False
    with loader_of(folder, optimizer) as loader:
        for _ in loader.epochs():
            for number, batch in windows(loader, optimizer):
                model(batch).backward()
                if (number + 1) % EVERY == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if number == 5:
                    saved = saved or (copy.deepcopy(model.state_dict()), loader.state_dict())
                if number == 10 and not went_back:
                    went_back = True
                    model.load_state_dict(saved[0])  # type: ignore[index]
                    loader.load_state_dict(saved[1])  # type: ignore[index]
                    after(model.learnt)
                    break
    return model


@pytest.mark.parametrize("after", [keep, replace])
def test_gradients_of_a_window_that_stay_as_the_data_go_back_are_learnt_again(
    after: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"stepped on gradients of 10 record"):
        model = train_and_go_back(tmp_path, after)
    assert model.wrong() == 10  # of the batch in hand, and of the one before
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.returned) == (Outcome.INEXACT, 10)


def test_gradients_that_go_as_the_data_go_back_are_none(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = train_and_go_back(tmp_path, remove)
    assert not model.wrong()
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


def train_with_zero_grad_first(folder: Path, to_none: bool) -> Counts:
    """Three epochs of 20 batches; no window has the last two of the first ones."""
    model = Counts()
    optimizer = sgd(model)
    with loader_of(folder, optimizer, epochs=3) as loader:
        for epoch in loader.epochs():
            optimizer.zero_grad(set_to_none=to_none)
            for number, batch in enumerate(loader):
                model(batch).backward()
                if (number + 1) % EVERY == 0:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
            if epoch == 2:
                optimizer.step()
    return model


@pytest.mark.parametrize("to_none", [True, False])
def test_a_window_whose_gradients_an_epoch_throws_away_is_not_learnt(to_none: bool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=GONE):
        model = train_with_zero_grad_first(tmp_path, to_none)
    assert model.wrong(3) in range(10, 21)  # of each epoch but the last ten records, some in both
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.unstepped) == (Outcome.INEXACT, 20)
    named = [finding for finding in verdict.findings if finding.kind == "unlearnt"]
    assert sum(len(finding.records) for finding in named) + verdict.unnamed.get("unlearnt", 0) == 20


def test_a_window_that_is_given_back_when_its_gradients_are_gone_comes_again(tmp_path: Path) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, optimizer) as loader:
        first = True
        for _ in loader.epochs():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batches = iter(loader)
            if first:
                first = False
                for _ in range(2):
                    model(next(batches)).backward()
                optimizer.zero_grad()
                loader.give_back(window=True)
                continue
            for batch in batches:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert not model.wrong()
    assert verdict_of(tmp_path).unstepped == 0


def test_what_only_one_of_two_optimizers_has_not_stepped_on_is_not_lost(tmp_path: Path) -> None:
    """A generator steps on each third batch, and takes no gradient of those between."""
    critic, generator = Counts(), Counts()
    one, other = sgd(critic), sgd(generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loader_of(tmp_path, one, other, epochs=2) as loader:
            for epoch in loader.epochs():
                for number, batch in enumerate(loader):
                    one.zero_grad()
                    critic(batch).backward()
                    one.step()
                    one.zero_grad()
                    if (number + 1) % EVERY == 0 or (epoch == 1 and number == 19):
                        other.zero_grad()
                        generator(batch).backward()
                        other.step()
                        other.zero_grad()
    assert not critic.wrong(2)
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


@pytest.mark.parametrize(
    "part",
    [
        lambda: nn.LazyLinear(1),
        lambda: nn.Embedding(RECORDS, 1, sparse=True),
        lambda: nn.Linear(1, 1, dtype=torch.complex64),
    ],
    ids=["lazy", "sparse", "complex"],
)
def test_a_loop_with_odd_parameters_may_be_left_in_a_window(
    part: Callable[[], nn.Module], tmp_path: Path
) -> None:
    layer, model = part(), Counts()
    optimizer = torch.optim.SGD([*layer.parameters(), *model.parameters()], lr=1.0)
    is_complex = any(parameter.is_complex() for parameter in layer.parameters())
    left = False
    with loader_of(tmp_path, optimizer) as loader:
        for _ in loader.epochs():
            for batch in loader:
                taken = batch if isinstance(layer, nn.Embedding) else batch[:, None] / RECORDS
                (model(batch) + layer(taken + 0j if is_complex else taken).abs().sum()).backward()
                if not left:
                    left = True
                    break
                optimizer.step()
                optimizer.zero_grad()
            optimizer.zero_grad()
    assert not model.wrong()
    assert verdict_of(tmp_path).proven


@pytest.mark.parametrize("is_dropped", [False, True], ids=["kept", "dropped"])
def test_a_batch_in_hand_goes_back_where_a_framework_takes_the_loader(
    tmp_path: Path, is_dropped: bool
) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, optimizer) as loader:
        batches = iter(loader)
        model(next(batches)).backward()
        if is_dropped:
            del batches
        read_ahead(loader)
        with pytest.warns(UserWarning, match=AGAIN):
            optimizer.step()
        for batch in loader:
            loader.passed_on()
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        loader.passed_on()
    assert model.wrong() == 5
    assert verdict_of(tmp_path).outcome is Outcome.INEXACT


@pytest.mark.parametrize("every", [1, 2], ids=["steps", "windows"])
@pytest.mark.parametrize("window", [False, True], ids=["batch", "window"])
def test_a_batch_that_is_trained_on_after_it_was_given_back_is_told(
    every: int, window: bool, tmp_path: Path
) -> None:
    model = Counts()
    optimizer, steps = sgd(model), 0
    with loader_of(tmp_path, optimizer) as loader, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in loader.epochs():
            for batch in loader:
                if steps == 2:
                    loader.give_back(window=window)
                model(batch).backward()
                steps += 1
                if steps % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    assert model.wrong() == 5
    assert verdict_of(tmp_path).outcome is Outcome.INEXACT
    assert any("5 record(s) of 'training' that went back" in str(one.message) for one in told)


@pytest.mark.parametrize("own", [False, True], ids=["one gradient", "gradients of their own"])
def test_optimizers_that_share_a_parameter_step_several_times_on_a_batch(own: bool, tmp_path: Path) -> None:
    model = Counts()
    first, second = sgd(model), sgd(model)
    with loader_of(tmp_path, first, second) as loader:
        for batch in loader:
            first.zero_grad()
            model(batch).backward()
            first.step()
            if own:
                second.zero_grad()
                model(batch).backward()
            second.step()
    assert not model.wrong(2)  # in one epoch
    verdict = verdict_of(tmp_path)
    assert verdict.proven
    assert verdict.several == RECORDS


def test_optimizers_that_share_a_parameter_which_one_alone_trains_step_once_on_a_batch(
    tmp_path: Path,
) -> None:
    trunk, model = nn.Parameter(torch.zeros(1)), Counts()
    first, second = sgd(model), torch.optim.SGD([trunk, *model.parameters()], lr=1.0)
    with loader_of(tmp_path, first, second) as loader:
        for batch in loader:
            model(batch).backward()
            first.step()
            first.zero_grad()
            trunk.sum().backward()
            second.step()
            second.zero_grad()
    assert not model.wrong()
    assert (verdict_of(tmp_path).proven, verdict_of(tmp_path).several) == (True, 0)


@pytest.mark.parametrize("first", [False, True], ids=["after detach", "before detach"])
def test_an_optimizer_that_takes_over_steps_on_a_gradient_that_was_used(first: bool, tmp_path: Path) -> None:
    model = Counts()
    old, new = sgd(model), sgd(model)
    with loader_of(tmp_path, old) as loader:
        for number, batch in enumerate(loader):
            old.zero_grad()
            model(batch).backward()
            old.step()
            if number == 5:
                if first:
                    loader.attach(new)
                loader.detach(old)
                loader.attach(new)
                new.step()
                old = new
    assert model.wrong() == 5
    assert verdict_of(tmp_path).outcome is Outcome.DELIVERED


@pytest.mark.parametrize("to_none", [False, True], ids=["made 0", "made None"])
def test_a_gradient_that_is_thrown_away_while_no_optimizer_is_attached_is_in_no_step(
    to_none: bool, tmp_path: Path
) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, optimizer) as loader:
        for number, batch in enumerate(loader):
            if number == 5:
                model(batch).backward()
                loader.detach(optimizer)
                optimizer.zero_grad(set_to_none=to_none)
                loader.attach(optimizer)
            else:
                learn(model, optimizer, batch)
    assert model.wrong()
    assert verdict_of(tmp_path).outcome is Outcome.DELIVERED


def test_a_batch_of_before_the_data_went_back_is_learnt_again(tmp_path: Path) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, optimizer) as loader:
        for number, batch in enumerate(loader):
            if number == 3:
                token, state = loader.state_dict(), copy.deepcopy(model.state_dict())
            if number == 6:
                model.load_state_dict(state)
                loader.load_state_dict(token)
                model(batch).backward()
                with pytest.warns(UserWarning, match="that went back"):
                    optimizer.step()
                break
            learn(model, optimizer, batch)
        for batch in loader:
            learn(model, optimizer, batch)
    assert model.wrong()
    assert verdict_of(tmp_path).outcome is Outcome.INEXACT


@pytest.mark.parametrize("skips", ["first", "last", "both"])
def test_of_two_optimizers_with_a_scaler_the_first_line_says_what_one_skipped(
    skips: str, tmp_path: Path
) -> None:
    model, other = Counts(), Counts()
    first, last = sgd(model), sgd(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with loader_of(tmp_path) as loader:
        loader.attach(first, scaler=scaler)
        loader.attach(last, scaler=scaler)
        for number, batch in enumerate(loader):
            first.zero_grad()
            last.zero_grad()
            scaler.scale(model(batch) + other(batch)).backward()
            for name, one in (("first", model), ("last", other)):
                if number == 6 and skips in (name, "both"):
                    next(one.parameters()).grad *= math.inf
            scaler.step(first)
            scaler.step(last)
            scaler.update()
    assert (bool(model.wrong()), bool(other.wrong())) == (skips != "last", skips != "first")
    how = "by some of the optimizers" if skips == "first" else "stepped over by a GradScaler"
    assert headline(verdict_of(tmp_path)) == f"PROVEN, 5 of {RECORDS} {how}"


def test_an_optimizer_takes_over_a_gradient_that_was_made_0(tmp_path: Path) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, optimizer, epochs=2) as loader:
        for _ in loader.epochs():
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            new = sgd(model)
            loader.attach(new)
            loader.detach(optimizer)
            optimizer = new
    assert not model.wrong(epochs=2)
    assert headline(verdict_of(tmp_path)) == "PROVEN"


def test_a_loop_that_is_left_before_any_step_is_in_no_other_threads_way(tmp_path: Path) -> None:
    """All tensors of the process are looked at: who makes a tuple meanwhile would fail if that were held."""
    errors: list[BaseException] = []
    over = threading.Event()

    def build() -> None:
        while not over.is_set():
            try:
                tuple(number for number in range(200))
            except SystemError as error:
                errors.append(error)

    many, interval = [[number] for number in range(200_000)], sys.getswitchinterval()
    threads = [threading.Thread(target=build) for _ in range(2)]
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for number in range(3):
            with loader_of(tmp_path / str(number)) as loader:
                for batch in loader:
                    Counts()(batch).backward()
                    break
                iter(loader)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        for thread in threads:
            thread.join(60)
    assert many
    assert not errors
