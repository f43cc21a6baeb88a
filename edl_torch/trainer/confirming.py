"""The check, before a batch goes to the loop, that the master still counts its leases as this trainer's."""

from __future__ import annotations

from edl_torch.core.calls import ConfirmCall
from edl_torch.errors import SessionLost
from edl_torch.trainer.actions import Call, Procedure
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.registrar import Registrar
from edl_torch.trainer.state import State


class Confirmer:
    """Presents the leases to the master when liveness is in doubt. For the training loop only."""

    def __init__(self, state: State, registrar: Registrar) -> None:
        self._state = state
        self._registrar = registrar

    def __repr__(self) -> str:
        return f"<Confirmer {self._state.liveness or 'in one process with the master'}>"

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
