"""One grpc call, repeated until the master answers: the patience that all clients of a master share.

It must not know which calls there are, nor what they mean.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from edl_torch.client.grpc.heartbeat import backoff
from edl_torch.errors import EdlError, InvalidArgument, MasterUnavailable, ServiceClosed
from edl_torch.rpc.status import AnotherAnswers, NoTrust, from_status, is_masters_own
from edl_torch.trainer.liveness import FIRST_S, WaitLogSchedule

log = logging.getLogger("edl_torch.client")

ATTEMPT_S = 10.0  # of one attempt of a call, beside the time that it may wait at the master
LEAST_ATTEMPT_S = 0.05

A = TypeVar("A")  # the answer


class Caller:
    """Calls to the master at `address`. `close()` ends those that wait; they raise ServiceClosed.

    `explain` gets some seconds, and raises where it is certain that the master will never let us in. It is
    asked while no call was answered yet: a master that did answer, and ends connections, is only away. For
    the same reason TLS that fails is an error at once before the first answer, and waited out after it.
    Whatever else answers at the address is always waited out: another program may have the port until the
    master is back.
    """

    def __init__(
        self,
        address: str,
        master_timeout_s: float,
        explain: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not master_timeout_s >= 0:
            raise InvalidArgument(f"master_timeout_s must be 0 or more, not {master_timeout_s}")
        self._address = address
        self.timeout_s = master_timeout_s
        self._process = os.getpid()
        self._closing = threading.Event()
        self._explain = explain
        self._answered = False
        self._warned = False
        self._clock = clock

    def call(
        self, rpc: Callable[..., A], request: Any, *, wait_s: float = 0.0, attempt_s: float = ATTEMPT_S
    ) -> A:
        """Repeat for `master_timeout_s`, with pauses of at most a second; then raise MasterUnavailable."""
        began = self._clock()
        give_up_at = began + self.timeout_s
        first = ""  # in words: an error would hold this frame, and with it the loop's iterator, as garbage
        pauses = backoff()
        silence = WaitLogSchedule()
        waits = False  # inside grpc: every other attempt, for only the others can say who answers instead
        while True:
            now = self._clock()
            left_s = give_up_at - now
            timeout_s = wait_s + max(LEAST_ATTEMPT_S, min(attempt_s, left_s))
            if first and now - began < FIRST_S:  # it waits inside grpc: not beyond the time to say so
                timeout_s = min(timeout_s, FIRST_S - (now - began))
            try:
                answer = self.attempt(rpc, request, timeout_s, wait_for_ready=waits)
                self._answered, self._warned = True, False
                return answer
            except (MasterUnavailable, NoTrust) as error:
                if not self._answered:
                    self._explain_or_raise(error, left_s, not first)
                first, waits = first or str(error), not waits
                pause_s = next(pauses)
                now = self._clock()
                if now + pause_s >= give_up_at:
                    raise self.unavailable(first, error) from error
                self._tell(error)
                if silence.is_due(now - began):
                    self.say_waiting(now - began, str(error))
            self.pause(pause_s)

    def say_waiting(self, waited_s: float, why: str) -> None:
        """Log that the master has been waited for."""
        log.warning(
            "no answer from the master at %s for %.0f s: %s; waiting for up to %g s (master_timeout_s)",
            *(self._address, waited_s, why, self.timeout_s),
        )

    def _explain_or_raise(self, error: EdlError, left_s: float, is_first: bool) -> None:
        if isinstance(error, NoTrust):
            raise error
        if is_first and self._explain is not None:
            self._explain(left_s)

    def _tell(self, error: EdlError) -> None:
        if isinstance(error, AnotherAnswers | NoTrust) and not self._warned:
            self._warned = True
            log.warning("%s; waiting for the master for up to %g s", error, self.timeout_s)
        else:
            log.debug("%s; trying again", error)

    def attempt(
        self, rpc: Callable[..., A], request: Any, timeout_s: float, *, wait_for_ready: bool = False
    ) -> A:
        """Call once. Without `wait_for_ready` it fails fast, and can say why. With it, it waits inside grpc:
        older releases make a new connection only while a call waits for it."""
        self.check_usable()
        try:
            return rpc(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            self.check_usable()
            # What the master itself says is said once: grpc's error has nothing but the same text, twice.
            raise from_status(error, self._address) from (None if is_masters_own(error) else error)
        except ValueError:  # grpc's word for a channel that was closed meanwhile
            self.check_usable()
            raise

    def pause(self, seconds: float) -> None:
        """Wait, but not after `close`."""
        self._closing.wait(seconds)

    @property
    def is_usable(self) -> bool:
        """Whether calls can be made: not after `close`, and not in a forked child."""
        return not self._closing.is_set() and self.is_ours

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it."""
        return os.getpid() == self._process

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def check_usable(self) -> None:
        """Raise ServiceClosed or EdlError where no call can be made."""
        if self._closing.is_set():
            raise ServiceClosed(f"the client of the master at {self._address} was closed")
        if not self.is_ours:
            raise EdlError(
                "a MasterClient cannot be used in a forked child: make one there, or ask the parent"
            )

    def unavailable(self, first: str, last: EdlError | None = None) -> MasterUnavailable:
        """What to raise in the end: what was said at first, and the last error."""
        other = isinstance(last, AnotherAnswers | NoTrust) and str(last) != first
        return MasterUnavailable(
            f"no answer from the master at {self._address} within {self.timeout_s:g} s: "
            f"is it running, and is the address right? At first: {first}"
            + (f". In the end: {last}" if other else "")
        )

    def close(self) -> None:
        """No more calls."""
        self._closing.set()

    def __repr__(self) -> str:
        return f"<Caller {'closed ' if self.is_closed else ''}{self._address}>"
