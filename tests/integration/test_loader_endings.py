"""How loaders end: loops that stop, processes that end, threads that are closed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from loader_kit import (
    UNEVEN,
    SafeReader,
    acknowledged,
    all_records,
    each_way,
    elastic,
    flat,
    numbers,
    once,
    run_through,
    take,
    trainer,
)
from torch.utils.data import DataLoader

from edl_torch import ElasticDataLoader, LocalMaster
from edl_torch.audit.verdict import Outcome, audit
from edl_torch.errors import MasterUnavailable, ServiceClosed
from edl_torch.testing import FakeMaster, wait_until

SCRIPT = Path(__file__).with_name("loader_process.py")
ROOT = SCRIPT.parents[2]

OwnThreads = Callable[[], list[threading.Thread]]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return preloaded.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"the process hung; it said {out!r} and {err!r}") from None
    return process.returncode, out, err


def nobody_is_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        pytest.param("elastic 0 remote", "break", marks=pytest.mark.long),
        pytest.param("elastic 2 embedded", "break", marks=pytest.mark.long),
        pytest.param("elastic 2 remote", "break", marks=pytest.mark.long),
        ("elastic 2 remote", "drop"),
        ("elastic 2 remote", "exception"),
        pytest.param("plain 2 remote", "break", marks=pytest.mark.long),
        ("plain 2 remote", "exception"),
    ],
)
def test_a_script_that_never_closes_ends(how: str, ending: str) -> None:
    process = start(*how.split(), ending)
    code, out, err = end_of(process)
    if ending == "exception":
        assert code == 1
        assert err.rstrip().endswith("SystemError: the loop failed")
    else:
        assert (code, err) == (0, "")
        assert out == "batches 5 finished False\n"
    wait_until(lambda: nobody_is_left(process.pid))


@pytest.mark.parametrize(
    "how",
    [
        "elastic 2 remote",
        "plain 0 remote",
        pytest.param("elastic 0 embedded", marks=pytest.mark.long),
        pytest.param("plain 2 embedded", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_in_the_loop_ends_trainer_and_workers(how: str) -> None:
    process = start(*how.split(), "interrupt")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = end_of(process)
    assert code == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: nobody_is_left(process.pid))


@pytest.mark.parametrize(
    "how", [pytest.param("elastic 0 embedded", marks=pytest.mark.long), "elastic 0 remote"]
)
def test_a_forked_child_leaves_the_service_alone(how: str) -> None:
    code, out, err = end_of(start(*how.split(), "fork"))
    assert (code, err) == (0, "")
    assert out == "batches 100 finished True\n"


@each_way
def test_close_ends_every_thread(in_process: bool, num_workers: int, own_threads: OwnThreads) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=in_process) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers)
        iterator = iter(loader)
        take(iterator, 2)
        assert own_threads()
        service.close()
        wait_until(lambda: not own_threads())


def test_close_with_workers_that_idle_in_a_plain_pass_is_quick(own_threads: OwnThreads) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=False) as (service, dataset):
        iterator = iter(DataLoader(dataset, 4, num_workers=2, persistent_workers=True))
        take(iterator, 2)
        service.close()
        wait_until(lambda: not own_threads())


@each_way
def test_a_master_that_is_away_is_an_error_in_the_loop_and_not_an_end(
    in_process: bool, num_workers: int
) -> None:
    fake = FakeMaster()
    with trainer(fake, {"a": 60}, in_process=in_process) as (service, dataset):
        seen: list[list[int]] = []
        loader = elastic(dataset, num_workers=num_workers)
        with pytest.raises(MasterUnavailable, match="away"):
            run_through(loader, seen, lambda count: fake.faults.master_away(count >= 2))
        assert len(seen) < 15
        fake.faults.master_away(False)
        loader = elastic(dataset, num_workers=num_workers)
        while not service.finished:
            seen += take(iter(loader), 100)
        assert {record for batch in seen for record in batch} == set(range(60))
    fake.outcomes["training"].check_complete(1)


def test_closing_while_the_master_is_away_is_quick_and_quiet(own_threads: OwnThreads) -> None:
    fake = FakeMaster()
    with trainer(fake, in_process=False) as (_, dataset):
        take(iter(elastic(dataset)), 2)
        fake.faults.master_away()
    wait_until(lambda: not own_threads())


def test_persistent_workers_end_with_their_service(own_children: Callable[[], list[BaseProcess]]) -> None:
    with trainer(FakeMaster(), num_epochs=2) as (_, dataset):
        loader = elastic(dataset, num_workers=2, persistent_workers=True)
        take(iter(loader), 100)
        workers = own_children()
        assert len(workers) == 2
    assert [worker.exitcode for worker in workers] == [0, 0]  # though the loader is still there
    loader.close()


# Loops that stop --------------------------------------------------------------------------------------------


def stop_by_break(loader: Any, seen: list[list[int]]) -> None:
    for batch in loader:
        seen.append(numbers(batch))
        if len(seen) == 3:
            break


def stop_by_exception(loader: Any, seen: list[list[int]]) -> None:
    with pytest.raises(ZeroDivisionError):
        run_through(loader, seen, lambda count: 1 / (3 - count))


def stop_by_del(loader: Any, seen: list[list[int]]) -> None:
    iterator = iter(loader)
    seen += take(iterator, 3)
    del iterator


def stop_by_loader_close(loader: Any, seen: list[list[int]]) -> None:
    for batch in loader:
        seen.append(numbers(batch))
        if len(seen) == 3:
            loader.close()


def stop_by_service_close(loader: Any, seen: list[list[int]]) -> None:
    with pytest.raises(ServiceClosed):
        run_through(loader, seen, lambda count: count == 3 and loader.service.close())


STOPS = [stop_by_break, stop_by_exception, stop_by_del, stop_by_loader_close, stop_by_service_close]


def test_a_loop_inside_a_loop_that_are_both_left_give_back_the_batch_in_hand() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        loader = elastic(dataset)
        for _ in loader:
            for batch in loader:  # ends the iteration around it
                left = numbers(batch)
                break
            break  # its iterator goes after the newer one's
        service.state_dict()
        assert not acknowledged(fake, service)
        assert numbers(next(iter(loader))) == left


@pytest.mark.parametrize(
    ("options", "in_process"),
    [({}, True), ({"num_workers": 2}, False), ({"num_threads": 2}, True)],
    ids=["embedded", "remote, 2 workers", "embedded, 2 threads"],
)
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
def test_however_a_loop_stops_the_batch_in_hand_goes_back(
    stop: Any, options: dict[str, int], in_process: bool, own_threads: OwnThreads
) -> None:
    fake = FakeMaster()
    with trainer(fake, SafeReader(UNEVEN), in_process=in_process) as (service, dataset):
        seen: list[list[int]] = []
        stop(elastic(dataset, **options), seen)
        assert len(seen) == 3
        wait_until(lambda: not any(one.name.startswith("edl-read") for one in own_threads()))
        assert service.record_count == 0
    with trainer(fake) as (other, dataset):
        assert acknowledged(fake, other) == once(flat(seen[:2]))
        rest = flat(take(iter(elastic(dataset)), 100))
        assert sorted(flat(seen[:2]) + rest) == all_records()
    fake.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dropped_last_records_have_their_outcome_and_full_batches_only_arrive(num_workers: int) -> None:
    fake = FakeMaster()
    with trainer(fake, batch_size=4) as (service, dataset):
        loader = elastic(dataset, num_workers=num_workers, drop_last=True)
        first = take(iter(loader), 3)
        batches = take(iter(loader), 100)
        assert all(len(batch) == 4 for batch in first + batches)
        told = acknowledged(fake, service)
        assert told == once(flat(first[:2] + batches))
        progress = service.progress()
        assert progress.dropped == 39 % 4
        assert sum(told.values()) + progress.dropped == 39
        assert service.finished


class SimulatedPinning:
    """What torch's pinning thread does to each item that arrives; here there is no accelerator to pin for."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        from torch.utils.data._utils.pin_memory import pin_memory

        return (pin_memory(item) for item in self.inner)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_pinned_loops_stop_exactly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        loader = elastic(dataset, num_workers=2, pin_memory=True)
        unpinned = loader._inner.read
        monkeypatch.setattr(loader._inner, "read", lambda: iter(SimulatedPinning(unpinned())))
        seen = take(iter(loader), 3)
        assert acknowledged(fake, service) == once(flat(seen[:2]))
        rest = take(iter(loader), 100)
        assert sorted(flat(seen[:2] + rest)) == all_records()


