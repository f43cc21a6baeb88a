"""What an `ElasticDataLoader` and the optimizers attached to it tell their session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from edl_torch.core.calls import NEW_PASS
from edl_torch.errors import AccountingError, ConcurrentIteration
from edl_torch.shard import Indices, Slice
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.tickets import Ticket

if TYPE_CHECKING:
    from edl_torch.client.session import Session


class Gradients(Protocol):
    """The gradients of attached optimizers' parameters, looked at as batches come and go."""

    def mark(self) -> None:
        """Note what gradients are in place, as a batch comes to the loop."""

    def changed(self) -> list[tuple[Any, Any]]:
        """Return parameters with their gradients, of those that have changed since."""

    def unchanged(self) -> bool:
        """Whether there are gradients, and all are as they were then."""


class ElasticSession:
    """The elastic passes of one session, one after the other."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainer = session.trainer
        self._passes = session.trainer.elastic
        self.gradients: Gradients | None = None  # of optimizers, once one is attached
        self._abandoned_with: list[tuple[Any, Any]] | None = None  # as that iterator went: gradients
        self._left: list[tuple[Batch, Any]] = []  # what went back, with its gradients, until the next step
        self._abandoned = 0  # the pass whose iterator is no more; written by a finaliser, so without a lock

    def __repr__(self) -> str:
        return f"<ElasticSession {self._passes}>"

    # Beginning and end ------------------------------------------------------------------------------------

    def open(self, epoch: int = NEW_PASS) -> int:
        """Begin a pass over `epoch`, or the one that runs; one that is open is ended. Returns its number."""
        self.end_abandoned()
        self._session.loop_thread = get_ident()
        with self._leaving():
            number = self._session.run(self._trainer.open(epoch))
        self.model_changed()
        return number

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is open, or was last; NEW_PASS before the first one."""
        return self._trainer.state.supply.current.epoch

    def is_open(self, number: int) -> bool:
        """Whether pass `number` is open."""
        return self._passes.is_open(number)

    def check_newest(self, number: int) -> None:
        """Raise ConcurrentIteration where a later iteration has ended pass `number`.

        Raise AccountingError where the data went back while a wrapper held batches of it.
        """
        if self._passes.superseded >= number:
            raise ConcurrentIteration(
                f"dataset {self._session.description.name!r} was iterated anew, which has ended this older "
                f"iterator: what it had not handed out went back. Use the newest one"
            )
        if self._passes.read_ahead == number:
            raise AccountingError(
                f"the data of {self._session.description.name!r} went back to a checkpoint while what lies "
                f"between the loop and its loader held batches that it had read ahead: they come again, and "
                f"would be trained on twice. Leave the loop after load_state_dict(), and begin a new one"
            )

    def close(self, number: int) -> None:
        """End a pass: an unfinished batch in hand and all that was not delivered go back."""
        with self._leaving():
            self._session.end(self._passes.close(number))
        if not self._session.cut:
            self._session.see_model("end")
        self.warn_of_what_went_back()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Keep the gradients of the batch in hand where it goes back: a step may still use them."""
        batches, discarded = self._trainer.state.batches, self._passes.discarded
        batch, changed = batches.in_hand, []
        if self.gradients is not None and batches.has_in_hand:
            # Of an iterator that is no more: as it went, before the loop scaled or clipped what is gathered.
            changed = self.gradients.changed() if self._abandoned_with is None else self._abandoned_with
            changed = [(p, gradient) for p, gradient in self._in_place(changed) if gradient.any()]
        self._abandoned_with = None
        try:
            yield
        finally:
            if changed and batch is not None and self._passes.discarded != discarded:
                self._left.append((batch, changed))

    def _in_place(self, kept: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return those of some gradients that are still there: ranks may reduce theirs into other tensors."""
        reduced = self._session.position.lockstep is not None
        return [(p, g) for p, g in kept if p.grad is g or (reduced and p.grad is not None)]

    def _learn_again(self) -> None:
        """Note that a step has used gradients of batches that went back, where these are still in place."""
        left, self._left = self._left, []
        learnt = [batch for batch, kept in left if self._in_place(kept)]
        if learnt:
            self._session.run(self._passes.learnt_again(learnt))

    def abandon(self, number: int) -> None:
        """Note that the iterator of pass `number` was garbage-collected. For finalisers: takes no lock, makes
        no call, never raises; `end_abandoned` acts on it."""
        if self.gradients is not None and self._passes.is_open(number):
            self._abandoned_with = self.gradients.changed()
        self._abandoned = max(number, self._abandoned)  # a newer one has ended the older ones

    @property
    def abandoned(self) -> bool:
        """Whether a pass is still to be ended whose iterator was garbage-collected."""
        return bool(self._abandoned)

    def end_abandoned(self) -> None:
        """End the pass whose iterator was garbage-collected, if there is one, as `close` would.

        Never raises what a report raised: the next one does. Called before anything else that the loop asks
        for.
        """
        if self._abandoned:
            self.end_abandoned_silently()
            self.warn_of_what_went_back()

    def warn_of_what_went_back(self) -> None:
        """Warn, once, where a batch went back that the loop may have trained on."""
        self._session.end(self._passes.warnings.of_what_went_back())

    def end_abandoned_silently(self) -> None:
        """Do as `end_abandoned`, without a warning: the loop gets that later."""
        while number := self._abandoned:
            with self._leaving():
                self._session.end(self._passes.end_abandoned(number))
            if self._abandoned == number:
                self._abandoned = 0

    def check_gets_on(self) -> None:
        """Raise AccountingError for a loop whose passes give back all that they were handed."""
        self._session.do(self._passes.warnings.check_gets_on)

    # More to read -----------------------------------------------------------------------------------------

    def more_to_read(self) -> bool:
        """Wait, with every batch handed out, until the epoch is over. True when there is more to read."""
        return self._session.run(self._passes.more_to_read())

    def look_for_more(self, wait_s: float = 0.0) -> bool:
        """Ask the master for more, once, with every batch handed out; wait for `wait_s` at most."""
        return self._session.run(self._passes.look_for_more(wait_s))

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the epoch is over."""
        return self._session.do(lambda: self._trainer.state.supply.current.is_over)

    def settle_stuck(self) -> None:
        """Acknowledge, at the end of the job, batches that wait for a step. Else raises AccountingError."""
        self._session.run(self._passes.settle_stuck())

    # Batches ----------------------------------------------------------------------------------------------

    def batch_requested(self, number: int) -> bool:
        """Note that the loop asks for the next batch: without an optimizer it is done with those before.

        False where pass `number` is not open any more.
        """
        self._session.loop_thread = get_ident()
        is_open = self._session.do(self._passes.request_now, number)
        if is_open is None:
            self._session.run(self._trainer.reporter.send())
        return is_open is not False

    def hand(self, ticket: Ticket) -> bool:
        """Hand a batch to the loop. False when it was thrown away."""
        mine = self._session.do(self._passes.hand_now, ticket) or self._session.run(self._passes.hand(ticket))
        if self.gradients is not None:
            self.gradients.mark()
        return mine

    def promise(self, ticket: Ticket, *, unanswered: int) -> bool:
        """Make sure that a batch is this trainer's; `deliver` hands it over later. False: it was thrown away.

        So many reports may still be without answer: 0, where a refused one must not cost a second batch.
        """
        return self._session.run(self._passes.promise(ticket, unanswered))

    def deliver(self, ticket: Ticket) -> bool:
        """Hand the batch that was promised to the loop. False when it was lost meanwhile."""
        mine = self._session.do(self._passes.deliver, ticket)
        if self.gradients is not None:
            self.gradients.mark()
        return mine

    def pad(self) -> None:
        """Note that the loop gets a padding batch, which holds no record of its own."""
        self._session.do(self._passes.pad)

    def return_remainder(self, ticket: Ticket) -> None:
        """Give a partial batch back to the master, until it fills a whole one."""
        self._session.run(self._passes.return_remainder(ticket))

    def records_in_hand(self) -> Indices:
        """Name and number of each record of the batch that was handed out last."""
        return self._passes.records_in_hand()

    def passed_on(self) -> Batch | None:
        """Note that a wrapper passes on the oldest batch that it has read ahead. Returns it, or None."""
        batch = self._session.run(self._passes.passed_on())
        if self.gradients is not None:
            self.gradients.mark()
        return batch

    def give_back(self, *, window: bool = False) -> None:
        """Give back the batch in hand, or the window: it was not trained on."""
        self._session.run(self._passes.give_back(window=window))

    @property
    def records_unstepped(self) -> int:
        """Records of the batches that were handed out and wait for a step of an attached optimizer."""
        state = self._trainer.state
        return self._session.do(lambda: state.batches.records if state.batches.attached else 0)

    @property
    def discarded(self) -> int:
        """How often a batch in hand has failed or gone back."""
        return self._passes.discarded

    # Batches of another trainer ---------------------------------------------------------------------------

    def shares(self, ticket: Ticket) -> tuple[Slice, ...]:
        """The records of a batch that was promised, for trainers that follow this one."""
        return self._session.do(self._passes.shares, ticket)

    def follow(self, slices: Iterable[Slice]) -> Ticket:
        """Take in a batch of the trainer that this one follows; `deliver` hands it over."""
        return self._session.do(self._passes.follow, slices)

    def follow_to_the_end(self) -> None:
        """Note that the trainer which this one follows has handed out every batch."""
        self._session.do(self._passes.follow_to_the_end)

    # Optimizers -------------------------------------------------------------------------------------------

    def attach(self, name: str) -> int:
        """Let steps of another optimizer decide when a batch was trained on. Returns its number."""
        return self._session.do(self._trainer.state.batches.attach, name)

    def detach(self, optimizer: int) -> None:
        """Let an optimizer decide no more: what all others have stepped on is acknowledged."""
        self._session.run(self._passes.detach(optimizer))

    def forget_optimizer(self, optimizer: int) -> None:
        """Note that an attached optimizer does not exist any more."""
        self._session.do(self._trainer.state.batches.gone, optimizer)

    def stepped(self, optimizer: int) -> None:
        """Note a step of an attached optimizer.

        A wrapper that tells has no word for a loop that was left with one of its last batches. A step after
        that is not on this batch: no gradient has changed since it came.
        """
        if self._abandoned:
            self.end_abandoned()
        session, model, state = self._session, self._session.model, self._trainer.state
        is_left = model is not None and not self.is_open(state.supply.current.number) and state.batches
        if session.do(self._step_now, optimizer):
            session.run(self._trainer.reporter.send())
        if self._left:
            self._learn_again()
        if model is not None:
            is_due = model.stepped()
            if is_left:  # behind the end of a pass nothing else looks at the model that has these batches
                session.flush()
                session.see_model("end")
            elif is_due:
                session.see_model("step")

    def _step_now(self, optimizer: int) -> bool:
        batches, before_hand = self._trainer.state.batches, False
        if batches.ended and batches.has_in_hand and self.gradients is not None:
            before_hand = self.gradients.unchanged()
        return self._passes.step_now(optimizer, before_hand)

    @property
    def is_audited(self) -> bool:
        """Whether a log is kept, and so the model is looked at."""
        return self._session.model is not None

    def about_to_step(self) -> None:
        """Look at the model before the first step of a pass, or of another optimizer: what goes on from here
        is what was loaded, whenever that was."""
        model = self._session.model
        if model is not None and model.is_due:
            self._session.see_model("begin")

    def model_changed(self, word: str = "") -> None:
        """Note that the model may be another one, or that the user says why it is one."""
        model = self._session.model
        if model is not None:
            model.is_due, model.word = True, word or model.word
