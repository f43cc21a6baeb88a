"""Membership of a trainer: registers it at first use, and anew once the master gave it up.

In doubt it presents its leases, before a batch goes to the loop.
"""

from __future__ import annotations

from dataclasses import replace

from edl_torch.core.calls import ConfirmCall, Fence, ProgressCall, RegisterAnswer
from edl_torch.core.plan import Plan
from edl_torch.core.registration import check_data
from edl_torch.core.state import went_back
from edl_torch.errors import JournalWentBack, SessionLost, StaleLease, UnknownDataset
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import (
    MEMBERSHIP,
    Attend,
    Call,
    Joined,
    Membership,
    Procedure,
    Register,
    Wait,
)

_BUSY = (Membership.REGISTERING, Membership.REJOINING)


class Registrar:
    """The registration of one trainer. One procedure registers at a time; others wait for it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __repr__(self) -> str:
        return f"<Registrar {self._state.registered.phase.name} {self._state.fence}>"

    @property
    def _phase(self) -> Membership:
        return self._state.registered.phase

    def _move(self, to: Membership) -> None:
        self._state.registered.phase = MEMBERSHIP[self._phase, to]

    def _begin(self, to: Membership) -> Procedure[None]:
        while self._phase in _BUSY:
            yield Wait(lambda: self._phase not in _BUSY)
        if to is Membership.REJOINING or self._phase is Membership.NEW:
            self._move(to)

    def plan(self) -> Procedure[Plan]:
        """Return the dataset as registered; register it at first use."""
        registered = self._state.registered
        yield from self._begin(Membership.REGISTERING)
        if self._phase is Membership.REGISTERING:
            try:
                answer = yield Register(again=False)
                registered.plan = Plan(answer.spec)
                self._take_part(answer)
                if not (yield Attend(answer.fence.member)):
                    self._state.liveness = None
                elif self._state.liveness is not None:
                    self._state.liveness.begin(self._state.now)
                self._move(Membership.MEMBER)
            finally:
                if self._phase is Membership.REGISTERING:
                    registered.plan = None
                    self._move(Membership.NEW)
        assert registered.plan is not None
        return registered.plan

    def again(self, lost: Fence) -> Procedure[None]:
        """Register anew after the master gave this member up, unless another call has done so.

        Raises StaleLease when the master is another one by now, or the dataset went back to a checkpoint, and
        JournalWentBack when the master has forgotten that it gave this member up.
        """
        yield from self._begin(Membership.REJOINING)
        try:
            yield from self._present(lost)
            if lost == self._state.fence:
                self._state.forget()
                self._take_part((yield from self._registered_again(lost)))
        finally:
            self._move(Membership.MEMBER)
        if not self._state.elastic:
            self._state.close_pass()  # as when leases are taken back in a plain pass

    def _registered_again(self, lost: Fence) -> Procedure[RegisterAnswer]:
        name = self._state.config.dataset
        try:
            answer: RegisterAnswer = yield Register(again=True)
        except UnknownDataset as exc:
            raise StaleLease(self._forgotten("does not know this dataset")) from exc
        fence = answer.fence
        if fence.ledger != lost.ledger:
            raise StaleLease(self._forgotten(f"keeps ledger {fence.ledger}, not {lost.ledger}"))
        if fence.member == lost.member:
            raise JournalWentBack(went_back(f"member {lost.member} of {name!r} was given up, and is back"))
        if fence.lineage != lost.lineage:
            raise StaleLease(
                f"{name!r} was taken back to a checkpoint by another trainer: "
                f"this one's leases are void. Start it again from the newest checkpoint"
            )
        assert self._state.registered.plan is not None
        self._state.registered.plan.learn(answer.spec.segments)
        yield from self._present(lost)  # again: the journal may have gone back before the answer
        return answer

    def _present(self, lost: Fence) -> Procedure[None]:
        """Tell the master all that it has answered to a member which it gave up. Raises JournalWentBack.

        The call that found this out may have been a repeat, and then does not name what was answered since.
        """
        try:
            yield Call(self._state.call(ProgressCall, lost))
        except JournalWentBack:
            raise
        except StaleLease:
            return  # as it must be: the master has given it up

    def _take_part(self, answer: RegisterAnswer) -> None:
        self._state.become(answer.fence)
        self._note_joined()

    def _note_joined(self) -> None:
        plan, fence = self._state.registered.plan, self._state.fence
        if plan is not None:
            known_by, batch_size = self._state.registered.known_by, self._state.config.batch_size
            joined = Joined(spec=plan.known_spec, fence=fence, batch_size=batch_size, known_by=known_by)
            self._state.facts.append(joined)

    def heard(self, spec: DatasetSpec) -> None:
        """Take over the dataset as the rank registered it that holds the leases for this one.

        The same data may have other names here. Raises DatasetConflict for other data.
        """
        plan = self._state.registered.plan
        if plan is not None:
            check_data(spec, plan.spec)
            self._state.registered.plan = Plan(replace(spec, sources=plan.spec.sources))

    def enter(self, lineage: int) -> None:
        """Go on in `lineage`, which this trainer opened by going back to a token."""
        self._state.become(replace(self._state.fence, lineage=lineage))

    def join(self, lineage: int) -> None:
        """Go on in `lineage`, which another rank of this job opened by going back to a token."""
        self.enter(lineage)
        self._note_joined()

    def _forgotten(self, what: str) -> str:
        return (
            f"the master of {self._state.config.dataset!r} is another one than before, it {what}: this "
            f"trainer's leases are void. Restart all trainers from one checkpoint (load_state_dict), or from "
            f"the beginning; a master with `--state DIR` survives its own restart"
        )


class Confirmer:
    """Presents the leases to the master when liveness is in doubt. For the training loop only."""

    def __init__(self, state: State, registrar: Registrar) -> None:
        self._state = state
        self._registrar = registrar

    def __repr__(self) -> str:
        return f"<Confirmer {self._state.liveness or 'in one process with the master'}>"

    def moved_on(self) -> Procedure[None]:
        """Note that the loop goes on; return as `ensure` does."""
        if self._state.liveness is not None:
            self._state.liveness.moved_on(self._state.now)
            yield from self.ensure()

    @property
    def is_sure(self) -> bool:
        """Whether every lease is this trainer's, without a question: one that is not registered has none."""
        state = self._state
        return state.liveness is None or state.registered.plan is None or state.liveness.sure(state.now)

    def ensure(self) -> Procedure[None]:
        """Return once every lease that is still in flight is this trainer's.

        Raises MasterUnavailable when the master does not answer, StaleLease when it is another master by now.
        """
        while not self.is_sure:
            assert self._state.liveness is not None
            # An answer that this process slept over is no longer sure: it counts from when it was asked for.
            yield from self._present(self._state.liveness)

    def _present(self, liveness: Liveness) -> Procedure[None]:
        """Ask once. The doubt stays when something happened meanwhile that the answer does not cover."""
        state = self._state
        fence, doubts, asked_at = state.fence, liveness.doubts, state.now
        liveness.presented += 1
        call = state.call(ConfirmCall, fence, leases=state.inflight.leases())
        try:
            answer = yield Call(call)
        except SessionLost:
            yield from self._registrar.again(fence)
            return
        if answer.void:
            state.void(answer.void)
        # The call may have waited for the stream, and others have come meanwhile.
        if fence == state.fence and set(state.inflight.leases()) <= set(call.leases):
            liveness.confirmed(doubts, asked_at)
