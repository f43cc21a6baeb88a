"""Loops that throw away what the model has learnt of some batches: none is proven.

The oracle is the model, which counts how often it learnt each record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_kit import BATCH, RECORDS, Counts, judged, learn, loader_of, sgd, verdict_of

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import Outcome, audit


class Job:
    """A loader, a model and its optimizer, which `attaches` or attaches itself."""

    def __init__(self, loader: ElasticDataLoader, attaches: bool) -> None:
        self.loader, self.attaches = loader, attaches
        self.model = Counts()
        self.optimizer: Any = None
        self.renew()

    def renew(self, **more: Any) -> None:
        """Another optimizer for what the model has now."""
        if self.attaches and self.optimizer is not None:
            self.loader.detach(self.optimizer)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, **more)
        if self.attaches:
            self.loader.attach(self.optimizer)

    def learn(self, batch: torch.Tensor) -> None:
        learn(self.model, self.optimizer, batch)


def loads_the_best_and_renews_the_optimizer(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        if number == 3:
            best = copy.deepcopy(job.model.state_dict())
        if number == 5:
            job.model.load_state_dict(best)
            job.renew()
        job.learn(batch)


def renews_the_head_and_the_optimizer(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        if number == 5:
            job.model.learnt = torch.nn.Parameter(torch.zeros(RECORDS))
            job.renew()
        job.learn(batch)


def goes_on_with_a_copy_of_the_best_model(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        job.learn(batch)
        if number == 4:
            best = copy.deepcopy(job.model)
        if number == 8:
            job.model = best
            job.renew()


def puts_the_best_parameters_in_place(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        job.learn(batch)
        if number == 4:
            best = copy.deepcopy(job.model.state_dict())
        if number == 8:
            job.model.load_state_dict(best, assign=True)
            job.renew()


def does_so_between_passes_that_it_leaves(job: Job) -> None:
    best = copy.deepcopy(job.model.state_dict())
    for epoch in range(3):
        if epoch:
            job.model.load_state_dict(best)
            job.renew()
        for number, batch in enumerate(islice(job.loader, 4)):
            job.learn(batch)
            if number == 1:
                copy.deepcopy(job.model.state_dict())


def renews_the_head_while_its_loss_is_kept(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        if number == 5:
            job.model.learnt = torch.nn.Parameter(torch.zeros(RECORDS))
            job.renew()
        job.optimizer.zero_grad()
        loss = job.model(batch)
        loss.backward()
        job.optimizer.step()


def trains_nothing_of_what_the_optimizer_has(job: Job) -> None:
    """It was made before the layers that it has were frozen, and others added."""
    job.model.requires_grad_(False)
    adapter = torch.nn.Parameter(torch.zeros(RECORDS))
    for batch in job.loader:
        job.optimizer.zero_grad()
        (job.model(batch) - adapter[batch].sum()).backward()
        job.optimizer.step()


def freezes_in_the_middle_what_the_optimizer_has(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        if number == 5:
            job.optimizer.zero_grad()
            job.model.requires_grad_(False)
        job.optimizer.zero_grad()
        (job.model(batch) + torch.zeros(1, requires_grad=True)).sum().backward()
        job.optimizer.step()


def loads_the_best_after_a_break(job: Job) -> None:
    for number, batch in enumerate(job.loader, 1):
        job.learn(batch)
        if number == 5:
            best = copy.deepcopy(job.model.state_dict())
        if number == RECORDS // BATCH:
            break
    job.model.load_state_dict(best)


def detaches_before_it_loads_the_best(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        if number == 3:
            best = copy.deepcopy(job.model.state_dict())
        if number == 5:
            if job.attaches:
                job.loader.detach(job.optimizer)
            job.optimizer = None
            job.model.load_state_dict(best)
            job.renew()
        job.learn(batch)


def does_so_at_the_end(job: Job) -> None:
    for number, batch in enumerate(job.loader, 1):
        job.learn(batch)
        if number == 5:
            best = copy.deepcopy(job.model.state_dict())
    if job.attaches:
        job.loader.detach(job.optimizer)
    job.model.load_state_dict(best)


def does_so_without_the_optimizer(job: Job) -> None:
    loads_the_best_after_a_break(job)
    job.optimizer = None


def makes_gradients_zero_before_the_step(job: Job) -> None:
    for number, batch in enumerate(job.loader):
        job.model(batch).backward()
        if number:
            job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()


def makes_all_gradients_zero_before_the_step(job: Job) -> None:
    for batch in job.loader:
        job.model(batch).backward()
        job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()


def holds_some_values_of_a_layer_in_the_middle(job: Job) -> None:
    for batch in job.loader:
        job.learn(batch)
        with torch.no_grad():
            job.model.learnt[: RECORDS // 2] = 0


def does_so_unseen_by_torch(job: Job) -> None:
    for batch in job.loader:
        job.learn(batch)
        job.model.learnt.data[: RECORDS // 2] = 0


def never_throws_gradients_away_and_clips_each_part(job: Job) -> None:
    for batch in job.loader:
        for part in batch.chunk(2):
            job.model(part).backward()
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e12)
        job.optimizer.step()


def never_throws_gradients_away_and_clips_after_the_step(job: Job) -> None:
    for batch in job.loader:
        job.model(batch).backward()
        job.optimizer.step()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1e12)


def never_throws_gradients_away_and_puts_copies_in_place(job: Job) -> None:
    for batch in job.loader:
        job.model(batch).backward()
        job.optimizer.step()
        for parameter in job.model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()


def puts_gradients_of_an_older_process_in_place(job: Job) -> None:
    """Their batches come again."""
    for number, batch in enumerate(job.loader):
        if number == 1:
            for parameter in job.model.parameters():
                parameter.grad = -torch.ones_like(parameter)
        job.model(batch).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


def makes_the_optimizer_in_a_function_that_is_tried_again(job: Job) -> None:
    """It is left between `backward()` and the step, and the gradient stays."""

    def attempt(fails_at: int) -> None:
        job.renew()
        for number, batch in enumerate(job.loader):
            job.model(batch).backward()
            if number == fails_at:
                return
            job.optimizer.step()
            job.optimizer.zero_grad()

    job.optimizer = None
    attempt(5)
    job.optimizer = None
    attempt(-1)


LOOPS: list[Callable[[Job], None]] = [
    loads_the_best_and_renews_the_optimizer,
    renews_the_head_and_the_optimizer,
    renews_the_head_while_its_loss_is_kept,
    trains_nothing_of_what_the_optimizer_has,
    freezes_in_the_middle_what_the_optimizer_has,
    goes_on_with_a_copy_of_the_best_model,
    puts_the_best_parameters_in_place,
    does_so_between_passes_that_it_leaves,
    loads_the_best_after_a_break,
    does_so_without_the_optimizer,
    detaches_before_it_loads_the_best,
    does_so_at_the_end,
    makes_gradients_zero_before_the_step,
    makes_all_gradients_zero_before_the_step,
    holds_some_values_of_a_layer_in_the_middle,
    does_so_unseen_by_torch,
    never_throws_gradients_away_and_clips_each_part,
    never_throws_gradients_away_and_clips_after_the_step,
    never_throws_gradients_away_and_puts_copies_in_place,
    puts_gradients_of_an_older_process_in_place,
    makes_the_optimizer_in_a_function_that_is_tried_again,
]


@pytest.fixture(params=[True, False], ids=["attached", "by itself"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path) as loader:
        yield Job(loader, request.param)


@pytest.mark.filterwarnings("ignore:an optimizer stepped on gradients:UserWarning")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_what_was_learnt_and_is_gone_is_not_proven(
    job: Job, loop: Callable[[Job], None], tmp_path: Path
) -> None:
    loop(job)
    assert not job.model.has_each()
    job.loader.close()
    assert audit([tmp_path])[0].outcome is not Outcome.PROVEN


@pytest.mark.parametrize("throws_away", [True, False])
def test_a_gradient_of_no_batch_that_a_step_uses_with_a_batch_is_not_proven(
    tmp_path: Path, throws_away: bool
) -> None:
    """As of a backward pass before the loop, which makes lazy layers."""

    def loop(loader: ElasticDataLoader, model: Counts, optimizer: Any) -> None:
        model(torch.arange(BATCH)).backward()
        if throws_away:
            optimizer.zero_grad()
        for batch in loader:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, verdict = judged(tmp_path, loop)
    assert model.has_each() is throws_away
    assert verdict.outcome is (Outcome.PROVEN if throws_away else Outcome.DELIVERED)


class LeavesOut(torch.optim.SGD):
    """Leaves out its first steps, as where its own loss scale overflows."""

    left = 2

    def step(self, closure: Any = None) -> Any:
        self.left -= 1
        return None if self.left >= 0 else super().step(closure)


@pytest.mark.parametrize("attaches", [True, False])
def test_first_steps_that_an_optimizer_leaves_out_have_learnt_nothing(tmp_path: Path, attaches: bool) -> None:
    model, verdict = judged(
        tmp_path,
        lambda loader, model, optimizer: [learn(model, optimizer, batch) for batch in loader],
        attach=attaches,
        optimizer_of=lambda model: LeavesOut(model.parameters(), lr=1.0),
    )
    assert not model.has_each()
    assert verdict.outcome is Outcome.DELIVERED


class Unscales(torch.optim.Optimizer):
    """Leaves out itself what a `GradScaler` says has overflowed."""

    _step_supports_amp_scaling = True
    found_inf: Any
    grad_scale: Any

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in () if self.found_inf else self.param_groups[0]["params"]:
            parameter -= parameter.grad / self.grad_scale


def test_first_steps_that_a_scaler_has_left_out_are_said_in_the_first_line(tmp_path: Path) -> None:
    model = Counts()
    optimizer = Unscales(model.parameters(), {})
    scaler = torch.amp.GradScaler("cpu")
    with loader_of(tmp_path) as loader:
        loader.attach(optimizer, scaler=scaler)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            scaler.scale(model(batch) * (1.0 if number > 1 else float("inf"))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert model.total == RECORDS - 2 * BATCH
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


def test_another_optimizer_for_the_same_model_is_proven(job: Job, tmp_path: Path) -> None:
    for number, batch in enumerate(job.loader):
        if number == 5:
            job.renew()
        job.learn(batch)
    assert job.model.has_each()
    job.loader.close()
    assert audit([tmp_path])[0].outcome is Outcome.PROVEN


@pytest.mark.parametrize("attaches", [True, False])
def test_a_stage_that_trains_less_with_an_optimizer_of_its_own_is_proven(
    tmp_path: Path, attaches: bool
) -> None:
    """What was frozen keeps the gradient that the last stage has used."""
    model, optimizer = Counts(), None
    with ElasticDataLoader(range(RECORDS), batch_size=BATCH, num_epochs=2, audit_dir=tmp_path) as loader:
        for stage in loader.epochs():
            model.above.requires_grad_(stage == 0)
            if attaches and optimizer is not None:
                loader.detach(optimizer)
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
            if attaches:
                loader.attach(optimizer)
            for batch in loader:
                learn(model, optimizer, batch)
    assert model.has_each(2)
    assert audit([tmp_path])[0].outcome is Outcome.PROVEN


@pytest.mark.parametrize("has_zeros", [True, False])
def test_a_loop_that_looks_at_its_first_batch_alone_is_proven(
    job: Job, has_zeros: bool, tmp_path: Path
) -> None:
    if has_zeros:  # of a loop over other data, which threw its gradients away
        job.model(torch.arange(BATCH)).backward()
        job.optimizer.zero_grad(set_to_none=False)
    job.model(next(iter(job.loader)))
    for batch in job.loader:
        job.model(batch).backward()
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=not has_zeros)
    assert job.model.has_each()
    job.loader.close()
    assert audit([tmp_path])[0].outcome is Outcome.PROVEN


def test_a_users_word_on_models_is_none_on_gradients(tmp_path: Path) -> None:
    with ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path) as loader:
        model = Counts()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader.attach(optimizer, one_model="weights are clamped")
        for batch in loader:
            model(batch).backward()
            optimizer.step()
    assert not model.has_each()
    assert audit([tmp_path])[0].outcome is not Outcome.PROVEN


def test_a_model_that_is_loaded_back_does_not_hide_in_a_loop_over_two_loaders(tmp_path: Path) -> None:
    """A step of the other loader's optimizer, which trains another model."""
    with (
        ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path / "one") as one,
        ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path / "other") as other,
    ):
        jobs = Job(one, attaches=True), Job(other, attaches=True)
        for number, batches in enumerate(zip(one, other, strict=True)):
            if number == 3:
                best = copy.deepcopy(jobs[0].model.state_dict())
            for job, batch in zip(jobs, batches, strict=True):
                job.learn(batch)
            if number == 5:
                jobs[0].model.load_state_dict(best)
    outcomes = [audit([tmp_path / name])[0].outcome for name in ("one", "other")]
    assert outcomes == [Outcome.DELIVERED, Outcome.PROVEN]


