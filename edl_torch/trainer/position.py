"""Where a trainer is in its data, as a token, and the way back to one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from edl_torch.core.calls import Fence, FencedCall, ProgressCall, RestoreCall, SnapshotCall, StatusCall
from edl_torch.core.mixture import goes_on
from edl_torch.core.plan import Plan
from edl_torch.core.status import DatasetStatus, MasterStatus
from edl_torch.core.token import Token
from edl_torch.errors import SessionLost, StaleLease, UnknownDataset
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.elastic import ElasticPasses
from edl_torch.trainer.registrar import Registrar
from edl_torch.trainer.reporter import Reporter
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import Call, Describe, Logged, Procedure, Restored, TokenTaken

FIRST_LINEAGE = 1


def _moved(spec: DatasetSpec, found: Token, moved: Token) -> str:
    then = f"goes on with epoch {moved.epoch}"
    if 0 < spec.num_epochs <= moved.epoch:
        then = f"has no epoch left for them (give num_epochs={moved.epoch + 1} or more)"
    return (
        f"dataset {spec.name!r} has other data than the checkpoint's: it {then}, and "
        f"{found.abandoned:,} record(s) of the epochs before it are abandoned"
    )


class Position:
    """One trainer's position in its dataset."""

    def __init__(
        self, state: State, registrar: Registrar, reporter: Reporter, elastic: ElasticPasses
    ) -> None:
        self._state = state
        self._registrar = registrar
        self._reporter = reporter
        self._elastic = elastic
        self._held = 0  # the pass that a wrapper held batches of when a restore began
        self._seen: tuple[str, int] | None = None  # ledger ('' for any) and lineage of before it registered
        self._restores = 0

    def __repr__(self) -> str:
        return f"<Position {self._state.config.dataset!r} {self._state.fence}>"

    def _as_member(self, kind: type[FencedCall[Any]], **more: Any) -> Procedure[Any]:
        """Return what the master answers this trainer, which registers anew where it was given up."""
        yield from self._registrar.plan()
        while True:
            fence = self._state.fence
            try:
                return (yield Call(self._state.call(kind, fence, **more)))
            except SessionLost:
                yield from self._registrar.again(fence)

    def progress(self) -> Procedure[DatasetStatus]:
        """Return the dataset's progress. Raises StaleLease for a trainer that is not of its history."""
        status: DatasetStatus = yield from self._as_member(ProgressCall)
        return status

    # The token ----------------------------------------------------------------------------------------------

    def snapshot(self) -> Procedure[str]:
        """Acknowledge what the loop is done with, the batch in hand included, and take the token.

        The token of data that nobody has asked for yet is their beginning, and registers nothing: a token to
        go back to may come next, as `torch.distributed.checkpoint` asks for the state before it loads one.
        """
        beginning = yield from self.beginning()
        if beginning:
            return beginning
        yield from self.settle()
        return (yield from self.take_token())

    def settle(self) -> Procedure[None]:
        """Tell the master all that a token taken now must have."""
        yield from self._registrar.plan()
        yield from self._elastic.settle_in_hand()
        yield from self._reporter.flush()
        self._state.check()

    def take_token(self) -> Procedure[str]:
        """Ask the master for the token. Raises StaleLease where it is not this model's."""
        token: str = yield from self._as_member(SnapshotCall)
        self._state.check()  # once more: a session that was given up just now has lost what it held
        self.note_taken(token)
        return token

    def note_taken(self, token: str) -> None:
        """Note that a token was taken, here or at the rank that takes it for all."""
        state = self._state
        uncounted = 0 if state.exact else state.plain.uncounted
        half_stepped = sum(batch.records for batch in state.batches.touched()) if state.elastic else 0
        state.facts.append(
            TokenTaken(token=token, exact=state.exact, uncounted=uncounted, half_stepped=half_stepped)
        )

    def beginning(self) -> Procedure[str]:
        """Return the token of data that no master has heard of; '' of others, and without a plan."""
        state = self._state
        if state.registered.plan is not None:
            return ""
        try:
            yield Call(StatusCall(dataset=state.config.dataset))
        except UnknownDataset:
            text: str = yield Describe()
            return text
        return ""

    # The way back -------------------------------------------------------------------------------------------

    def note_history(self) -> Procedure[None]:
        """Note which history the dataset is in, before a checkpoint of it is read; registers nothing.

        A restore that finds another one is refused: what was read may be older than what others trained.
        """
        state = self._state
        if state.registered.plan is not None:
            return
        try:
            answer: MasterStatus = yield Call(StatusCall(dataset=state.config.dataset))
        except UnknownDataset:
            self._seen = ("", FIRST_LINEAGE)
        else:
            (found,) = answer.datasets
            self._seen = (found.ledger, found.lineage)

    def restore(self, token: str | None) -> Procedure[None]:
        """Go back to a token (None: the beginning); what is in flight is thrown away."""
        yield from self.prepare_restore()
        lineage = yield from self.take_back_to(token)
        self._registrar.enter(lineage)
        self.restored()

    def prepare_restore(self) -> Procedure[None]:
        """Tell the master what there is to tell. A restore that is refused then leaves all as it was."""
        self._held = self._elastic.held_by_wrapper
        yield from self._registrar.plan()
        with suppress(StaleLease):  # of before: all that is void after this
            yield from self._reporter.flush()

    def take_back_to(self, token: str | None) -> Procedure[int]:
        """Take the dataset back. Returns the lineage that this opens."""
        self._check_seen(self._state.fence)
        self._restores += 1
        plan = self._state.registered.plan
        if token is not None and plan is not None and self._state.config.follows_data:
            found = Token.decode(token)
            moved = found.onto(plan.spec)
            if moved is not found:
                token = moved.encode()
                self._state.facts.append(Logged(_moved(plan.spec, found, moved)))
        lineage: int = yield from self._as_member(RestoreCall, request=self._restores, token=token)
        if token is not None and plan is not None and plan.mixed is not None:
            self._say_reweighed(plan, Token.decode(token))
        self._state.facts.append(Restored(token=token, lineage=lineage))
        return lineage

    def _say_reweighed(self, plan: Plan, found: Token) -> None:
        """Log that the program gives a mixture other weights, or mean lengths, than those of the token."""
        if not found.segments or goes_on(found.weights, found.mean_lengths, plan.spec):
            return
        index = plan.records_before(0, found.position) + found.offset
        self._state.facts.append(
            Logged(
                f"mixture {plan.spec.name!r}: this program gives other weights than the checkpoint's: they "
                f"hold from index {index:,} on, where the checkpoint stands"
            )
        )

    def restored(self) -> None:
        """End the pass without finishing it: the model and the data are at a token now."""
        self._state.close_pass()
        self._state.plain.begun.clear()
        self._elastic.read_ahead = self._held
        self._elastic.warnings.restored()
        self._state.restored()

    def _check_seen(self, fence: Fence) -> None:
        """Raise StaleLease if the dataset went back to a checkpoint since `note_history`."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        name = self._state.config.dataset
        ledger, lineage = seen
        if ledger not in ("", fence.ledger):
            raise StaleLease(
                f"dataset {name!r} has another master since this trainer read its "
                f"checkpoint: ledger {fence.ledger}, not {ledger}. Start this one again from the newest "
                f"checkpoint"
            )
        if lineage != fence.lineage:
            raise StaleLease(
                f"dataset {name!r} was taken back to a checkpoint by another trainer while "
                f"this one read its own: lineage {fence.lineage}, not {lineage}. Start this one again from "
                f"the newest checkpoint"
            )
