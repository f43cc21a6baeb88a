"""Loops that habit writes, each against a model that counts: exact ones are proven, and no other one is.

The model counts how often it learnt each record; nothing asks the loader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Outcome, Verdict, audit
from edl_torch.cli.verdict_words import headline, inexact, undecided

RECORDS, BATCH, EVERY = 48, 4, 3


class Counts(nn.Module):
    """At a rate of 1 each record adds 1 to its own weight; a layer below and one above learn nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Parameter(torch.zeros(RECORDS))
        self.learnt = nn.Parameter(torch.zeros(RECORDS))
        self.above = nn.Parameter(torch.zeros(1))
        self.fails = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        deep = (self.below - self.below.detach())[batch]  # 0, with a gradient
        if self.fails:
            deep = _Fails.apply(deep)
        middle = deep - self.learnt[batch]
        return middle.sum() + (self.above - self.above.detach()).sum()

    @property
    def is_exact(self) -> bool:
        return bool((self.learnt.detach() == 1).all())


class _Fails(torch.autograd.Function):
    """Passes on its input, and fails in the middle of a backward pass."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise MemoryError("in the middle")


Loop = Callable[[Any, Counts, Any], Any]
EXACT: list[Loop] = []
OTHER: list[Loop] = []


def exact(loop: Loop) -> Loop:
    EXACT.append(loop)
    return loop


def other(loop: Loop) -> Loop:
    """A loop that learns each record once in none of the models, or of which that is not seen."""
    OTHER.append(loop)
    return loop


def judged(
    folder: Path, loop: Loop, *, attach: bool = True, sgd: Any = torch.optim.SGD, **options: Any
) -> tuple[Counts, Verdict]:
    model = Counts()
    optimizer = sgd(model.parameters(), lr=1.0)
    options = {"batch_size": BATCH, "num_epochs": 1, "shuffle": True, "records_per_shard": BATCH, **options}
    with ElasticDataLoader(torch.arange(RECORDS), audit_dir=folder, **options) as loader:
        if attach:
            loader.attach(optimizer)
        for _ in loader.epochs():
            loop(loader, model, optimizer)
    (verdict,) = audit([folder])
    return model, verdict


def lacks(verdict: Verdict) -> list[str]:
    return [*undecided(verdict), *inexact(verdict)]


def learn(model: Counts, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


# Exact -------------------------------------------------------------------------------------------------


@exact
def zero_grad_first(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        learn(model, optimizer, batch)


@exact
def zero_grad_last_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@exact
def zero_grad_first_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad(set_to_none=False)
        model(batch).backward()
        optimizer.step()


@exact
def clipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()


@exact
def a_closure(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:

        def again(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        optimizer.step(again)


@exact
def an_average_of_weights_beside(loader: Any, model: Counts, optimizer: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in loader:
        learn(model, optimizer, batch)
        average.update_parameters(model)


@exact
def an_evaluation_between(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        with torch.no_grad():
            model(batch)
        learn(model, optimizer, batch)
        if number % 3 == 2:
            model.eval()
            with torch.inference_mode():
                model(torch.arange(RECORDS))
            model.train()


@exact
def several_losses_of_a_batch(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        model(batch[:2]).backward()
        model(batch[2:]).backward()
        optimizer.step()


@exact
def retain_graph(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


@exact
def checkpointed(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        checkpoint(model, batch, use_reentrant=False).backward()
        optimizer.step()


@exact
def checkpointed_reentrant(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        here = torch.ones(1, requires_grad=True)
        checkpoint(lambda one, of: model(of) * one.sum(), here, batch, use_reentrant=True).backward()
        optimizer.step()


@exact
def a_scheduler(loader: Any, model: Counts, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for batch in loader:
        learn(model, optimizer, batch)
        scheduler.step()


@exact
def frozen_and_thawed(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        model.below.requires_grad_(number > 3)
        model.above.requires_grad_(number % 2 == 0)
        learn(model, optimizer, batch)


@exact
def the_penalty_of_a_gradient(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        (slope,) = torch.autograd.grad(loss, [model.learnt], create_graph=True)
        (loss + 0 * slope.square().sum()).backward()
        optimizer.step()


@exact
def left_after_a_step_and_begun_again(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number == 2:
            break


@exact
def an_error_before_the_backward_pass(loader: Any, model: Counts, optimizer: Any) -> None:
    with suppress(ValueError):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = model(batch)
            if number == 3 and not hasattr(model, "failed"):
                model.failed = True
                raise ValueError
            loss.backward()
            optimizer.step()


@exact
def out_of_memory_and_once_more(loader: Any, model: Counts, optimizer: Any) -> None:
    """The backward pass fails in its middle; what it has left is thrown away, and half a batch tried."""
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        model.fails = number == 3
        try:
            model(batch).backward()
        except MemoryError:
            model.fails = False
            optimizer.zero_grad()
            for half in batch.chunk(2):
                model(half).backward()
        optimizer.step()


@exact
def an_optimizer_for_each_parameter_in_the_backward_pass(loader: Any, model: Counts, optimizer: Any) -> None:
    loader.detach(optimizer)
    each = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter, one in each.items():
        loader.attach(one)
        parameter.register_post_accumulate_grad_hook(step)
    for batch in loader:
        model(batch).backward()
    model.each = each  # type: ignore[assignment]


@exact
def two_optimizers(loader: Any, model: Counts, optimizer: Any) -> None:
    loader.detach(optimizer)
    one = torch.optim.SGD([model.learnt], lr=1.0)
    two = torch.optim.AdamW([model.below, model.above], lr=0.1)
    for each in (one, two):
        loader.attach(each)
    for batch in loader:
        model(batch).backward()
        for each in (one, two):
            each.step()
            each.zero_grad()
    model.each = one, two  # type: ignore[assignment]


@exact
def an_adversary(loader: Any, model: Counts, optimizer: Any) -> None:
    """As a GAN's: the generator's loss goes through the critic, whose gradients of it are thrown away."""
    critic = nn.Linear(1, 1)
    judge = torch.optim.SGD(critic.parameters(), lr=0.1)
    loader.attach(judge)
    for batch in loader:
        judge.zero_grad()
        critic(model(batch).detach().reshape(1, 1)).sum().backward()
        judge.step()
        optimizer.zero_grad()
        (model(batch) + 0 * critic(model(batch).reshape(1, 1)).sum()).backward()
        optimizer.step()
    loader.detach(judge)


@exact
def a_group_is_added(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number == 3:
            more = nn.Parameter(torch.zeros(1))
            optimizer.add_param_group({"params": [more]})
        learn(model, optimizer, batch)


@exact
def moments(loader: Any, model: Counts, optimizer: Any) -> None:
    """A second optimizer that averages, beside the one that counts."""
    other_model = Counts()
    adam = torch.optim.Adam(other_model.parameters())
    loader.attach(adam)
    for batch in loader:
        learn(other_model, adam, batch)
        learn(model, optimizer, batch)
    loader.detach(adam)


def in_windows(batches: Any, model: Counts, optimizer: Any, *, total: int) -> None:
    for number, batch in enumerate(batches, 1):
        model(batch).backward()
        if number % EVERY == 0 or number == total:
            optimizer.step()
            optimizer.zero_grad()


@exact
def windows(loader: Any, model: Counts, optimizer: Any) -> None:
    in_windows(loader, model, optimizer, total=len(loader))


@exact
def windows_that_are_clipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        model(batch).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e9)
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()


@exact
def windows_left_and_resumed(loader: Any, model: Counts, optimizer: Any) -> None:
    """It is left in a window, whose gradients are thrown away and whose batches go back."""
    for number, batch in enumerate(loader, 1):
        model(batch).backward()
        if number == EVERY + 1 and not hasattr(model, "left"):
            model.left = True
            optimizer.zero_grad()
            loader.give_back(window=True)
            break
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@exact
def windows_with_an_error_in_the_backward_pass(loader: Any, model: Counts, optimizer: Any) -> None:
    """What the window has is thrown away, and comes again."""
    for number, batch in enumerate(loader, 1):
        model.fails = number == EVERY + 2 and not hasattr(model, "failed")
        try:
            model(batch).backward()
        except MemoryError:
            model.failed = True
            optimizer.zero_grad()
            loader.give_back(window=True)
            break
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@exact
def frozen_within_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        model.above.requires_grad_(number % EVERY != 1)
        model(batch).backward()
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()


@exact
def experts(loader: Any, model: Counts, optimizer: Any) -> None:
    """Batches reach experts in turn, and none of those in the middle has a hook."""
    layers = [nn.Parameter(torch.zeros(1)) for _ in range(20)]
    loader.detach(optimizer)
    parts = [nn.Parameter(torch.zeros(RECORDS)) for _ in range(4)]
    each = torch.optim.SGD([layers[0], *parts, *layers[1:]], lr=1.0)
    loader.attach(each)
    for number, batch in enumerate(loader):
        each.zero_grad()
        (-parts[number % 4][batch].sum()).backward()
        each.step()
    loader.detach(each)
    with torch.no_grad():
        model.learnt.copy_(torch.stack([*parts]).sum(0))


@exact
def ten_steps_ahead_of_the_learning_rate(loader: Any, model: Counts, optimizer: Any) -> None:
    """Rates change, and one step is at none: its batch is learnt at the next."""
    for batch in loader:
        for group in optimizer.param_groups:
            group["lr"] = 1.0
        learn(model, optimizer, batch)


@exact
def compiled(loader: Any, model: Counts, optimizer: Any) -> None:
    forward = torch.compile(model, backend="aot_eager")
    for batch in loader:
        optimizer.zero_grad()
        forward(batch).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_an_exact_loop_is_proven(loop: Loop, tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, loop)
    assert (model.is_exact, lacks(verdict), verdict.outcome) == (True, [], Outcome.PROVEN)
    assert headline(verdict) == "PROVEN"


# A loop that gathers, has several optimizers, or detaches must say which one
BY_ITSELF = [
    loop
    for loop in EXACT
    if not {"window", "detach", "attach"} & {*loop.__code__.co_names}
    and "window" not in loop.__name__
    and loop is not a_closure  # before its first step there is no gradient
]


@pytest.mark.parametrize("loop", BY_ITSELF, ids=lambda loop: loop.__name__)
def test_an_exact_loop_is_proven_without_a_word(loop: Loop, tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, loop, attach=False)
    assert (model.is_exact, lacks(verdict), verdict.outcome) == (True, [], Outcome.PROVEN)


# Several steps on a batch ------------------------------------------------------------------------------


def in_chunks(loader: Any, model: Counts, optimizer: Any) -> None:
    """Half of a batch, and the other half: each record is learnt once."""
    for number, batch in enumerate(loader):
        if number < 2:
            for half in batch.chunk(2):
                learn(model, optimizer, half)
        else:
            learn(model, optimizer, batch)


def twice(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number < 2:
            learn(model, optimizer, batch)


def twice_by_hand(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        for _ in range(2 if number < 2 else 1):
            (model.learnt.grad,) = torch.autograd.grad(model(batch), [model.learnt])
            optimizer.step()


@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("loop", [in_chunks, twice, twice_by_hand])
def test_a_batch_that_is_in_several_steps_is_told_in_the_first_line(
    loop: Loop, attach: bool, tmp_path: Path
) -> None:
    model, verdict = judged(tmp_path, loop, attach=attach)
    assert model.is_exact == (loop is in_chunks)
    assert headline(verdict) == "PROVEN, 8 of 48 in several steps"


def test_a_closure_of_many_passes_is_one_step(tmp_path: Path) -> None:
    def lbfgs(loader: Any, model: Counts, optimizer: Any) -> None:
        model.above.requires_grad_(False)

        for batch in loader:

            def again(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model.learnt[batch] - 1).square().sum() + 0 * model(batch)
                loss.backward()
                return loss

            optimizer.state.clear()
            optimizer.step(again)

    def of(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.LBFGS:
        return torch.optim.LBFGS([*parameters], lr=lr, max_iter=30)

    model, verdict = judged(tmp_path, lbfgs, sgd=of)
    assert torch.allclose(model.learnt, torch.ones(RECORDS))
    assert (headline(verdict), lacks(verdict)) == ("PROVEN", [])


# Others ------------------------------------------------------------------------------------------------


@other
def an_error_in_the_backward_pass(loader: Any, model: Counts, optimizer: Any) -> None:
    """A part of a gradient stays, and is stepped on."""
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        model.fails = number == 3
        with suppress(MemoryError):
            model(batch).backward()
        optimizer.step()


@other
def an_error_in_the_backward_pass_of_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        model.fails = number == 4
        with suppress(MemoryError):
            model(batch).backward()
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()


@other
def an_error_in_the_backward_pass_and_the_batch_once_more(loader: Any, model: Counts, optimizer: Any) -> None:
    """What it has left is not thrown away."""
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        model.fails = number == 3
        try:
            model(batch).backward()
        except MemoryError:
            model.fails = False
            model(batch).backward()
        optimizer.step()


@other
def an_error_in_a_checkpointed_backward_pass(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        model.fails = number == 3
        with suppress(MemoryError):
            checkpoint(model, batch, use_reentrant=False).backward()
        optimizer.step()


@other
def skipped_in_a_window_that_is_clipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        if number != 2 * EVERY:
            model(batch).backward()
        if number % EVERY == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()


@other
def skipped_in_a_window_of_experts(loader: Any, model: Counts, optimizer: Any) -> None:
    layers = [nn.Parameter(torch.zeros(1)) for _ in range(20)]
    loader.detach(optimizer)
    each = torch.optim.SGD([layers[0], model.learnt, *layers[1:]], lr=1.0)
    loader.attach(each)
    for number, batch in enumerate(loader, 1):
        if number != 2 * EVERY:
            (-model.learnt[batch].sum()).backward()
        if number % EVERY == 0:
            each.step()
            each.zero_grad()
    loader.detach(each)


@other
def left_with_the_graph_of_a_gradient(loader: Any, model: Counts, optimizer: Any) -> None:
    """What stays is added to in another tensor."""
    for number, batch in enumerate(loader):
        model(batch).backward(create_graph=True)
        if number == 3 and not hasattr(model, "left"):
            model.left = True
            break
        optimizer.step()
        optimizer.zero_grad()


@other
def left_with_a_gradient_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        model(batch).backward()
        if number == 3 and not hasattr(model, "left"):
            model.left = True
            break
        optimizer.step()
        optimizer.zero_grad()


@other
def given_back_with_a_gradient_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        model(batch).backward()
        if number == 3 and not hasattr(model, "left"):
            model.left = True
            loader.give_back()
            continue
        optimizer.step()
        optimizer.zero_grad()


@other
def skipped_and_averaged_by_hand(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        if number != 2 * EVERY:
            model(batch).backward()
        if number % EVERY == 0:
            for parameter in model.parameters():
                parameter.grad = parameter.grad / 1  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()


@other
def a_window_twice(loader: Any, model: Counts, optimizer: Any) -> None:
    batches = iter(loader)
    for number in range(RECORDS // BATCH // 2):
        window = [next(batches) for _ in range(2)]
        for _ in range(2 if number == 0 else 1):
            optimizer.zero_grad()
            for batch in window:
                model(batch).backward()
            optimizer.step()


@other
def an_old_model_in_the_middle(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number == 2:
            saved = copy.deepcopy(model.state_dict())
        learn(model, optimizer, batch)
        if number == 4:
            model.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:an optimizer stepped on gradients", "ignore:Using backward")
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("loop", OTHER, ids=lambda loop: loop.__name__)
def test_no_other_loop_is_proven(loop: Loop, attach: bool, tmp_path: Path) -> None:
    if not attach and "detach" in loop.__code__.co_names:
        pytest.skip("it has none to detach")
    model, verdict = judged(tmp_path, loop, attach=attach)
    assert not model.is_exact or "fails" in loop.__code__.co_names
    assert verdict.outcome is not Outcome.PROVEN
    assert lacks(verdict)
