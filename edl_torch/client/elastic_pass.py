"""Passes of an `ElasticDataLoader`: batches go to the loop, and come back as acknowledgements or give-backs.

The master decides when such a pass ends. It does not know what is in a batch, nor torch.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace

from edl_torch.audit.way import Way
from edl_torch.client.confirming import Confirmer
from edl_torch.client.joining import Joining
from edl_torch.client.leases import LeaseSource, Mode
from edl_torch.client.plain_pass import PlainPasses
from edl_torch.client.reporter import Reporter
from edl_torch.client.steps import Steps
from edl_torch.client.streams import BrokenStreams
from edl_torch.client.threads import Threads
from edl_torch.client.tickets import Book, Ticket
from edl_torch.core.calls import NEW_PASS, Acknowledgement
from edl_torch.errors import AccountingError, ConcurrentIteration
from edl_torch.shard import Indices, Slice


class ElasticPasses:
    """The elastic passes of one session, one after the other. The book's lock guards the steps too."""

    def __init__(
        self,
        dataset: str,
        *,
        book: Book,
        steps: Steps,
        joining: Joining,
        leases: LeaseSource,
        reporter: Reporter,
        confirmer: Confirmer,
        broken: BrokenStreams,
        plain: PlainPasses,
        threads: Threads,
    ) -> None:
        self._dataset = dataset
        self._book = book
        self._steps = steps
        self._joining = joining
        self._leases = leases
        self._reporter = reporter
        self._confirmer = confirmer
        self._broken = broken
        self._plain = plain
        self._exhausted = False  # every batch of the pass was handed out
        self._in_hand: tuple[tuple[Slice, int, int], ...] = ()
        self._asked = True  # for more than what was handed out
        self._stands_in = False  # the loop has a batch that holds no record of its own
        self._taken_out = 0
        self._abandoned = 0  # the pass whose iterator is no more; written by a finaliser, so without a lock
        self._ending = threads.lock()

    def __repr__(self) -> str:
        return f"<ElasticPasses {self._leases} exhausted={self._exhausted}>"

    # Beginning and end ------------------------------------------------------------------------------------

    def open(self, epoch: int = NEW_PASS) -> int:
        """Begin a pass over `epoch`, or the one that runs; the master ends it. Returns its number."""
        self.end_unreachable()
        if self._leases.is_open and self._leases.mode is Mode.ELASTIC:
            raise ConcurrentIteration(
                f"dataset {self._dataset!r} is being iterated already: finish, break out of or "
                f"close() the first iterator before opening another"
            )
        self._joining.plan()
        self._plain.finish()
        self._tell_idle()
        with self._book.lock:
            self._steps.passed_on()
        self.batch_requested()
        self._exhausted = False
        self._broken.clear()
        return self._leases.open(Mode.ELASTIC, epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is open, or was last; NEW_PASS before the first one."""
        return self._leases.epoch

    def is_open(self, number: int) -> bool:
        """Whether pass `number` is open."""
        return self._leases.is_open and number == self._leases.pass_number

    def more_to_read(self) -> bool:
        """With every batch handed out: wait for the master's verdict. True when there is more to read."""
        more = self._drained(self._leases.wait_for_more)
        if not more:
            self.check_stuck()
        return more

    def look_for_more(self, wait_s: float = 0.0) -> bool:
        """With every batch handed out: ask the master once, and wait for `wait_s` at most."""
        return self._drained(lambda: self._leases.look_for_more(wait_s))

    def _drained(self, ask: Callable[[], bool]) -> bool:
        """Tell the master all that there is to tell, and ask whether there is more."""
        self._exhausted = True
        self._give_back_undelivered()
        self._reporter.flush()
        more = ask()
        self._exhausted = not more
        return more

    def _tell_idle(self) -> None:
        with self._book.lock:
            idle = self._steps.take_idle()
        if idle:
            warnings.warn(
                f"of the optimizers attached for {self._dataset!r}, {', '.join(idle)} did not step since the "
                f"last pass began, though others did: batches wait for a step of each. Call "
                f"service.detach(optimizer) where "
                f"another has taken its place",
                stacklevel=2,
            )

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the epoch is over."""
        return self._leases.is_over

    def _give_back_undelivered(self) -> None:
        """Return what loader workers drew and no batch brought."""
        with self._book.lock:
            self._reporter.note(give_backs=self._book.give_back_undelivered())
        self._reporter.send()

    def check_stuck(self) -> None:
        """Records that only this trainer can finish would make `while not service.finished` spin for ever."""
        if self._leases.is_open and self._leases.read_nothing and self._book:
            slowest = ", ".join(self._steps.slowest) or "none is attached"
            raise AccountingError(
                f"{self._book.batch_records} record(s) of {self._dataset!r} were handed out after the last "
                f"optimizer.step() ({slowest}) and nothing else is left: step on them at the end of an "
                f"epoch; call service.detach(optimizer) where another has taken its place; or call "
                f"service.report_batch_done() if they count as trained on, as after a step that a GradScaler "
                f"may skip"
            )

    def close(self, number: int) -> None:
        """The loop ended: an unfinished batch in hand and all that was not delivered go back."""
        if self._end(number):
            self._reporter.send()

    def _end(self, number: int) -> bool:
        """Returns whether there is something to tell the master."""
        if not self.is_open(number):
            return False
        finished = self._exhausted and self._asked  # synchronous ranks look ahead of the batch in hand
        self._leases.close_pass()
        if not finished:
            self._withdraw()
        return not finished

    def _withdraw(self) -> None:
        with self._book.lock:
            in_hand = self._steps.in_hand if self._steps.attached else self._book.batches
            if self._stands_in:  # those before it are not in hand any more
                in_hand = min(in_hand, self._steps.ahead)
            self._taken_out += bool(in_hand)
            returned = self._book.handed(in_hand, self._steps.untouched)
            self._reporter.note(give_backs=self._book.withdraw(in_hand), returned=returned)
            self._steps.withdrawn(in_hand)

    def abandon(self, number: int) -> None:
        """Pass `number` has lost its iterator. For finalisers: takes no lock, makes no call, never raises;
        `end_abandoned` acts on it."""
        self._abandoned = number

    @property
    def abandoned(self) -> bool:
        """Whether a pass that lost its iterator has not been ended yet."""
        return bool(self._abandoned)

    def end_abandoned(self) -> None:
        """End the pass that lost its iterator, if there is one, as `close` would. Never raises what a report
        raised: the next one does. Called before anything else that the loop asks for, and for others who wait
        for records."""
        while number := self._abandoned:
            with self._ending:  # another thread may be at it, and must have finished before the next pass
                if self._end(number):
                    self._reporter.post()
                if self._abandoned == number:
                    self._abandoned = 0

    def end_unreachable(self) -> None:
        """As `end_abandoned`, for who is about to begin another pass: nor is one in the way that only garbage
        holds, as an error does which a frame under the iterator's has caught and kept."""
        self.end_abandoned()
        if self._leases.is_open and self._leases.mode is Mode.ELASTIC:
            gc.collect()
            self.end_abandoned()

    # Batches ----------------------------------------------------------------------------------------------

    def hand(self, ticket: Ticket) -> bool:
        """A batch goes to the loop. False when it must be thrown away.

        Whatever happens to this trainer from now on, this batch is all that another may have to repeat.
        """
        self._reporter.flush()
        self._make_sure()
        handed = self.deliver(ticket)
        if not handed:
            self._throw_away(ticket)
        return handed

    def _make_sure(self) -> None:
        """What is in the book from here on is this trainer's beyond doubt."""
        self._confirmer.moved_on()
        self._confirmer.ensure()

    def promise(self, ticket: Ticket, *, unanswered: int) -> bool:
        """Make sure that a batch is this trainer's before it is promised to the loop; `deliver` hands it
        over later. False: it was thrown away.

        So many reports may still be without answer: 0, where a refused one must not cost a second batch.
        """
        self._reporter.wait_answered(unanswered)
        self._make_sure()
        with self._book.lock:
            mine = self._book.is_mine(ticket)
        if not mine:
            self._throw_away(ticket)
        return mine

    def _throw_away(self, ticket: Ticket) -> None:
        with self._book.lock:
            self._reporter.note(give_backs=self._book.discard(ticket))
        self._reporter.send()

    def deliver(self, ticket: Ticket) -> bool:
        """A batch that was promised goes to the loop. False when it was lost meanwhile."""
        with self._book.lock:
            handed = self._book.hand(ticket)
            if handed:
                self._steps.handed()
                self._in_hand = self._book.slices(ticket)
                self._stands_in = self._asked = False
        return handed

    def stood_in(self) -> None:
        """The loop gets a batch that holds no record of its own."""
        self._in_hand, self._stands_in, self._asked = (), True, False

    @property
    def taken_out(self) -> int:
        """How often the batch in hand was taken out of the loop's: it failed, or was given back."""
        return self._taken_out

    def records_in_hand(self) -> Indices:
        """Name and number of each record of the batch that was handed out last."""
        plan = self._joining.plan()
        parts = [
            plan.indices(replace(item, skip=first, limit=after - first))
            for item, first, after in self._in_hand
        ]
        return Indices.joined(parts)

    def return_remainder(self, ticket: Ticket) -> None:
        """A partial batch is not to be trained: back to the master, until it fills one."""
        with self._book.lock:
            self._reporter.note(give_backs=self._book.return_remainder(ticket))
        self._reporter.send()

    def batch_requested(self) -> None:
        """The loop asks for the next batch: without an optimizer it is done with those before."""
        self._asked = True
        self._confirmer.moved_on()
        if not self._steps.attached:
            self._settle(self._steps.ahead, Way.NEXT)

    def attach(self, name: str) -> int:
        """Another optimizer decides when a batch has been trained on; returns its number."""
        with self._book.lock:
            return self._steps.attach(name)

    def detach(self, optimizer: int) -> None:
        """An optimizer decides no more: what all others have stepped on is acknowledged."""
        with self._book.lock:
            self._steps.detach(optimizer)
            keep = self._steps.keep
        if self._steps.attached:
            self._settle(keep, Way.STEP)

    def forget_optimizer(self, optimizer: int) -> None:
        """An optimizer does not exist any more."""
        with self._book.lock:
            self._steps.gone(optimizer)

    def stepped(self, optimizer: int) -> None:
        """An attached optimizer stepped."""
        self.end_abandoned()
        self._confirmer.moved_on()
        with self._book.lock:
            if self._exhausted:
                self._steps.exhausted_step()
            self._steps.stepped(optimizer)
            keep = self._steps.keep
        self._settle(keep, Way.STEP)

    def settle_in_hand(self) -> None:
        """Acknowledge what the loop is done with, and the batch in hand unless a step on it is due."""
        attached = self._steps.attached
        self._settle(self._steps.keep if attached else self._steps.ahead, Way.STEP if attached else Way.TOKEN)

    def _settle(self, keep: int, way: Way = Way.UNKNOWN) -> None:
        """Acknowledge all handed batches but the last `keep`."""
        with self._book.lock:
            self._note_settled(keep, way)
        self._reporter.send()

    def _note_settled(self, keep: int, way: Way) -> list[Acknowledgement]:
        """The book's lock is held."""
        acknowledgements = self._book.settle(keep)
        self._reporter.note(acknowledgements=acknowledgements, way=way)
        return acknowledgements

    def report(self) -> int:
        """The loop says that it is done with the batch in hand. Returns how many leases that completed."""
        with self._book.lock:
            self._steps.reported()
            acknowledgements = self._note_settled(self._steps.ahead, Way.REPORT)
            completed = sum(done.task not in self._book for done in acknowledgements)
        self._reporter.send()
        return completed

    def fail_batch(self, reason: str) -> None:
        """The batch in hand could not be trained on: its records go to quarantine. One that stands in has
        none.
        """
        if self._stands_in:
            return
        with self._book.lock:
            failures = self._book.fail_batch(reason, self._steps.ahead)
            self._steps.failed()
            self._taken_out += 1
            self._reporter.note(failures=failures)
        self._reporter.send()