@pytest.mark.parametrize("loads_after", [None, 0, 1])
def test_of_one_model_that_two_loaders_train_in_turn_both_see_what_is_written(
    tmp_path: Path, loads_after: int | None
) -> None:
    """Weights that are loaded back after a step of the first loader's optimizer, or of the second one's."""
    model = Counts()
    with (
        ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path / "one") as one,
        ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path / "other") as other,
    ):
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
        for loader, optimizer in zip((one, other), optimizers, strict=True):
            loader.attach(optimizer)
        for number, batches in enumerate(zip(one, other, strict=True)):
            if number == 2:
                best = copy.deepcopy(model.state_dict())
            for place, (optimizer, batch) in enumerate(zip(optimizers, batches, strict=True)):
                learn(model, optimizer, batch)
                if (number, place) == (5, loads_after):
                    model.load_state_dict(best)
    is_exact = model.has_each(2)
    assert is_exact == (loads_after is None)
    expected = Outcome.PROVEN if is_exact else Outcome.DELIVERED
    assert [audit([tmp_path / name])[0].outcome for name in ("one", "other")] == [expected, expected]


def steps_in_turn(loaders: Any, model: Counts, optimizers: Any, clears: Callable[[Any], None]) -> None:
    for batches in zip(*loaders, strict=True):
        for optimizer, batch in zip(optimizers, batches, strict=True):
            clears(optimizer)
            model(batch).backward()
            optimizer.step()


