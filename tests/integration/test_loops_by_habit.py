"""Loops that habit writes and whose model learns each record once: they are proven."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learning_kit import (
    BATCH,
    RECORDS,
    Counts,
    Loop,
    each_attachment,
    judged,
    lacks,
    learn,
    sgd,
)
from torch import nn

import edl_torch
from edl_torch.audit.verdict import Outcome
from edl_torch.cli.verdict_words import headline
from edl_torch.integrations.adapter import read_ahead

EVERY = 3  # batches make a window; of 12 in an epoch
EXACT: list[Loop] = []


def exact(loop: Loop) -> Loop:
    EXACT.append(loop)
    return loop


def step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


# A step on each batch -----------------------------------------------------------------------------------


@exact
def zero_grad_first(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        learn(model, optimizer, batch)


@exact
def an_error_in_the_backward_pass_whose_part_is_thrown_away(
    loader: Any, model: Counts, optimizer: Any
) -> None:
    for number, batch in enumerate(loader):
        model.fails = number == 3
        with suppress(MemoryError):
            learn(model, optimizer, batch)
        if model.fails:
            model.fails = False
            learn(model, optimizer, batch)


@exact
def zeroed_by_a_hook_of_the_optimizer(loader: Any, model: Counts, optimizer: Any) -> None:
    hook = optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for batch in loader:
        model(batch).backward()
        optimizer.step()
    hook.remove()


@exact
def a_closure(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):

        def again(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        if number % 2:
            optimizer.step(closure=again)
        else:
            optimizer.step(again)


@exact
def averages_of_weights_beside_and_in_place_for_a_moment(loader: Any, model: Counts, optimizer: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    for batch in loader:
        learn(model, optimizer, batch)
        average.update_parameters(model)
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value / 2 for name, value in trained.items()})
        model.load_state_dict(trained)


@exact
def a_scheduler_and_clipped_gradients(loader: Any, model: Counts, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        scheduler.step()


@exact
def the_penalty_of_a_gradient(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        (slope,) = torch.autograd.grad(loss, [model.learnt], create_graph=True)
        (loss + 0 * slope.square().sum()).backward()
        optimizer.step()


@exact
def a_group_is_added(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number == 3:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1)) for _ in range(30)]})
        learn(model, optimizer, batch)


@exact
def compiled(loader: Any, model: Counts, optimizer: Any) -> None:
    forward = torch.compile(model, backend="aot_eager")
    for batch in loader:
        optimizer.zero_grad()
        forward(batch).backward()
        optimizer.step()


@exact
def experts(loader: Any, model: Counts, optimizer: Any) -> None:
    """Batches reach experts in turn, and none of those in the middle has a hook."""
    layers = [nn.Parameter(torch.zeros(1)) for _ in range(20)]
    loader.detach(optimizer)
    parts = [nn.Parameter(torch.zeros(RECORDS)) for _ in range(4)]
    each = sgd(layers[0], *parts, *layers[1:])
    loader.attach(each)
    for number, batch in enumerate(loader):
        each.zero_grad()
        (-parts[number % 4][batch].sum()).backward()
        each.step()
    loader.detach(each)
    with torch.no_grad():
        model.learnt.copy_(torch.stack([*parts]).sum(0))


# Left, and begun again ----------------------------------------------------------------------------------


@exact
def left_after_a_step_and_begun_again(loader: Any, model: Counts, optimizer: Any) -> None:
    next(iter(loader))  # a look at the first batch
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number == 2:
            break


@exact
def an_error_in_the_first_batch_and_in_a_later_one(loader: Any, model: Counts, optimizer: Any) -> None:
    """As in a notebook, where the cell is run again."""
    for at, fails in ((0, "before"), (0, "after"), (3, "before"), (0, "")):
        with suppress(ValueError):
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                if number == at and fails == "before":
                    raise ValueError
                model(batch).backward()
                if number == at and fails:
                    raise ValueError
                optimizer.step()


# Several optimizers -------------------------------------------------------------------------------------


@exact
def an_optimizer_for_each_parameter_in_the_backward_pass(loader: Any, model: Counts, optimizer: Any) -> None:
    loader.detach(optimizer)
    each = {parameter: sgd(parameter) for parameter in model.parameters()}
    for parameter, one in each.items():
        loader.attach(one)
        parameter.register_post_accumulate_grad_hook(lambda parameter: step(each[parameter]))
    for batch in loader:
        model(batch).backward()
    model.each = each  # type: ignore[assignment]


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


# Windows ------------------------------------------------------------------------------------------------


def in_windows(batches: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(batches, 1):
        model(batch).backward()
        if number % EVERY == 0:
            step(optimizer)


@exact
def windows_that_go_back(loader: Any, model: Counts, optimizer: Any) -> None:
    """One is left in its middle, one has an error: gradients are thrown away, and batches come again."""
    attempt = getattr(model, "attempts", 0)
    model.attempts = attempt + 1
    for number, batch in enumerate(loader, 1):
        model.fails = (attempt, number) == (1, EVERY + 2)
        with suppress(MemoryError):
            model(batch).backward()
        if model.fails or (attempt, number) == (0, EVERY + 1):
            optimizer.zero_grad()
            loader.give_back(window=True)
            break
        if number % EVERY == 0:
            step(optimizer)
    step(optimizer)


@exact
def another_optimizer_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    """It takes the place of one, and what is gathered with it."""
    for number, batch in enumerate(loader, 1):
        model(batch).backward()
        if number == EVERY - 1:
            newer = sgd(model)
            loader.attach(newer)
            loader.detach(optimizer)
            optimizer = newer
        if number % EVERY == 0:
            step(optimizer)


@exact
def a_window_is_read_before_it_is_trained_on(loader: Any, model: Counts, optimizer: Any) -> None:
    """As Transformers and torchtitan do, whose adapters say which batch is in training."""
    read_ahead(loader)
    batches = iter(loader)
    while window := list(islice(batches, EVERY)):
        for batch in window:
            loader.passed_on()
            model(batch).backward()
        step(optimizer)
    loader.passed_on()


@exact
def windows_that_are_clipped_and_stepped_on_at_the_head(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number and number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            step(optimizer)
        model(batch).backward()
    step(optimizer)


@exact
def window_of_one_that_steps_at_the_head_and_gives_a_batch_back(
    loader: Any, model: Counts, optimizer: Any
) -> None:
    for number, batch in enumerate(loader):
        step(optimizer)  # before the first batch, and after the one that went back, on nothing
        if number == 5 and not hasattr(model, "gave_back"):
            model.gave_back = True
            loader.give_back()
            continue
        model(batch).backward()
    step(optimizer)


@pytest.mark.parametrize("loop", EXACT, ids=lambda loop: loop.__name__)
def test_an_exact_loop_is_proven(loop: Loop, tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, loop)
    assert (model.has_each(), lacks(verdict), headline(verdict)) == (True, [], "PROVEN")


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
    assert (model.has_each(), lacks(verdict), headline(verdict)) == (True, [], "PROVEN")


# Several steps on a batch -------------------------------------------------------------------------------


def in_chunks(loader: Any, model: Counts, optimizer: Any) -> None:
    """Half of a batch, and the other half: each record is learnt once."""
    for number, batch in enumerate(loader):
        for part in batch.chunk(2) if number < 2 else [batch]:
            learn(model, optimizer, part)


def twice(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        for _ in range(2 if number < 2 else 1):
            learn(model, optimizer, batch)


def twice_by_hand(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        for _ in range(2 if number < 2 else 1):
            (model.learnt.grad,) = torch.autograd.grad(model(batch), [model.learnt])
            optimizer.step()


@each_attachment
@pytest.mark.parametrize("loop", [in_chunks, twice, twice_by_hand])
def test_a_batch_that_is_in_several_steps_is_told_in_the_first_line(
    loop: Loop, attach: bool, tmp_path: Path
) -> None:
    model, verdict = judged(tmp_path, loop, attach=attach)
    assert model.has_each() == (loop is in_chunks)
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

    def of(model: Counts) -> torch.optim.LBFGS:
        return torch.optim.LBFGS([*model.parameters()], lr=1.0, max_iter=30)

    model, verdict = judged(tmp_path, lbfgs, optimizer_of=of)
    assert torch.allclose(model.learnt, torch.ones(RECORDS))
    assert (headline(verdict), lacks(verdict)) == ("PROVEN", [])


def test_of_two_optimizers_the_one_that_trains_each_second_batch_is_told_in_the_first_line(
    tmp_path: Path,
) -> None:
    other = nn.Parameter(torch.zeros(RECORDS))
    rarely = sgd(other)

    def gan(loader: Any, model: Counts, optimizer: Any) -> None:
        loader.attach(rarely)
        for number, batch in enumerate(loader):
            rarely.zero_grad()
            if number % 2:
                (-other[batch].sum()).backward()
            rarely.step()
            learn(model, optimizer, batch)

    model, verdict = judged(tmp_path, gan)
    assert model.has_each()
    assert int(other.detach().sum()) == RECORDS // 2
    assert headline(verdict) == "PROVEN, 24 of 48 by some of the optimizers"


# Optimizers of other kinds ------------------------------------------------------------------------------


class ByData(torch.optim.Optimizer):
    """Writes behind torch's count of writes, as many optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad.data, alpha=group["lr"])


