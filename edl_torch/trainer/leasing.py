"""Asks the master for leases while a pass is open, and deals them to the streams that read."""

from __future__ import annotations

from edl_torch.core.calls import NEW_PASS, Grant, LeaseAnswer, LeaseCall, PassState, StatusCall
from edl_torch.core.status import MasterStatus, TrainerStatus
from edl_torch.errors import ConcurrentIteration, EdlError, SessionLost
from edl_torch.trainer.inflight import Mode
from edl_torch.trainer.liveness import WaitLogSchedule
from edl_torch.trainer.registrar import Registrar
from edl_torch.trainer.reporter import Reporter
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import (
    Asking,
    Call,
    Granted,
    Logged,
    LookAround,
    Procedure,
    Reweighed,
    SiblingSession,
    Wait,
)

POLL_S = 1.0  # the longest single wait at the master: so a closed pass or Ctrl-C is noticed soon


class Leasing:
    """Calls for leases: one at a time."""

    def __init__(self, state: State, registrar: Registrar, reporter: Reporter) -> None:
        self._state = state
        self._registrar = registrar
        self._reporter = reporter
        self._waited_s = 0.0  # in calls that could wait, since records or the end of an epoch came
        self._nothing_yet = False  # what the last call was answered
        self._silence = WaitLogSchedule()

    def __repr__(self) -> str:
        return f"<Leasing {self._state.supply}>"

    def next(self, stream: str, number: int) -> Procedure[Grant | None]:
        """Return the next lease for a stream of pass `number`; None when it has nothing more to fetch now.

        Waits only while nothing is to be had, the epoch is not over, and this trainer holds nothing.
        """
        state, supply = self._state, self._state.supply
        while True:
            supply.current.streams.add(stream)
            if supply.error is not None:
                error, supply.error = supply.error, None
                raise error
            grant = supply.draw(stream, number)
            if grant is not None or state.closed or not supply.may_get_more(number):
                self._drew(stream, number, grant)
                return grant
            patient = not state.elastic and not state.inflight
            dry = supply.empty_answers
            yield from self._ask_or_wait(POLL_S if patient else 0.0)
            if not patient and supply.empty_answers != dry:
                self._drew(stream, number, None)
                return None
            if patient:
                yield from self._check_thread()

    def _drew(self, stream: str, number: int, grant: Grant | None) -> None:
        state = self._state
        if grant is not None:
            state.inflight.draw(grant.task, stream)
        if not state.elastic and number == state.supply.current.number:
            state.plain.drew(stream, grant)

    def wait_for_more(self) -> Procedure[bool]:
        """Wait, with no batch left to hand out, for the master's verdict: True when there is more to read."""
        supply = self._state.supply
        current = supply.current
        while current.is_open and supply.current is current:
            if supply.ready:
                return True
            if current.is_over:
                return False
            if (yield from self._ask_or_wait(POLL_S, drained=True)) and self._waits_for_itself():
                return False
            yield from self._check_thread()
        return False

    def look_for_more(self, wait_s: float = 0.0) -> Procedure[bool]:
        """Ask the master once, with no batch left to hand out. True when there is more to read."""
        supply = self._state.supply
        if not supply.ready and supply.current.is_open and not supply.current.is_over:
            yield from self._ask_or_wait(wait_s, drained=True)
        return bool(supply.ready)

    def fetch_ahead(self) -> Procedure[None]:
        """Fetch a lease before it is asked for. What that raises is kept for the next one to ask."""
        supply = self._state.supply
        dry = supply.empty_answers
        try:
            yield from self._ask(0.0)
        except EdlError as exc:
            supply.error, supply.current.ahead = exc, False
        else:
            if supply.empty_answers != dry:
                supply.current.ahead = False  # the rest of the pass is fetched when it is asked for

    def _waits_for_itself(self) -> bool:
        """Whether there is no pass to be had, and this trainer holds records that others may wait for."""
        current = self._state.supply.current
        no_pass = current.epoch == NEW_PASS and current.state is PassState.OPEN
        return no_pass and not self._state.supply.ready and bool(self._state.inflight)

    def _ask_or_wait(self, wait_s: float, *, drained: bool = False) -> Procedure[bool]:
        """Ask, unless another call is under way: then wait for its answer. Returns whether it asked."""
        state, supply = self._state, self._state.supply
        if supply.phase is Asking.IDLE:
            yield from self._ask(wait_s, drained=drained)
            return True
        seen, current = supply.answers, supply.current
        yield Wait(lambda: supply.answers != seen or not current.is_open or state.closed)
        return False

    def _ask(self, wait_s: float, *, drained: bool = False) -> Procedure[None]:
        state, supply = self._state, self._state.supply
        # Repeated, it gets the answer of then: leases that no other call would ever tell us of.
        number, fence = supply.lost_in or supply.current.number, state.fence
        supply.lost_in = number
        presented = None if state.liveness is None else state.liveness.presented
        call = state.call(
            LeaseCall,
            fence,
            request=supply.request + 1,
            epoch=supply.current.epoch,
            count=supply.to_ask_for,
            drained=drained,
            ahead=supply.current.mode is Mode.ELASTIC and not drained,
            segment=0 if state.registered.plan is None else state.registered.plan.newest_segment,
        )
        supply.begin_asking()
        asked_at = state.now
        try:
            answer = yield Call(call, wait_s)
            state.registered.answered(fence, asked=call.request)
            supply.request, supply.lost_in = call.request, 0
            if fence == state.fence:  # else they are void
                self._take_in(answer, number, presented)
                self._note_wait(answer, state.now - asked_at if wait_s else 0.0)
        except SessionLost:
            yield from self._registrar.again(fence)
        finally:
            supply.end_asking()
        if state.outbox.sendable:
            yield from self._reporter.post()
        if self._silence.is_due(self._waited_s):
            yield from self._say_waiting()

    def _note_wait(self, answer: LeaseAnswer, waited_s: float) -> None:
        self._nothing_yet = answer.nothing_yet
        if answer.nothing_yet:
            self._waited_s += waited_s
        else:
            self._waited_s = 0.0
            self._silence.end()

    def _check_thread(self) -> Procedure[None]:
        """Raise ConcurrentIteration where this thread waits for records that its own other loop holds."""
        if not self._nothing_yet:
            return
        siblings: tuple[SiblingSession, ...] = yield LookAround()
        if held := sum(one.records for one in siblings if one.same_thread):
            raise ConcurrentIteration(
                f"this loop waits for {held} record(s) of {self._state.config.dataset!r} that another loader "
                f"of this process holds, whose loop is in the same thread and cannot go on before this one: "
                f"both would wait for ever. For all of the data from each, give each loader a dataset_name "
                f"of its own; to share the data, run them in processes of their own. A loader left over from "
                f"before, as by a notebook cell that ran again, lets go with `loader.close()`"
            )

    def _say_waiting(self) -> Procedure[None]:
        """Log for how long this trainer has waited for records of others, and who has them."""
        config, waited_s = self._state.config, self._waited_s
        siblings: tuple[SiblingSession, ...] = yield LookAround()
        here = {one.session for one in siblings}
        others = (
            "are with others, until they are trained on or given back, or their trainer is not heard of for "
            "the master's lease timeout"
        )
        said = f"{others}: the master does not say who has them"
        try:
            status: MasterStatus = yield Call(StatusCall())
        except EdlError:
            pass  # whoever waits for the master itself hears of it from the call for leases
        else:
            holders = [one for one in status.trainers if one.leased and config.dataset in one.datasets]
            found = [
                _described(one, here=one.session in here) for one in holders if one.session != config.session
            ]
            said = f"{others}: {'; '.join(found) or 'no other trainer has any'}"
            if holders and not found:
                said = (
                    f"are this trainer's own: {holders[0].leased} are lent to it, and count when its loop is "
                    f"done with them, by a step of each attached optimizer"
                )
        self._state.facts.append(
            Logged(
                f"dataset {config.dataset!r}: this trainer has waited {waited_s:.0f} s for records, or for "
                f"the end of the epoch. The records that are left {said}"
            )
        )

    def _take_in(self, answer: LeaseAnswer, number: int, presented: int | None) -> None:
        state = self._state
        if answer.segments:
            assert state.registered.plan is not None
            state.registered.plan.learn(answer.segments)
            state.facts.append(Reweighed(answer.segments))
        for grant in answer.grants:
            if state.config.audited:
                state.facts.append(Granted(grant))
            state.inflight.grant(grant)
        if answer.grants and state.liveness is not None and presented != state.liveness.presented:
            # What was presented since may have been without them, and then its answer does not cover them.
            state.liveness.doubt()
        if not state.supply.take_in(answer, number):
            state.outbox.note(give_backs=state.inflight.give_back_undrawn(answer.grants))


def _described(trainer: TrainerStatus, *, here: bool) -> str:
    """Return who holds records, for people; `here` where it is in this process."""
    where = ", in this process: `close()` it if its loop was left" if here else ""
    return (
        f"trainer {trainer.worker_id!r} (session {trainer.session[:8]}{where}) has {trainer.leased} "
        f"record(s), last heard of {trainer.idle_s:.0f} s ago, its loop last moved on "
        f"{trainer.since_progress_s:.0f} s ago"
    )