# A loader that nobody closes ------------------------------------------------------------------------------


def learn_in_a_function(audit_dir: Path) -> None:
    """As habit writes it: the loop is left after its last step, and the loader is forgotten."""
    weights = torch.nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    loader = ElasticDataLoader(range(20), 2, audit_dir=audit_dir)
    for step, records in enumerate(loader, start=1):
        optimizer.zero_grad()
        (-weights[records].sum()).backward()
        optimizer.step()
        if step == 10:
            return


def test_a_loader_that_was_collected_ends_before_another_is_made(tmp_path: Path) -> None:
    learn_in_a_function(tmp_path)
    gc.collect()
    with ElasticDataLoader(range(2), 2):
        (verdict,) = audit([tmp_path])
    assert verdict.outcome is Outcome.PROVEN, verdict


class Values:
    def __init__(self) -> None:
        self.rows = np.arange(20)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize("passes", [0, 1])
def test_a_loader_that_was_collected_keeps_no_dataset(passes: int) -> None:
    dataset = Values()
    loader = ElasticDataLoader(dataset, 2)
    assert sum(len(batch) for _ in range(passes) for batch in loader) == 20 * passes
    del loader
    kept = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert kept() is None


def test_data_are_looked_at_once_more_where_a_loader_was_collected_in_the_middle_of_its_pass(
    tmp_path: Path,
) -> None:
    dataset = Values()
    next(iter(ElasticDataLoader(dataset, 2, audit_dir=tmp_path)))
    dataset.rows += 7
    gc.collect()
    with ElasticDataLoader(range(2), 2):
        (verdict,) = audit([tmp_path])
    assert ["changed 'rows'" in said for said in verdict.changed] == [True]


