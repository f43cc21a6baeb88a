"""Trainers and a master on hosts of their own, on a network that breaks in many ways. Real processes, TCP.

A host that is cut off for longer than the lease timeout costs at most the batch in its trainer's hand: it is
trained on twice. A shorter cut costs nothing. In the end an audit proves that every record had one outcome.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_plan import BATCH
from chaos_processes import Launcher
from network_hosts import Network, ip, why_not
from network_job import NetworkJob
from network_switch import BROKEN, CLEAR, Line

from edl_torch.testing import wait_until

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

    def start(**options: Any) -> NetworkJob:
        network.mend()
        job = NetworkJob(network, launcher, tmp_path, **options)
        jobs.append(job.__enter__())
        job.trained(*TRAINERS, batches=4)
        return job

    yield start
    for job in jobs:
        job.__exit__()


def cut_for_long(job: NetworkJob, network: Network, *cut: str) -> None:
    """From the break until those who were cut off train again, and nobody was restarted."""
    job.taken_for_dead(*cut)
    living = [name for name in TRAINERS if name not in cut]
    if living:
        job.trained(*living, batches=8)  # what the others held is served first
    network.mend()
    job.trained(*cut, batches=3)
    outcome = job.finish()
    assert set(cut) <= set(outcome.released)
    assert outcome.doubled <= outcome.excused


def test_a_network_leaves_nothing_behind_though_its_user_fails(network: Network) -> None:
    other = Network("one", "two")
    with contextlib.suppress(RuntimeError), other:
        process = subprocess.Popen([*other["one"].prefix, "sleep", "60"])
        wait_until(lambda: ip("netns", "pids", other["one"].namespace).split() == [str(process.pid)])
        raise RuntimeError("its user")
    assert process.wait(60) == -signal.SIGKILL
    left = set(ip("netns", "list").split())
    assert not left & {host.namespace for host in other.hosts.values()}
    assert left >= {host.namespace for host in network.hosts.values()}


def test_of_two_behind_a_partition_one_comes_back_and_one_gives_up_with_an_error(
    network: Network, start_job: StartJob
) -> None:
    job = start_job(**SHORT, impatient={"t2": 6.0})
    network.switch.between({"t1", "t2"}, {"master", "t0"}, BROKEN)
    job.taken_for_dead("t1", "t2")
    job.trained("t0", batches=8)
    network.switch.between({"t1"}, {"master", "t0"}, CLEAR)
    job.trained("t1", batches=3)
    outcome = job.finish(failing=("t2",))
    assert {"t1", "t2"} <= set(outcome.released)
    assert outcome.doubled <= outcome.excused
    errors = job.lives["t2"].errors
    assert "MasterUnavailable: no answer from the master at 10.77.0.1:50001 within 6 s" in errors


@pytest.mark.long
def test_a_line_that_carries_one_direction_alone_costs_a_batch(network: Network, start_job: StartJob) -> None:
    """t1 is not heard by the master; t2 is heard, and hears no answer."""
    job = start_job(**SHORT)
    before = network.switch.lost.copy()
    network.switch.set("t1", "master", BROKEN)
    network.switch.set("master", "t2", BROKEN)
    cut_for_long(job, network, "t1", "t2")
    assert set(network.switch.lost - before) == {("t1", "master"), ("master", "t2")}


@pytest.mark.long
def test_a_pulled_cable_and_an_interface_that_is_down_cost_a_batch(
    network: Network, start_job: StartJob
) -> None:
    job = start_job(**SHORT)
    network["t1"].pull()
    network["t2"].down()
    cut_for_long(job, network, "t1", "t2")


@pytest.mark.long
def test_the_masters_own_cable_costs_each_trainer_a_batch(network: Network, start_job: StartJob) -> None:
    job = start_job(**SHORT)
    network["master"].pull()
    cut_for_long(job, network, *TRAINERS)


def test_a_master_that_dies_behind_a_partition_comes_back_and_nothing_is_lost(
    network: Network, start_job: StartJob
) -> None:
    job = start_job(**SHORT)
    network.switch.between({"master", "t0"}, {"t1", "t2"}, BROKEN)
    job.master.kill()
    job.master.start()
    cut_for_long(job, network, "t1", "t2")


def test_what_passes_before_the_lease_timeout_costs_nothing(network: Network, start_job: StartJob) -> None:
    job = start_job(**LONG, size=500 * BATCH)
    late = Line(delay_s=0.03, loss=0.03)
    breaks: dict[str, Callable[[], None]] = {
        "a partition": lambda: network.switch.between({"master", "t0"}, {"t1", "t2"}, BROKEN),
        "no way to the master": lambda: network.switch.set("t1", "master", BROKEN),
        "no way from the master": lambda: network.switch.set("master", "t1", BROKEN),
        "the cable out": network["t1"].pull,
        "the interface down": network["t1"].down,
        "delay and loss": lambda: network.switch.between({"master"}, {"t1", "t2"}, late),
    }
    for begin in breaks.values():
        begin()
        job.trained("t0", batches=4)
        network.mend()
        job.trained("t1", "t2", batches=2)
    outcome = job.finish()
    assert outcome.doubled == 0
    assert outcome.released == Counter()
