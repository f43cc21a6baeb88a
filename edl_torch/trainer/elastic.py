"""Passes of an `ElasticDataLoader`: batches go to the loop, and come back as outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edl_torch.core.calls import NEW_PASS, Acknowledgement
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.shard import Indices, Slice
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.foreign_loop import PlainPasses
from edl_torch.trainer.inflight import Mode, Pass
from edl_torch.trainer.leasing import Leasing
from edl_torch.trainer.loop_warnings import LoopWarnings
from edl_torch.trainer.registrar import Confirmer
from edl_torch.trainer.reporter import Reporter
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import (
    LOOP,
    Evidence,
    Loop,
    PaddingLearnt,
    Procedure,
    Run,
    StepShown,
    Ticket,
    Warn,
    runs_of,
)


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
        self._paddings = 0  # batches, since the last one with records
        self.phase = Loop.IDLE
        self.superseded = 0  # the last pass that a later iteration ended
        self.read_ahead = 0  # the last pass of which a wrapper held batches when the data went back
        self.discarded = 0  # how often a batch in hand failed, or went back
        self._exhausted = False  # every batch of the pass was handed out

    def __repr__(self) -> str:
        return f"<ElasticPasses {self.phase.name} exhausted={self._exhausted} {self._state.supply}>"

    # Beginning and end ------------------------------------------------------------------------------------

    def open(self, epoch: int = NEW_PASS) -> Procedure[int]:
        """Begin a pass over `epoch`, or the one that runs. Returns its number. One that is open is ended."""
        state = self._state
        yield from self.supersede()
        yield from self._plain.finish()
        if state.batches.is_told:  # its wrapper may have read the last pass to its end before it was left
            self._withdraw()
        yield from self.warnings.of_the_last_pass()
        state.batches.begin_pass()
        self.phase = LOOP[self.phase, Loop.ASKING]
        if state.liveness is not None:
            state.liveness.moved_on(state.now)
        if not state.batches.is_told:
            self._settle(state.batches.done(), Evidence.STEP if state.batches.attached else Evidence.NEXT)
        yield from self._reporter.send()
        self._exhausted = False
        state.close_pass()
        return state.supply.open(Mode.ELASTIC, epoch)

    def set_lookahead(self, lookahead: int | None) -> Procedure[None]:
        """Have so many batches read ahead of the loop from the next pass on; None: a wrapper tells. A pass
        that is open is ended."""
        yield from self.supersede()
        if self._state.batches.is_told:
            self._withdraw()
        self._state.batches.set_lookahead(lookahead)
        yield from self._reporter.send()

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is open, or was last; NEW_PASS before the first one."""
        return self._state.supply.current.epoch

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the epoch is over."""
        return self._state.supply.current.is_over

    def is_open(self, number: int) -> bool:
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
        return number if self._state.batches.ahead and self.is_open(number) else 0

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
        self.phase = LOOP[self.phase, Loop.IDLE]
        self.warnings.pass_ended()
        self._state.close_pass()
        if finished:
            self._state.batches.end_pass()
        else:
            self._withdraw()
        return not finished

    def _withdraw(self) -> None:
        """Give back the batch in hand, what was read ahead, and what no batch has brought."""
        state, batches = self._state, self._state.batches
        back = [batch for batch in batches.unfinished if batch is batches.in_hand]
        if back:
            self.discarded += 1
            self.warnings.went_back()
        touched = [batch for batch in batches.touched() if batch in back]
        if batches.is_unclear:
            batches.unclear += touched
            touched = []
        back += batches.ahead
        batches.take_back(back)
        give_backs = state.inflight.withdraw(batch.ticket for batch in back)
        state.outbox.note(give_backs=give_backs, returned=runs_of(batch.ticket for batch in touched))

    def count_without_steps(self) -> None:
        """Note that no step will show whether the loop has trained on batches that went back before any."""
        batches = self._state.batches
        batches.hears_steps = False
        if unclear := batches.unclear:
            batches.unclear = []
            self._state.facts.append(StepShown(what="returned", runs=_runs_with_slices(unclear)))
            self.warnings.went_back()

    def learnt_again(self, batches: Iterable[Batch]) -> Procedure[None]:
        """Note that a step used gradients of batches that went back when their loop was left."""
        batches = list(batches)
        self._state.facts.append(StepShown(what="returned", runs=_runs_with_slices(batches)))
        for batch in batches:
            batch.went_back = False  # it is said once
        yield from self.warnings.of_what_is_learnt_again(sum(batch.records for batch in batches))

    def learnt_in_several_steps(self, batches: Iterable[Batch]) -> None:
        """Note that an optimizer stepped more than once on batches, each time on new gradients."""
        if new := [batch for batch in batches if batch.ticket and not batch.several]:
            self._state.facts.append(StepShown(what="several", runs=_runs_with_slices(new)))
        for batch in new:
            batch.several = True

    def learnt_from_padding(self, batches: int) -> None:
        """Note that a step used so many padding batches of which the loop had not asked what they weigh."""
        self._state.facts.append(PaddingLearnt(batches))

    def weigh_padding(self, gathered: bool) -> None:
        """Note that the loop knows what the batch in hand weighs, or all `gathered` that it was passed."""
        batches = self._state.batches
        if gathered:
            batches.weigh_gathered()
        else:
            batches.weigh_padding(batches.in_hand)

    def lose_gradients(self, batches: Iterable[Batch]) -> Procedure[None]:
        """Note that the gradients of batches that wait for a step were thrown away."""
        records = 0
        for batch in batches:
            batch.lost = True
            records += batch.records
        yield from self.warnings.of_lost_gradients(records)

    # More to read -----------------------------------------------------------------------------------------

    def more_to_read(self) -> Procedure[bool]:
        """Wait, with every batch handed out, until the epoch is over. True when there is more to read."""
        self._count_what_waits()
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
        self._count_what_waits()
        state, current = self._state, self._state.supply.current
        if not (current.is_open and not current.granted and state.inflight):
            return
        name, records = state.config.dataset, state.batches.records
        slowest = ", ".join(state.batches.slowest) or "none is attached"
        left = f"{records} record(s) of {name!r} were handed out after the last optimizer.step() ({slowest})"
        if not (records and state.batches.all_step and self._is_after_all_epochs(current)):
            raise AccountingError(
                f"{left} and nothing else is left: step on them at the end of "
                f"an epoch; call loader.detach(optimizer) where another has taken its place; or call "
                f"loader.stepped() if they count as trained on, as after a step that a GradScaler "
                f"may skip"
            )
        yield from self._reporter.flush()  # before, what was trained on is told as such
        self._settle(state.batches.give_up(), Evidence.UNSTEPPED)
        yield from self._reporter.flush()
        yield Warn(
            f"{left}, and the data are at their end: these records count, and the model has not learnt from "
            f"them yet. Step on what is left after the loop over an epoch, inside of the loop over epochs: a "
            f"later step does not count for them; if it steps at i + 1 == len(loader), "
            f"enumerate(loader, loader.batches_done) goes on where a resumed epoch was. Or call "
            f"loader.stepped() if they count as trained on, as after a step that a GradScaler may skip"
        )

    def _count_what_waits(self) -> None:
        """Count what waits for an optimizer that attached itself, and may step no more: the loop has asked
        for another batch."""
        batches = self._state.batches
        if batches.attached and not batches.insists:
            self._settle(batches.reported(), Evidence.NEXT)

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

    def hand(self, ticket: Ticket) -> Procedure[bool]:
        """Hand a batch to the loop. False when it was thrown away.

        Whatever happens to this trainer from now on, this batch is all that another may have to repeat.
        """
        outbox = self._state.outbox
        # Where acknowledgements may wait, master and trainer end together: nobody would repeat a batch.
        if outbox.error is not None or (not self._state.config.report_delay_s and outbox.unanswered):
            yield from self._reporter.flush()
        if self._state.liveness is not None:
            yield from self._confirmer.moved_on()
        if self.deliver(ticket):
            return True
        yield from self._throw_away(ticket)
        return False

    def promise(self, ticket: Ticket, unanswered: int) -> Procedure[bool]:
        """Make sure that a batch is this trainer's; `deliver` hands it over later. False: it was thrown away.

        So many reports may still be without answer: 0, where a refused one must not cost a second batch.
        """
        yield from self._reporter.wait_answered(unanswered)
        yield from self._confirmer.moved_on()
        if self._state.inflight.is_mine(ticket):
            return True
        yield from self._throw_away(ticket)
        return False

    def _throw_away(self, ticket: Ticket) -> Procedure[None]:
        self._state.outbox.note(give_backs=self._state.inflight.give_back([ticket]))
        yield from self._reporter.send()

    def deliver(self, ticket: Ticket) -> bool:
        """Hand over a batch that was promised. False when it was lost meanwhile."""
        holds = self._state.inflight.hand(ticket)
        if holds is None:
            return False
        self.phase = LOOP[self.phase, Loop.TRAINING]
        self._state.batches.hand(ticket, holds)
        self._paddings = 0
        return True

    def pad(self) -> None:
        """Note that the loop gets a padding batch, which holds no record of its own."""
        self._paddings += 1
        self.warnings.check_steps(self._paddings)
        self.phase = LOOP[self.phase, Loop.TRAINING]
        self._state.batches.hand()

    def records_in_hand(self) -> Indices:
        """Return name and number of each record of the batch in hand."""
        plan, batch = self._state.registered.plan, self._state.batches.in_hand
        if plan is None or batch is None:
            return Indices.joined([])
        return Indices.joined(
            [
                plan.indices(replace(item, skip=first, limit=after - first))
                for item, first, after in batch.holds
            ]
        )

    def return_remainder(self, ticket: Ticket) -> Procedure[None]:
        """Give a partial batch back, until it fills a whole one."""
        self._state.outbox.note(give_backs=self._state.inflight.give_back([ticket], remainder=True))
        yield from self._reporter.send()

    # What the loop is done with ---------------------------------------------------------------------------

    def request(self, number: int) -> Procedure[bool]:
        """Note that the loop asks pass `number` for a batch. Without an optimizer it is done with the others.

        Returns whether that pass is still open.
        """
        if not self.is_open(number):
            return False
        state, batches = self._state, self._state.batches
        self.phase = LOOP[self.phase, Loop.ASKING]
        if state.liveness is not None:
            state.liveness.moved_on(state.now)
        if batches.attached or batches.is_told:
            batches.asked()  # what another report led to is raised before the batch is handed over
        elif self._settle(batches.done(), Evidence.NEXT) and self._reporter.is_due:
            yield from self._reporter.send()
        return True

    def passed_on(self) -> Procedure[Batch | None]:
        """Note that a wrapper passes on the oldest batch that it has read ahead, or that none is left.

        The loop has asked for it, and so is done with those before. Returns the batch, or None.
        """
        batches = self._state.batches
        if not batches.is_told:
            raise InvalidArgument(
                "passed_on() is for lookahead='manual': with a number the loader counts by itself"
            )
        if not batches.attached:
            self._settle(batches.done(), Evidence.NEXT)
        batch = batches.pass_on()
        yield from self._reporter.send()
        return batch

    def stepped(
        self, optimizer: int, before_hand: bool = False, way: Evidence = Evidence.STEP
    ) -> Procedure[None]:
        """Note a step of an attached optimizer, or, with `before_hand`, one on what came before the batch in
        hand."""
        state = self._state
        if state.liveness is not None:
            state.liveness.moved_on(state.now)
        state.batches.stepped(optimizer, before_hand=before_hand)
        self._settle(state.batches.done(), way)
        if self._reporter.is_due:
            yield from self._reporter.send()

    def detach(self, optimizer: int) -> Procedure[None]:
        """Let an optimizer decide no more: what all others have stepped on is acknowledged."""
        batches = self._state.batches
        batches.detach(optimizer)
        if batches.attached:
            self._settle(batches.done(), Evidence.STEP)
            yield from self._reporter.send()

    def settle_in_hand(self) -> Procedure[None]:
        """Acknowledge what the loop is done with, and the batch in hand unless a step on it is due."""
        batches = self._state.batches
        way = Evidence.STEP if batches.attached else Evidence.TOKEN
        self._settle(batches.done(), way)
        yield from self._reporter.send()

    def _settle(self, done: list[Ticket], way: Evidence) -> list[Acknowledgement]:
        """Acknowledge batches that the loop is done with. Returns what is told of them."""
        if not done:
            return []
        batches = self._state.batches
        if batches.unclear:
            self.count_without_steps()
        if batches.counted_unseen:
            batches.counted_unseen, way = False, max(way, Evidence.UNSEEN)
        acknowledgements = self._state.inflight.acknowledge(done)
        self._state.outbox.note(acknowledgements=acknowledgements, way=way)
        if partly := batches.counted_partly:
            batches.counted_partly = []
            if way is Evidence.STEP:
                self._state.facts.append(StepShown(what="partly", runs=_runs_with_slices(partly)))
        if lost := batches.counted_lost:
            batches.counted_lost = []
            if way <= Evidence.UNSEEN:
                self._state.facts.append(StepShown(what="unlearnt", runs=_runs_with_slices(lost)))
        return acknowledgements

    def report(self) -> Procedure[int]:
        """Acknowledge the batch in hand, as the loop says. Returns how many leases that completed."""
        state = self._state
        acknowledgements = self._settle(state.batches.reported(), Evidence.REPORT)
        completed = sum(task not in state.inflight for task in {done.task for done in acknowledgements})
        yield from self._reporter.send()
        return completed

    def give_back(self, *, window: bool = False) -> Procedure[None]:
        """Give the batch in hand back: it was not trained on, though some optimizer may have stepped.

        Or the whole window: each batch that was handed out and is not acknowledged, if there is one.
        """
        state, batches = self._state, self._state.batches
        hand = batches.in_hand
        if not batches if window else hand is not None and not hand.ticket:
            return
        back = [batch for batch in batches.unfinished if window or batch is hand]
        if not back:
            raise AccountingError(
                f"there is no batch of {state.config.dataset!r} to give back: the one in hand was "
                f"acknowledged, by the step of the last attached optimizer or a report. Give it back "
                f"before that"
            )
        returned = runs_of(batch.ticket for batch in batches.touched() if batch in back)
        batches.take_back(back, by_loop=True)
        give_backs = state.inflight.give_back(batch.ticket for batch in back)
        state.outbox.note(give_backs=give_backs, returned=returned)
        self.discarded += 1
        yield from self._reporter.send()

    def fail_batch(self, reason: str) -> Procedure[None]:
        """Put the batch in hand into quarantine: it could not be trained on. Padding has no records."""
        state = self._state
        if state.batches.is_learnt:
            yield from self.warnings.of_a_bad_batch_that_is_learnt()
            return
        failed = state.batches.failed()
        if failed:
            state.quarantine(failed, reason)
            self.discarded += 1
            yield from self._reporter.send()


def _runs_with_slices(batches: Iterable[Batch]) -> tuple[tuple[Run, Slice], ...]:
    runs = [run for batch in batches for run in zip(batch.ticket, batch.holds, strict=True)]
    return tuple([(run, cut) for run, (cut, _, _) in runs])
