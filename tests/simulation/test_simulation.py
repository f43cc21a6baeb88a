"""Short simulations, and that they see what they are there to see. `make simulate` is the long version.

EDL_SIMULATION_SEEDS="17 18" runs other seeds than the usual ones.
"""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sim_cluster
from cases import cases
from run import mixture_options, options
from sim_cluster import Cluster
from sim_master import SimMaster
from sim_mixture import MixtureModel
from sim_model import BrokenPromise
from sim_network import Weather

from edl_torch.core import ledger, mixture
from edl_torch.core.backlog import Backlog
from edl_torch.core.changes import Changes, Mark
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import Lease, Leases
from edl_torch.core.ledger import ShardLedger
from edl_torch.errors import StaleLease
from edl_torch.shard import MixtureSegment, Slice
from edl_torch.trainer.elastic import ElasticPasses
from edl_torch.trainer.registrar import Confirmer
from edl_torch.trainer.vocabulary import Evidence, Procedure, Ticket

SEEDS = [int(word) for word in os.environ.get("EDL_SIMULATION_SEEDS", "11").split()]
PUSHES = 200  # on a heap: the most that an event may cost, four times of what it does
SHORT = {"trainers": 12, "shards": 1500, "faults": 200, "restores": 3}
BROKEN = {"trainers": 8, "shards": 800, "faults": 120, "restores": 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_every_promise_holds(seed: int) -> None:
    print(f"EDL_SIMULATION_SEEDS={seed}")
    result = Cluster(options(seed, **SHORT)).run()
    print(result)
    assert result.faults.total() == SHORT["faults"]


MIXED = {"shards": 500, "faults": 100, "restores": 3}


@cases("seed", [1], range(1, 60))
def test_each_index_of_a_mixture_is_the_record_of_its_book_whatever_happens(seed: int) -> None:
    cluster = Cluster(mixture_options(seed, **MIXED))
    cluster.run()
    assert isinstance(cluster.model, MixtureModel)
    assert cluster.model.changes
    assert cluster.model.read >= cluster.options.job.size


def test_it_is_fast_enough_to_be_of_use() -> None:
    """In units of this machine, whose pace at this moment is measured beside it: one of three runs."""
    costs: list[float] = []
    while len(costs) < 3 and min(costs, default=PUSHES) >= PUSHES:
        costs.append(1 / Cluster(options(6, **BROKEN)).run().rate / _push_s())
    assert min(costs) < PUSHES, costs


def _push_s(count: int = 100_000) -> float:
    """Processor time of one push onto a heap, and of every second one's pop."""
    heap: list[tuple[int, int]] = []
    began = time.process_time()
    for number in range(count):
        heapq.heappush(heap, (number * 7919 % 10007, number))
        if number % 2:
            heapq.heappop(heap)
    return (time.process_time() - began) / count


@pytest.mark.long
def test_hundreds_of_trainers() -> None:
    result = Cluster(options(4, trainers=400, shards=3000, faults=20, restores=0)).run()
    assert result.doubled <= result.allowed


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (8, {}),
        pytest.param(9, {}, marks=pytest.mark.long),
        # Granted to the new life of a session before its trainer had heard that it was registered.
        (12, {}),
        pytest.param(70, {}, marks=pytest.mark.long),
        # The master has been restarted in between.
        (8, {"master": 10, "stream": 10}),
        pytest.param(31, {"master": 10, "stream": 10}, marks=pytest.mark.long),
    ],
)
def test_calls_that_come_after_their_session_was_given_up_and_came_back(
    monkeypatch: pytest.MonkeyPatch, seed: int, faults: dict[str, int]
) -> None:
    """A lease of which its session never hears would keep the epoch open for ever."""
    monkeypatch.setattr(sim_cluster, "ALL_FAULTS", {"stop": 30, "cut": 30, "kill": 1} | faults)
    job = options(seed, trainers=12, shards=600, faults=300, restores=0)
    Cluster(replace(job, weather=Weather(0.002, 0.002, repeat=0.5, late=0.02))).run()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_loop_that_hung_is_handed_no_batch_of_a_lease_that_was_taken(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """It stood still for longer than the master waits, and went on before a heartbeat told it."""
    monkeypatch.setattr(sim_cluster, "ALL_FAULTS", {"hang": 1})
    Cluster(options(seed, **BROKEN | {"restores": 0})).run()


def test_a_seed_fixes_every_event(tmp_path: Path) -> None:
    few = BROKEN | {"shards": 200, "faults": 60}
    numbers = [word for name, value in few.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--seed", "9", *numbers]
    digests = set()
    for hash_seed in ("1", "2"):  # the order in sets of strings
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        digests.add(done.stdout.split("digest ")[1])
    assert len(digests) == 1
    assert Cluster(options(10, **few)).run().digest not in digests


# What breaks when the code does: each stands for one rule that somebody might take out ---------------------


def broken_fencing(patch: pytest.MonkeyPatch) -> None:
    """Any session may speak for any lease."""
    patch.setattr(Leases, "live", lambda self, session, task, attempt: self.find(task))


def broken_refusal(patch: pytest.MonkeyPatch) -> None:
    """A late acknowledgement is answered as if it had counted."""
    find = ShardLedger._find

    def lenient(self: ShardLedger, session: str, task: int, attempt: int) -> Lease | None:
        try:
            return find(self, session, task, attempt)
        except StaleLease:
            return None

    patch.setattr(ShardLedger, "_find", lenient)


def broken_return(patch: pytest.MonkeyPatch) -> None:
    """What comes back from the dead begins a record too early, where something was acknowledged."""
    slices = Lease.slices

    def too_much(self: Lease) -> Iterator[Slice]:
        found = list(slices(self))
        if found and self.done % 8:
            first = found[0]
            found[0] = Slice(epoch=first.epoch, shard=first.shard, skip=first.skip - 1, limit=first.limit + 1)
        return iter(found)

    patch.setattr(Lease, "slices", too_much)


def broken_replay(patch: pytest.MonkeyPatch) -> None:
    """A repeated request is a new one."""
    patch.setattr(Dispatcher, "_answered", lambda self, call, member: None)


def broken_lineage(patch: pytest.MonkeyPatch) -> None:
    """Calls of before a restore are answered."""
    patch.setattr(Dispatcher, "_fenced", lambda self, call: self._ledgers[call.dataset])


def broken_expiry(patch: pytest.MonkeyPatch) -> None:
    """Nobody is ever dead."""
    patch.setattr(Dispatcher, "expire", lambda self, now: ())


def broken_journal(patch: pytest.MonkeyPatch) -> None:
    """What waits is not written down."""
    of = Changes.of

    def forgetful(self: Changes, dataset: str) -> Mark:
        mark = of(self, dataset)
        return lambda kind, *key: None if kind == "waiting" else mark(kind, *key)

    patch.setattr(Changes, "of", forgetful)


def broken_tickets(patch: pytest.MonkeyPatch) -> None:
    """A batch is acknowledged when it is handed out."""
    hand = ElasticPasses.hand

    def eager(self: ElasticPasses, ticket: Ticket) -> Procedure[bool]:
        handed = yield from hand(self, ticket)
        self._settle(self._state.batches.reported(), Evidence.NEXT)
        yield from self._reporter.send()
        return handed

    patch.setattr(ElasticPasses, "hand", eager)


def broken_confirming(patch: pytest.MonkeyPatch) -> None:
    """A trainer that was cut off does not ask what is still its own."""
    patch.setattr(Confirmer, "ensure", lambda self: iter(()))


def broken_token(patch: pytest.MonkeyPatch) -> None:
    """A token does not say which weights hold."""
    patch.setattr(ledger, "needed", lambda segments, index: ())


def broken_start(patch: pytest.MonkeyPatch) -> None:
    """New weights hold for what is lent, too."""
    patch.setattr(Backlog, "passed", property(lambda self: max(0, self.plan.size - self._ahead - 8)))


def broken_lags(patch: pytest.MonkeyPatch) -> None:
    """What a component was owed is forgotten when weights change."""
    settled = mixture._settled
    patch.setattr(mixture, "_settled", lambda lags, *more: settled([0] * len(lags), *more))


def broken_promise(patch: pytest.MonkeyPatch) -> None:
    """Who gives other weights is answered before they are in the journal."""
    answer = SimMaster._answer

    def early(self: SimMaster, reply: Any, value: Any, error: Any) -> None:
        if isinstance(value, MixtureSegment):
            reply.send(value, error)
            reply = None
        answer(self, reply, value, error)

    patch.setattr(SimMaster, "_answer", early)


BREAKS_OF_MIXTURES = [
    (broken_lags, 1, "another order"),
    (broken_token, 6, "another record"),
    (broken_start, 1, "new weights hold for what is lent|lost or doubled"),
    (broken_promise, 1, "answered and are not kept"),
]


@cases("break_it, seed, promise", BREAKS_OF_MIXTURES[:1], BREAKS_OF_MIXTURES)
def test_code_that_breaks_a_promise_of_mixtures_is_found_out(
    monkeypatch: pytest.MonkeyPatch, break_it: Any, seed: int, promise: str
) -> None:
    break_it(monkeypatch)
    with pytest.raises(BrokenPromise, match=promise):
        Cluster(mixture_options(seed, **MIXED)).run()


BREAKS = [
    (broken_fencing, "late outcome was not refused"),
    (broken_return, "not the rest came back"),
    (broken_confirming, "lost lease was handed out"),
    (broken_tickets, "acknowledged, not trained"),
    (broken_refusal, "late outcome was not refused"),
    (broken_replay, "stuck|lost or doubled"),
    (broken_lineage, "another lineage was answered"),
    (broken_expiry, "stuck"),
    (broken_journal, "lost or doubled|lent again"),
]


@cases("break_it, promise", BREAKS[:4], BREAKS)
def test_code_that_breaks_a_promise_is_found_out(
    monkeypatch: pytest.MonkeyPatch, break_it: Any, promise: str
) -> None:
    break_it(monkeypatch)
    # Where nobody restores, what a trainer is handed can be judged to the end.
    seed, restores = (2, 0) if break_it is broken_confirming else (10, BROKEN["restores"])
    with pytest.raises(BrokenPromise, match=promise):
        Cluster(options(seed, **BROKEN | {"restores": restores})).run()
