"""Which batches are in the gradients: no loop is proven whose model has not each record once.

The model counts how often it learnt each record; nothing asks the loader.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Outcome, audit, judge
from edl_torch.cli.audit_page import render
from edl_torch.cli.verdict_words import headline, inexact, undecided
from edl_torch.integrations.adapter import read_ahead

RECORDS = 48
EVERY = 4
MARKING = ("gradients.py", "optimizers.py")  # the files that mark batches at each step

Loop = Callable[[Any, "Counts", Any], Any]


class Counts(nn.Module):
    """At a rate of 1 each record adds 1 to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt = nn.Parameter(torch.zeros(RECORDS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.learnt[batch].sum()

    @property
    def is_exact(self) -> bool:
        return bool((self.learnt.detach() == 1).all())


def sgd(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0)


def judged(folder: Path, loop: Loop, word: str = "") -> tuple[Counts, Outcome, str, str]:
    """Run a loop over one epoch. The model, the verdict, its first line, and what it lacks."""
    model = Counts()
    optimizer = sgd(model.learnt)
    with ElasticDataLoader(
        torch.arange(RECORDS), audit_dir=folder, batch_size=4, num_epochs=1, shuffle=True
    ) as loader:
        loader.attach(optimizer, one_model=word)
        for _ in loader.epochs():
            loop(loader, model, optimizer)
    (verdict,) = audit([folder])
    return model, verdict.outcome, headline(verdict), " ".join([*undecided(verdict), *inexact(verdict)])


def learn(model: Counts, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


# Exact -------------------------------------------------------------------------------------------------


def gradients_by_hand(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        (model.learnt.grad,) = torch.autograd.grad(model(batch), [model.learnt])
        optimizer.step()


def zeros_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        model(batch).backward()
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def averaged_weights_for_a_moment(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        learn(model, optimizer, batch)
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value / 2 for name, value in trained.items()})
        model.load_state_dict(trained)


def most_batches_reach_no_watched_parameter(loader: Any, model: Counts, optimizer: Any) -> None:
    heads = [nn.Parameter(torch.zeros(1)) for _ in range(30)]
    optimizer.add_param_group({"params": heads})
    for batch in loader:
        learn(model, optimizer, batch)


def trained_in_turn(loader: Any, model: Counts, optimizer: Any) -> None:
    """As a GAN's two models: one steps on each batch, and the other on each second one."""
    other = Counts()
    second = sgd(other.learnt)
    loader.attach(second)
    for number, batch in enumerate(loader, 1):
        learn(model, optimizer, batch)
        if number % 2 == 0:
            learn(other, second, batch)
    loader.detach(second)


def another_optimizer_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    """It takes the place of one, and what is gathered with it."""
    for number, batch in enumerate(loader, 1):
        model(batch).backward()
        if number == EVERY - 1:
            newer = sgd(model.learnt)
            loader.attach(newer)
            loader.detach(optimizer)
            optimizer = newer
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()


def a_window_is_read_before_it_is_trained_on(loader: Any, model: Counts, optimizer: Any) -> None:
    """As Transformers and torchtitan do, whose adapters say which batch is in training."""
    read_ahead(loader)
    batches = iter(loader)
    while window := list(islice(batches, EVERY)):
        for batch in window:
            loader.passed_on()
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    loader.passed_on()


@pytest.mark.parametrize(
    "loop",
    [
        a_window_is_read_before_it_is_trained_on,
        trained_in_turn,
        another_optimizer_in_a_window,
        gradients_by_hand,
        zeros_in_place,
        averaged_weights_for_a_moment,
        most_batches_reach_no_watched_parameter,
    ],
)
def test_an_exact_loop_is_proven(loop: Loop, tmp_path: Path) -> None:
    model, outcome, _, lacks = judged(tmp_path, loop)
    assert (model.is_exact, outcome, lacks) == (True, Outcome.PROVEN, "")


# Not shown ---------------------------------------------------------------------------------------------


def rolled_back_by_version(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number == 4:
            saved = copy.deepcopy(model.state_dict())
        learn(model, optimizer, batch)
        if number == 6:
            model.load_state_dict(saved)


def rolled_back_unseen_by_autograd(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number == 4:
            saved = model.learnt.data.clone()
        learn(model, optimizer, batch)
        if number == 6:
            model.learnt.data.copy_(saved)


def one_ahead(batches: Any) -> Iterator[Any]:
    ahead = None
    for batch in batches:
        if ahead is not None:
            yield ahead
        ahead = batch
    if ahead is not None:
        yield ahead


def unsaid_read_ahead(loader: Any, model: Counts, optimizer: Any) -> None:
    """It is left after a step, with a batch on its way that this step counts."""
    for number, batch in enumerate(one_ahead(loader), 1):
        model(batch).backward()
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == 2 * EVERY:
            return
    optimizer.step()
    optimizer.zero_grad()


def step_at_the_top(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.step()
        optimizer.zero_grad()
        model(batch).backward()


def skipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number != 3:
            learn(model, optimizer, batch)


def gradients_in_buffers(loader: Any, model: Counts, optimizer: Any) -> None:
    buffer = torch.zeros(RECORDS)
    for number, batch in enumerate(loader, 1):
        model(batch).backward()
        assert model.learnt.grad is not None
        buffer, model.learnt.grad = buffer + model.learnt.grad, None
        if number % EVERY == 0:
            model.learnt.grad = buffer if number > EVERY else torch.zeros(RECORDS)  # a window is forgotten
            optimizer.step()
            buffer, model.learnt.grad = torch.zeros(RECORDS), None


def thrown_away_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        if number == 6:
            optimizer.zero_grad()
        model(batch).backward()
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()


def another_optimizer_trains(loader: Any, model: Counts, optimizer: Any) -> None:
    other = sgd(model.learnt)
    for number, batch in enumerate(loader):
        learn(model, other, batch)
        if number % 2 == 0:
            optimizer.zero_grad()
        optimizer.step()  # on the same gradients once more


def another_optimizer_trains_a_part(loader: Any, model: Counts, optimizer: Any) -> None:
    """Of which nobody asks whether it has all: it has not."""
    part = Counts()
    other = sgd(part.learnt)
    for number, batch in enumerate(loader):
        (model(batch) + part(batch)).backward()
        optimizer.step()
        if number % 2:
            other.step()
        optimizer.zero_grad()
        other.zero_grad()
    model.learnt.data = part.learnt.data  # what is judged here


def never_zeroed(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        model(batch).backward()
        optimizer.step()


def stepped_twice(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number == 5:
            optimizer.step()


def zeroed_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        optimizer.zero_grad(set_to_none=False)
        model(batch).backward()
        if number % 2 == 0:
            optimizer.step()


def zeroed_before_the_step(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        model(batch).backward()
        if number == 3:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def rolled_back_before_a_break(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number == 4:
            saved = copy.deepcopy(model.state_dict())
        learn(model, optimizer, batch)
        if number == 6:
            model.load_state_dict(saved)
            break


def rolled_back_at_the_end(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        if number == 6:
            saved = copy.deepcopy(model.state_dict())
        learn(model, optimizer, batch)
        if number == RECORDS // 4:
            model.load_state_dict(saved)


def rolled_back_beside_another(loader: Any, model: Counts, optimizer: Any) -> None:
    """Two optimizers of parameters of their own."""
    other = Counts()
    second = sgd(other.learnt)
    loader.attach(second)
    for number, batch in enumerate(loader):
        if number == 4:
            saved = copy.deepcopy(model.state_dict())
        learn(model, optimizer, batch)
        learn(other, second, batch)
        if number == 6:
            model.load_state_dict(saved)


def zeroed_and_skipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        if number == 3:
            continue
        model(batch).backward()
        optimizer.step()


def zeroed_in_a_window_of_groups(loader: Any, model: Counts, optimizer: Any) -> None:
    """A head stands before what is below it, as where the first group is the new one."""
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    optimizer.add_param_group({"params": [p for layer in reversed(layers) for p in layer.parameters()]})
    loader.detach(optimizer)
    loader.attach(optimizer)
    for number, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        deep = torch.ones(1, 1)
        for layer in layers:
            deep = layer(deep)
        (model(batch) + deep.sum()).backward()
        if number % 2 == 0:
            optimizer.step()


def stepped_twice_and_clipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number == 5:
            nn.utils.clip_grad_norm_([model.learnt], 1.0)
            optimizer.step()


def gradients_by_hand_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    """Each takes the place of the one before."""
    for number, batch in enumerate(loader, 1):
        (model.learnt.grad,) = torch.autograd.grad(model(batch), [model.learnt])
        if number % 2 == 0:
            optimizer.step()


def zeroed_in_place_before_the_step(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        model(batch).backward()
        if number == 3:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()


def one_of_two_throws_a_gradient_away(loader: Any, model: Counts, optimizer: Any) -> None:
    """In a window in which the other one has gradients, and none of this batch."""
    other = Counts()
    second = sgd(other.learnt)
    loader.attach(second)
    for number, batch in enumerate(loader):
        model(batch).backward()
        if number == 1:
            optimizer.zero_grad()
        else:
            other(batch).backward()
        if number % EVERY == EVERY - 1:
            for each in (optimizer, second):
                each.step()
                each.zero_grad()


UNSEEN = "no gradient was seen"
AGAIN = "on gradients that it had stepped on before"
WRITTEN = "were written after"


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (rolled_back_by_version, WRITTEN),
        (rolled_back_unseen_by_autograd, WRITTEN),
        (unsaid_read_ahead, UNSEEN),
        (skipped, UNSEEN),
        (gradients_in_buffers, UNSEEN),
        (thrown_away_in_a_window, UNSEEN),
        (zeroed_in_a_window, UNSEEN),
        (zeroed_and_skipped, UNSEEN),
        (zeroed_in_a_window_of_groups, UNSEEN),
        (stepped_twice_and_clipped, AGAIN),
        (zeroed_before_the_step, UNSEEN),
        (zeroed_in_place_before_the_step, UNSEEN),
        (gradients_by_hand_in_a_window, UNSEEN),
        (one_of_two_throws_a_gradient_away, UNSEEN),
        (rolled_back_before_a_break, WRITTEN),
        (rolled_back_at_the_end, WRITTEN),
        (rolled_back_beside_another, WRITTEN),
        (never_zeroed, AGAIN),
        (stepped_twice, AGAIN),
        (another_optimizer_trains, WRITTEN),
        (another_optimizer_trains_a_part, "an optimizer stepped that is not attached"),
    ],
)
def test_a_loop_whose_model_lacks_records_is_not_proven(loop: Loop, why: str, tmp_path: Path) -> None:
    model, outcome, _, lacks = judged(tmp_path, loop)
    assert not model.is_exact
    assert outcome is not Outcome.PROVEN
    assert why in lacks


def test_a_step_at_the_top_that_leaves_out_the_last_batch_is_not_proven(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"4 record\(s\) .* handed out after the last optimizer"):
        model, outcome, _, _ = judged(tmp_path, step_at_the_top)
    assert int(model.learnt.detach().sum()) == RECORDS - 4
    assert outcome is Outcome.INEXACT


def bounded(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        learn(model, optimizer, batch)
        with torch.no_grad():
            model.learnt.clamp_(max=0.5)


def test_weights_that_are_bounded_after_each_step_are_one_model_by_its_users_word(tmp_path: Path) -> None:
    assert judged(tmp_path / "said", bounded, "weights are clamped")[1] is Outcome.PROVEN
    assert judged(tmp_path / "unsaid", bounded)[1] is Outcome.DELIVERED


def overflowing(loader: Any, model: Counts, optimizer: Any, *, is_known: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if is_known:
        loader.attach(optimizer, scaler=scaler)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        scaler.scale(model(batch) * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def test_a_scaler_that_nobody_named_is_asked_for(tmp_path: Path) -> None:
    _, outcome, _, lacks = judged(tmp_path, overflowing)
    assert outcome is Outcome.DELIVERED
    assert "loader.attach(optimizer, scaler=scaler)" in lacks


def test_what_a_scaler_steps_over_stands_in_the_first_line(tmp_path: Path) -> None:
    model, _, first_line, _ = judged(tmp_path, partial(overflowing, is_known=True))
    assert int((model.learnt == 0).sum()) == 4
    assert first_line == "PROVEN, 4 of 48 stepped over by a GradScaler"
    page = render(list(judge([tmp_path])), [str(tmp_path)], written="now")
    assert "one model has learnt 44 of them. 4 of 48 were stepped over by a GradScaler." in page


def test_an_optimizer_that_is_detached_leaves_its_parameters_to_python() -> None:
    model = Counts()
    optimizer = sgd(model.learnt)
    learnt = weakref.ref(model.learnt)
    with ElasticDataLoader(torch.arange(RECORDS), batch_size=4, num_epochs=1) as loader:
        loader.attach(optimizer)
        batches = iter(loader)
        learn(model, optimizer, next(batches))
        loader.detach(optimizer)
        del model, optimizer
        gc.collect()
        assert learnt() is None


@pytest.mark.parametrize("audited", [True, False])
def test_marks_make_as_many_calls_with_200_parameters_as_with_two(audited: bool, tmp_path: Path) -> None:
    """Two are looked at. Functions in C count too; what torch does for each parameter is its own."""

    def calls(parameters: int) -> int:
        layers = [nn.Parameter(torch.zeros(1)) for _ in range(parameters)]
        optimizer, counted = torch.optim.SGD(layers), 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event in ("call", "c_call") and Path(frame.f_code.co_filename).name in MARKING

        folder = tmp_path / str(parameters) if audited else None
        with ElasticDataLoader(torch.arange(RECORDS), batch_size=4, audit_dir=folder) as loader:
            loader.attach(optimizer)
            for number, batch in enumerate(loader):
                if number in (4, 8):
                    sys.setprofile(note if number == 4 else None)
                optimizer.zero_grad()
                (torch.stack(layers).sum() * batch.sum()).backward()
                optimizer.step()
        return counted

    assert calls(200) == calls(2) > 0
