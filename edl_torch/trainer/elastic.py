"""Passes of an `ElasticDataLoader`: batches go to the loop, and come back as outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edl_torch.core.calls import NEW_PASS
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.shard import Indices, Slice
from edl_torch.trainer.actions import Procedure, Warn
from edl_torch.trainer.confirming import Confirmer
from edl_torch.trainer.facts import Way
from edl_torch.trainer.leasing import Leasing
from edl_torch.trainer.loop_warnings import LoopWarnings
from edl_torch.trainer.phases import LOOP, Loop
from edl_torch.trainer.plain import PlainPasses
from edl_torch.trainer.reporter import Reporter
from edl_torch.trainer.state import State
from edl_torch.trainer.supply import Mode, Pass
from edl_torch.trainer.tickets import Ticket


class ElasticPasses:
    """The elastic passes of one trainer, one after the other. The master decides when one ends."""

    def __init__(
        self, state: State, reporter: Reporter, leasing: Leasing, confirmer: Confirmer, plain: PlainPasses
    ) -> None:
        self._state = state
        self._reporter = reporter
        self._leasing = leasing
        self._confirmer = confirmer
        self._plain = plain
        self.warnings = LoopWarnings(state)
        self.phase = Loop.IDLE
        self.superseded = 0  # the last pass that a later iteration ended
        self.read_ahead = 0  # the last pass of which a wrapper held batches when the data went back
        self.discarded = 0  # how often a batch in hand failed, or went back
        self._exhausted = False  # every batch of the pass was handed out
        self._in_hand: list[tuple[Slice, int, int]] | None = []  # None: a padding batch
        self._failed = False  # the batch that the loop has is in quarantine
        self._promised: Ticket = ()  # of the next step, on which the ranks have agreed

    def __repr__(self) -> str:
        return f"<ElasticPasses {self.phase.name} exhausted={self._exhausted} {self._state.supply}>"

    # Beginning and end ------------------------------------------------------------------------------------

    def open(self, epoch: int = NEW_PASS) -> Procedure[int]:
        """Begin a pass over `epoch`, or the one that runs. Returns its number. One that is open is ended."""
        state = self._state
        yield from self.supersede()
        yield from self._plain.finish()
        yield from self.warnings.of_the_last_pass()
        if state.steps.told_in_hand:  # read and not passed on, or passed on to a loop that was left
            self._withdraw()
        state.steps.begin_pass()
        yield from self.batch_requested()
        self._exhausted = self._failed = False
        state.close_pass()
        return state.supply.open(Mode.ELASTIC, epoch)

    def is_open(self, number: int) -> bool:
        """Whether elastic pass `number` is open."""
        current = self._state.supply.current
        return current.is_open and number == current.number and current.mode is Mode.ELASTIC

    def close(self, number: int) -> Procedure[None]:
        """End a pass: an unfinished batch in hand and all that was not delivered go back."""
        if self.end(number):
            yield from self._reporter.send()

    @property
    def held_by_wrapper(self) -> int:
        """The pass that is open, where a wrapper may hold batches of it; 0 without."""
        number = self._state.supply.current.number
        return number if self._state.steps.ahead and self.is_open(number) else 0

    def supersede(self) -> Procedure[None]:
        """End the pass that is open, as another iteration begins: its iterator raises from now on."""
        number = self._state.supply.current.number
        if self.is_open(number):
            self.superseded = number
            yield from self.close(number)

    def end_abandoned(self, number: int) -> Procedure[None]:
        """Do as `close`, but leave what a report raises to the next one."""
        if self.end(number):
            yield from self._reporter.post()

    def end(self, number: int) -> bool:
        """End a pass. Returns whether there is something to tell the master."""
        if not self.is_open(number):
            return False
        # Synchronous ranks look ahead of the batch in hand: all may be handed out, and one be in training.
        finished = self._exhausted and self.phase is Loop.ASKING
        had_batch = self.phase is Loop.TRAINING and self._in_hand is not None
        self.phase = LOOP[self.phase, Loop.IDLE]
        self.warnings.pass_ended()
        self._state.close_pass()
        if not finished and self._withdraw() and had_batch:
            self.warnings.went_back()
        return not finished

    def _withdraw(self) -> int:
        """Give back what the loop has not finished with. Returns how many batches it was handed of that."""
        state, steps = self._state, self._state.steps
        in_hand = steps.in_hand if steps.attached else state.inflight.batches
        if self._in_hand is None or self._failed:  # those before it are not in hand any more
            in_hand = min(in_hand, steps.ahead)
        self.discarded += bool(in_hand)
        returned = state.inflight.handed(in_hand, steps.untouched)
        state.outbox.note(give_backs=state.inflight.withdraw(in_hand), returned=returned)
        steps.withdrawn(in_hand)
        return in_hand

    # More to read -----------------------------------------------------------------------------------------

    def more_to_read(self) -> Procedure[bool]:
        """Wait, with every batch handed out, until the epoch is over. True when there is more to read."""
        yield from self._drain()
        more = yield from self._leasing.wait_for_more()
        self._exhausted = not more
        if not more:
            yield from self.settle_stuck()
        else:
            yield from self.warnings.of_no_steps()
        return more

    def look_for_more(self, wait_s: float = 0.0) -> Procedure[bool]:
        """Ask the master once, with every batch handed out, and wait for `wait_s` at most."""
        yield from self._drain()
        more = yield from self._leasing.look_for_more(wait_s)
        self._exhausted = not more
        if more:
            yield from self.warnings.of_no_steps()
        return more

    def _drain(self) -> Procedure[None]:
        """Tell the master all that there is to tell; what was drawn and no batch brought goes back."""
        state = self._state
        self._exhausted = True
        state.outbox.note(give_backs=state.inflight.give_back_undelivered())
        yield from self._reporter.flush()

    def settle_stuck(self) -> Procedure[None]:
        """Decide on batches that wait for a step of this trainer's, where nothing else is left to read.

        Batches that a loop has gathered for a step count, at the end of the job, without one. Raises
        AccountingError where they wait for an optimizer that does not step at all, or not any more.
        """
        state, current = self._state, self._state.supply.current
        if not (current.is_open and not current.granted and state.inflight):
            return
        name, records = state.config.dataset, state.inflight.batch_records
        slowest = ", ".join(state.steps.slowest) or "none is attached"
        left = f"{records} record(s) of {name!r} were handed out after the last optimizer.step() ({slowest})"
        if not (records and state.steps.all_step and self._is_after_all_epochs(current)):
            raise AccountingError(
                f"{left} and nothing else is left: step on them at the end of "
                f"an epoch; call loader.detach(optimizer) where another has taken its place; or call "
                f"loader.stepped() if they count as trained on, as after a step that a GradScaler "
                f"may skip"
            )
        yield from self._reporter.flush()  # before, what was trained on is told as such
        state.steps.withdrawn(state.inflight.batches)
        self._settle(0, Way.UNSTEPPED)
        yield from self._reporter.flush()
        yield Warn(
            f"{left}, and the data are at their end: these records count, and the model has not learnt from "
            f"them. Step on what is left at the end of an epoch, or call loader.stepped() if they "
            f"count as trained on, as after a step that a GradScaler may skip"
        )

    def _is_after_all_epochs(self, current: Pass) -> bool:
        if not self._state.config.keeps_ledger:
            return False  # such a master does not tell: others may give records back, and epochs may follow
        plan = self._state.registered.plan
        assert plan is not None, "a pass is open"
        return current.epoch == NEW_PASS or 0 < plan.spec.num_epochs <= current.epoch

    # Batches of another trainer ---------------------------------------------------------------------------

    def shares(self, ticket: Ticket) -> tuple[Slice, ...]:
        """Return the records of a batch that was promised, for trainers that follow this one."""
        return self._state.inflight.slices(ticket)

    def follow(self, slices: Iterable[Slice]) -> Ticket:
        """Take in a batch of the trainer that this one follows; `deliver` hands it over."""
        self._exhausted = False
        return self._state.inflight.take_over(slices)

    def follow_to_the_end(self) -> None:
        """Note that the trainer which this one follows has handed out every batch."""
        self._exhausted = True

    # Batches ----------------------------------------------------------------------------------------------

    def hand_now(self, ticket: Ticket) -> bool:
        """Hand a batch to the loop, where there is nothing to wait for. False: `hand` must be tried."""
        state = self._state
        # Where acknowledgements may wait, master and trainer end together: nobody would repeat a batch.
        told = state.outbox.error is None if state.config.report_delay_s else state.outbox.is_settled
        return self._is_sure() and told and self.deliver(ticket)

    def hand(self, ticket: Ticket) -> Procedure[bool]:
        """Hand a batch to the loop. False when it was thrown away.

        Whatever happens to this trainer from now on, this batch is all that another may have to repeat.
        """
        yield from self._reporter.flush()
        yield from self._make_sure()
        if self.deliver(ticket):
            return True
        yield from self._throw_away(ticket)
        return False

    def _is_sure(self) -> bool:
        """Note that the loop goes on. Returns whether the leases are this trainer's without a question."""
        state = self._state
        if state.liveness is None:
            return True
        state.liveness.moved_on(state.now)
        return state.liveness.sure(state.now)

    def _make_sure(self) -> Procedure[None]:
        if not self._is_sure():
            yield from self._confirmer.ensure()

    def promise(self, ticket: Ticket, unanswered: int) -> Procedure[bool]:
        """Make sure that a batch is this trainer's; `deliver` hands it over later. False: it was thrown away.

        So many reports may still be without answer: 0, where a refused one must not cost a second batch.
        """
        yield from self._reporter.wait_answered(unanswered)
        yield from self._make_sure()
        if self._state.inflight.is_mine(ticket):
            self._promised = ticket
            return True
        yield from self._throw_away(ticket)
        return False

    def _throw_away(self, ticket: Ticket) -> Procedure[None]:
        self._state.outbox.note(give_backs=self._state.inflight.discard(ticket))
        yield from self._reporter.send()

    def deliver(self, ticket: Ticket) -> bool:
        """Hand over a batch that was promised. False when it was lost meanwhile."""
        self._promised = ()
        holds = self._state.inflight.hand(ticket)
        if holds is None:
            return False
        self.phase = LOOP[self.phase, Loop.TRAINING]
        self._state.steps.handed()
        self._failed = self._failed and self._state.steps.is_told
        self._in_hand = holds
        return True

    def pad(self) -> None:
        """Note that the loop gets a padding batch, which holds no record of its own."""
        self.phase = LOOP[self.phase, Loop.TRAINING]
        self._state.steps.padded()
        if not self._state.steps.is_told:  # there, those read before it may still be in hand
            self._in_hand = None

    def records_in_hand(self) -> Indices:
        """Return name and number of each record of the batch that was handed out last."""
        plan = self._state.registered.plan
        if plan is None:
            return Indices.joined([])
        parts = [
            plan.indices(replace(item, skip=first, limit=after - first))
            for item, first, after in self._in_hand or []
        ]
        return Indices.joined(parts)

    def return_remainder(self, ticket: Ticket) -> Procedure[None]:
        """Give a partial batch back, until it fills a whole one."""
        self._state.outbox.note(give_backs=self._state.inflight.return_remainder(ticket))
        yield from self._reporter.send()

    # What the loop is done with ---------------------------------------------------------------------------

    def batch_requested(self) -> Procedure[None]:
        """Note that the loop asks for the next batch: without an optimizer it is done with those before."""
        self._request()
        yield from self._reporter.send()

    def request_now(self, number: int) -> bool | None:
        """Do as `batch_requested` for pass `number`, where it is open.

        Returns whether it is; None where a report must be sent, as `Reporter.send` does.
        """
        if not self.is_open(number):
            return False
        return None if self._request() else True

    def _request(self) -> bool:
        """Note that the loop asks for a batch. Returns whether a report must be sent."""
        state = self._state
        self.phase = LOOP[self.phase, Loop.ASKING]
        if state.liveness is not None:
            state.liveness.moved_on(state.now)
        if state.steps.attached or state.steps.is_told:
            return False  # what another report led to is raised before the batch is handed over
        return self._settle(state.steps.ahead, Way.NEXT) and self._reporter.is_due

    def passed_on(self, *, padding: bool = False) -> Procedure[None]:
        """Note that a wrapper passes on the oldest batch that it has read ahead, or that none is left.

        The loop has asked for it, and so is done with those before. A `padding` batch holds no record and
        is not counted as read ahead.
        """
        steps = self._state.steps
        if not steps.is_told:
            raise InvalidArgument(
                "passed_on() is for lookahead='told': with a number the loader counts by itself"
            )
        if not steps.attached:
            self._settle(steps.ahead, Way.NEXT)
        self._failed = False
        if not padding:
            steps.passed_on()
        yield from self._reporter.send()

    def stepped(self, optimizer: int) -> Procedure[None]:
        """Note a step of an attached optimizer."""
        if self.step_now(optimizer):
            yield from self._reporter.send()

    def step_now(self, optimizer: int) -> bool:
        """Do as `stepped`. Returns whether a report must be sent, as `Reporter.send` does."""
        state = self._state
        if state.liveness is not None:
            state.liveness.moved_on(state.now)
        if self._exhausted:
            state.steps.stepped_after_the_end(optimizer)
        else:
            state.steps.stepped(optimizer)
        self._settle(state.steps.keep, Way.STEP)
        return self._reporter.is_due

    def detach(self, optimizer: int) -> Procedure[None]:
        """Let an optimizer decide no more: what all others have stepped on is acknowledged."""
        steps = self._state.steps
        steps.detach(optimizer)
        if steps.attached:
            self._settle(steps.keep, Way.STEP)
            yield from self._reporter.send()

    def settle_in_hand(self) -> Procedure[None]:
        """Acknowledge what the loop is done with, and the batch in hand unless a step on it is due."""
        steps = self._state.steps
        attached = steps.attached
        self._settle(steps.keep if attached else steps.ahead, Way.STEP if attached else Way.TOKEN)
        yield from self._reporter.send()

    def _settle(self, keep: int, way: Way) -> bool:
        """Acknowledge all handed batches but the last `keep`. Returns whether there are any."""
        done = self._state.inflight.settle(keep)
        self._state.outbox.note(acknowledgements=done, way=way)
        return bool(done)

    def report(self) -> Procedure[int]:
        """Acknowledge the batch in hand, as the loop says. Returns how many leases that completed."""
        state = self._state
        state.steps.reported()
        acknowledgements = state.inflight.settle(state.steps.ahead)
        completed = sum(done.task not in state.inflight for done in acknowledgements)
        state.outbox.note(acknowledgements=acknowledgements, way=Way.REPORT)
        yield from self._reporter.send()
        return completed

    def give_back(self, *, window: bool = False) -> Procedure[None]:
        """Give the batch in hand back: it was not trained on, though some optimizer may have stepped.

        Or the whole window: each batch that was handed out and is not acknowledged, if there is one.
        """
        state = self._state
        if not state.inflight.batches if window else self._in_hand is None or self._failed:
            return
        if state.steps.ahead:
            raise AccountingError(
                f"a batch of {state.config.dataset!r} cannot be given back behind a wrapper that reads "
                f"ahead: later batches of the same leases are on their way to the loop"
            )
        if not state.inflight.batches:
            raise AccountingError(
                f"there is no batch of {state.config.dataset!r} to give back: the one in hand was "
                f"acknowledged, by the step of the last attached optimizer or a report. Give it back "
                f"before that"
            )
        batches = state.inflight.batches if window else 1
        if state.inflight.shares_lease(self._promised, batches):
            raise AccountingError(
                f"a batch of {state.config.dataset!r} cannot be given back any more: the ranks have agreed "
                f"on the next step, and this one's batch for it is of the same lease. Go back to the last "
                f"checkpoint, on all ranks; or make shards of one batch, with records_per_shard"
            )
        returned = state.inflight.handed(batches, state.steps.untouched)
        state.outbox.note(give_backs=state.inflight.take_back(batches), returned=returned)
        state.steps.withdrawn(batches)
        self.discarded += 1
        self._in_hand = None
        yield from self._reporter.send()

    def fail_batch(self, reason: str) -> Procedure[None]:
        """Put the batch in hand into quarantine: it could not be trained on. Padding has no records."""
        state = self._state
        if self._in_hand is None or self._failed:
            return
        state.quarantine(state.inflight.take_failed(state.steps.ahead), reason)
        state.steps.failed()
        self._failed = True
        self.discarded += 1
        yield from self._reporter.send()
