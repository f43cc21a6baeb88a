"""Loops as people write them, with an attached optimizer: a model that remembers learns each record once."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_data import Numbers

from edl_torch import ElasticDataLoader
from edl_torch.testing import FakeMaster

RECORDS, EPOCHS = 22, 2


class Job:
    """A loader, an optimizer, and the records that each step was on."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer: Any = torch.optim.SGD([self.weight], lr=0.125)
        self.learnt: Counter[tuple[int, int]] = Counter()
        self.gathered: list[tuple[int, int]] = []
        loader.attach(self.optimizer)

    def backward(self, batch: Any) -> None:
        (self.weight * batch.float().mean()).backward()
        self.gathered += [(self.loader.epoch, number) for number in batch.tolist()]

    def step(self) -> None:
        self.learnt.update(self.gathered)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.gathered = []

    def train(self, batch: Any) -> None:
        self.backward(batch)
        self.step()


Habit = Callable[[Job], object]
HABITS: list[Habit] = []


def habit(loop: Habit) -> Habit:
    HABITS.append(loop)
    return loop


@habit
def look_first(job: Job) -> None:
    next(iter(job.loader))


@habit
def look_first_and_keep_the_iterator(job: Job) -> Iterator[Any]:
    batches = iter(job.loader)
    next(batches)
    return batches


@habit
def count_the_batches_and_say_so(job: Job) -> None:
    assert sum(1 for _ in job.loader) == 6
    job.loader.give_back(window=True)


@habit
def next_until_it_stops_then_begin_again(job: Job) -> None:
    batches = iter(job.loader)
    for _ in range(10):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(job.loader)
            batch = next(batches)
        job.train(batch)


@habit
def so_many_steps_an_epoch(job: Job) -> None:
    for _ in range(3):
        for _, batch in zip(range(2), job.loader, strict=False):
            job.train(batch)


@habit
def a_generator_around_the_loader_that_is_kept(job: Job) -> Iterator[Any]:
    kept = (batch + 0 for batch in job.loader)
    job.train(next(kept))
    return kept


@habit
def a_function_that_returns_from_its_loop(job: Job) -> None:
    def some() -> None:
        for batch in job.loader:
            job.train(batch)
            if 8 in batch:
                return

    some()
    some()


@habit
def large_batches_of_two(job: Job) -> None:
    batches = iter(job.loader)
    while both := list(itertools.islice(batches, 2)):
        for batch in both:
            job.backward(batch)
        job.step()


@habit
def an_exception_whose_traceback_is_kept(job: Job) -> BaseException:
    try:
        for at, batch in enumerate(job.loader):
            job.backward(batch)
            if at == 2:
                raise ValueError
            job.step()
    except ValueError:
        job.zero_grad()
        return sys.exc_info()[1] or ValueError()
    raise AssertionError


@habit
def ctrl_c_in_the_optimizer(job: Job) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for at, batch in enumerate(job.loader):
        if at == 2:
            hook = job.optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                job.optimizer.step()
            hook.remove()
            break
        job.train(batch)


@habit
def back_to_a_token_in_the_middle_of_a_window(job: Job) -> None:
    for at, batch in enumerate(job.loader):
        job.backward(batch)
        if at == 2:
            token, learnt = job.loader.state_dict(), Counter(job.learnt)
        if at == 4:
            job.loader.load_state_dict(token)
            job.learnt = learnt
            job.zero_grad()
            break
        if at % 2:
            job.step()


@habit
def two_steps_on_each_batch(job: Job) -> None:
    """As SAM does."""
    for batch in job.loader:
        job.backward(batch)
        job.optimizer.step()
        job.step()


@habit
def a_copy_of_the_optimizer_steps_too(job: Job) -> None:
    for batch in itertools.islice(job.loader, 3):
        copy.deepcopy(job.optimizer).step()
        job.train(batch)


@habit
def another_optimizer_for_the_second_epoch(job: Job) -> None:
    for batch in job.loader:
        job.train(batch)
    job.optimizer = torch.optim.Adam([job.weight], lr=0.1)
    job.loader.attach(job.optimizer)


def a_compiled_step(job: Job) -> None:
    job.optimizer.step = torch.compile(job.optimizer.step, backend="eager")


@habit
def a_step_for_the_whole_epoch(job: Job) -> None:
    for batch in job.loader:
        job.backward(batch)
    job.step()


@habit
def two_epochs_in_one_chain(job: Job) -> None:
    for batch in itertools.chain(job.loader, job.loader):
        job.train(batch)


def check(loop: Habit, **arguments: Any) -> None:
    """Run a loop, and train on what it has left to the end."""
    data, fake = Numbers(RECORDS), FakeMaster()
    with ElasticDataLoader(
        data, 4, num_epochs=EPOCHS, records_per_shard=6, master_client=fake, **arguments
    ) as loader:
        job = Job(loader)
        kept = loop(job)
        for _ in loader.epochs():
            for batch in loader:
                job.train(batch)
        del kept
    every = itertools.product(range(EPOCHS), range(RECORDS))
    assert job.learnt == Counter(dict.fromkeys(every, 1))


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("loop", HABITS, ids=lambda loop: loop.__name__)
def test_whatever_the_loop_did_each_record_is_learnt_once(loop: Habit, num_threads: int) -> None:
    check(loop, num_threads=num_threads)


@pytest.mark.long
@pytest.mark.parametrize("loop", HABITS, ids=lambda loop: loop.__name__)
def test_so_it_is_with_loader_workers(loop: Habit) -> None:
    check(loop, num_workers=2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_so_it_is_with_a_compiled_step() -> None:
    check(a_compiled_step)
