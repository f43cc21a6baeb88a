"""Trainers behind a network that breaks, stalls and delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from proxy import Proxy
from ride_kit import BATCH, Gate, Master, Trainer, check

from edl_torch import MasterClient
from edl_torch.client.grpc import channel
from edl_torch.errors import MasterUnavailable
from edl_torch.testing import wait_until

StartMaster = Callable[..., Master]


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., Proxy]]:
    proxies: list[Proxy] = []

    def start(master: Master, **options: int) -> Proxy:
        proxies.append(Proxy(master.address, **options))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("accumulate", [0, 3])
def test_a_broken_connection_is_made_anew_and_nothing_is_lost(
    start_master: StartMaster, start_proxy: Callable[..., Proxy], accumulate: int
) -> None:
    master = start_master(grace_s=5.0)
    proxy = start_proxy(master)
    gate = Gate(10)
    trainer = Trainer(proxy.address, gate, accumulate=accumulate)
    gate.wait_reached()
    taken = proxy.accepted
    proxy.cut()
    gate.open()
    check(master, trainer.done().trained)
    assert proxy.accepted > taken
    assert master.dispatcher.expired == 0


def test_a_connection_that_the_network_has_forgotten_is_given_up_for_another(
    start_master: StartMaster, start_proxy: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a gateway that has too many: neither end hears of it, and new ones pass."""
    shorter = [(name, 500 if value == 10_000 else value) for name, value in channel._OPTIONS]
    monkeypatch.setattr(channel, "_OPTIONS", shorter)
    master = start_master()
    proxy = start_proxy(master)
    with closing(MasterClient(proxy.address, master_timeout_s=40.0)) as client:
        client.status()
        client.status()
        proxy.forget()
        client.status()
        assert proxy.accepted > 1


def test_a_connection_that_breaks_again_and_again_loses_and_doubles_nothing(
    start_master: StartMaster, start_proxy: Callable[..., Proxy]
) -> None:
    master = start_master(grace_s=10.0)
    proxy = start_proxy(master, seed=11)
    proxy.delay(0.0, 0.004)
    proxy.cut_at_random(0.04)
    trainer = Trainer(proxy.address)
    check(master, trainer.done(40).trained)
    assert proxy.accepted > 1


@pytest.mark.parametrize("accumulate", [0, 4])
def test_a_black_hole_for_longer_than_the_timeout_doubles_what_was_in_hand(
    start_master: StartMaster, start_proxy: Callable[..., Proxy], accumulate: int
) -> None:
    master = start_master(lease_timeout_s=1.0)
    proxy = start_proxy(master)
    gate = Gate(8)
    cut_off = Trainer(
        proxy.address, gate, accumulate=accumulate
    )  # with 4: two steps done, one batch of the third
    gate.wait_reached()
    proxy.hold()
    gate.open()
    wait_until(lambda: master.dispatcher.expired == 1)
    others = Gate(30)
    living = Trainer(master.address, others)
    others.wait_reached()  # what the other held, and more
    proxy.release()
    wait_until(lambda: cut_off.batches > 12 or cut_off.error)
    others.open()
    in_hand = max(1, accumulate) * BATCH
    check(master, cut_off.done().trained, living.done().trained, doubled=in_hand)


def test_who_is_cut_off_hands_out_one_batch_and_then_waits(
    start_master: StartMaster, start_proxy: Callable[..., Proxy]
) -> None:
    master = start_master(lease_timeout_s=30.0, grace_s=30.0)
    proxy = start_proxy(master)
    gate = Gate(5)
    trainer = Trainer(proxy.address, gate, accumulate=100)  # no report is due: only presence can stop it
    gate.wait_reached()
    proxy.refuse()
    proxy.cut()
    wait_until(lambda: not trainer.attending)
    gate.open()
    wait_until(lambda: trainer.batches == 6)
    with pytest.raises(AssertionError, match="not within"):
        wait_until(lambda: trainer.batches > 6, timeout_s=0.25)
    proxy.refuse(False)
    check(master, trainer.done().trained)


def test_a_master_out_of_reach_is_an_error_that_names_it_and_never_an_end(
    start_master: StartMaster, start_proxy: Callable[..., Proxy]
) -> None:
    master = start_master(grace_s=30.0)
    proxy = start_proxy(master)
    gate = Gate(5)
    trainer = Trainer(proxy.address, gate, accumulate=100, master_timeout_s=0.5)
    gate.wait_reached()
    proxy.refuse()
    proxy.cut()
    wait_until(lambda: not trainer.attending)
    gate.open()
    with pytest.raises(MasterUnavailable, match=rf"{proxy.address} within 0\.5 s"):
        trainer.done()
    assert trainer.batches == 6