def one_after_the_other(loaders: Any, model: Counts, optimizers: Any, clears: Callable[[Any], None]) -> None:
    for loader, optimizer in zip(loaders, optimizers, strict=True):
        for batch in loader:
            clears(optimizer)
            model(batch).backward()
            optimizer.step()


def passes_in_turn(loaders: Any, model: Counts, optimizers: Any, clears: Callable[[Any], None]) -> None:
    for _ in range(2):
        one_after_the_other(loaders, model, optimizers, clears)


def zeros(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("clears", [torch.optim.Optimizer.zero_grad, zeros], ids=["to None", "to 0"])
@pytest.mark.parametrize(
    ("loop", "epochs"), [(steps_in_turn, 1), (one_after_the_other, 1), (passes_in_turn, 2)]
)
def test_one_model_that_two_loaders_train_is_proven(
    tmp_path: Path, loop: Callable[..., None], epochs: int, clears: Callable[[Any], None]
) -> None:
    """Each by an optimizer of its own, and both open to the end."""
    model = Counts()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    with (
        loader_of(tmp_path / "one", num_epochs=epochs) as one,
        loader_of(tmp_path / "other", num_epochs=epochs) as other,
    ):
        for loader, optimizer in zip((one, other), optimizers, strict=True):
            loader.attach(optimizer)
        loop((one, other), model, optimizers, clears)
    assert model.has_each(2 * epochs)
    assert [verdict_of(tmp_path / name).outcome for name in ("one", "other")] == [Outcome.PROVEN] * 2


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_gradient_that_another_loaders_optimizer_has_used_is_learnt_twice(
    tmp_path: Path, in_turn: bool
) -> None:
    model = Counts()
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    with loader_of(tmp_path / "one") as one, loader_of(tmp_path / "other") as other:
        other.attach(second)
        one.attach(first)
        others = iter(other)
        for batch in one:
            first.zero_grad()
            model(batch).backward()
            first.step()
            if in_turn:
                model(next(others)).backward()
                second.step()
        for batch in others:
            model(batch).backward()
            second.step()
            second.zero_grad()
    assert not model.has_each(2)
    outcomes = [verdict_of(tmp_path / name).outcome for name in ("one", "other")]
    assert outcomes == [Outcome.DELIVERED] * 2


class _Both(Enum):
    """How two optimizers of two loaders train a layer that both have between theirs."""

    JOINTLY = "one backward pass, and both step"
    AFTER = "the second one adds to what the first one has used"
    ZEROED = "each on its own gradient"


@pytest.mark.parametrize("both", _Both)
def test_a_layer_of_two_loaders_optimizers_that_is_neither_first_nor_last_is_looked_at(
    tmp_path: Path, both: _Both
) -> None:
    shared, ends = Counts(), [torch.nn.Parameter(torch.zeros(16)) for _ in range(4)]
    optimizers = [
        torch.optim.SGD([ends[place], *shared.parameters(), ends[place + 2]], lr=1.0) for place in range(2)
    ]

    def loss_of(place: int, batch: torch.Tensor) -> torch.Tensor:
        return shared(batch) + ends[place].sum() + ends[place + 2].sum()

    with loader_of(tmp_path / "one") as one, loader_of(tmp_path / "other") as other:
        for loader, optimizer in zip((one, other), optimizers, strict=True):
            loader.attach(optimizer)
        for batches in zip(one, other, strict=True):
            if both is _Both.ZEROED:
                for place, batch in enumerate(batches):
                    optimizers[place].zero_grad()
                    loss_of(place, batch).backward()
                    optimizers[place].step()
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            if both is _Both.JOINTLY:
                (loss_of(0, batches[0]) + loss_of(1, batches[1])).backward()
            for place, batch in enumerate(batches):
                if both is _Both.AFTER:
                    loss_of(place, batch).backward()
                optimizers[place].step()
    is_exact = shared.has_each(2)
    assert is_exact == (both is _Both.ZEROED)
    expected = Outcome.PROVEN if is_exact else Outcome.DELIVERED
    assert [verdict_of(tmp_path / name).outcome for name in ("one", "other")] == [expected] * 2


@pytest.mark.parametrize("fails_at", [0, 5])
@pytest.mark.parametrize("attaches", [True, False])
def test_what_a_failed_attempt_has_left_in_the_gradients_is_learnt_twice(
    tmp_path: Path, attaches: bool, fails_at: int
) -> None:
    """The batch comes again, from another loader."""
    model, token = Counts(), None
    for attempt in range(2):
        with ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path) as loader:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            if attaches:
                loader.attach(optimizer)
            if token is not None:
                loader.load_state_dict(token)
            for number, batch in enumerate(loader):
                model(batch).backward()
                if attempt == 0 and number == fails_at:
                    break
                optimizer.step()
                optimizer.zero_grad()
                token = loader.state_dict()
    assert sorted(set(model.learnt.tolist())) == [1, 2]
    assert audit([tmp_path])[0].outcome is not Outcome.PROVEN


