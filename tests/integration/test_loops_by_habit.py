"""Loops that habit writes, each against a model that counts: exact ones are proven, and no other one is.

The model counts how often it learnt each record; nothing asks the loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import edl_torch
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
def an_error_in_the_first_batch(loader: Any, model: Counts, optimizer: Any) -> None:
    """As in a notebook, where the cell is run again."""
    for fails in ("before", "after", ""):
        with suppress(ValueError):
            for batch in loader:
                optimizer.zero_grad()
                if fails == "before":
                    raise ValueError
                model(batch).backward()
                if fails:
                    raise ValueError
                optimizer.step()


@exact
def a_look_at_the_first_batch(loader: Any, model: Counts, optimizer: Any) -> None:
    next(iter(loader))
    for batch in loader:
        learn(model, optimizer, batch)


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


@exact
def window_of_one_that_steps_at_the_head_of_the_body(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.step()  # before the first batch on nothing
        optimizer.zero_grad()
        model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@exact
def window_that_steps_at_the_head_of_the_body(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
        model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@exact
def window_of_one_that_steps_at_the_head_and_gives_a_batch_back(
    loader: Any, model: Counts, optimizer: Any
) -> None:
    for number, batch in enumerate(loader):
        optimizer.step()  # after the batch that went back on nothing
        optimizer.zero_grad()
        if number == 5 and not hasattr(model, "gave_back"):
            model.gave_back = True
            loader.give_back()
            continue
        model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


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
def an_error_in_the_first_batch_with_a_gradient_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for fails in (True, False):
        with suppress(ValueError):
            for batch in loader:
                model(batch).backward()
                if fails:
                    raise ValueError
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


class SkipsSome(torch.optim.SGD):
    """Leaves some of its steps out, as optimizers do that find a gradient too large."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 5 == 0:
            return None
        return super().step(closure)


@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
def test_a_step_that_an_optimizer_leaves_out_is_not_proven(attach: bool, tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, zero_grad_first, sgd=SkipsSome, attach=attach)
    assert not model.is_exact
    assert verdict.outcome is Outcome.DELIVERED
    assert verdict.rests_on == {"step": 40, "unseen": 8}


