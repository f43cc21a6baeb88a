"""The weights of a simulated model: the multiset of records that it learnt, compared with what a token says.

Neither asks the master, nor uses the token's or the ledger's code: a token is JSON here, and the order of
records is asked of a plan, whole windows at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from sim_model import BrokenPromise
from sim_trainer import Job

from edl_torch.core.plan import Plan
from edl_torch.shard import Slice

Counts = npt.NDArray[np.uint8]  # how often each record was learnt: by epoch, and by its number
Run = tuple[int, npt.NDArray[np.int64]]  # epoch, and numbers of records, each once
SHOWN = 3


class Weights:
    """A model's weights: what they have learnt of these data, and `parameters`, of all.

    `forgot` says that its user went back to a token alone: no token is of this model.
    """

    def __init__(self, counts: Counts, parameters: Counts, *, forgot: bool = False) -> None:
        self.counts = counts
        self.parameters = parameters
        self.forgot = forgot

    def __repr__(self) -> str:
        return f"<Weights {int(self.counts.sum())} records>"

    def learn(self, runs: Iterable[Run]) -> None:
        """A step of the optimizer over these records."""
        for epoch, numbers in runs:
            self.counts[epoch][numbers] += 1
            self.parameters[epoch][numbers] += 1

    def copy(self) -> Weights:
        """The same, at this moment."""
        return Weights(self.counts.copy(), self.parameters.copy(), forgot=self.forgot)


class Judge:
    """Compares weights with tokens of one job. Every method raises BrokenPromise.

    Epochs before `first_epoch` were of other data: nobody looks at what was learnt there.
    """

    def __init__(self, job: Job, first_epoch: int = 0, *, compared: int = 0) -> None:
        self._job = job
        self._first_epoch = min(first_epoch, job.epochs)
        self.data = job.data
        self._width = 1 << (job.size + 100).bit_length()  # the same for all data that follow
        plan = Plan(job.spec())
        self._is_bad = job.is_bad(np.arange(job.size))
        # Of each epoch: its windows in their order, where they begin, and all records in theirs.
        self._windows = [
            [plan.window_at(epoch, place) for place in range(plan.num_windows)] for epoch in range(job.epochs)
        ]
        self._starts: list[dict[int, int]] = []
        self._order = np.empty((job.epochs, job.size), np.int64)
        for epoch, windows in enumerate(self._windows):
            lengths = [plan.records_in(epoch, window) for window in windows]
            starts = accumulate(lengths, initial=0)
            self._starts.append(dict(zip(windows, starts, strict=False)))
            whole = (
                Slice(epoch=epoch, shard=window, skip=0, limit=length)
                for window, length in zip(windows, lengths, strict=True)
            )
            order = np.concatenate([plan.indices(window).numbers for window in whole])
            assert (np.sort(order) == np.arange(job.size)).all(), "an epoch has each record once"
            self._order[epoch] = order
        self.compared = compared

    def first_records(self, count: int) -> npt.NDArray[np.int64]:
        """The first records of epoch 0."""
        return self._order[0][:count]

    def nothing(self) -> Weights:
        """A model that has learnt nothing."""
        return self.on_these_data(np.zeros((self._job.epochs, self._width), np.uint8))

    def on_these_data(self, parameters: Counts) -> Weights:
        """A model that has learnt nothing of these data."""
        counts = np.zeros((self._job.epochs, self._job.size), np.uint8)
        counts[: self._first_epoch] = 1
        return Weights(counts, parameters)

    def same(self, weights: Weights, token: str, where: str) -> None:
        """Weights and token are the same instant: what the token counts was learnt once, nothing else was."""
        if weights.forgot:
            return
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
        counted = np.zeros((self._job.epochs, self._job.size), np.int8)
        counted[:epoch] = 1
        if epoch < self._job.epochs and position < len(self._windows[epoch]):
            before = self._starts[epoch][self._windows[epoch][position]]
            counted[epoch, self._order[epoch][: before + offset]] = 1
        elif epoch < self._job.epochs:
            counted[epoch] = 1
        for of, window, skip, limit in (*fields["open"], *fields["crumbs"]):
            first = self._starts[of][window] + skip
            counted[of, self._order[of][first : first + limit]] -= 1
        bad = [(of, self._starts[of][window] + place) for of, window, place, *_ in fields["quarantine"]]
        if bad:
            epochs, places = np.array(bad).T
            np.subtract.at(counted, (epochs, self._order[epochs, places]), 1)
        if (counted < 0).any():
            raise BrokenPromise(f"a token has two places for a record: {self._named(counted < 0)}")
        return counted.view(np.uint8)

    def nothing_missing(self, weights: Weights, where: str) -> None:
        """Every record of every epoch was learnt, but for those that cannot be read or fill no batch."""
        if weights.forgot:
            return
        wanted = self._wanted()
        missing = weights.counts < wanted
        allowed = self._job.batch - 1 if self._job.drop_last else 0
        if (missing.sum(axis=1) > allowed).any():
            raise BrokenPromise(
                f"{where}: {int(missing.sum())} of {int(wanted.sum())} records were never "
                f"trained, {self._named(missing)}"
            )

    def complete(self, weights: Weights, where: str) -> None:
        """That, and none of them was learnt twice."""
        self.nothing_missing(weights, where)
        surplus = weights.counts > self._wanted()
        if not weights.forgot and surplus.any():
            raise BrokenPromise(f"{where}: trained too often {self._named(surplus)}")

    def _wanted(self) -> Counts:
        wanted = np.tile((~self._is_bad).astype(np.uint8), (self._job.epochs, 1))
        wanted[: self._first_epoch] = 1
        return wanted

    def _named(self, which: npt.NDArray[np.bool_]) -> str:
        """How many records, and the first of them as epoch:number."""
        epochs, numbers = which.nonzero()
        named = ", ".join(
            f"{epoch}:{number}"
            for epoch, number in zip(epochs[:SHOWN].tolist(), numbers[:SHOWN].tolist(), strict=True)
        )
        return f"{len(numbers)} ({named})" if named else "0"
