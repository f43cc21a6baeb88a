"""Masters that restart, move to another address, or come back with an older journal."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

import pytest
from ride_kit import BATCH, Gate, Master, Trainer, check

from edl_torch import MasterClient
from edl_torch.client.grpc.channel import FollowingChannel
from edl_torch.errors import MasterUnavailable, StaleLease
from edl_torch.system import processes
from edl_torch.testing import wait_until

StartMaster = Callable[..., Master]


@pytest.mark.parametrize("accumulate", [0, 4])
def test_trainers_ride_through_a_restart_on_the_same_ledger(
    start_master: StartMaster, accumulate: int
) -> None:
    master = start_master(lease_timeout_s=10.0)
    gates = [Gate(10), Gate(13)]
    trainers = [Trainer(master.address, gate, accumulate=accumulate) for gate in gates]
    for gate in gates:
        gate.wait_reached()
    master.stop()
    wait_until(lambda: not any(trainer.attending for trainer in trainers))
    for gate in gates:
        gate.open()
    wait_until(lambda: [t.batches for t in trainers] == [11, 14])  # the batch in hand is finished
    began = time.monotonic()
    master.start()
    check(master, *(trainer.done().trained for trainer in trainers))
    assert master.dispatcher.expired == 0
    first = min(moment for trainer in trainers for moment in trainer.when if moment > began)
    assert first - began < 5.0  # pauses between attempts are of a second at most


def test_a_master_without_a_memory_is_refused_with_a_remedy(start_master: StartMaster) -> None:
    master = start_master()
    gate = Gate(3)
    trainer = Trainer(master.address, gate)
    gate.wait_reached()
    master.stop()
    master.forget("second")
    master.start()
    gate.open()
    with pytest.raises(StaleLease, match=r"another one than before.*load_state_dict.*--state"):
        trainer.done()
    assert trainer.batches <= 4


def test_a_loop_that_hangs_loses_its_leases_where_progress_is_asked_for(start_master: StartMaster) -> None:
    master = start_master(lease_timeout_s=30.0, progress_timeout_s=1.5)
    gate = Gate(5)
    hung = Trainer(master.address, gate, accumulate=2)
    gate.wait_reached()
    wait_until(lambda: master.dispatcher.stalled == 1)
    others = Gate(20)
    living = Trainer(master.address, others)
    others.wait_reached()
    gate.open()
    wait_until(lambda: hung.batches > 10 or hung.error)  # with new leases
    others.open()
    check(master, hung.done().trained, living.done().trained, doubled=2 * BATCH)
    assert master.dispatcher.expired == 0


# A master that comes back at another address, under trainers that follow it ---------------------------------


def move(master: Master) -> None:
    """Stop it; the next start is at another port."""
    master.stop()
    master.address = "127.0.0.1:0"


def follow(find: Callable[[], str]) -> FollowingChannel:
    return FollowingChannel(find, look_every_s=0.02)


def test_trainers_follow_a_master_that_comes_back_elsewhere(start_master: StartMaster) -> None:
    master = start_master(lease_timeout_s=10.0)
    first = master.address
    gates = [Gate(10), Gate(13)]
    trainers = [Trainer(follow(lambda: master.address), gate) for gate in gates]
    for gate in gates:
        gate.wait_reached()
    move(master)
    wait_until(lambda: not any(trainer.attending for trainer in trainers))
    master.start()
    assert master.address != first
    for gate in gates:
        gate.open()
    check(master, *(trainer.done().trained for trainer in trainers))
    assert master.dispatcher.expired == 0


def test_while_nobody_knows_where_the_master_is_calls_wait(start_master: StartMaster) -> None:
    master = start_master()
    asked = 0

    def find() -> str:
        nonlocal asked
        asked += 1
        if master.address.endswith(":0"):
            raise MasterUnavailable("it has no address now")
        return master.address

    gate = Gate(5)
    trainer = Trainer(follow(find), gate)
    gate.wait_reached()
    assert asked == 1  # nobody is asked in peace
    move(master)
    gate.open()
    wait_until(lambda: asked > 5)
    assert trainer.is_alive()
    master.start()
    check(master, trainer.done().trained)


def test_forked_children_let_go_of_connections_to_the_new_address(start_master: StartMaster) -> None:
    master = start_master()
    first = port_of(master)
    with MasterClient(follow(lambda: master.address), "w", master_timeout_s=20.0) as client:
        assert guarded(first)
        move(master)
        master.start()
        client.status()
        assert port_of(master) != first
        assert guarded(port_of(master))
    assert not guarded(port_of(master))


def port_of(master: Master) -> int:
    return int(master.address.rpartition(":")[2])


def guarded(port: int) -> bool:
    """Whether a child forked now would drop a connection to this port."""
    loopback = ipaddress.ip_address("127.0.0.1")
    return any(guard.covers(loopback, port) for guard in tuple(processes._guards))


def test_an_address_that_nobody_knows_at_first_is_an_error() -> None:
    def find() -> str:
        raise MasterUnavailable("no actor")

    with pytest.raises(MasterUnavailable, match="no actor"):
        FollowingChannel(find)
