"""What an `ElasticDataLoader` and the optimizers attached to it tell their session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from edl_torch.core.calls import NEW_PASS
from edl_torch.errors import AccountingError, ConcurrentIteration
from edl_torch.shard import Indices, Slice
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.facts import Way
from edl_torch.trainer.tickets import Ticket

if TYPE_CHECKING:
    from edl_torch.client.session import Session

    _Kept = list[tuple[Any, ref[Any] | None]]


class Gradients(Protocol):
    """The gradients of attached optimizers' parameters, looked at as batches come and go."""

    def mark(self) -> None:
        """Note what gradients are in place, as a batch comes to the loop."""

    def changed(self) -> list[Any]:
        """Return parameters whose gradients have changed since."""

    def unchanged(self) -> bool:
        """Whether there are gradients, and all are as they were then."""

    def came(self) -> bool:
        """Whether a gradient came since, as far as can be seen now."""

    def all(self) -> list[Any]:
        """Return all parameters; none where the gradients of some cannot be seen."""


class ElasticSession:
    """The elastic passes of one session, one after the other."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trainer = session.trainer
        self._passes = session.trainer.elastic
        self.gradients: Gradients | None = None  # of optimizers, once one is attached
        self._abandoned_with: list[Any] | None = None  # as that iterator went: `gradients.changed()`
        # What went back, until the next step: batches, and parameters with the gradients that have them.
        self._left: list[tuple[list[Batch], _Kept]] = []
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
        self._lose_gradients()
        self.model_changed()
        self.look_for_gradients()
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
        batch, kept = batches.in_hand, self._of_batch_in_hand()
        self._abandoned_with = None
        try:
            yield
        finally:
            if kept and batch is not None and self._passes.discarded != discarded:
                self._left.append(([batch], kept))

    def _of_batch_in_hand(self) -> _Kept:
        if self.gradients is None or not self._trainer.state.batches.has_in_hand:
            return []
        # Of an iterator that is no more: as it went, before the loop scaled or clipped what is gathered.
        changed = self.gradients.changed() if self._abandoned_with is None else self._abandoned_with
        return self._in_place([(parameter, None) for parameter in changed])

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Keep the gradients of the window where the data go back: a step may still use them."""
        if self._abandoned:
            self.end_abandoned()
        batches = self._trainer.state.batches
        left = []
        if self.gradients is not None and (window := batches.untouched()):
            if batches.in_hand in window and not self._of_batch_in_hand():
                window.pop()
            left = [(window, self._in_place([(parameter, None) for parameter in self.gradients.all()]))]
        yield
        self._left += left

    def _in_place(self, kept: _Kept) -> _Kept:
        """Return those of some gradients that are still there.

        Until the next batch comes, whatever is there and not 0: a loop may scale what it has gathered, and
        ranks reduce it, into other tensors; these always may.
        """
        found: _Kept = []
        for parameter, known in kept:
            gradient = parameter.grad
            if gradient is None or (known is None and not gradient.any()):
                continue
            if known is None or gradient is known() or self._session.position.lockstep is not None:
                found.append((parameter, None))
        return found

    def _mark(self) -> None:
        """Note what gradients are in place, as a batch comes to the loop."""
        if self.gradients is not None:
            self.gradients.mark()
            if self._left:
                left = [(batches, self._in_place(kept)) for batches, kept in self._left]
                self._left = [(back, [(p, ref(p.grad)) for p, _ in kept]) for back, kept in left if kept]

    def _learn_again(self) -> None:
        """Note that a step has used gradients of batches that went back, where these are still in place."""
        left, self._left = self._left, []
        learnt = [batch for batches, kept in left if self._in_place(kept) for batch in batches]
        if learnt:
            self._session.run(self._passes.learnt_again(learnt))

    def _lose_gradients(self) -> None:
        """Note, as a pass has begun, that batches gathered for a step have left no gradient.

        Where more than one batch is read ahead, unseen, nobody can say whose gradients were in the last step.
        What another optimizer has stepped on is not lost.
        """
        batches = self._trainer.state.batches
        if self.gradients is None or batches.reads_far or not (window := batches.untouched()):
            return
        parameters = self.gradients.all()
        there = (p.grad for p in parameters if p.grad is not None)
        # What was never written to is no gradient that zero_grad(set_to_none=False) has made 0.
        if parameters and not any(not gradient._version or gradient.any() for gradient in there):
            self._session.end(self._passes.lose_gradients(window))

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
        self._see()
        is_open = self._session.do(self._passes.request_now, number)
        if is_open is None:
            self._session.run(self._trainer.reporter.send())
        return is_open is not False

    def hand(self, ticket: Ticket) -> bool:
        """Hand a batch to the loop. False when it was thrown away."""
        mine = self._session.do(self._passes.hand_now, ticket) or self._session.run(self._passes.hand(ticket))
        self._mark()
        return mine

    def promise(self, ticket: Ticket, *, unanswered: int) -> bool:
        """Make sure that a batch is this trainer's; `deliver` hands it over later. False: it was thrown away.

        So many reports may still be without answer: 0, where a refused one must not cost a second batch.
        """
        return self._session.run(self._passes.promise(ticket, unanswered))

    def deliver(self, ticket: Ticket) -> bool:
        """Hand the batch that was promised to the loop. False when it was lost meanwhile."""
        mine = self._session.do(self._passes.deliver, ticket)
        self._mark()
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
        self._see()
        batch = self._session.run(self._passes.passed_on())
        self._mark()
        return batch

    def give_back(self, *, window: bool = False) -> None:
        """Give back the batch in hand, or the window: it was not trained on."""
        self._session.run(self._passes.give_back(window=window))

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

    def look_for_gradients(self) -> None:
        """Note whether gradients of all attached optimizers can be seen: then a batch without is in doubt."""
        self._trainer.state.batches.sees = self.gradients is not None and bool(self.gradients.all())

    def gradient_comes(self, *, is_first: bool) -> None:
        """Note that a backward pass reaches a parameter; `is_first` where none has a gradient before."""
        self._trainer.state.batches.mark(is_first=is_first)

    def mark_window(self) -> None:
        """Note, as an adapter says, that each batch since the last step is trained on before the next."""
        for batch in self._trainer.state.batches.untouched():
            batch.marked = True

    def _see(self) -> None:
        """Look for a gradient of the batch in hand where none was seen to come."""
        batches = self._trainer.state.batches
        if batches.in_doubt and self.gradients is not None and self.gradients.came():
            batches.mark()

    @property
    def batch_in_hand(self) -> int:
        """The number of the batch in hand; 0 where the loop has none with records."""
        batch = self._trainer.state.batches.in_hand
        return batch.number if batch is not None and batch.ticket else 0

    def stepped(self, optimizer: int, *, skipped: bool = False) -> None:
        """Note a step of an attached optimizer, or one that its GradScaler skipped.

        A wrapper that tells has no word for a loop that was left with one of its last batches. A step after
        that is not on this batch: no gradient has changed since it came.
        """
        if self._abandoned:
            self.end_abandoned()
        session, model, state = self._session, self._session.model, self._trainer.state
        is_left = model is not None and not self.is_open(state.supply.current.number) and state.batches
        self._see()
        if skipped:  # by a report of its own, as the log has how each came about
            session.flush()
        if session.do(self._step_now, optimizer, Way.SKIPPED if skipped else Way.STEP) or skipped:
            session.run(self._trainer.reporter.send())
        if skipped:
            session.flush()
        if self._left:
            self._learn_again()
        if model is not None:
            is_due = model.stepped()
            if is_left:  # behind the end of a pass nothing else looks at the model that has these batches
                session.flush()
                session.see_model("end")
            elif is_due:
                session.see_model("step")

    def _step_now(self, optimizer: int, way: Way) -> bool:
        batches = self._trainer.state.batches
        before_hand = batches.steps_before_hand
        if batches.ended and batches.has_in_hand and self.gradients is not None:
            before_hand = self.gradients.unchanged()
        return self._passes.step_now(optimizer, before_hand, way)

    @property
    def is_audited(self) -> bool:
        """Whether a log is kept, and so the model is looked at."""
        return self._session.model is not None

    @property
    def model_is_due(self) -> bool:
        """Whether the model may be another one, and is looked at before the next step."""
        return self._session.model is None or self._session.model.is_due

    def doubt(self, why: str) -> None:
        """Write down, once in a lineage, what speaks against one model; `ModelSeen.at` has the words."""
        model = self._session.model
        if model is not None and why not in model.doubts:
            model.doubts.add(why)
            self._session.see_model(why)

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
