"""A master that comes back at another address, under trainers that follow it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest
from ride_kit import Gate, Master, Trainer, check

from edl_torch import MasterClient
from edl_torch.client.grpc.channel import FollowingChannel
from edl_torch.errors import MasterUnavailable
from edl_torch.system import processes
from edl_torch.testing import wait_until

StartMaster = Callable[..., Master]


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
