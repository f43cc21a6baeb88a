"""The weights of a simulated model: the multiset of records that it learnt, compared with what a token says.

Neither asks the master, nor uses the token's or the ledger's code: a token is JSON here, and the order of
shards is asked of a plan shard by shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from sim_model import BrokenPromise
from sim_trainer import Job

from edl_torch.core.plan import Plan

Counts = npt.NDArray[np.uint8]  # how often each record was learnt: by epoch, and by its place in the storage
Run = tuple[int, int, int]  # epoch, place of the first record, place after the last
SHOWN = 3


class Weights:
    """A model's weights."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def __repr__(self) -> str:
        return f"<Weights {int(self.counts.sum())} records>"

    def learn(self, runs: Iterable[Run]) -> None:
        """A step of the optimizer over these records."""
        for epoch, first, after in runs:
            self.counts[epoch, first:after] += 1

    def copy(self) -> Weights:
        """The same, at this moment."""
        return Weights(self.counts.copy())


class Judge:
    """Compares weights with tokens of one job. Every method raises BrokenPromise."""

    def __init__(self, job: Job) -> None:
        self._job = job
        plan = Plan(job.spec())
        self._per = job.records_per_shard
        self._shards = plan.num_shards
        places = np.arange(self._shards * self._per)
        self._is_record = places < job.size
        every = job.bad_every
        self._is_bad = (places + 7) % every == 0 if every else np.zeros_like(self._is_record)
        self._order = [
            np.array([plan.shard_at(epoch, position) for position in range(self._shards)])
            for epoch in range(job.epochs)
        ]
        self.compared = 0

    def first_records(self, shards: int) -> list[int]:
        """The places of the first records of the first shards of epoch 0."""
        return [int(shard) * self._per for shard in self._order[0][:shards]]

    def nothing(self) -> Weights:
        """A model that has learnt nothing."""
        return Weights(np.zeros((self._job.epochs, len(self._is_record)), np.uint8))

    def same(self, weights: Weights, token: str, where: str) -> None:
        """Weights and token are the same instant: what the token counts was learnt once, nothing else was."""
        self.compared += 1
        fields = json.loads(token)
        counted = self._counted(fields)
        missing, surplus = weights.counts < counted, weights.counts > counted
        dropped = 0
        if fields["dropped"]:  # the token does not say which: less than a batch of each epoch behind it
            per_epoch = missing[: fields["cursor"][0]].sum(axis=1)
            dropped = int(per_epoch.sum()) if (per_epoch < self._job.batch).all() else 0
        if surplus.any() or int(missing.sum()) != dropped or dropped != fields["dropped"]:
            raise BrokenPromise(
                f"model and token differ at {where}: the model has {int(weights.counts.sum())} records, the "
                f"token counts {int(counted.sum()) - fields['dropped']}; not in the model "
                f"{self._named(missing)}, too often in it {self._named(surplus)}; cursor "
                f"{fields['cursor']}, {len(fields['open'])} open slices, {fields['dropped']} records dropped"
            )

    def _counted(self, fields: dict[str, Any]) -> Counts:
        """1 for each record that was trained on (or dropped), by what the token says."""
        epoch, position, offset = fields["cursor"]
        counted = np.zeros((self._job.epochs, self._shards, self._per), np.int8)
        counted[:epoch] = 1
        if epoch < self._job.epochs:
            order = self._order[epoch]
            counted[epoch, order[:position]] = 1
            if offset:
                counted[epoch, order[position], :offset] = 1
        counted = counted.reshape(self._job.epochs, -1) * self._is_record.astype(np.int8)
        for of, shard, skip, limit in (*fields["open"], *fields["crumbs"]):
            counted[of, shard * self._per + skip : shard * self._per + skip + limit] -= 1
        for of, shard, place, *_ in fields["quarantine"]:
            counted[of, shard * self._per + place] -= 1
        if (counted < 0).any():
            raise BrokenPromise(f"a token has two places for a record: {self._named(counted < 0)}")
        return counted.view(np.uint8)

    def nothing_missing(self, weights: Weights, where: str) -> None:
        """Every record of every epoch was learnt, but for those that cannot be read or fill no batch."""
        wanted = self._wanted()
        missing = weights.counts < wanted
        allowed = self._job.batch - 1 if self._job.drop_last else 0
        if (missing.sum(axis=1) > allowed).any():
            raise BrokenPromise(
                f"{where}: {int(missing.sum())} of {int(wanted.sum()) * self._job.epochs} records were never "
                f"trained, {self._named(missing)}"
            )

    def complete(self, weights: Weights, where: str) -> None:
        """That, and none of them was learnt twice."""
        self.nothing_missing(weights, where)
        surplus = weights.counts > self._wanted()
        if surplus.any():
            raise BrokenPromise(f"{where}: trained too often {self._named(surplus)}")

    def _wanted(self) -> Counts:
        return (self._is_record & ~self._is_bad).astype(np.uint8)

    def _named(self, which: npt.NDArray[np.bool_]) -> str:
        """How many records, and the first of them as epoch:shard:position."""
        epochs, places = which.nonzero()
        named = ", ".join(
            f"{epoch}:{place // self._per}:{place % self._per}"
            for epoch, place in zip(epochs[:SHOWN].tolist(), places[:SHOWN].tolist(), strict=True)
        )
        return f"{len(places)} ({named})" if named else "0"
