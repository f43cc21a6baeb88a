"""With an attached optimizer a batch has been trained on when the optimizer has stepped, not before."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_kit import acknowledged, all_records, elastic, flat, numbers, once, take, trainer

from edl_torch import ElasticDataLoader
from edl_torch.audit.verdict import audit
from edl_torch.errors import InvalidArgument
from edl_torch.testing import FakeMaster


def optimizer(kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    """One with a gradient, as after a backward pass."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    made: torch.optim.Optimizer = kind([parameter], lr=0.1)
    return made


def test_close_takes_its_hook_off_the_optimizer() -> None:
    sgd = optimizer()
    with trainer(FakeMaster()) as (service, dataset):
        service.attach(sgd)
        take(iter(elastic(dataset)), 1)
    sgd.step()


@pytest.mark.parametrize("reported", [False, True])
def test_a_last_step_that_a_scaler_skips_counts_where_the_loop_says_so(reported: bool) -> None:
    """Its gradients overflowed: the scaler takes no step, and there is no batch left for another one."""
    fake = FakeMaster()
    weight = torch.nn.Parameter(torch.ones(()))
    sgd = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with trainer(fake) as (service, dataset):
        service.attach(sgd)

        def train() -> None:
            seen = 0
            while not service.finished:
                for batch in elastic(dataset):
                    seen += len(numbers(batch))
                    sgd.zero_grad()
                    scaler.scale(weight * (torch.inf if seen == len(all_records()) else 1.0)).backward()
                    scaler.step(sgd)
                    scaler.update()
                    if reported:
                        service.report_batch_done()

        if reported:
            train()
            assert acknowledged(fake, service) == once(all_records())
        else:
            with pytest.warns(UserWarning, match=r"3 record\(s\) .* the model has not learnt.* GradScaler"):
                train()
            assert acknowledged(fake, service) == once(all_records())


def test_an_optimizer_is_attached_once_and_detached_once() -> None:
    with trainer(FakeMaster()) as (service, _):
        sgd = optimizer()
        service.attach(sgd)
        service.attach(sgd)
        service.detach(sgd)
        with pytest.raises(InvalidArgument, match="not attached"):
            service.detach(sgd)


# Steps that train nothing, and steps that only look like it -----------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_counts_where_the_scaler_is_given(fused: bool) -> None:
    fake = FakeMaster()
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=0.1, fused=fused) for weight in weights)
    scaler = torch.amp.GradScaler("cpu")
    with trainer(fake) as (service, dataset):
        service.attach(first, scaler=scaler)
        service.attach(second, scaler=scaler)
        service.attach(second, scaler=scaler)  # is attaching once
        loop = iter(elastic(dataset))
        seen = []
        for factor in (1.0, torch.inf, 1.0, torch.inf):
            seen += take(loop, 1)
            for weight, optimizer in zip(weights, (first, second), strict=True):
                assert acknowledged(fake, service) == once(flat(seen[:-1]))
                optimizer.zero_grad()
                scaler.scale((weight * factor).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
            assert acknowledged(fake, service) == once(flat(seen))
        service.detach(first)
        service.detach(second)
        take(loop, 1)
        scaler.scale(weights[0].sum()).backward()
        scaler.step(first)  # decides nothing any more
        assert acknowledged(fake, service) == once(flat(seen))


class Wrapping:
    """As AcceleratedOptimizer: an optimizer around another, whose hooks are not its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


def test_of_a_wrapper_the_optimizer_inside_is_attached() -> None:
    fake = FakeMaster()
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    wrapper: Any = Wrapping(Wrapping(inner))
    with trainer(fake) as (service, dataset):
        service.attach(wrapper)
        service.attach(inner)
        loop = iter(elastic(dataset))
        seen = take(loop, 1)
        assert not acknowledged(fake, service)
        inner.param_groups[0]["params"][0].sum().backward()
        wrapper.step()
        assert acknowledged(fake, service) == once(flat(seen))
        service.detach(wrapper)
        with pytest.raises(InvalidArgument, match="not attached"):
            service.detach(inner)


class Engine:
    """As DeepSpeed's: its optimizer steps for each group of parameters, at the end of an accumulation."""

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: int) -> None:
        self.optimizer = Wrapping(optimizer)
        self.global_steps = 0
        self.overflows = False
        self._micro_steps = 0
        self._accumulation = accumulation

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulation == 0:
            for _ in range(0 if self.overflows else 2):
                self.optimizer.step()
            self.global_steps += 1


