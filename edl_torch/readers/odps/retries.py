"""How often, and after what pause, a call is made again: bounded, jittered, counted, logged.

It must not know what is called.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from edl_torch.errors import InvalidArgument, ReaderError
from edl_torch.readers.odps.errors import Verdict, judge, trouble
from edl_torch.readers.secret import cause_without_secrets

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_THROTTLE_PATIENCE = 4  # times `limit`: a full quota empties by waiting
_dice = random.SystemRandom()  # forked children must not share a seed: they would come back together


class Retries:
    """The retries of a reader in one process.

    `limit` retries without progress end a call, after some `first_s · 2^limit` seconds; from then on calls
    are made once, until one succeeds: a service that is away fails a job once, not record by record.
    """

    def __init__(
        self,
        limit: int = 8,
        first_s: float = 0.2,
        most_s: float = 15.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if type(limit) is not int or limit < 0:
            raise InvalidArgument(f"retries={limit!r}: expected how often a call is made again, 0 or more")
        self.limit, self.first_s, self.most_s, self.sleep = limit, first_s, most_s, sleep
        self.count = 0
        self.away = False

    def __reduce__(self) -> tuple[object, ...]:
        return Retries, (self.limit, self.first_s, self.most_s, self.sleep)

    def budget(self, what: str, hide: Callable[[str], str] = str) -> Budget:
        """The retries of one operation; `what` names it in logs and errors, `hide` takes secrets out."""
        return Budget(self, what, hide)

    def run(self, what: str, call: Callable[[], T], hide: Callable[[str], str] = str) -> T:
        """`call()`, again where its error may pass. Raises ReaderError, from the last error."""
        budget = self.budget(what, hide)
        results: list[T] = []
        while (error := troubled(lambda: results.append(call()))) is not None:
            budget.spend(error)
        budget.succeed()
        return results[0]


def troubled(call: Callable[[], object]) -> Exception | None:
    """The error of `call()`, where it may be the service's. Who goes on from it is outside its handler: what
    is raised then has this error in its chain only where it says so."""
    try:
        call()
    except trouble() as exc:
        return exc
    return None


class Budget:
    """What is left of an operation's retries."""

    def __init__(self, retries: Retries, what: str, hide: Callable[[str], str]) -> None:
        self._retries, self._what, self._hide = retries, what, hide
        self._made = 0

    def progress(self) -> None:
        """Something was received: the next failure is a first one."""
        self._made = 0
        self._retries.away = False

    def succeed(self) -> None:
        """The operation is complete."""
        self._retries.away = False

    def spend(self, error: Exception, verdict: Verdict | None = None) -> None:
        """Sleep before the next try, or raise ReaderError from `error` where there is none left."""
        retries, verdict = self._retries, verdict or judge(error)
        allowed = 0 if retries.away else retries.limit
        if verdict is Verdict.THROTTLED:
            allowed *= _THROTTLE_PATIENCE
        passing = verdict in (Verdict.RETRY, Verdict.THROTTLED, Verdict.EXPIRED)
        if not passing or self._made >= allowed:
            retries.away = retries.away or passing
            raise self._failure(error) from cause_without_secrets(error, self._hide)
        pause = min(retries.most_s, retries.first_s * 2**self._made) * _dice.uniform(0.5, 1.0)
        self._made += 1
        retries.count += 1
        _logger.warning(
            "%s: retry %d of %d in %.1f s: %s", self._what, self._made, allowed, pause, self._text(error)
        )
        retries.sleep(pause)

    def _failure(self, error: Exception) -> ReaderError:
        tried = f" after {self._made} retries" if self._made else ""
        return ReaderError(f"{self._what} failed{tried}: {self._text(error)}")

    def _text(self, error: Exception) -> str:
        return self._hide(f"{type(error).__name__}: {' '.join(str(error).split())}")
