"""Runs a program: real loaders, real torch, a master in memory; checks the promises as it goes.

What a batch holds it reads from the batch: each sample is its record's number.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from loop_data import NumberColumns, Numbers, NumbersInOrder, reading_ahead
from loop_model import Model
from loop_program import Flush, Kind, Order, Place, Program, Report, Seed, Way
from loop_promises import (
    Books,
    BrokenPromise,
    Judged,
    check_finished,
    check_gradient,
    check_once,
    check_verdict,
)
from loop_reference import Batch, Reference, Saved
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import ConcurrentIteration, EdlError
from edl_torch.testing import FakeMaster

TRIES = 6  # passes more than a loop needs: three silent ones are an error


class Left(Exception):
    """The loop's body raised."""


class Broken(Exception):
    """The loop's body says `break`."""


class Interpreter:
    """One job: a model, and the loops that train it."""

    def __init__(self, program: Program, *, forgets_model: bool = False) -> None:
        self.program = program
        self.forgets_model = forgets_model
        self.reference = Reference(len(program.optimizers), program.attached, plain=program.loader.plain)
        self.model = Model(len(program.optimizers))
        self.saved: tuple[dict[str, str], list[torch.Tensor], Saved] | None = None
        self.error: EdlError | None = None
        self.finished = False
        self.judged: Judged | None = None  # by its audit
        self.heir: Interpreter | None = None  # that went on from what was saved
        self._batches = 0
        self._epoch = 0
        self._restored = False  # it went on from a token
        self._overflowed: set[int] = set()  # optimizers whose gradients are not finite
        self._unsure: set[int] = set()  # of whose gradients a part is gone, or was scaled by something else
        self._kept: list[Any] = []
        self._scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if program.scaler else None

    def run(self, fake: FakeMaster, folder: Path | None) -> None:
        """Train to the end, or until there is an error. Raises BrokenPromise."""
        self.books = Books(fake, self.program)
        with warnings.catch_warnings(record=True) as self._warned:
            warnings.simplefilter("always")
            with self._service(fake, folder) as (self.service, dataset):
                self._loader, self._generator = self._make_loader(dataset)
                try:
                    if self.saved is not None:
                        self._restore()
                    self._renew()
                    self._train()
                except EdlError as error:
                    self.error = error
                except RuntimeError as error:  # torch's, of a loader worker
                    raise BrokenPromise("unclear error", repr(error)) from error
                self.books.check(self.reference)
                self._kept.clear()
        self._judge(folder)

    @property
    def warnings(self) -> list[str]:
        """What the user was told."""
        return [str(said.message) for said in self._warned]

    def _judge(self, folder: Path | None) -> None:
        if self.error is not None and self.program.is_sound:
            raise BrokenPromise("error without reason", repr(self.error)) from self.error
        exact = self.program.is_sound and not (
            self.program.loader.plain and self.program.loader.workers > 1 and self.program.is_left_early
        )
        if exact:
            check_once(self.program, self.reference)
        if self.finished:
            check_finished(self.program, self.reference)
        if folder is not None and self.reference.batches:
            self.judged = check_verdict(self.program, self.reference, folder, ended=self.error is None)

    # What it is made of -----------------------------------------------------------------------------------

    @contextmanager
    def _service(
        self, fake: FakeMaster, folder: Path | None
    ) -> Iterator[tuple[DataShardService, ShardedDataset]]:
        data = self.program.data
        kind = Numbers if data.picked else NumbersInOrder
        reader = (NumberColumns if self.program.loader.columnar else kind)(data.records, data.unreadable)
        with DataShardService(
            data.batch_size,
            fake.connect(in_process=self.program.loader.in_process),
            reader=reader,
            num_epochs=data.epochs,
            records_per_shard=data.records_per_shard,
            shuffle=data.order is Order.RECORDS,
            shuffle_shards=data.order in (Order.SHARDS, Order.WINDOWS),
            shuffle_window=3 if data.order is Order.WINDOWS else None,
            lookahead="manual" if self.program.told else self.program.lookahead,
            max_bad_records=data.records * data.epochs,
            audit_dir=folder,
        ) as service:
            shuffle = data.order is Order.IN_SHARD
            yield service, ShardedDataset(service, reader, shuffle, on_bad_record="quarantine")

    def _make_loader(self, dataset: ShardedDataset) -> tuple[DataLoader[Any], torch.Generator]:
        wanted = self.program.loader
        generator = torch.Generator()
        arguments: dict[str, Any] = {"num_workers": wanted.workers, "drop_last": wanted.drop_last}
        if wanted.seed is Seed.GENERATOR:
            arguments["generator"] = generator
        if wanted.workers:
            arguments |= {"multiprocessing_context": "fork", "persistent_workers": wanted.persistent}
            arguments |= {"prefetch_factor": wanted.prefetch, "in_order": wanted.in_order}
        if wanted.threads:
            arguments |= {"num_threads": wanted.threads, "prefetch_factor": wanted.prefetch}
        if not wanted.plain:
            columnar = {"batch_size": None} if wanted.columnar else {}
            return ElasticDataLoader(dataset, **columnar, **arguments), generator
        size = self.program.data.batch_size if wanted.batch_size is None else wanted.batch_size or None
        return DataLoader(dataset, size, **arguments), generator

    def _renew(self) -> None:
        old = getattr(self, "_optimizers", [])
        self.reference.renewed()
        if self.program.renew == "detach":
            for optimizer in old:
                self.service.detach(optimizer)
        self._optimizers = [
            torch.optim.SGD([below, head], lr=plan.rate, fused=plan.fused or None)
            for below, head, plan in zip(
                self.model.below, self.model.heads, self.program.optimizers, strict=True
            )
        ]
        for number in sorted(self.program.attached):
            self.service.attach(self._optimizers[number])

    # Passes -----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        program = self.program
        passes, warned = program.data.epochs, 0
        if not program.counted_epochs:
            passes += len(program.incidents) + TRIES + (program.take and passes * program.data.records)
        for number in range(passes):
            if not program.counted_epochs and self.service.finished:
                break
            if number and program.renew:
                self._renew()
            warned = len(self._warned)
            self._one_pass()
        self.finished = self.service.finished
        again = program.is_left_early or program.has(Kind.RESTORE) or (program.reads_far and program.gathers)
        if not self.finished and program.is_sound and not (program.counted_epochs and again):
            raise BrokenPromise("endless", f"not finished after {passes} passes")
        silent = warned == len(self._warned) and not (program.counted_epochs or program.gets_nowhere)
        if not self.finished and not program.is_sound and silent:
            raise BrokenPromise("endless without error", f"not finished after {passes} passes")

    def _one_pass(self) -> None:
        self._seed()
        self._epoch = self.service.epoch
        given, before, warned = 0, self._batches, len(self._warned)
        iterator = self._begin()
        try:
            source = iterator
            if self.program.lookahead:
                told = [self._loader.passed_on] if self.program.told else []
                source = reading_ahead(iterator, self.program.lookahead, *told)
            for batch in islice(source, self.program.take or None):
                given += 1
                try:
                    self._body(batch)
                except Broken:
                    self._leave()
                    break
        except Left:
            self._leave()
        if any("after the last optimizer.step()" in str(said.message) for said in self._warned[warned:]):
            self.reference.declared()  # what waited for a step counts without one, as the loop was told
        if given and given == self.program.take:
            self._not_passed()
            self._leave()
        keep = any(i.keep_iterator for i in self.program.incidents if before <= i.at < self._batches)
        if keep:
            self._kept.append(iterator)
        del iterator, source
        self._flush()
        if self.program.saves_passes:
            self._save()
        if not given and self.program.is_sound and not self._may_be_empty and not self.service.finished:
            raise BrokenPromise("empty pass", f"epoch {self._epoch}")

    @property
    def _may_be_empty(self) -> bool:
        """Where nothing but records that are dropped, or cannot be read, is left of an epoch."""
        data, left = self.program.data, self.program.is_left_early or self._restored
        if left and data.unreadable:
            return True
        return self.program.loader.drop_last and (
            left or data.records - len(data.unreadable) < data.batch_size
        )

    def _begin(self) -> Iterator[Any]:
        try:
            return iter(self._loader)
        except ConcurrentIteration:
            if not self._kept or not isinstance(self._loader, ElasticDataLoader):
                raise
            self._loader.close()
            return iter(self._loader)

    def _seed(self) -> None:
        if self.program.loader.seed is Seed.GLOBAL:
            torch.manual_seed(0)
        self._generator.manual_seed(0)

    def _not_passed(self) -> None:
        """`islice` does not ask for a batch after its last one."""
        if self.reference.hand is not None:
            self.reference.hand.passed = False

    def _leave(self) -> None:
        """The loop is left: gradients of the batch in hand are thrown away, and all others with them.

        Or they stay, and the batch that went back is learnt twice where it was among them."""
        reference = self.reference
        lost = reference.batches if self.program.loader.plain else reference.batches[-1:]
        reference.left(lost)
        if any(reference.hand in window for window in reference.windows):
            self._unsure |= {n for n, window in enumerate(reference.windows) if window}
            if self.program.zeroes:
                self._zero_grad()

    def _flush(self) -> None:
        last = self._epoch >= self.program.data.epochs - 1
        if self.program.flush is Flush.PASS or (self.program.flush is Flush.END and last):
            self._step(lambda number: bool(self.reference.windows[number]))

    # One batch --------------------------------------------------------------------------------------------

    def _body(self, batch: Any) -> None:
        numbers = torch.atleast_1d(torch.as_tensor(batch))
        if self.program.told:  # that a wrapped loop was left is known once it is begun again
            self._epoch = self._loader.epoch
        held = self.reference.delivered(self._epoch, numbers.tolist())
        at, self._batches = self._batches, self._batches + 1
        self.books.check(self.reference)
        if self._happens(at, Place.FETCHED):
            return
        if self.program.looks:
            with torch.no_grad():
                self.model.mean_loss(numbers)
        for below in self.model.below:
            below.requires_grad_(not self.program.freezes or at % 2 == 0)
        if self.program.delayed:
            self._step(self._is_due, before_hand=True)
            self.books.check(self.reference)
        self._backward(numbers, held, at)
        self._happens(at, Place.BACKWARD)
        if not self.program.delayed:
            self._step(self._is_due)
        if self.program.swaps:
            self._swap()
        self.books.check(self.reference)
        if any((i.at, i.kind) == (at, Kind.AGAIN) for i in self.program.incidents):
            self._backward(numbers, held, -1)
            self._step(self._is_due)
        self._report(held)
        if self._happens(at, Place.STEPPED):
            return
        self.books.check(self.reference)
        held.passed = True

    def _is_due(self, number: int) -> bool:
        """A loop that steps at its head does so before its first batch too, where it steps on each."""
        every = self.program.optimizers[number].every
        return len(self.reference.windows[number]) >= every or (self.program.delayed and every == 1)

    def _swap(self) -> None:
        """As an average of the weights is put in their place for an evaluation, and they are put back."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                values = parameter.clone()
                parameter.mul_(0.5)
                parameter.copy_(values)

    def _happens(self, at: int, place: Place) -> bool:
        """Incidents of this place; whether the body ends with them."""
        ends = False
        for incident in self.program.incidents:
            if (incident.at, incident.place) == (at, place):
                ends |= self._happen(incident.kind)
        return ends

    def _happen(self, kind: Kind) -> bool:
        match kind:
            case Kind.BREAK:
                raise Broken
            case Kind.RAISE:
                raise Left
            case Kind.QUARANTINE:
                self._quarantine()
                return True
            case Kind.GIVE_BACK:
                hand = self.reference.hand
                assert hand is not None
                self._loader.give_back()
                self.reference.left([hand])
                hand.back = True
                return True
            case Kind.ROLLBACK:
                if self.saved is not None:
                    self.model.load(self.saved[1])
                    self.reference.learnt = [Counter(learnt) for learnt in self.saved[2].learnt]
                    self.reference.zeroed()
                    self._overflowed.clear()
                    self._unsure = set(range(len(self.program.optimizers)))
            case Kind.ZERO_GRAD:
                self._unsure |= {n for n, window in enumerate(self.reference.windows) if window}
                self._zero_grad()
            case Kind.CONTINUE:
                hand = self.reference.hand
                assert hand is not None
                hand.passed = True
                return True
            case Kind.REPORT:
                self._say()
            case Kind.SAVE:
                if not self.reference.attached and not self.program.loader.plain:
                    self.reference.declared()
                self._save()
            case Kind.RESTORE:
                return self._go_back()
        return False

    def _backward(self, numbers: torch.Tensor, held: Batch, at: int) -> None:
        kinds = {incident.kind for incident in self.program.incidents if incident.at == at}
        self.model.fails = bool(kinds & {Kind.FAILS, Kind.RETRIES})
        plans = self.program.optimizers
        trained = [n for n, plan in enumerate(plans) if at < 0 or at % plan.trains == 0]
        if any(plan.trains > 1 for plan in plans):
            for n, (below, head) in enumerate(zip(self.model.below, self.model.heads, strict=True)):
                below.requires_grad_(n in trained)
                head.requires_grad_(n in trained)
        self.reference.backward(held, trained)
        if self._scaler is not None and Kind.OVERFLOW in kinds:
            self._overflowed |= set(trained)
        if not trained:
            return
        try:
            self._pass_back(numbers, at)
        except MemoryError:
            self.model.fails = False
            if Kind.RETRIES in kinds:
                self._unsure |= {n for n, window in enumerate(self.reference.windows) if len(window) > 1}
                self._zero_grad()
                self.reference.backward(held)
                self._pass_back(numbers, at)
            else:
                self.reference.partial.append(held)
                self._unsure |= set(range(len(self.program.optimizers)))
        if self.program.clips:  # each optimizer's alone: of all of them one overflow makes 0
            for pair in zip(self.model.heads, self.model.below, strict=True):
                torch.nn.utils.clip_grad_norm_(pair, 1e12)

    def _pass_back(self, numbers: torch.Tensor, at: int) -> None:
        match self.program.way:
            case Way.PARTS:
                for _ in range(2):
                    self._loss(numbers, at, 0.5).backward()  # type: ignore[no-untyped-call]
            case Way.RETAIN:
                loss = self._loss(numbers, at, 0.5)
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                loss.backward()  # type: ignore[no-untyped-call]
            case Way.BY_HAND:
                trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
                gradients = torch.autograd.grad(self._loss(numbers, at, 1.0), trained)
                for parameter, gradient in zip(trained, gradients, strict=True):
                    new = gradient.clone()  # it may be a view that is stretched
                    parameter.grad = new if parameter.grad is None else parameter.grad + new
            case _:
                self._loss(numbers, at, 1.0).backward()  # type: ignore[no-untyped-call]

    def _loss(self, numbers: torch.Tensor, at: int, share: float) -> torch.Tensor:
        loss = self._mean_loss(numbers) * share
        if isinstance(self._loader, ElasticDataLoader) and self.program.weighed:
            loss = self._loader.weigh(loss)
        if self._scaler is not None:
            if any(i.kind is Kind.OVERFLOW and i.at == at for i in self.program.incidents):
                loss = loss * float("inf")
            loss = self._scaler.scale(loss)
        return loss

    def _mean_loss(self, numbers: torch.Tensor) -> torch.Tensor:
        match self.program.way:
            case Way.CHECKPOINT:
                return checkpoint(self.model.mean_loss, numbers, use_reentrant=False)  # type: ignore[no-any-return]
            case Way.REENTRANT:
                one = torch.ones((), dtype=torch.float64, requires_grad=True)
                return checkpoint(  # type: ignore[no-any-return]
                    lambda one, of: self.model.mean_loss(of) * one, one, numbers, use_reentrant=True
                )
        return self.model.mean_loss(numbers)

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=not self.program.in_place)
        self._overflowed.clear()
        self.reference.zeroed()

    # Steps ------------------------------------------------------------------------------------------------

    def _step(self, is_due: Any, *, before_hand: bool = False) -> None:
        due = [n for n, plan in enumerate(self.program.optimizers) if plan.every and is_due(n)]
        skips = self._overflowed.intersection(due)
        for number in due:
            self._step_one(number, before_hand)
        if due and self._scaler is not None:
            self._scaler.update()
        if skips:  # another scale holds from here on, and what is gathered has the old one
            self._unsure |= {n for n, window in enumerate(self.reference.windows) if window}

    def _step_one(self, number: int, before_hand: bool) -> None:
        optimizer, overflowed = self._optimizers[number], number in self._overflowed
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if isinstance(self._loader, ElasticDataLoader) and self.program.weighed:
            self._loader.scale_gradients(optimizer)
            if not overflowed and number not in self._unsure:
                self._check_gradient(number)
        if not overflowed or self.program.optimizers[number].fused:  # else its step() is not called
            self.reference.steps(number)
        if overflowed:
            self.reference.windows[number] = []
        else:
            self.reference.stepped(number, before_hand=before_hand)
        self._call_step(number, optimizer)
        optimizer.zero_grad(set_to_none=not self.program.in_place)
        self._unsure.discard(number)
        self._overflowed.discard(number)

    def _call_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.step(optimizer)
            return
        match self.program.optimizers[number].closure:
            case "none":
                optimizer.step(closure=None)
            case "given":
                optimizer.step(lambda: 0.0)
            case _:
                optimizer.step()

    def _check_gradient(self, number: int) -> None:
        window = self.reference.windows[number]
        expected = self.model.gradient(number, [n for batch in window for n in batch.numbers])
        check_gradient(self.model.heads[number].grad, expected, window)

    # What it says -----------------------------------------------------------------------------------------

    def _report(self, held: Batch) -> None:
        size = len(held.numbers)
        match self.program.report:
            case Report.DEFAULT:
                self._say()
            case Report.OWN:
                self._say(size)
            case Report.SMALL:
                self._say(max(0, size - 1))
            case Report.LARGE:
                self._say(size + 3)
            case Report.TWICE:
                self._say()
                self._say()

    def _say(self, size: int | None = None) -> None:
        self.reference.declared()
        self.service.report_batch_done(size)
        self.books.check(self.reference)

    def _quarantine(self) -> None:
        hand = self.reference.hand
        assert hand is not None
        hand.bad = True
        self.service.report_batch_done(len(hand.numbers), err_msg="a bad batch")

    def _save(self) -> None:
        token = self.service.state_dict()
        self.saved = token, self.model.copy(), self.reference.saved()

    def _go_back(self) -> bool:
        if self.saved is None:
            return False
        self._restore()
        if self.program.loader.plain or self.program.lookahead:
            raise Broken  # what its queue holds, or a wrapper, cannot be taken back
        return True

    def _restore(self) -> None:
        assert self.saved is not None
        token, weights, counted = self.saved
        self.service.load_state_dict(token)
        if self.forgets_model:
            counted = replace(counted, learnt=[Counter() for _ in self.model.heads])
        else:
            self.model.load(weights)
        self.reference.restored(counted)
        self.books.restart()
        self._overflowed.clear()
        self._restored = True
        self._unsure = set(range(len(self.program.optimizers)))