@pytest.mark.parametrize("swaps_back", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_checkpoint_with_other_weights_than_the_last_step_left_is_none_of_the_model(
    tmp_path: Path, swaps_back: bool, leaves: bool
) -> None:
    """The best ones, or averaged ones. Who goes on from those that were trained has one model."""
    with ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path) as loader:
        job = Job(loader, attaches=True)
        for number, batch in enumerate(loader):
            if number == 3:
                best = copy.deepcopy(job.model.state_dict())
            job.learn(batch)
            if number == 7:  # after eight steps the audit has what they left
                trained = copy.deepcopy(job.model.state_dict())
                if leaves:
                    break
                job.model.load_state_dict(best)
                token = loader.state_dict()
                job.model.load_state_dict(trained)
                break
        if leaves:
            job.model.load_state_dict(best)
            token = loader.state_dict()
            job.model.load_state_dict(trained)
    with ElasticDataLoader(range(RECORDS), batch_size=BATCH, audit_dir=tmp_path) as loader:
        heir = Job(loader, attaches=True)
        heir.model.load_state_dict(trained if swaps_back else best)
        loader.load_state_dict(token)
        for batch in loader:
            heir.learn(batch)
    is_exact = heir.model.has_each()
    assert is_exact is swaps_back
    assert (audit([tmp_path])[0].outcome is Outcome.PROVEN) is is_exact