def test_steps_that_torch_does_not_count_are_proven_by_their_values(tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, zero_grad_first, optimizer_of=lambda model: ByData(model.parameters()))
    assert (model.has_each(), headline(verdict)) == (True, "PROVEN")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def zero(model: Counts) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer([*model.parameters()], optimizer_class=torch.optim.SGD, lr=1.0)


def local_sgd(model: Counts) -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=4, warmup_steps=0))


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@each_attachment
@pytest.mark.parametrize("optimizer_of", [zero, local_sgd])
def test_an_optimizer_that_steps_by_another_is_proven(
    optimizer_of: Any, attach: bool, tmp_path: Path
) -> None:
    """torch's own wrappers, which call the step of the one inside."""
    model, verdict = judged(tmp_path / "audit", zero_grad_first, attach=attach, optimizer_of=optimizer_of)
    assert (model.has_each(), lacks(verdict), headline(verdict)) == (True, [], "PROVEN")


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_one_inside_that_steps_by_itself_too_is_not_proven(tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for batch in loader:
            learn(model, optimizer, batch)
            optimizer.optim.step()

    model, verdict = judged(tmp_path / "audit", loop, optimizer_of=zero)
    assert not model.has_each()
    assert verdict.outcome is Outcome.DELIVERED


# Compiled -----------------------------------------------------------------------------------------------


@contextmanager
def compiled_files() -> Iterator[set[str]]:
    """The files of functions that torch compiles."""
    from torch._dynamo import convert_frame

    files: set[str] = set()
    convert = convert_frame.ConvertFrameAssert.__call__

    def noted(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        files.add(frame.f_code.co_filename)
        return convert(self, frame, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_frame.ConvertFrameAssert, "__call__", noted)
        yield files


@pytest.mark.filterwarnings("ignore")  # torch's own
@each_attachment
@pytest.mark.parametrize("what", ["the step", "the body", "the body behind a wrapper"])
def test_a_compiled_step_is_proven_and_nothing_of_ours_is_compiled(
    what: str, attach: bool, tmp_path: Path
) -> None:
    """torch.compile leaves our hooks alone: it can compile neither what they look at, nor a new number of a
    backward pass each time. Behind a wrapper the last steps come after the end of the pass, and then hooks
    ask what the wrapper had read ahead."""
    ahead = int(what == "the body behind a wrapper")

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        body = partial(learn, model, optimizer)
        if what == "the step":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        else:
            body = torch.compile(body, backend="eager")
        for batch in prefetched(loader, ahead):
            body(batch)

    with compiled_files() as files:
        model, verdict = judged(tmp_path, loop, attach=attach, lookahead=ahead)
    assert (model.has_each(), headline(verdict)) == (True, "PROVEN")
    assert what == "the step" or learn.__code__.co_filename in files
    assert not [file for file in files if file.startswith(os.path.dirname(edl_torch.__file__))]


# Wrappers that read ahead -------------------------------------------------------------------------------


def prefetched(loader: Any, ahead: int) -> Iterator[torch.Tensor]:
    waiting: list[torch.Tensor] = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.pop(0)
    yield from waiting


@each_attachment
@pytest.mark.parametrize("twice", [None, 10, 11], ids=["once", "the last but one", "the last"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_what_a_wrapper_has_read_ahead_is_in_several_steps_where_it_is(
    ahead: int, twice: int | None, attach: bool, tmp_path: Path
) -> None:
    """Where it has read several ahead nobody tells, at the end of a pass, which of them the loop has."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(prefetched(loader, ahead)):
            for _ in range(1 + (number == twice)):
                learn(model, optimizer, batch)

    model, verdict = judged(tmp_path, loop, attach=attach, lookahead=ahead)
    assert model.has_each() == (twice is None)
    several = "" if twice is None else f", {BATCH} of {RECORDS} in several steps"
    assert headline(verdict) == f"PROVEN{several}" if ahead == 1 else verdict.outcome is Outcome.DELIVERED


@each_attachment
@pytest.mark.parametrize("leaves", [True, False], ids=["left", "skipped"])
@pytest.mark.parametrize("place", [10, 11], ids=["the last but one", "the last"])
@pytest.mark.parametrize("ahead", [2, 3])
def test_a_batch_that_a_wrapper_has_read_to_the_end_and_the_loop_does_not_learn_is_not_proven(
    ahead: int, place: int, leaves: bool, attach: bool, tmp_path: Path
) -> None:
    """Each gradient that comes after the end of the pass is of one of its last batches, and not of all."""

    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(prefetched(loader, ahead)):
            if number == place and model.total < RECORDS:  # in the first epoch
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
        in_windows(prefetched(loader, ahead), model, optimizer)

    model, verdict = judged(tmp_path, loop, lookahead=ahead, num_epochs=2)
    assert model.has_each(2)
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
    assert not model.has_each()
    assert verdict.outcome is not Outcome.PROVEN


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
                step(optimizer)
                assert loader.progress().acknowledged == model.total
        hook.remove()
        loader.passed_on()

    model, verdict = judged(tmp_path, loop, lookahead="manual")
    assert (model.has_each(), verdict.acknowledged) == (True, RECORDS)
    assert verdict.outcome is Outcome.DELIVERED  # which batch the gradients are of is not seen


# Steps at the head of the body --------------------------------------------------------------------------


def test_a_step_at_the_head_of_the_body_is_no_error_without_attach(tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for number, batch in enumerate(loader):
            if number:
                optimizer.step()
            optimizer.zero_grad()
            model(batch).backward()
        optimizer.step()

    model, verdict = judged(tmp_path, loop, attach=False)
    assert (model.has_each(), verdict.outcome) == (True, Outcome.DELIVERED)
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
