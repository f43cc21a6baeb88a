"""Warnings for the user of an `ElasticDataLoader` whose loop loses batches, or leaves them waiting.

What a loop did is noted where it happens; its own next calls give the warnings, and the error of a loop that
never gets on.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl_torch.core.calls import PassState
from edl_torch.errors import AccountingError
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import Procedure, Warn

PADDINGS = 1000  # batches in a row, while some optimizer has never stepped: one that gathers has windows
EMPTY_PASSES = 1000  # in a row, after the last epoch: such a loop would go round for ever
VAIN_PASSES = 10  # in a row that gave back all that they had: a loop may try again after errors


class LoopWarnings:
    """Notes of what a loop did, and warnings and an error that come of them, most of them once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._finished_in = 0  # the lineage in which a pass ended with the last epoch
        self._told_finished = False
        self._empty = 0  # passes in a row that began after it
        self._took_back = False  # whether a batch in hand went back that the loop may have trained on
        self._told_took_back = False
        self._told_lost = False  # of gradients that were thrown away
        self._told_again = False  # of a step on gradients of what went back
        self._told_too_late = False  # of a bad batch that was learnt
        self._gave_back = False  # whether batches in hand went back since the loop asked if all is done
        self._settled = 0  # batches that it was done with when it asked
        self._vain = 0  # how often in a row it asked, and had given back all
        self._unstepped: list[str] = []  # optimizers that never stepped, to be told of when there is more

    def __repr__(self) -> str:
        return f"<LoopWarnings finished_in={self._finished_in} took_back={self._took_back}>"

    # What is noted ----------------------------------------------------------------------------------------

    def pass_ended(self) -> None:
        """Note the end of a pass, which may be that of the last epoch."""
        if self._state.supply.current.state is PassState.FINISHED:
            self._finished_in = self._state.fence.lineage

    def went_back(self) -> None:
        """Note that the batch in hand went back as its pass ended. A step alone could say if it counts."""
        self._gave_back = True
        batches = self._state.batches
        self._took_back |= not (batches.attached or batches.is_unclear)

    def restored(self) -> None:
        """Forget what went back: the model and the data are at a token from before."""
        self._took_back = self._gave_back = False
        self._vain = 0

    # What is told -----------------------------------------------------------------------------------------

    def of_the_last_pass(self) -> Procedure[None]:
        """Warn, as a pass begins, of what was noted in those before."""
        yield from self.of_what_went_back()
        yield from self._of_no_more_epochs()
        yield from self._of_idle_optimizers()

    def of_what_went_back(self) -> Procedure[None]:
        """Warn, once, that a batch went back which the loop may have trained on. For the loop's own calls."""
        if self._took_back and not self._told_took_back:
            self._told_took_back = True
            yield Warn(
                f"the loop was left with the batch in hand of {self._state.config.dataset!r}, which goes "
                f"back and is read again, though the loop may have trained on it: nothing says that it is "
                f"done. Call loader.attach(optimizer) before the loop, so that each step says so, or "
                f"loader.stepped() before leaving it"
            )

    def of_what_is_learnt_again(self, records: int) -> Procedure[None]:
        """Warn, once, of a step on gradients of a batch that went back."""
        if self._told_again:
            return
        self._told_again = True
        yield Warn(
            f"an optimizer stepped on gradients of {records} record(s) of {self._state.config.dataset!r} "
            f"that went back: by give_back(), when the loop was left with them in hand, or as a checkpoint "
            f"was loaded. They come again, and the model learns them twice. Step before leaving a loop, or "
            f"call optimizer.zero_grad() after it, and then loader.give_back(window=True): what was gathered "
            f"comes again, too. After load_state_dict() call optimizer.zero_grad()"
        )

    def of_a_bad_batch_that_is_learnt(self) -> Procedure[None]:
        """Warn, once, that the batch which is said to be bad counts as trained on."""
        if not self._told_too_late:
            self._told_too_late = True
            yield Warn(
                f"report_batch_done(err_msg=…) came after a step on the batch in hand of "
                f"{self._state.config.dataset!r}, or a report of it: it counts as trained on, and its "
                f"records do not go to quarantine. Say that a batch is bad before optimizer.step(), and "
                f"leave that out"
            )

    def of_lost_gradients(self, records: int) -> Procedure[None]:
        """Warn, once, of batches that the next step counts, though no gradient is left of them."""
        if not self._told_lost:
            self._told_lost = True
            yield Warn(
                f"{records} record(s) of {self._state.config.dataset!r} were handed out after the last "
                f"optimizer.step(), and no attached optimizer has a gradient now: they count at its next "
                f"step, though the model has not learnt from them. Step before zero_grad() at the end of an "
                f"epoch; after a loop that only looks at the data call loader.give_back(window=True)"
            )

    def of_no_step_at_the_end(self, records: int, slowest: Sequence[str]) -> Procedure[None]:
        """Warn of batches that a loop which has come to its end goes without a step on of these
        optimizers."""
        if records:
            yield Warn(
                f"{records} record(s) of {self._state.config.dataset!r} were handed out after the last "
                f"optimizer.step() ({', '.join(slowest)}), and the loader was closed: they go back; where no "
                f"other trainer takes them the audit finds them lost. Step once more after the last batch of "
                f"an epoch; after one that the loop leaves out on purpose call loader.stepped()"
            )

    def _of_no_more_epochs(self) -> Procedure[None]:
        """Warn, once, of a pass that begins after the last epoch. Raises AccountingError for a loop that
        begins pass after pass there."""
        plan, lineage = self._state.registered.plan, self._state.fence.lineage
        if self._finished_in != lineage or plan is None:
            self._empty = 0
            return
        self._empty += 1
        if self._empty > EMPTY_PASSES:
            self._empty = 0
            raise AccountingError(
                f"{EMPTY_PASSES} passes in a row over {plan.spec.name!r} read nothing, as all its epochs are "
                f"over: the loop around them may never end. Give num_epochs=… for more epochs (0: endless), "
                f"and loop with `for epoch in loader.epochs():`"
            )
        if not self._told_finished:
            self._told_finished = True
            if plan.spec.components:
                yield Warn(
                    f"mixture {plan.spec.name!r} has come to its end: this pass over the loader reads "
                    f"nothing, and neither does a later one. A mixture has one epoch, and ends where its "
                    f"num_records=, stopping_strategy= or max_passes= say"
                )
                return
            yield Warn(
                f"all {plan.spec.num_epochs} epoch(s) of {plan.spec.name!r} are over: this pass over the "
                f"loader reads nothing, and neither does a later one. Give num_epochs=… for more epochs, and "
                f"loop with `for epoch in loader.epochs():`"
            )

    def _of_idle_optimizers(self) -> Procedure[None]:
        """Warn of optimizers that did not step in the last pass, though others did."""
        batches = self._state.batches
        self._unstepped = batches.take_never()
        if idle := batches.take_idle():
            self._unstepped = []
            yield Warn(
                f"of the optimizers attached for {self._state.config.dataset!r}, {', '.join(idle)} did not "
                f"step since the last pass began, though others did: batches wait for a step of each. Call "
                f"loader.detach(optimizer) where another has taken its place"
            )

    def of_no_steps(self) -> Procedure[None]:
        """Warn of optimizers that did not step in the last pass, now that there is more to read."""
        unstepped, self._unstepped = self._unstepped, []
        if unstepped:
            yield Warn(
                f"{', '.join(unstepped)}, attached for {self._state.config.dataset!r}, did not step since "
                f"the last pass began, and no batch counts before it does. Attach the optimizer whose "
                f"step() the loop calls, and call loader.detach(optimizer) for the other"
            )

    def check_steps(self, paddings: int) -> None:
        """Raise AccountingError for a loop that has got so many padding batches in a row, and would get them
        for ever."""
        if paddings >= PADDINGS and (never := self._state.batches.waits_for_ever()):
            raise AccountingError(
                f"{paddings} padding batches in a row were handed out for {self._state.config.dataset!r}, "
                f"and {', '.join(never)} has never stepped: no batch counts before it does. Attach the "
                f"optimizer whose step() the loop calls, and call loader.detach(optimizer) for the other"
            )

    def check_gets_on(self) -> None:
        """Raise AccountingError for a loop that asks whether all is done, where its passes keep nothing.

        Only one that asks can go on for ever; one that looks at a batch now and then does not ask.
        """
        settled, gave_back = self._state.batches.settled, self._gave_back
        if settled != self._settled:
            self._vain = 0
        elif gave_back:
            self._vain += 1
        self._settled, self._gave_back = settled, False
        if self._vain < VAIN_PASSES:
            return
        self._vain = 0
        batches = self._state.batches
        slowest = ", ".join(batches.slowest)
        why = f"{slowest} did not step on it" if batches.attached else "nothing says it is done"
        raise AccountingError(
            f"{VAIN_PASSES} passes in a row over {self._state.config.dataset!r} were left before a batch "
            f"counted: what the loop has in hand when it is left (break, islice) goes back, as {why}. Call "
            f"loader.attach(optimizer) before the loop and step before leaving it, or call loader.stepped()"
        )
