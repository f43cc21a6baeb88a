"""A ledger beside a model that tracks every record of every epoch by itself; calls change both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from edl_torch.core.calls import NEW_PASS, Grant, PassState
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.token import Token
from edl_torch.errors import StaleLease
from edl_torch.shard import DatasetSpec, Slice, Source

Record = tuple[int, int, int]  # epoch, window, position

AHEAD, LENT, REMAINDER, TRAINED, BAD, DROPPED = "ahead", "lent", "remainder", "trained", "bad", "dropped"
NAMES = ("a", "b", "c", "d")


@dataclass
class ModelLease:
    """What the model knows of a live lease: its records by position, in order."""

    grant: Grant
    session: str
    positions: list[int]  # without outcome
    start: int
    stop: int
    back: set[int] = field(default_factory=set)  # given back

    def record(self, position: int) -> Record:
        return self.grant.slice.epoch, self.grant.slice.shard, position

    @property
    def done(self) -> int:
        """The acknowledged prefix reaches to the first record without outcome."""
        return min(self.positions, default=self.stop)


def records_of(piece: Slice) -> list[Record]:
    return [(piece.epoch, piece.shard, position) for position in range(piece.skip, piece.stop)]


class LedgerBesideModel(RuleBasedStateMachine):
    """The state, and the calls that change both sides."""

    @initialize(
        counts=st.lists(st.integers(0, 16), min_size=1, max_size=3).filter(any),
        per=st.integers(1, 16),
        shuffles=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        epochs=st.integers(1, 3),
        barrier=st.booleans(),
        window=st.integers(1, 5),
        sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    )
    def begin(
        self,
        counts: list[int],
        per: int,
        shuffles: tuple[bool, bool, bool],
        epochs: int,
        barrier: bool,
        window: int,
        sizes: list[int],
    ) -> None:
        self.spec = DatasetSpec(
            name="training",
            sources=tuple(Source(name=f"file-{i}", start=i, count=count) for i, count in enumerate(counts)),
            records_per_shard=per,
            seed=5,
            shuffle=shuffles[0],
            shuffle_shards=shuffles[1],
            shuffle_in_shard=shuffles[2],
            num_epochs=epochs,
            epoch_barrier=barrier,
            max_bad_records=10**6,
            shuffle_window=window,
        )
        self.ledger = ShardLedger(self.spec)
        self.state: dict[Record, str] = {
            (epoch, window, position): AHEAD
            for epoch in range(epochs)
            for window in self._windows(epoch)
            for position in range(self.ledger.plan.records_in(epoch, window))
        }
        self.sizes: dict[str, int] = {}
        self.live: dict[int, ModelLease] = {}
        self.gone: list[tuple[str, Grant]] = []  # leases that were taken back: nothing may touch them
        self.closed: list[tuple[str, Grant]] = []  # ended by their session and not confirmed yet
        self.handed: set[int] = set()
        self.drops: Counter[int] = Counter()
        self.largest_batch = max(sizes)
        self.saved: list[tuple[str, dict[Record, str]]] = []
        for name, size in zip(NAMES, sizes, strict=False):
            self._join(name, size)

    # Helpers --------------------------------------------------------------------------------------------

    def _windows(self, epoch: int) -> list[int]:
        return self.ledger.plan.windows_at(epoch, 0, self.ledger.plan.num_windows)

    def _join(self, name: str, size: int) -> None:
        self.ledger.join(name, size)
        self.sizes[name] = size
        self.largest_batch = max(self.largest_batch, size)

    def _in(self, *states: str) -> set[Record]:
        return {record for record, state in self.state.items() if state in states}

    def _forget(self, task: int, where: list[tuple[str, Grant]]) -> None:
        lease = self.live.pop(task)
        self.handed.discard(task)
        where.append((lease.session, lease.grant))

    def _close_if_done(self, task: int) -> None:
        if not self.live[task].positions:
            self._forget(task, self.closed)

    def _settle_drops(self) -> None:
        """The ledger may drop remainders, all of an epoch at once, only when nothing else of it is left."""
        while self.ledger.dropped > len(self._in(DROPPED)):
            remainders = Counter(record[0] for record in self._in(REMAINDER))
            busy = {record[0] for record in self._in(AHEAD, LENT)}
            if not self.spec.epoch_barrier:
                assert not busy, "dropped while records wait or are lent"
            free = [epoch for epoch in sorted(remainders) if not self.spec.epoch_barrier or epoch not in busy]
            assert free, "dropped records of an epoch that is not over"
            for record in self._in(REMAINDER):
                if record[0] == free[0]:
                    self.state[record] = DROPPED
                    self.drops[record[0]] += 1
        if self.spec.epoch_barrier:
            assert all(count < self.largest_batch for count in self.drops.values())
        else:
            assert sum(self.drops.values()) < self.largest_batch

    def _photo(self) -> tuple[str, str, int]:
        return self.ledger.snapshot().encode(), repr(self.ledger), len(self.ledger.leases)

    def _a_lease(self, data: st.DataObject) -> ModelLease:
        return self.live[data.draw(st.sampled_from(sorted(self.live)), label="task")]

    def _lease(self, name: str, asked: int, count: int, drained: bool, ahead: bool = False) -> None:
        before = self.ledger.snapshot()
        remainders_before = self._in(REMAINDER)
        was_over = asked != NEW_PASS and asked < before.epoch
        holds = any(lease.session == name for lease in self.live.values())
        epoch, state, grants = self.ledger.lease(name, epoch=asked, count=count, drained=drained, ahead=ahead)
        note(f"-> epoch {epoch} {state} {grants}")
        if drained:
            self.handed |= {task for task, lease in self.live.items() if lease.session == name}
        self._settle_drops()
        self._check_grants(name, epoch, grants, before, remainders_before)
        if not grants and not (ahead and not drained and holds and len(self.sizes) > 1):
            assert not self.ledger.backlog.waiting(epoch), "who has nothing to go on with is not refused"
        bundle = [g for g in grants if g.bundle]
        assert len(grants) - len(bundle) <= count
        assert len({g.task for g in grants} | set(self.live)) == len(grants) + len(self.live), (
            "task id used again"
        )
        for grant in grants:
            self._lend(name, grant)
        if grants:
            assert state is PassState.OPEN
        elif state is PassState.EPOCH_OVER:
            self._check_over(epoch)
        elif state is PassState.FINISHED:
            assert not self._in(AHEAD, LENT, REMAINDER)
        elif was_over and self.spec.epoch_barrier:
            assert self._waits_for_someone(epoch)

    def _lend(self, name: str, grant: Grant) -> None:
        for record in records_of(grant.slice):
            expected = REMAINDER if grant.bundle else AHEAD
            assert self.state[record] == expected, f"{record} is {self.state[record]}"
            self.state[record] = LENT
        piece = grant.slice
        positions = list(range(piece.skip, piece.stop))
        self.live[grant.task] = ModelLease(grant, name, positions, piece.skip, piece.stop)

    def _check_grants(
        self, name: str, epoch: int, grants: tuple[Grant, ...], before: Token, remainders: set[Record]
    ) -> None:
        size = self.sizes[name]
        ends = {(s.epoch, s.shard, s.stop) for s in before.open}
        for grant in grants:
            piece = grant.slice
            assert piece.limit > 0
            if self.spec.epoch_barrier:
                assert piece.epoch == epoch, "a pass never mixes epochs"
        waiting = [r for r in self._in(AHEAD) if r[0] == epoch or not self.spec.epoch_barrier]
        cursor_epoch = max([before.epoch, *(g.slice.epoch for g in grants)])
        begun = len([r for r in waiting if r[0] <= cursor_epoch])
        for grant in (g for g in grants if not g.bundle):
            piece = grant.slice
            at_end = piece.stop == self.ledger.plan.records_in(piece.epoch, piece.shard)
            assert piece.limit % size == 0 or at_end or (piece.epoch, piece.shard, piece.stop) in ends
            share = begun // (2 * len(self.sizes))
            if self.spec.epoch_barrier:
                assert piece.limit <= max(size, share - share % size), "the guided tail"
            assert piece.limit <= max(size, self.ledger.plan.window * self.spec.records_per_shard)
            begun -= piece.limit
        bundled = sum(g.slice.limit for g in grants if g.bundle)
        assert bundled % size == 0, "a bundle is whole batches"
        assert {r for g in grants if g.bundle for r in records_of(g.slice)} <= remainders
        assert len({g.bundle for g in grants if g.bundle}) <= 1

    def _check_over(self, epoch: int) -> None:
        """Over for this pass: nothing of the epoch waits, and what is lent is with drained trainers."""
        relevant = {r for r in self.state if r[0] == epoch or not self.spec.epoch_barrier}
        assert not relevant & self._in(AHEAD)
        for task, lease in self.live.items():
            if relevant & {lease.record(p) for p in lease.positions}:
                assert task in self.handed, f"the pass ended while task {task} may still produce batches"

    def _waits_for_someone(self, epoch: int) -> bool:
        """A pass over an epoch that the cursor has left stays open for somebody's sake only."""
        lent = any(t not in self.handed and held.grant.slice.epoch == epoch for t, held in self.live.items())
        return lent or any(self.state[r] in (AHEAD, REMAINDER) for r in self.state if r[0] == epoch)

    def _acknowledge(self, lease: ModelLease, upto: int, start: int = 0) -> None:
        who = lease.session, lease.grant.task, lease.grant.attempt
        if not lease.back.isdisjoint(range(start, upto)):
            photo = self._photo()
            with pytest.raises(StaleLease, match="were given back"):
                self.ledger.acknowledge(*who, upto, start=start)
            assert self._photo() == photo, "what is refused changes nothing"
            return
        self.ledger.acknowledge(*who, upto, start=start)
        for position in [p for p in lease.positions if start <= p < upto]:
            self.state[lease.record(position)] = TRAINED
            lease.positions.remove(position)
        self._close_if_done(lease.grant.task)
        self._settle_drops()

    def _give_back(self, lease: ModelLease, start: int, remainder: bool, upto: int | None = None) -> None:
        grant = lease.grant
        self.ledger.give_back(lease.session, grant.task, grant.attempt, start, upto, remainder=remainder)
        end = grant.slice.stop if upto is None else upto
        for position in [p for p in lease.positions if start <= p < end]:
            self.state[lease.record(position)] = REMAINDER if remainder else AHEAD
            lease.positions.remove(position)
            lease.back.add(position)
        self._close_if_done(grant.task)
        self._settle_drops()