def test_an_engine_counts_at_the_end_of_an_accumulation_and_once() -> None:
    fake = FakeMaster()
    engine: Any = Engine(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), accumulation=2)
    with trainer(fake) as (service, dataset):
        service.attach(engine)
        service.attach(engine)
        early: list[int] = []
        engine.optimizer.optimizer.register_step_post_hook(
            lambda *_: early.append(len(acknowledged(fake, service)))
        )
        loop = iter(elastic(dataset))
        seen = take(loop, 1)
        engine.step()
        assert not acknowledged(fake, service)
        seen += take(loop, 1)
        engine.step()
        assert early == [0, 0]
        assert acknowledged(fake, service) == once(flat(seen))


def test_a_step_that_an_engine_skips_for_an_overflow_counts() -> None:
    fake = FakeMaster()
    engine: Any = Engine(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), accumulation=1)
    engine.overflows = True
    with trainer(fake) as (service, dataset):
        service.attach(engine)
        loop = iter(elastic(dataset))
        seen = take(loop, 1)
        engine.step()
        assert acknowledged(fake, service) == once(flat(seen))


def test_the_optimizer_inside_of_an_engine_is_no_other_one(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    engine: Any = Engine(torch.optim.SGD([weight], lr=0.1), accumulation=1)
    engine.module = torch.nn.ParameterList([weight])
    with ElasticDataLoader(torch.arange(12.0), 4, num_epochs=1, audit_dir=tmp_path) as loader:
        loader.attach(engine)
        for batch in loader:
            (weight * batch).sum().backward()
            engine.step()
            engine.zero_grad()
    (verdict,) = audit([tmp_path])
    assert verdict.proven, verdict.models


def test_an_engine_that_is_detached_is_as_it_was() -> None:
    engine: Any = Engine(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), accumulation=1)
    with trainer(FakeMaster()) as (service, _):
        service.attach(engine)
        service.detach(engine)
        assert "step" not in vars(engine)


def test_an_engine_that_one_service_has_detached_steps_for_the_other() -> None:
    engine: Any = Engine(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), accumulation=1)
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        with trainer(FakeMaster()) as (first, _):
            first.attach(engine)
            service.attach(engine)
        loop = iter(elastic(dataset))
        seen = take(loop, 1)
        engine.step()
        assert acknowledged(fake, service) == once(flat(seen))
        service.detach(engine)
        engine.step()


# Gradients ------------------------------------------------------------------------------------------------


def test_a_failed_batch_has_no_weight() -> None:
    with trainer(FakeMaster(), max_bad_records=4) as (service, dataset):
        loader = elastic(dataset)
        weight = torch.nn.Parameter(torch.ones(()))
        for count, _ in enumerate(loader):
            if count == 0:
                assert loader.weight == 4
                service.report_batch_done(err_msg="NaN loss")
                assert loader.weight == 0
                loader.weigh(weight * torch.nan).backward()
                assert weight.grad == 0
            else:
                assert loader.weight > 0


@pytest.mark.parametrize("every", [1, 3])
def test_tokens_that_are_ignored_are_not_in_the_mean(every: int) -> None:
    """Batches hold unequal numbers of labels that count; the mean is over all of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5).double()
    x = torch.randn(39, 3).double()
    labels = torch.randint(0, 5, (39,))
    labels[torch.rand(39) < 0.6] = -100
    of = {record: position for position, record in enumerate(all_records())}
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(rows: list[int]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x[rows]), labels[rows])

    window: list[int] = []
    with trainer(FakeMaster()) as (service, dataset):
        service.attach(sgd)
        loader = elastic(dataset)
        for count, batch in enumerate(loader, 1):
            rows = [of[number] for number in numbers(batch)]
            window += rows
            loader.weigh(loss_of(rows), count=(labels[rows] != -100).sum()).backward()
            if count % every == 0 or count == len(loader):
                loader.scale_gradients(sgd)
                found = model.weight.grad
                wanted = torch.autograd.grad(loss_of(window), model.weight)[0]
                assert found is not None
                if wanted.isfinite().all():
                    assert float((found - wanted).norm()) <= 1e-12 * float(wanted.norm())
                sgd.step()
                sgd.zero_grad()
                window = []
        assert service.finished


def test_a_pass_that_nobody_learnt_from_is_told_when_the_next_begins() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3) as (service, dataset):
        loader, sgd = elastic(dataset), optimizer()
        service.attach(sgd)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in loader:
                sgd.param_groups[0]["params"][0].grad = torch.ones(1)
                sgd.step()
                sgd.zero_grad()
            for _ in loader:
                pass
        said = r"39 record\(s\) of 'training'.*no attached optimizer has a gradient"
        with pytest.warns(UserWarning, match=said):
            iter(loader)
