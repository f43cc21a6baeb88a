"""Runs synchronous ranks as threads over one master in memory, and checks what their one model learns."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo
from loop_data import Numbers, reading_ahead
from loop_model import Model
from loop_program import Order
from loop_promises import BrokenPromise, check_gradient, is_bare_proof
from loop_reference import Batch, Counts
from rank_program import Poison, Ranks
from rank_reduce import Exchange, mean

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.audit.verdict import audit
from edl_torch.cli.verdict_words import inexact, undecided
from edl_torch.errors import AccountingError
from edl_torch.testing import FakeMaster, ThreadPeers

STUCK = "after the last optimizer.step()"

Saved = tuple[dict[str, str], list[torch.Tensor], Counts, Counts]  # token, weights, learnt, bad


class Rank:
    """One rank in its thread."""

    def __init__(
        self,
        program: Ranks,
        peers: ThreadPeers,
        exchange: Exchange,
        service: DataShardService,
        loader: ElasticDataLoader,
    ) -> None:
        self.program = program
        self.number = peers.rank
        self.exchange = exchange
        self.service = service
        self.loader = loader
        self.model = Model(len(program.every))
        self.optimizers = [torch.optim.SGD([head], lr=0.125) for head in self.model.heads]
        self.windows: list[list[Batch]] = [[] for _ in program.every]
        self.given = [0] * len(program.every)  # batches since each optimizer's last step
        self.learnt: Counts = Counter()  # by the first optimizer, of all ranks
        self.bad: Counts = Counter()  # on this rank
        self.saved: Saved | None = None
        self.is_padding = False  # whether the batch in hand is
        self._step = -1
        if program.attached:
            for optimizer in self.optimizers:
                service.attach(optimizer)

    def train(self, saved: Saved | None) -> None:
        token, weights, learnt, bad = saved or (None, self.model.copy(), Counter(), Counter())
        if saved is not None and self.program.forgets_model:
            learnt = Counter()
        else:
            self.model.load(weights)
        if not self.number:
            self.bad = Counter(bad)
        self.learnt = Counter(learnt)
        self.service.load_state_dict(token)
        for _ in range(self.program.data.epochs + 4):
            if self.service.finished:
                return
            self._one_pass()
        raise BrokenPromise("endless", "not finished")

    def _one_pass(self) -> None:
        batches, left = iter(self.loader), False
        if self.program.lookahead:
            batches = reading_ahead(batches, self.program.lookahead, self.loader.passed_on)
        for batch in batches:
            self._step += 1
            # A loop that does not weigh never asks, and learns from padding batches like from any other.
            counts = self.loader.weight if self.program.weighed else True
            self.is_padding = not len(self.loader.records)
            held = Batch(self.loader.epoch, batch.tolist() if counts else [])
            if left := self._step == self.program.leave:
                if self.program.trained:
                    self._backward(batch, held)
                break
            self._body(batch, held)
            if self._step == self.program.save:
                self._save()
        del batches
        if left and not self.program.flush:
            return
        for number, window in enumerate(self.windows):
            if self.given[number] or window:
                self._step_one(number)

    def _save(self) -> None:
        bad = sum(self.exchange.of(self.number, Counter(self.bad)), Counts())
        self.saved = self.service.state_dict(), self.model.copy(), Counter(self.learnt), bad

    def _body(self, batch: torch.Tensor, held: Batch) -> None:
        if (self._step, self.number) in self.program.failed and not self.is_padding:
            self.service.report_batch_done(err_msg="a bad batch")
            self.bad.update(held.records)
        else:
            self._backward(batch, held)
        for number, every in enumerate(self.program.every):
            self.given[number] += 1
            if self.given[number] >= every:
                self._step_one(number)

    def _backward(self, batch: torch.Tensor, held: Batch) -> None:
        loss = self.model.mean_loss(batch)
        if not held.numbers and self.program.poison is not Poison.NONE:
            loss = loss * float(self.program.poison)
        (self.loader.weigh(loss) if self.program.weighed else loss).backward()  # type: ignore[no-untyped-call]
        for window in self.windows:
            window.append(held)

    def _step_one(self, number: int) -> None:
        head, optimizer = self.model.heads[number], self.optimizers[number]
        gradients = self.exchange.of(self.number, None if head.grad is None else head.grad.clone())
        windows = self.exchange.of(self.number, list(self.windows[number]))
        if self.program.reduced:
            head.grad = mean(gradients, head)
        else:
            windows = [list(self.windows[number])]
        union = [batch for window in windows for batch in window if batch.numbers]
        if self.program.weighed:
            self.loader.scale_gradients(optimizer)
            if self.program.reduced and not self.program.trained:  # else it has a batch that went back
                self._check_gradient(number, union)
        optimizer.step()
        optimizer.zero_grad()
        self.windows[number], self.given[number] = [], 0
        if number == 0:
            self.learnt.update(record for batch in union for record in batch.records)

    def _check_gradient(self, number: int, union: list[Batch]) -> None:
        if union:
            expected = self.model.gradient(number, [n for batch in union for n in batch.numbers])
            check_gradient(self.model.heads[number].grad, expected, union)


def run(program: Ranks) -> str | None:
    """Raises BrokenPromise.

    Returns None unless one model has learnt each record once, as its ranks tell; then why that is not proven,
    or ''.
    """
    print(f"program: {program!r}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = _run_all(program, None, Path(folder))
        except AccountingError as error:  # nothing is left to make a window whole that was left
            if STUCK in str(error) and not program.flush:
                return None
            raise
        why = _check(program, ranks, Path(folder))
        saved = ranks[0].saved
        if program.heirs and saved is not None:
            calm = replace(program, size=program.heirs, leave=-1, failed=(), save=-1, heirs=0)
            why = _check(calm, _run_all(calm, saved, Path(folder)), Path(folder))
    return why


def _run_all(program: Ranks, saved: Saved | None, folder: Path) -> list[Rank]:
    fake = FakeMaster(ledger_id="first" if saved is None else "heirs'")
    exchange = Exchange(program.size)
    ranks: dict[int, Rank] = {}
    errors: dict[int, Exception] = {}

    def work(peers: ThreadPeers) -> None:
        try:
            with _rank(program, fake, peers, exchange, folder) as rank:
                ranks[peers.rank] = rank
                rank.train(saved)
        except Exception as error:  # noqa: BLE001  the top of a thread
            errors[peers.rank] = error
        finally:
            if peers.rank in errors:
                exchange.leave()
            peers.leave()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [
            threading.Thread(target=work, args=(peers,), daemon=True)
            for peers in ThreadPeers.group(program.size, 30.0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    if any(thread.is_alive() for thread in threads):
        raise BrokenPromise("hang", "a rank does not end")
    _raise(errors)
    return [ranks[number] for number in range(program.size)]


def _raise(errors: dict[int, Exception]) -> None:
    for error in errors.values():
        if isinstance(error, BrokenPromise) or STUCK in str(error):
            raise error
    for rank, error in errors.items():
        if not isinstance(error, threading.BrokenBarrierError):
            raise BrokenPromise("error without reason", f"rank {rank}: {error!r}") from error


@contextmanager
def _rank(
    program: Ranks, fake: FakeMaster, peers: ThreadPeers, exchange: Exchange, folder: Path
) -> Iterator[Rank]:
    data = program.data
    reader = Numbers(data.records, data.unreadable)
    with DataShardService(
        data.batch_size,
        fake.connect(f"rank{peers.rank}", in_process=program.in_process),
        reader=reader,
        num_epochs=data.epochs,
        records_per_shard=data.records_per_shard,
        shuffle=data.order is Order.RECORDS,
        shuffle_shards=data.order in (Order.SHARDS, Order.WINDOWS),
        shuffle_window=3 if data.order is Order.WINDOWS else None,
        max_bad_records=data.records * data.epochs,
        lookahead="manual" if program.lookahead else 0,
        audit_dir=folder,
    ) as service:
        shuffle = data.order is Order.IN_SHARD
        dataset = ShardedDataset(service, reader, shuffle, on_bad_record="quarantine")
        loader = ElasticDataLoader(dataset, synchronous=peers)
        yield Rank(program, peers, exchange, service, loader)


def _check(program: Ranks, ranks: list[Rank], folder: Path) -> str | None:
    """Each record is in the one model once, unless all left after a backward pass: then nothing is proven."""
    data = program.data
    bad = sum((rank.bad for rank in ranks), Counts())
    readable = [n for n in range(data.records) if n not in data.unreadable]
    expected = Counter({(epoch, n): 1 for epoch in range(data.epochs) for n in readable}) - bad
    (verdict,) = audit([folder])
    proven = is_bare_proof(verdict)
    one_model = program.reduced and not program.forgets_model
    for rank in ranks:
        lost, doubled = expected - rank.learnt, rank.learnt - expected
        promised = lost or (doubled and (proven or program.weighed))  # unweighed padding batches are copies
        if promised and one_model and (proven or not program.trained):
            raise BrokenPromise("learnt", f"lost {sorted(lost)}, doubled {sorted(doubled)}")
    exact = any(rank.learnt == expected for rank in ranks)
    if proven and not exact:
        raise BrokenPromise("proven", f"models have {[len(rank.learnt) for rank in ranks]}: {verdict.models}")
    if not exact or not program.attached:
        return None
    return "; ".join([*undecided(verdict), *inexact(verdict)])
