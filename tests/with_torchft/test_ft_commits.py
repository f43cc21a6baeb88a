"""Under torchft every record is learnt once an epoch, whatever commits fail, and whoever is healed."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchft's imports
    from replicas import Fault, Replica, run

from edl_torch import ElasticDataLoader
from edl_torch.errors import ForeignLoop, Unsupported
from edl_torch.integrations.torchft import attach_manager
from edl_torch.testing import FakeMaster

RECORDS = 107
EPOCHS = 2


def test_one_replica_whose_commits_fail(lighthouse: str) -> None:
    chance = random.Random(3)
    master = FakeMaster()
    alone = Replica(0, lighthouse, master, RECORDS, window=3, after=fails(chance, 0.3))
    run(alone)
    assert alone.failed > 2
    check(master, alone)


@pytest.mark.parametrize("window", [1, 3])
def test_a_replica_that_fails_when_its_gradients_are_in_the_sum(lighthouse: str, window: int) -> None:
    """The other one commits; the step is in the model that this one takes over."""
    master = FakeMaster()
    replicas = [
        Replica(0, lighthouse, master, RECORDS, window=window),
        Replica(1, lighthouse, master, RECORDS, window=window, after=fails_each_second),
    ]
    run(*replicas)
    assert replicas[1].failed > 1
    assert all(at > replicas[1].ended for at in replicas[0].failures), "it fails for one that has left alone"
    check(master, *replicas)


def test_a_model_that_could_not_be_fetched_is_asked_for_again(lighthouse: str) -> None:
    """Whether the others have committed is not known before."""
    master = FakeMaster()
    replicas = [
        Replica(0, lighthouse, master, RECORDS),
        Replica(1, lighthouse, master, RECORDS, after=fails_each_second),
    ]
    fetches_but_once(replicas[1])
    run(*replicas)
    assert replicas[0].failed
    check(master, *replicas)


def test_a_step_that_fails_for_all_is_in_no_model(lighthouse: str) -> None:
    master = FakeMaster()
    replicas = [
        Replica(0, lighthouse, master, RECORDS),
        Replica(1, lighthouse, master, RECORDS, before=fails_at(2)),
    ]
    run(*replicas)
    assert [replica.failed for replica in replicas] == [1, 1]
    check(master, *replicas)


def test_a_replica_that_comes_later_is_healed(lighthouse: str) -> None:
    master = FakeMaster()
    replicas = [Replica(number, lighthouse, master, RECORDS) for number in range(2)]
    run(*replicas, delays_s=(0.0, 0.5))
    check(master, *replicas)


def test_spares_learn_nothing(lighthouse: str) -> None:
    from torchft.manager import WorldSizeMode

    master = FakeMaster()
    mode = WorldSizeMode.FIXED_WITH_SPARES
    replicas = [Replica(number, lighthouse, master, RECORDS, world_size_mode=mode) for number in range(2)]
    run(*replicas)
    check(master, *replicas)


def test_a_loop_with_a_manager_that_is_not_attached_is_refused() -> None:
    from torchft import Manager

    with ElasticDataLoader(range(12), 4, synchronous=False) as loader:
        assert len(list(loader)) == 3
        manager = Manager.__new__(Manager)
        with pytest.raises(ForeignLoop, match=r"attach_manager\(loader, manager\)"):
            next(iter(loader))
        del manager


def test_a_manager_of_several_ranks_is_refused() -> None:
    from torchft import Manager

    manager = Manager.__new__(Manager)
    manager._group_world_size = 2
    with (
        ElasticDataLoader(range(12), 4, synchronous=False) as loader,
        pytest.raises(Unsupported, match="groups of one rank, and this one has 2"),
    ):
        attach_manager(loader, manager)


def fails(chance: random.Random, rate: float) -> Fault:
    """A fault that strikes this often."""

    def fault(replica: Replica) -> None:
        if chance.random() < rate:
            replica.manager.report_error(RuntimeError("injected"))

    return fault


def fails_each_second(replica: Replica) -> None:
    """A fault in each second step."""
    if replica.attempts % 2 == 0:
        replica.manager.report_error(RuntimeError("injected"))


def fetches_but_once(replica: Replica) -> None:
    """Let a replica fail once where it takes over a model after a commit that failed."""
    transport = replica.manager._checkpoint_transport
    fetch = transport.recv_checkpoint

    def broken(*args: Any, **kwargs: Any) -> Any:
        if replica.attempts < 2:  # at the start all take over one model
            return fetch(*args, **kwargs)
        transport.recv_checkpoint = fetch
        replica.group.abort()
        raise ConnectionError("injected")

    transport.recv_checkpoint = broken


def fails_at(attempt: int) -> Fault:
    """A fault in one step."""

    def fault(replica: Replica) -> None:
        if replica.attempts == attempt:
            replica.manager.wait_quorum()
            replica.manager.report_error(RuntimeError("injected"))
            replica.group.abort()  # the other one waits no longer

    return fault


def check(master: FakeMaster, *replicas: Replica) -> None:
    """The newest model has learnt each record once an epoch, and that is what the master was told."""
    newest = max(replicas, key=lambda replica: replica.manager.current_step())
    assert newest.counts.tolist() == [EPOCHS] * RECORDS
    master.outcomes["training"].check_complete(EPOCHS)
