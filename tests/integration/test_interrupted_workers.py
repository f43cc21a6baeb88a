"""Loader workers and signals: Ctrl-C at a terminal, SIGTERM to the group, and a trainer that was killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import preloaded
import pytest
import torch
from processes import alive

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.errors import ServiceClosed
from edl_torch.testing import wait_until

RECORDS, BATCH = 24, 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, signals, /proc")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


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
def test_a_loop_whose_workers_get_ctrl_c_too_is_begun_again(
    persistent_workers: bool, own_children: Callable[[], list[BaseProcess]]
) -> None:
    def interrupt_all(taken: int) -> None:
        if taken == 3:
            for worker in own_children():
                os.kill(worker.pid or 0, signal.SIGINT)
            interrupt()

    with made(num_workers=2, persistent_workers=persistent_workers) as loader:
        assert learn(loader, interrupt_all) == [1] * RECORDS


def test_ctrl_c_as_workers_are_told_to_begin_anew_costs_their_next_pass_nothing() -> None:
    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "_get_data" and frame.f_back and frame.f_back.f_code.co_name == "_reset":
            answers.append(event)
            if answers == ["call", "return", "call"]:  # one has answered, and the other will
                interrupt()

    answers: list[str] = []
    with ElasticDataLoader(
        torch.arange(RECORDS), BATCH, num_epochs=3, num_workers=2, persistent_workers=True
    ) as loader:
        assert len(list(loader)) == RECORDS // BATCH
        sys.setprofile(on_event)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        sys.setprofile(None)
        for _ in loader.epochs():
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(RECORDS))


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
@pytest.mark.filterwarnings(  # Python loses an error that comes within a finaliser, and the loop goes on
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
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
                try:
                    left -= 1
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-3, 0.2) if left > 0 else 0)
                    for batch in loader:
                        optimizer.zero_grad()
                        (-learnt[batch].sum()).backward()
                        stepping = True
                        optimizer.step()
                        stepping = False
                finally:  # on a busy machine the signal may come here, too
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert learnt.tolist() == [1] * RECORDS
                if left <= 0:
                    break
                loader = loader.close()
            except TimeoutError:
                continue
            except ServiceClosed as refused:
                assert "cut off in its middle" in str(refused)  # noqa: PT017  the loop goes on anew
                loader = loader.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        loader.close()
    assert signal.getsignal(signal.SIGINT) is interrupt_handler


# SIGTERM to the whole group ---------------------------------------------------------------------------------


TRAINER = Path(__file__).with_name("signalled_trainer.py")


def run(method: str, persistent: str, ending: str, signals: int = 1) -> tuple[int, str, str, list[int]]:
    """Exit status, output, errors, and the workers."""
    trainer = preloaded.Popen(
        [sys.executable, str(TRAINER), method, persistent, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    try:
        workers = [int(word) for word in trainer.stdout.readline().split()[1:]]
        for _ in range(signals):
            os.killpg(trainer.pid, signal.SIGTERM)
        out, err = trainer.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
    return trainer.returncode, out, err, workers


@pytest.mark.parametrize(
    ("method", "persistent"),
    [
        ("fork", "persistent"),
        ("fork", "once"),
        pytest.param("spawn", "once", marks=pytest.mark.long),
        pytest.param("spawn", "persistent", marks=pytest.mark.long),
        pytest.param("forkserver", "once", marks=pytest.mark.long),
        pytest.param("forkserver", "persistent", marks=pytest.mark.long),
    ],
)
def test_the_trainer_goes_on_with_its_workers(method: str, persistent: str) -> None:
    status, out, err, workers = run(method, persistent, "closed", signals=3)
    assert (status, out) == (0, "trained\n"), err
    assert "Error" not in err
    assert not any(alive(pid) for pid in workers)


@pytest.mark.parametrize("persistent", ["persistent", "once"])
def test_a_program_that_ends_in_the_middle_of_a_pass_ends_its_workers(persistent: str) -> None:
    status, out, err, workers = run("fork", persistent, "open")
    assert (status, out) == (0, "trained\n"), err
    assert "Error" not in err
    assert not any(alive(pid) for pid in workers)


def test_a_worker_that_is_stuck_is_ended() -> None:
    status, out, err, workers = run("fork", "once", "stuck")
    assert (status, out) == (0, "trained\n"), err
    assert not any(alive(pid) for pid in workers)


def test_workers_go_with_a_trainer_that_is_killed() -> None:
    status, out, err, workers = run("fork", "once", "killed")
    assert (status, out) == (-signal.SIGKILL, "trained\n"), err
    wait_until(lambda: not any(alive(pid) for pid in workers), timeout_s=30)


def test_what_a_worker_itself_does_with_the_signal_holds() -> None:
    status, out, err, _ = run("fork", "once", "own")
    assert (status, out) == (1, "")
    assert "LoaderWorkerDied" in err or "killed by signal" in err


# A trainer that was killed ----------------------------------------------------------------------------------


ORPHANING = """
import sys, time
import numpy as np
from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.system import processes
from edl_torch.readers import MapDatasetReader

processes.PATIENCE_S = float(sys.argv[1])

class Large:
    def __len__(self): return 64
    def __getitem__(self, index): return np.zeros(100_000, dtype=np.uint8)

reader = MapDatasetReader(Large())
with DataShardService(4, reader=reader) as service:
    dataset = ShardedDataset(service, reader)
    for _ in ElasticDataLoader(dataset, num_workers=2, multiprocessing_context="fork"):
        print("a batch", flush=True)
        time.sleep(120)
"""


def test_they_end_though_nobody_takes_their_batches() -> None:
    trainer = preloaded.Popen(
        [sys.executable, "-W", "ignore", "-c", ORPHANING, "0.1"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"a batch\n"
        trainer.kill()
        assert trainer.communicate(timeout=30) == (b"", None)  # its workers had the pipe's other end too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
