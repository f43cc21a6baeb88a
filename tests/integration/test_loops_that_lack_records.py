"""Loops whose model has not each record once, or of which nobody sees that it has: none of them is proven."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_kit import (
    BATCH,
    RECORDS,
    Counts,
    Fails,
    Loop,
    each_attachment,
    judged,
    lacks,
    learn,
    loader_of,
    sgd,
)
from torch import nn

from edl_torch.audit.verdict import Outcome, judge
from edl_torch.cli.audit_page import render
from edl_torch.cli.verdict_words import headline

EVERY = 4  # batches make a window; of 12 in an epoch
MARKING = ("gradients.py", "optimizers.py")  # the files that mark batches at each step

UNSEEN = "no gradient was seen"
AGAIN = "on gradients that it, or another loader's optimizer, had stepped on before"
WRITTEN = "were written after"
ANOTHER = "an optimizer stepped that is not attached"

LOOPS: dict[str, tuple[Loop, str, bool]] = {}


def lacking(why: str, *, alone: bool = False) -> Callable[[Loop], Loop]:
    """Note a loop, what is said of it where it is attached, and whether its optimizer has `learnt` alone."""

    def add(loop: Loop) -> Loop:
        LOOPS[loop.__name__] = loop, why, alone
        return loop

    return add


def step(optimizer: Any, set_to_none: bool = True) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


# Backward passes that fail in their middle --------------------------------------------------------------


def go_back_once_more(model: Counts, batch: Any, *, fails: bool) -> None:
    """A backward pass, and one more where it fails: what the first has left is not thrown away."""
    model.fails = fails
    with suppress(MemoryError):
        model(batch).backward()
    if model.fails:
        model.fails = False
        model(batch).backward()


@lacking("")
def an_error_in_the_backward_pass_and_the_batch_once_more(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        go_back_once_more(model, batch, fails=number == 3)
        optimizer.step()


@lacking("")
def an_error_in_the_backward_pass_of_gradients_that_are_put_back(
    loader: Any, model: Counts, optimizer: Any
) -> None:
    """In the place of what it has left, which the second try has added to, is another tensor."""
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        go_back_once_more(model, batch, fails=number == 3)
        for parameter in model.parameters():
            parameter.grad = torch.nan_to_num(parameter.grad)
        optimizer.step()


@lacking("")
def an_error_at_the_end_of_a_backward_pass_and_one_gradient_thrown_away(
    loader: Any, model: Counts, optimizer: Any
) -> None:
    """That of the parameter which the pass has reached first."""
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        if number == 3:
            last = Fails.apply(torch.zeros(1, requires_grad=True)).sum()
            with suppress(MemoryError):
                (last + model(batch)).backward()
            model.above.grad = None
        model(batch).backward()
        optimizer.step()
    assert not model.has_each()


# Batches that no gradient is of -------------------------------------------------------------------------


@lacking(UNSEEN)
def skipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        if number != 3:
            learn(model, optimizer, batch)


@lacking(UNSEEN)
def zeroed_in_place_and_skipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        if number != 3:
            model(batch).backward()
            optimizer.step()


@lacking("")
def skipped_in_a_window_that_is_clipped(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        if number != 2 * EVERY:
            model(batch).backward()
        if number % EVERY == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            step(optimizer)


@lacking("")
def skipped_in_a_window_of_experts(loader: Any, model: Counts, optimizer: Any) -> None:
    layers = [nn.Parameter(torch.zeros(1)) for _ in range(20)]
    loader.detach(optimizer)
    each = sgd(layers[0], model.learnt, *layers[1:])
    loader.attach(each)
    for number, batch in enumerate(loader, 1):
        if number != 2 * EVERY:
            (-model.learnt[batch].sum()).backward()
        if number % EVERY == 0:
            step(each)
    loader.detach(each)


@lacking("")
def skipped_and_averaged_by_hand(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        if number != 2 * EVERY:
            model(batch).backward()
        if number % EVERY == 0:
            for parameter in model.parameters():
                parameter.grad = parameter.grad / 1  # type: ignore[operator]
            step(optimizer)


@lacking(UNSEEN)
def unsaid_read_ahead(loader: Any, model: Counts, optimizer: Any) -> None:
    """It is left after a step, with a batch on its way that this step counts."""
    batches = iter(loader)
    ahead = next(batches)
    for number, batch in enumerate([*batches] if model.total else batches, 1):
        model(ahead).backward()
        ahead = batch
        if number % EVERY == 0:
            step(optimizer)
        if number == 2 * EVERY:
            return
    model(ahead).backward()
    step(optimizer)


# Gradients that are thrown away -------------------------------------------------------------------------


@lacking(UNSEEN)
def zeroed_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader, 1):
        optimizer.zero_grad(set_to_none=False)
        model(batch).backward()
        if number % 2 == 0:
            optimizer.step()


@lacking(UNSEEN)
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


@lacking(UNSEEN)
def zeroed_before_the_step(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        model(batch).backward()
        if number == 3:
            optimizer.zero_grad()
        step(optimizer)


@lacking(UNSEEN)
def gradients_by_hand_in_a_window(loader: Any, model: Counts, optimizer: Any) -> None:
    """Each takes the place of the one before."""
    for number, batch in enumerate(loader, 1):
        (model.learnt.grad,) = torch.autograd.grad(model(batch), [model.learnt])
        if number % 2 == 0:
            optimizer.step()


@lacking(UNSEEN, alone=True)
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


@lacking(UNSEEN)
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
            step(optimizer)
            step(second)


# Gradients that are stepped on again --------------------------------------------------------------------


@lacking(AGAIN)
def never_zeroed(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        model(batch).backward()
        optimizer.step()


@lacking(AGAIN)
def never_zeroed_and_put_back(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        model(batch).backward()
        assert model.learnt.grad is not None
        for parameter in model.parameters():
            parameter.grad = torch.nan_to_num(parameter.grad)
        optimizer.step()


@lacking(AGAIN)
def stepped_twice(loader: Any, model: Counts, optimizer: Any, clips: bool = False) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number == 5:
            if clips:
                nn.utils.clip_grad_norm_([model.learnt], 1.0)
            optimizer.step()


@lacking(AGAIN)
def stepped_twice_and_clipped(loader: Any, model: Counts, optimizer: Any) -> None:
    stepped_twice(loader, model, optimizer, clips=True)


@lacking("")
def a_window_twice(loader: Any, model: Counts, optimizer: Any) -> None:
    batches = iter(loader)
    for number in range(RECORDS // BATCH // 2):
        window = [next(batches) for _ in range(2)]
        for _ in range(2 if number == 0 else 1):
            optimizer.zero_grad()
            for batch in window:
                model(batch).backward()
            optimizer.step()


@lacking("")
def left_with_a_gradient_in_place(
    loader: Any, model: Counts, optimizer: Any, graph: bool = False, gives_back: bool = False
) -> None:
    for number, batch in enumerate(loader):
        model(batch).backward(create_graph=graph)
        if number == 3 and not hasattr(model, "left"):
            model.left = True
            if not gives_back:
                break
            loader.give_back()
            continue
        step(optimizer)


@lacking("")
def left_with_the_graph_of_a_gradient(loader: Any, model: Counts, optimizer: Any) -> None:
    """What stays is added to in another tensor."""
    left_with_a_gradient_in_place(loader, model, optimizer, graph=True)


@lacking("")
def given_back_with_a_gradient_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    left_with_a_gradient_in_place(loader, model, optimizer, gives_back=True)


@lacking("")
def an_error_in_the_first_batch_with_a_gradient_in_place(loader: Any, model: Counts, optimizer: Any) -> None:
    for fails in (True, False):
        with suppress(ValueError):
            for batch in loader:
                model(batch).backward()
                if fails:
                    raise ValueError
                step(optimizer)


# Weights that go back -----------------------------------------------------------------------------------


def rolled_back(loader: Any, model: Counts, optimizer: Any, by: Any = None) -> None:
    load = by or model.load_state_dict
    for number, batch in enumerate(loader):
        if number == 4:
            state = copy.deepcopy(model.state_dict())
        learn(model, optimizer, batch)
        if number == 6:
            load(state)


@lacking(WRITTEN)
def rolled_back_by_version(loader: Any, model: Counts, optimizer: Any) -> None:
    rolled_back(loader, model, optimizer)


@lacking(WRITTEN, alone=True)
def rolled_back_unseen_by_autograd(loader: Any, model: Counts, optimizer: Any) -> None:
    def load(state: Any) -> None:
        model.learnt.data.copy_(state["learnt"])

    rolled_back(loader, model, optimizer, by=load)


@lacking(WRITTEN)
def rolled_back_beside_another(loader: Any, model: Counts, optimizer: Any) -> None:
    """Two optimizers of parameters of their own."""
    other = Counts()
    second = sgd(other.learnt)
    loader.attach(second)
    both = (learn(other, second, batch) or batch for batch in loader)
    rolled_back(both, model, optimizer)


# Other optimizers ---------------------------------------------------------------------------------------


@lacking(WRITTEN, alone=True)
def another_optimizer_trains(loader: Any, model: Counts, optimizer: Any) -> None:
    other = sgd(model.learnt)
    for number, batch in enumerate(loader):
        learn(model, other, batch)
        if number % 2 == 0:
            optimizer.zero_grad()
        optimizer.step()  # on the same gradients once more


@lacking(ANOTHER)
def a_new_optimizer_trains_the_middle_once_more(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number in (5, 9):
            learn(model, sgd(model.learnt), batch)


@lacking(ANOTHER)
def a_new_optimizer_steps_on_what_was_stepped_on(loader: Any, model: Counts, optimizer: Any) -> None:
    for number, batch in enumerate(loader):
        learn(model, optimizer, batch)
        if number == 5:
            sgd(model.learnt).step()


@lacking("")
def zeroed_before_a_step_that_moves_all_the_same(loader: Any, model: Counts, optimizer: Any) -> None:
    def moves(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.0)

    hook = optimizer.register_step_pre_hook(moves)
    for batch in loader:
        model(batch).backward()
        optimizer.zero_grad()
        optimizer.step()
    hook.remove()


@lacking(ANOTHER)
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


def alone_of(model: Counts) -> Any:
    return sgd(model.learnt)


@pytest.mark.filterwarnings("ignore:an optimizer stepped on gradients", "ignore:Using backward")
@each_attachment
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_whose_model_lacks_records_is_not_proven(name: str, attach: bool, tmp_path: Path) -> None:
    loop, why, alone = LOOPS[name]
    if not attach and "detach" in loop.__code__.co_names:
        pytest.skip("it has none to detach")
    model, verdict = judged(tmp_path, loop, attach=attach, optimizer_of=alone_of if alone else sgd)
    assert not model.has_each() or "an_error" in name
    assert verdict.outcome is not Outcome.PROVEN
    assert lacks(verdict)
    assert not attach or why in " ".join(lacks(verdict))


# Attached, or by itself ---------------------------------------------------------------------------------


def step_at_the_top(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        step(optimizer)
        model(batch).backward()


def test_a_step_at_the_top_that_leaves_out_the_last_batch_is_not_proven(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"4 record\(s\) .* handed out after the last optimizer"):
        model, verdict = judged(tmp_path, step_at_the_top)
    assert model.total == RECORDS - 4
    assert verdict.outcome is Outcome.INEXACT


def bounded(loader: Any, model: Counts, optimizer: Any) -> None:
    for batch in loader:
        learn(model, optimizer, batch)
        with torch.no_grad():
            model.learnt.clamp_(max=0.5)


@pytest.mark.parametrize("word", ["weights are clamped", ""])
def test_weights_that_are_bounded_after_each_step_are_one_model_by_its_users_word(
    word: str, tmp_path: Path
) -> None:
    _, verdict = judged(tmp_path, bounded, word=word, optimizer_of=alone_of)
    assert verdict.outcome is (Outcome.PROVEN if word else Outcome.DELIVERED)


class SkipsSome(torch.optim.SGD):
    """Leaves some of its steps out, as optimizers do that find a gradient too large."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return None if self.calls % 5 == 0 else super().step(closure)


