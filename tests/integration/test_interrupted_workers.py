"""Ctrl-C at a terminal, or in a notebook: loader workers get it too, and the loop is begun again."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.errors import ServiceClosed

RECORDS, BATCH = 24, 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and signals")

_at_fork: list[Callable[[], object]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=lambda: _at_fork and _at_fork.pop()())


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(record: Any) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    return record


def learn(loader: ElasticDataLoader, on_batch: Callable[[int], object]) -> list[int]:
    """Train until the epoch is over, again after each Ctrl-C. Returns how often each record was learnt."""
    learnt: Any = torch.zeros(RECORDS, requires_grad=True)
    optimizer = torch.optim.SGD([learnt], lr=1.0)
    loader.attach(optimizer)
    taken = interrupted = 0
    while int(learnt.sum()) < RECORDS:
        try:
            for batch in loader:
                taken += 1
                on_batch(taken)
                optimizer.zero_grad()
                (-learnt[batch].sum()).backward()
                optimizer.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 1
    return [int(times) for times in learnt.tolist()]


def made(**arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(
        torch.arange(RECORDS), BATCH, shuffle=True, master_client=LocalMaster(), **arguments
    )


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_loop_whose_workers_get_ctrl_c_too_is_begun_again(persistent_workers: bool) -> None:
    def interrupt_all(taken: int) -> None:
        if taken == 3:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGINT)
            interrupt()

    with made(num_workers=2, persistent_workers=persistent_workers) as loader:
        assert learn(loader, interrupt_all) == [1] * RECORDS


def test_ctrl_c_among_workers_that_start_comes_when_they_have() -> None:
    _at_fork.append(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with made(num_workers=2, multiprocessing_context="fork") as loader:  # 3.14's default is another
            assert learn(loader, lambda taken: None) == [1] * RECORDS
    finally:
        _at_fork.clear()


def test_a_worker_leaves_ctrl_c_to_its_trainer() -> None:
    with made(num_workers=1, transform=interrupted) as loader:
        assert sorted(int(record) for batch in loader for record in batch) == list(range(RECORDS))


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
def test_a_loop_with_workers_that_times_out_anywhere_learns_each_record_once_or_is_refused() -> None:
    """Real signals, at moments of the clock's: worker starts, queues and decisions are among them."""
    seed = time.time_ns()
    print(f"seed {seed}")
    chance, stepping, left = random.Random(seed), False, 12

    def time_out(number: int, frame: FrameType | None) -> None:
        if stepping:  # nobody would know whether the model has learnt
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
        else:
            raise TimeoutError

    before = signal.signal(signal.SIGALRM, time_out)
    interrupt_handler = signal.getsignal(signal.SIGINT)
    try:
        loader = None
        while True:
            if loader is None:
                learnt: Any = torch.zeros(RECORDS, requires_grad=True)
                optimizer = torch.optim.SGD([learnt], lr=1.0)
                loader = made(num_workers=2)
                loader.attach(optimizer)
            try:
                left -= 1
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-3, 0.2) if left > 0 else 0)
                for batch in loader:
                    optimizer.zero_grad()
                    (-learnt[batch].sum()).backward()
                    stepping = True
                    optimizer.step()
                    stepping = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert learnt.tolist() == [1] * RECORDS
                if left <= 0:
                    break
                loader = loader.close()
            except TimeoutError:
                continue
            except ServiceClosed as refused:
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert "cut off in its middle" in str(refused)  # noqa: PT017  the loop goes on anew
                loader = loader.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        loader.close()
    assert signal.getsignal(signal.SIGINT) is interrupt_handler