class ByData(torch.optim.Optimizer):
    """Writes behind torch's count of writes, as many optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad.data, alpha=group["lr"])


def test_steps_that_torch_does_not_count_are_proven_by_their_values(tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, zero_grad_first, sgd=ByData)
    assert (model.is_exact, headline(verdict)) == (True, "PROVEN")


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_batch_that_was_reported_as_bad_and_learnt_is_not_proven(first: bool, tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            if number == 3 and first:
                loader.service.report_batch_done(err_msg="bad")
            model(batch).backward()
            if number == 3 and not first:
                loader.service.report_batch_done(err_msg="bad")
            optimizer.step()

    model, verdict = judged(tmp_path, loop, max_bad_records=BATCH)
    assert model.is_exact
    assert verdict.quarantined == BATCH
    assert verdict.outcome is Outcome.DELIVERED
    assert "report_batch_done(err_msg=…)" in lacks(verdict)[0]


@pytest.mark.parametrize("how", ["at a loss of 0", "thrown away"])
def test_a_bad_batch_of_which_nothing_is_learnt_leaves_the_rest_proven(how: str, tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = model(batch)
            if number == 3:
                if how == "thrown away":
                    loss.backward()
                loader.service.report_batch_done(err_msg="bad")
                if how == "thrown away":
                    optimizer.zero_grad()
                    continue
                loss = loss * 0
            loss.backward()
            optimizer.step()

    model, verdict = judged(tmp_path, loop, max_bad_records=BATCH)
    assert int(model.learnt.sum()) == RECORDS - BATCH
    assert headline(verdict) == f"PROVEN, {BATCH} of {RECORDS} in quarantine"


def test_of_two_optimizers_the_one_that_trains_each_second_batch_is_told_in_the_first_line(
    tmp_path: Path,
) -> None:
    other = torch.nn.Parameter(torch.zeros(RECORDS))
    rarely = torch.optim.SGD([other], lr=1.0)

    def gan(loader: Any, model: Counts, optimizer: Any) -> None:
        loader.attach(rarely)
        for number, batch in enumerate(loader):
            rarely.zero_grad()
            if number % 2:
                (-other[batch].sum()).backward()
            rarely.step()
            learn(model, optimizer, batch)

    model, verdict = judged(tmp_path, gan)
    assert model.is_exact
    assert int(other.detach().sum()) == RECORDS // 2
    assert headline(verdict) == "PROVEN, 24 of 48 by some of the optimizers"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("name", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_an_optimizer_that_steps_by_another_is_proven(name: str, attach: bool, tmp_path: Path) -> None:
    """torch's own wrappers, which call the step of the one inside."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def wrapped(parameters: Any, lr: float) -> Any:
        if name == "ZeroRedundancyOptimizer":
            return ZeroRedundancyOptimizer([*parameters], optimizer_class=torch.optim.SGD, lr=lr)
        return PostLocalSGDOptimizer(
            torch.optim.SGD(parameters, lr=lr), PeriodicModelAverager(period=4, warmup_steps=0)
        )

    try:
        model, verdict = judged(tmp_path / "audit", zero_grad_first, attach=attach, sgd=wrapped)
    finally:
        dist.destroy_process_group()
    assert (model.is_exact, lacks(verdict), headline(verdict)) == (True, [], "PROVEN")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_one_inside_that_steps_by_itself_too_is_not_proven(tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for batch in loader:
            learn(model, optimizer, batch)
            optimizer.optim.step()

    def zero(parameters: Any, lr: float) -> Any:
        return ZeroRedundancyOptimizer([*parameters], optimizer_class=torch.optim.SGD, lr=lr)

    try:
        model, verdict = judged(tmp_path / "audit", loop, sgd=zero)
    finally:
        dist.destroy_process_group()
    assert not model.is_exact
    assert verdict.outcome is Outcome.DELIVERED


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("what", ["the step", "the body"])
def test_a_compiled_step_is_proven(what: str, attach: bool, tmp_path: Path, caplog: Any) -> None:
    """torch.compile leaves our hooks alone: it can compile neither what they look at, nor a new number of a
    backward pass each time."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        def body(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

        if what == "the step":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        else:
            body = torch.compile(body, backend="eager")
        for batch in loader:
            body(batch)

    model, verdict = judged(tmp_path, loop, attach=attach)
    assert (model.is_exact, headline(verdict)) == (True, "PROVEN")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("torch")]
    assert not [line for line in said if "edl_torch" in line]


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_compiled_body_behind_a_wrapper_compiles_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last steps come after the end of the pass, and then hooks ask what the wrapper had read ahead."""
    from torch._dynamo import convert_frame

    compiled: set[str] = set()
    convert = convert_frame.ConvertFrameAssert.__call__

    def noted(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        compiled.add(frame.f_code.co_filename)
        return convert(self, frame, *args, **options)

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        body = torch.compile(partial(learn, model, optimizer), backend="eager")
        ahead: list[torch.Tensor] = []
        for batch in loader:
            ahead.append(batch)
            if len(ahead) > 1:
                body(ahead.pop(0))
        body(ahead.pop(0))

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", noted)
    model, verdict = judged(tmp_path, loop, lookahead=1)
    assert (model.is_exact, headline(verdict)) == (True, "PROVEN")
    assert __file__ in compiled
    assert not [file for file in compiled if file.startswith(os.path.dirname(edl_torch.__file__))]


def test_a_step_at_the_head_of_the_body_is_no_error_without_attach(tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(loader):
            if number:
                optimizer.step()
            optimizer.zero_grad()
            model(batch).backward()
        optimizer.step()

    model, verdict = judged(tmp_path, loop, attach=False)
    assert model.is_exact
    assert verdict.outcome is Outcome.DELIVERED
    assert "loader.attach(optimizer)" in lacks(verdict)[0]


def test_a_loop_that_steps_at_its_head_before_any_gradient_is_on_the_batch_before_from_then_on(
    tmp_path: Path,
) -> None:
    """It shows its gradients, also where it throws one away between two steps on none."""
    early: list[int] = []

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(loader):
            optimizer.step()
            early.append(loader.progress().acknowledged - number * BATCH)
            optimizer.zero_grad()
            model(batch).backward()
            if not number:
                optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    judged(tmp_path, loop)
    assert max(early) <= 0


def test_a_step_counts_the_batches_that_a_wrapper_passes_on_at_the_step_alone(tmp_path: Path) -> None:
    """torchtitan's own trainer does, where it is not ours: gradients come before their batch is passed on."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        waiting: list[torch.Tensor] = []

        def pass_on(*_: Any) -> None:
            for _batch in waiting:
                loader.passed_on()
            waiting.clear()

        hook = optimizer.register_step_pre_hook(pass_on)
        for number, batch in enumerate(loader, 1):
            waiting.append(batch)
            model(batch).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                assert loader.progress().acknowledged == int(model.learnt.detach().sum())
        hook.remove()
        loader.passed_on()

    model, verdict = judged(tmp_path, loop, lookahead="manual")
    assert model.is_exact
    assert verdict.acknowledged == RECORDS
    assert verdict.outcome is Outcome.DELIVERED  # which batch the gradients are of is not seen


@pytest.mark.parametrize("how", ["add_", "+=", "another"])
@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
def test_a_window_that_is_gathered_by_hand_is_delivered(
    attach: bool, none: bool, how: str, tmp_path: Path
) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        weight = model.learnt
        for number, batch in enumerate(loader, 1):
            (gradient,) = torch.autograd.grad(model(batch), [weight])
            if weight.grad is None or how == "another":
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
            elif how == "add_":
                weight.grad.add_(gradient)
            else:
                weight.grad += gradient
            if number % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=none)

    model, verdict = judged(tmp_path, loop, attach=attach)
    assert model.is_exact
    assert (verdict.outcome, verdict.rests_on.get("unstepped", 0)) == (Outcome.DELIVERED, 0)


def prefetched(loader: Any, ahead: int) -> Iterator[torch.Tensor]:
    waiting: list[torch.Tensor] = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.pop(0)
    yield from waiting


@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("twice", [None, 10, 11], ids=["once", "the last but one", "the last"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_what_a_wrapper_has_read_ahead_is_in_several_steps_where_it_is(
    ahead: int, twice: int | None, attach: bool, tmp_path: Path
) -> None:
    """Where the pass is at its end nobody tells which of its last batches the loop has."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(prefetched(loader, ahead)):
            for _ in range(1 + (number == twice)):
                learn(model, optimizer, batch)

    model, verdict = judged(tmp_path, loop, attach=attach, lookahead=ahead)
    assert model.is_exact == (twice is None)
    assert headline(verdict) == (
        "PROVEN" if twice is None else f"PROVEN, {BATCH} of {RECORDS} in several steps"
    )


@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("leaves", [True, False], ids=["left", "skipped"])
@pytest.mark.parametrize("place", [10, 11], ids=["the last but one", "the last"])
@pytest.mark.parametrize("ahead", [2, 3])
def test_a_batch_that_a_wrapper_has_read_to_the_end_and_the_loop_does_not_learn_is_not_proven(
    ahead: int, place: int, leaves: bool, attach: bool, tmp_path: Path
) -> None:
    """Each gradient that comes after the end of the pass is of one of its last batches, and not of all."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(prefetched(loader, ahead)):
            if number == place and float(model.learnt.detach().sum()) < RECORDS:  # in the first epoch
                if leaves:
                    break
                continue
            learn(model, optimizer, batch)

    model, verdict = judged(tmp_path, loop, attach=attach, lookahead=ahead, num_epochs=2)
    assert sorted(set(model.learnt.tolist())) == [1, 2]
    assert verdict.outcome is Outcome.DELIVERED


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_windows_behind_a_wrapper_that_has_read_to_the_end_are_learnt(ahead: int, tmp_path: Path) -> None:
    """Where it has read several ahead nobody can say on how many of them the last step was."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        in_windows(prefetched(loader, ahead), model, optimizer, total=len(loader))

    model, verdict = judged(tmp_path, loop, lookahead=ahead, num_epochs=2)
    assert model.learnt.tolist() == [2] * RECORDS
    if ahead == 1:
        assert (headline(verdict), verdict.rests_on) == ("PROVEN", {"step": 2 * RECORDS})
    else:
        assert (verdict.outcome, lacks(verdict)[1:]) == (Outcome.DELIVERED, [])


def test_a_batch_whose_gradient_was_thrown_away_before_the_end_is_not_the_one_that_follows(
    tmp_path: Path,
) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(prefetched(loader, 1), 1):
            model(batch).backward()
            if number != RECORDS // BATCH - 1:
                optimizer.step()
            optimizer.zero_grad()

    model, verdict = judged(tmp_path, loop, lookahead=1)
    assert not model.is_exact
    assert verdict.outcome is not Outcome.PROVEN


def test_that_batches_are_learnt_again_is_said_once(tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for leaves in (True, False, True, False, False):
            for batch in loader:
                model(batch).backward()
                if leaves:
                    break
                optimizer.step()
                optimizer.zero_grad()
                break

    with pytest.warns(UserWarning, match="an optimizer stepped on gradients") as found:
        judged(tmp_path, loop)
    assert len([warning for warning in found if warning.category is UserWarning]) == 1


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