@each_attachment
def test_a_step_that_an_optimizer_leaves_out_is_not_proven(attach: bool, tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for batch in loader:
            learn(model, optimizer, batch)

    model, verdict = judged(
        tmp_path, loop, optimizer_of=lambda model: SkipsSome(model.parameters(), lr=1.0), attach=attach
    )
    assert not model.has_each()
    assert verdict.outcome is Outcome.DELIVERED
    assert verdict.rests_on == {"step": 40, "unseen": 8}


@each_attachment
@pytest.mark.parametrize("how", ["add_", "+=", "another"])
@pytest.mark.parametrize("none", [True, False], ids=["none", "zeros"])
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
                step(optimizer, none)

    model, verdict = judged(tmp_path, loop, attach=attach)
    assert model.has_each()
    assert (verdict.outcome, verdict.rests_on.get("unstepped", 0)) == (Outcome.DELIVERED, 0)


def test_that_batches_are_learnt_again_is_said_once(tmp_path: Path) -> None:
    def loop(loader: Any, model: Counts, optimizer: Any) -> None:
        for leaves in (True, False, True, False, False):
            for batch in loader:
                model(batch).backward()
                if leaves:
                    break
                step(optimizer)
                break

    with pytest.warns(UserWarning, match="an optimizer stepped on gradients") as found:
        judged(tmp_path, loop)
    assert len([warning for warning in found if warning.category is UserWarning]) == 1


# Steps that a scaler skips, and batches that are bad ----------------------------------------------------


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
    _, verdict = judged(tmp_path, overflowing)
    assert verdict.outcome is Outcome.DELIVERED
    assert "loader.attach(optimizer, scaler=scaler)" in " ".join(lacks(verdict))


def test_what_a_scaler_steps_over_stands_in_the_first_line(tmp_path: Path) -> None:
    model, verdict = judged(tmp_path, partial(overflowing, is_known=True))
    assert int((model.learnt == 0).sum()) == 4
    assert headline(verdict) == "PROVEN, 4 of 48 stepped over by a GradScaler"
    page = render(list(judge([tmp_path])), [str(tmp_path)], written="now")
    assert "one model has learnt 44 of them. 4 of 48 were stepped over by a GradScaler." in page


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
    assert (model.has_each(), verdict.quarantined) == (True, BATCH)
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
    assert model.total == RECORDS - BATCH
    assert headline(verdict) == f"PROVEN, {BATCH} of {RECORDS} in quarantine"


# What marking costs -------------------------------------------------------------------------------------


def test_an_optimizer_that_is_detached_leaves_its_parameters_to_python() -> None:
    model = Counts()
    optimizer = sgd(model)
    learnt = weakref.ref(model.learnt)
    with loader_of(None) as loader:
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

        with loader_of(tmp_path / str(parameters) if audited else None) as loader:
            loader.attach(optimizer)
            for number, batch in enumerate(loader):
                if number in (4, 8):
                    sys.setprofile(note if number == 4 else None)
                optimizer.zero_grad()
                (torch.stack(layers).sum() * batch.sum()).backward()
                optimizer.step()
        return counted

    assert calls(200) == calls(2) > 0
