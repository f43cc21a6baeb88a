"""An optimizer attaches itself: what is proven without `attach()` is true; else the line to add is named."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_kit import BATCH, RECORDS, Counts, learn, loader_of, sgd, verdict_of
from torch import nn

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Outcome
from edl_torch.cli.verdict_words import headline, undecided
from edl_torch.errors import InvalidArgument
from edl_torch.shard import TaskType
from edl_torch.testing import FakeMaster


def is_attached(data: ElasticDataLoader, optimizer: Any) -> bool:
    return optimizer in data.service.session.gradients.optimizers()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_threads": 2}, {"num_workers": 1, "num_threads": 2}],
    ids=["here", "workers", "threads", "both"],
)
def test_a_loop_without_attach_is_proven(tmp_path: Path, options: dict[str, Any]) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, num_epochs=2, **options) as data:
        for _ in data.epochs():
            for batch in data:
                learn(model, optimizer, batch)
    assert model.has_each(2)
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, list(undecided(verdict))) == (Outcome.PROVEN, [])


@pytest.mark.parametrize("named", [False, True])
def test_a_step_with_a_closure_is_proven(tmp_path: Path, named: bool) -> None:
    """Its gradient comes inside of the step: with the first there is none before."""
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path) as data:
        for batch in data:

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                return loss

            if named:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
    assert model.has_each()
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


def test_a_closure_that_finds_no_gradient_trains_on_nothing(tmp_path: Path) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path) as data:
        for at, batch in enumerate(data):
            if at == 0:
                optimizer.step(lambda: 0.0)
            else:
                learn(model, optimizer, batch)
    assert not model.has_each()
    assert verdict_of(tmp_path).outcome is Outcome.DELIVERED


def test_each_step_counts_at_once() -> None:
    fake, model = FakeMaster(), Counts()
    optimizer = sgd(model)
    with loader_of(None, master_client=fake) as data:
        for number, batch in enumerate(data, 1):
            learn(model, optimizer, batch)
            data.service.session.flush()
            assert fake.outcomes["training"].acknowledged.total() == BATCH * number


def test_windows_without_attach_are_delivered_and_the_line_is_named(tmp_path: Path) -> None:
    """No gradient of the first window was seen to come, but of its last batch."""
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path) as data:
        for number, batch in enumerate(data, 1):
            model(batch).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert model.has_each()
    verdict = verdict_of(tmp_path)
    assert verdict.outcome is Outcome.DELIVERED
    assert verdict.models.unattached == 2 * BATCH
    assert "Before the loop: loader.attach(optimizer)" in " ".join(undecided(verdict))


def steps_on_what_was_there(data: ElasticDataLoader, model: Counts, optimizer: Any) -> None:
    """An optimizer that has stepped before leaves its gradient, and the first batch adds none."""
    learn(model, optimizer, torch.arange(BATCH))
    with torch.no_grad():
        model.learnt.zero_()
    for number, batch in enumerate(data):
        if number:
            optimizer.zero_grad()
            model(batch).backward()
        optimizer.step()


def with_another_optimizer(data: ElasticDataLoader, model: Counts, optimizer: Any) -> None:
    """What attaches itself is the first to step, and learns from no batch."""
    other = Counts()
    others = sgd(other)
    for number, batch in enumerate(data):
        learn(other, others, torch.arange(3))
        if number != 5:
            learn(model, optimizer, batch)


def with_new_optimizers_within(data: ElasticDataLoader, model: Counts, optimizer: Any) -> None:
    """As one that searches for an adversarial example of each batch."""
    for number, batch in enumerate(data):
        noise = nn.Parameter(torch.zeros(BATCH))
        inner = torch.optim.SGD([noise], lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            (noise * batch).sum().backward()
            inner.step()
        if number != 5:
            learn(model, optimizer, batch)


@pytest.mark.parametrize(
    "loop",
    [
        steps_on_what_was_there,
        with_another_optimizer,
        with_new_optimizers_within,
    ],
)
def test_a_model_that_lacks_records_is_not_proven(tmp_path: Path, loop: Callable[..., None]) -> None:
    model = Counts()
    with loader_of(tmp_path) as data:
        loop(data, model, sgd(model))
    assert not model.has_each()
    verdict = verdict_of(tmp_path)
    assert verdict.outcome is Outcome.DELIVERED
    said = " ".join(undecided(verdict))
    assert "loader.attach(optimizer)" in said or "loader.give_back()" in said


def test_an_optimizer_that_steps_in_the_place_of_the_first_decides() -> None:
    fake, model, other = FakeMaster(), Counts(), Counts()
    first, second = sgd(other), sgd(model)
    with loader_of(None, master_client=fake) as data:
        for number, batch in enumerate(data, 1):
            if number == 1:
                learn(other, first, torch.arange(3))
            else:
                learn(model, second, batch)
            data.service.session.flush()
            waits = BATCH * (number == 2)  # a first step does not show what it was on
            assert fake.outcomes["training"].acknowledged.total() == BATCH * number - waits
        assert is_attached(data, second)
        assert not is_attached(data, first)


def test_one_batch_that_is_not_learnt_is_not_proven(tmp_path: Path) -> None:
    model = Counts()
    with loader_of(tmp_path, batch_size=RECORDS, records_per_shard=RECORDS) as data:
        steps_on_what_was_there(data, model, sgd(model))
    assert not model.has_each()
    assert verdict_of(tmp_path).outcome is Outcome.DELIVERED


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_validation_loader_that_is_held_open_stays_out(tmp_path: Path, when: str) -> None:
    model = Counts()
    optimizer = sgd(model)
    with (
        loader_of(tmp_path / "train") as data,
        loader_of(tmp_path / "val", dataset_name="validation") as validation,
    ):
        held: Iterator[Any] = iter(validation)
        for number, batch in enumerate(data):
            if number % 2 == (when == "within"):
                with torch.no_grad():
                    model(next(held))
            learn(model, optimizer, batch)
        assert not is_attached(validation, optimizer)
        for batch in held:
            model(batch)
    assert model.has_each()
    assert verdict_of(tmp_path / "val").outcome is Outcome.DELIVERED
    train = verdict_of(tmp_path / "train").outcome
    assert train is (Outcome.PROVEN if when == "within" else Outcome.DELIVERED)


def test_data_that_are_no_training_data_stay_out(tmp_path: Path) -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, task_type=TaskType.EVALUATION) as data:
        for batch in data:
            learn(model, optimizer, batch)
        assert not is_attached(data, optimizer)
    assert verdict_of(tmp_path).outcome is Outcome.DELIVERED


def test_two_loaders_in_one_loop_have_no_optimizer_until_it_is_said(tmp_path: Path) -> None:
    for said in (False, True):
        model = Counts()
        optimizer = sgd(model)
        folders = [tmp_path / f"{said} {name}" for name in "ab"]
        with ExitStack() as stack:
            both = [stack.enter_context(loader_of(folder)) for folder in folders]
            if said:
                for data in both:
                    data.attach(optimizer)
            for one, two in zip(*both, strict=True):
                learn(model, optimizer, torch.cat([one, two]))
        assert model.has_each(2)
        wanted = Outcome.PROVEN if said else Outcome.DELIVERED
        assert [verdict_of(folder).outcome for folder in folders] == [wanted] * 2


def test_two_loaders_one_after_the_other_are_both_proven(tmp_path: Path) -> None:
    """What the loop learns after the end of a pass is of the pass that it has begun since."""
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path / "a", num_epochs=2) as one, loader_of(tmp_path / "b", num_epochs=2) as two:
        for _ in range(2):
            for data in (one, two):
                for batch in data:
                    learn(model, optimizer, batch)
    assert model.has_each(4)
    assert [headline(verdict_of(tmp_path / name)) for name in "ab"] == ["PROVEN"] * 2


def test_a_pass_without_steps_counts_as_without_an_optimizer(tmp_path: Path) -> None:
    """The optimizer that was seen to train does so no more."""
    model = Counts()
    optimizer = sgd(model)
    seen = []
    with loader_of(tmp_path, num_epochs=3) as data:
        for epoch in data.epochs():
            for batch in data:
                seen += batch.tolist()
                if epoch == 0:
                    learn(model, optimizer, batch)
        assert data.service.finished
    assert sorted(seen) == sorted([*range(RECORDS)] * 3)
    assert verdict_of(tmp_path).outcome is Outcome.DELIVERED


def test_an_optimizer_that_is_gone_makes_room_for_the_next(tmp_path: Path) -> None:
    model = Counts()
    with loader_of(tmp_path, num_epochs=2) as data:
        for _ in data.epochs():
            optimizer = sgd(model)
            for batch in data:
                learn(model, optimizer, batch)
            del optimizer
            gc.collect()
    assert model.has_each(2)
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


def test_one_that_was_detached_does_not_attach_itself_again() -> None:
    model = Counts()
    optimizer = sgd(model)
    with loader_of(None) as data:
        for number, batch in enumerate(data):
            learn(model, optimizer, batch)
            assert is_attached(data, optimizer) == (number < 3)
            if number == 2:
                data.detach(optimizer)


def _steps_in_a_child(report: Any) -> None:
    model = Counts()
    learn(model, sgd(model), torch.arange(BATCH))
    report.put(model.learnt.sum().item())


def test_a_forked_child_that_steps_counts_no_batch_of_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    fake = FakeMaster()
    with loader_of(None, master_client=fake) as data:
        batches = iter(data)
        next(batches)
        report = context.SimpleQueue()
        child = context.Process(target=_steps_in_a_child, args=(report,))
        child.start()
        assert report.get() == BATCH
        child.join()
        data.service.session.flush()
        assert not fake.outcomes["training"].acknowledged


def test_a_forked_child_that_steps_an_attached_optimizer_writes_nothing_into_its_parents_log(
    tmp_path: Path,
) -> None:
    model = Counts()
    optimizer = sgd(model)

    def tries(batch: torch.Tensor) -> None:
        for _ in range(3):
            learn(model, optimizer, batch)

    with loader_of(tmp_path) as data:
        data.attach(optimizer)
        for number, batch in enumerate(data):
            if number == 3:
                child = multiprocessing.get_context("fork").Process(target=tries, args=(batch,))
                child.start()
                child.join()
                assert child.exitcode == 0
            learn(model, optimizer, batch)
    assert headline(verdict_of(tmp_path)) == "PROVEN"


def test_an_optimizer_that_tells_of_no_step_is_refused() -> None:
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base = base
            self.param_groups = base.param_groups

    with (
        loader_of(None) as data,
        pytest.raises(InvalidArgument, match=r"Wrapping tells of no step.*that it wraps"),
    ):
        data.attach(Wrapping(sgd(Counts())))