def test_a_loader_that_was_collected_ends_at_exit(tmp_path: Path) -> None:
    program = "import gc, sys; from pathlib import Path; import test_loader_endings as here; "
    program += "here.learn_in_a_function(Path(sys.argv[1])); gc.collect()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = preloaded.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment)
    assert process.wait(timeout=120) == 0
    (verdict,) = audit([tmp_path])
    assert verdict.outcome is Outcome.PROVEN, verdict


class NoHash(type):
    """As of classes that compare by what they have."""

    def __eq__(cls, other: object) -> bool:
        return cls is other

    __hash__ = None  # type: ignore[assignment]


def test_a_loop_is_left_before_any_step_beside_classes_without_a_hash(tmp_path: Path) -> None:
    kept = NoHash("Kept", (), {})()
    weights = torch.nn.Parameter(torch.zeros(20))
    with ElasticDataLoader(range(20), 2, audit_dir=tmp_path) as loader:
        for records in loader:
            weights[records].sum().backward()
            break
    assert type(type(kept)) is NoHash
    assert weights.grad is not None


class Fails(LocalMaster):
    """In no way of ours, as a trainer leaves."""

    def leave(self, session: str, member: int) -> None:
        raise RuntimeError("it is gone")


def test_a_loader_is_made_though_one_that_was_collected_cannot_end(caplog: pytest.LogCaptureFixture) -> None:
    next(iter(ElasticDataLoader(range(8), 2, master_client=Fails())))
    gc.collect()
    with ElasticDataLoader(range(8), 2) as loader:
        assert sum(len(batch) for batch in loader) == 8
    assert "a loader that was not closed could not be" in caplog.text