@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_are_swapped_for_an_evaluation_and_back_leave_the_next_step_as_it_is(
    job: Job, tmp_path: Path, fused: bool
) -> None:
    job.renew(fused=fused)
    for batch in job.loader:
        job.learn(batch)
        trained = copy.deepcopy(job.model.state_dict())
        job.model.load_state_dict({name: value / 2 for name, value in trained.items()})
        job.model.load_state_dict(trained)
    job.loader.close()
    assert audit([tmp_path])[0].outcome is Outcome.PROVEN


def test_weights_that_are_swapped_and_swapped_back_are_no_others_in_another_order_of_memory(
    tmp_path: Path,
) -> None:
    """A layer below has its values with the channels last."""
    layer = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    image = torch.ones(1, 3, 3, 3)
    model = torch.nn.ModuleList([layer, Counts()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with loader_of(tmp_path) as loader:
        for batch in loader:
            optimizer.zero_grad()
            (model[1](batch) + layer(image).sum()).backward()
            optimizer.step()
            trained = copy.deepcopy(model.state_dict())
            model.load_state_dict({name: value / 2 for name, value in trained.items()})
            model.load_state_dict(trained)
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


def reads_ahead(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """As a wrapper that needs to know which batch is the last one."""
    ahead = next(batches)
    for batch in batches:
        yield ahead
        ahead = batch
    yield ahead


@pytest.mark.parametrize("retries_the_window", [False, True])
@pytest.mark.parametrize("looks_by", ["a batch that went back", "a wrapper that reads ahead"])
def test_a_retry_of_a_batch_that_throws_away_the_one_before_it_is_not_proven(
    tmp_path: Path, looks_by: str, retries_the_window: bool
) -> None:
    """A backward pass fails in its middle, in the second batch of the last window."""
    model, gives_back = Counts(), looks_by == "a batch that went back"
    optimizer = sgd(model)
    window: list[torch.Tensor] = []

    def train(batch: torch.Tensor, fails: bool = False) -> None:
        for number, part in enumerate(batch.chunk(2)):
            model.fails = fails and number == 1
            model(part).backward()
            if gives_back:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e12)

    with loader_of(tmp_path, lookahead=0 if gives_back else 1) as loader:
        loader.attach(optimizer)
        batches = iter(loader)
        if gives_back:
            next(batches)
            loader.give_back()
        for number, batch in enumerate(batches if gives_back else reads_ahead(batches), 1):
            window.append(batch)
            try:
                train(batch, fails=number == RECORDS // BATCH)
            except MemoryError:
                model.fails = False
                optimizer.zero_grad()
                for again in window if retries_the_window else [batch]:
                    train(again)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                window.clear()
    assert model.has_each() == retries_the_window
    assert retries_the_window or verdict_of(tmp_path).outcome is not Outcome.PROVEN


def test_gradients_that_are_asked_for_and_not_added_are_none_of_the_step(tmp_path: Path) -> None:
    """By `torch.autograd.grad`, behind a wrapper that reads ahead, while those of the last step are there."""
    model = Counts()
    optimizer = sgd(model)
    with loader_of(tmp_path, lookahead=1) as loader:
        loader.attach(optimizer)
        for batch in reads_ahead(iter(loader)):
            loss = model(batch)
            torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert model.has_each()
    assert verdict_of(tmp_path).outcome is Outcome.PROVEN


@pytest.mark.parametrize("throws_away", [True, False])
def test_a_retry_that_makes_what_the_failed_pass_left_0_is_proven(
    job: Job, tmp_path: Path, throws_away: bool
) -> None:
    """Who does not adds to it: the layers that it reached learn the batch twice."""
    for number, batch in enumerate(job.loader):
        job.optimizer.zero_grad(set_to_none=False)
        try:
            job.model.fails = number == 4
            job.model(batch).backward()
        except MemoryError:
            job.model.fails = False
            if throws_away:
                job.optimizer.zero_grad(set_to_none=False)
            job.model(batch).backward()
        job.optimizer.step()
    assert job.model.has_each() == throws_away
    job.loader.close()
    assert (audit([tmp_path])[0].outcome is Outcome.PROVEN) == throws_away


def clips_each_part(model: Counts, batch: torch.Tensor) -> None:
    for part in batch.chunk(2):
        model(part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e12)


def puts_sums_in_the_place_of_gradients(model: Counts, batch: torch.Tensor) -> None:
    model(batch).backward(create_graph=True)


def adds(model: Counts, batch: torch.Tensor) -> None:
    model(batch).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("is_flat", [True, False], ids=["views of one tensor", "tensors"])
@pytest.mark.parametrize("throws_away", [False, True])
@pytest.mark.parametrize(
    "train", [clips_each_part, puts_sums_in_the_place_of_gradients, adds], ids=lambda train: train.__name__
)
def test_a_window_whose_gradients_something_writes_is_proven_where_it_keeps_them(
    tmp_path: Path, train: Callable[[Counts, torch.Tensor], None], is_flat: bool, throws_away: bool
) -> None:
    """The loop may throw away once what it has gathered, in the middle of a window."""
    model = Counts()
    optimizer = sgd(model)
    flat = torch.zeros(sum(one.numel() for one in model.parameters()))
    parts = flat.split([one.numel() for one in model.parameters()])
    if is_flat:
        for one, part in zip(model.parameters(), parts, strict=True):
            one.grad = part.view_as(one)

    def zero_grad() -> None:
        flat.zero_()
        optimizer.zero_grad(set_to_none=not is_flat)

    with loader_of(tmp_path) as loader:
        loader.attach(optimizer)
        for number, batch in enumerate(loader):
            if throws_away and number == 4:
                zero_grad()
            train(model, batch)
            if number % 3 == 2:
                optimizer.step()
                zero_grad()
    assert model.has_each() != throws_away
    assert (verdict_of(tmp_path).outcome is Outcome.PROVEN) == model.has_each()
