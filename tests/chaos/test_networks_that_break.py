"""Trainers and a master on hosts of their own, on a network that breaks in every way. Real processes, real TCP.

A host that is cut off for longer than the lease timeout costs at most the batch in its trainer's hand, trained on
twice; a shorter cut costs nothing. In the end an audit proves that every record had one outcome.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_plan import BATCH
from chaos_processes import Launcher
from network_hosts import Network, why_not
from network_job import NetworkJob
from network_switch import BROKEN, Line

TRAINERS = ("t0", "t1", "t2")
SHORT = {"lease_timeout_s": 1.0, "grace_s": 0.3}
LONG = {"lease_timeout_s": 60.0, "grace_s": 60.0}
StartJob = Callable[..., NetworkJob]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    with Network("master", *TRAINERS) as network:
        yield network


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, network: Network) -> Iterator[Launcher]:
    with Launcher(errors=tmp_path_factory.mktemp("launcher") / "log") as launcher:
        yield launcher


@pytest.fixture
def start_job(network: Network, launcher: Launcher, tmp_path: Path) -> Iterator[StartJob]:
    jobs: list[NetworkJob] = []

    def start(**options: float) -> NetworkJob:
        network.mend()
        job = NetworkJob(network, launcher, tmp_path, **options)
        jobs.append(job.__enter__())
        job.trained(*TRAINERS, batches=5)
        return job

    yield start
    for job in jobs:
        job.__exit__()


def cut_for_long(job: NetworkJob, network: Network, *cut: str) -> None:
    """From the break until those who were cut off train again, and nobody was restarted."""
    job.taken_for_dead(*cut)
    living = [name for name in TRAINERS if name not in cut]
    if living:
        job.trained(*living, batches=30)  # what the others held is served first
    network.mend()
    job.trained(*cut, batches=5)


def test_a_partition_costs_a_batch_for_each_trainer_behind_it(network: Network, start_job: StartJob) -> None:
    job = start_job(**SHORT)
    network.switch.between({"t1", "t2"}, {"master", "t0"}, BROKEN)
    cut_for_long(job, network, "t1", "t2")
    outcome = job.finish()
    assert outcome.doubled <= 2 * BATCH
    assert outcome.released == Counter(t1=1, t2=1)


def test_a_line_that_carries_one_direction_alone_costs_a_batch(network: Network, start_job: StartJob) -> None:
    """t1 is not heard by the master; t2 is heard, and hears no answer."""
    job = start_job(**SHORT)
    network.switch.set("t1", "master", BROKEN)
    network.switch.set("master", "t2", BROKEN)
    cut_for_long(job, network, "t1", "t2")
    outcome = job.finish()
    assert outcome.doubled <= 2 * BATCH
    lost = network.switch.lost
    assert lost["t1", "master"]
    assert lost["master", "t2"]


def test_a_pulled_cable_and_an_interface_that_is_down_cost_a_batch(
    network: Network, start_job: StartJob
) -> None:
    job = start_job(**SHORT)
    network["t1"].pull()
    network["t2"].down()
    cut_for_long(job, network, "t1", "t2")
    assert job.finish().doubled <= 2 * BATCH


@pytest.mark.parametrize("how", ["pull", "down"])
def test_the_masters_cable_costs_each_trainer_a_batch_at_most(
    network: Network, start_job: StartJob, how: str
) -> None:
    job = start_job(**SHORT)
    getattr(network["master"], how)()
    cut_for_long(job, network, *TRAINERS)
    assert job.finish().doubled <= 3 * BATCH


def test_a_master_that_dies_behind_a_partition_comes_back_and_nothing_is_lost(
    network: Network, start_job: StartJob
) -> None:
    job = start_job(**SHORT)
    network.switch.between({"master"}, {"t1", "t2"}, BROKEN)
    job.master.kill()
    job.master.start()
    cut_for_long(job, network, "t1", "t2")
    assert job.finish().doubled <= 2 * BATCH


def test_what_passes_before_the_lease_timeout_costs_nothing(network: Network, start_job: StartJob) -> None:
    job = start_job(**LONG)
    breaks: list[Callable[[], None]] = [
        lambda: network.switch.between({"master", "t0"}, {"t1", "t2"}, BROKEN),
        lambda: network.switch.set("t1", "master", BROKEN),
        lambda: network.switch.set("master", "t1", BROKEN),
        network["t1"].pull,
        network["t1"].down,
    ]
    for begin in breaks:
        begin()
        job.trained("t0", batches=15)
        network.mend()
        job.trained("t1", "t2", batches=3)
    outcome = job.finish()
    assert outcome.doubled == 0
    assert outcome.released == Counter()


def test_delay_and_loss_cost_time_alone(network: Network, start_job: StartJob) -> None:
    job = start_job(**LONG)
    network.switch.between({"master"}, set(TRAINERS), Line(delay_s=0.03, loss=0.05))
    began = time.monotonic()
    job.trained(*TRAINERS, batches=5)
    assert time.monotonic() - began > 5 * 2 * 0.03  # a batch waits for the answer to the one before
    network.mend()
    outcome = job.finish()
    assert outcome.doubled == 0
    assert outcome.released == Counter()


def test_who_stays_cut_off_gives_up_with_an_error_and_the_others_finish(
    network: Network, start_job: StartJob
) -> None:
    job = start_job(**SHORT, master_timeout_s=2.5)
    network.switch.between({"t2"}, {"master", "t0", "t1"}, BROKEN)
    outcome = job.finish(failing=("t2",))
    assert outcome.doubled <= BATCH
    errors = job.lives["t2"].errors
    assert "MasterUnavailable: no answer from the master at 10.77.0.1:50001 within 2.5 s" in errors
