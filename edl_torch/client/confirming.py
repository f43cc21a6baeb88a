"""Before a batch goes to the loop: are its leases this trainer's beyond doubt?

While presence is sure that is one look at a clock. When it is not, the trainer presents what it holds and
waits for the master's word. It must not know batches; what is void is handed to callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edl_torch.client.membership import Answered
from edl_torch.client.port import MasterPort
from edl_torch.client.presence import Presence
from edl_torch.core.calls import ConfirmCall, Fence, LeaseId
from edl_torch.errors import SessionLost

log = logging.getLogger("edl_torch.client")


class Confirmer:
    """One session's question which of its leases stand. Asked by the training loop only."""

    def __init__(
        self,
        port: MasterPort,
        session: str,
        dataset: str,
        *,
        held: Callable[[], tuple[LeaseId, ...]],
        on_void: Callable[[tuple[int, ...]], None],
        on_lost: Callable[[Fence], None],
        answered: Answered | None = None,
    ) -> None:
        self._port = port
        self._session = session
        self._dataset = dataset
        self._held = held
        self._on_void = on_void
        self._on_lost = on_lost
        self._answered = answered or Answered()
        self._membership = Fence()
        self._presence: Presence | None = None
        self.presented = 0  # how often leases were

    def __repr__(self) -> str:
        return f"<Confirmer {self._presence or 'in one process with the master'}>"

    def follow(self, membership: Fence) -> None:
        """Ask as this member from now on."""
        self._membership = membership
        self._tell_presence()

    def watch(self, presence: Presence | None) -> None:
        """The session attends; None where it can never be in doubt."""
        self._presence = presence
        self._tell_presence()

    def _tell_presence(self) -> None:
        if self._presence is not None:
            self._presence.member = self._membership.member

    def granted(self, presented: int) -> None:
        """Leases came, and are held now. When they were asked for, leases had been `presented` so often.

        What was presented since may have been without them, and then its answer does not cover them.
        """
        if self._presence is not None and presented != self.presented:
            self._presence.doubt()

    def moved_on(self) -> None:
        """The training loop asks for a batch, or is done with one."""
        if self._presence is not None:
            self._presence.moved_on()

    def ensure(self) -> None:
        """Return once every lease that is still in the book is this trainer's.

        Raises MasterUnavailable when the master does not answer within `master_timeout_s`, StaleLease when
        it is another master by now.
        """
        if self._presence is not None and not self._presence.sure:
            # An answer that this process slept over is no longer sure: it counts from when it was asked for.
            while not (self._present(self._presence) and self._presence.sure):
                pass

    def _present(self, presence: Presence) -> bool:
        """Ask once. False when something happened meanwhile that the answer does not cover."""
        member, doubts, asked_at = self._membership, presence.doubts, presence.clock()
        log.info("session %s presents its leases: %r", self._session, presence)
        self.presented += 1  # before the look at what is held: what comes after it is noticed
        call = ConfirmCall(
            session=self._session,
            dataset=self._dataset,
            fence=member,
            leases=self._held(),
            **self._answered.of(member),
        )
        try:
            answer = self._port.confirm(call)
        except SessionLost:
            self._on_lost(member)
            return False
        if answer.void:
            self._on_void(answer.void)
        if not set(self._held()) <= set(call.leases):
            return False  # the call has waited for the stream, and others came meanwhile
        presence.confirmed(doubts, asked_at)
        return presence.doubts == doubts and member == self._membership
