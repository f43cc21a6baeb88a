"""One iteration over an `ElasticDataLoader`: inner passes until the master says that the epoch is over.

It carries batches from torch's loader to the training loop and tells the session about each; it does not read
records and does not speak to the master.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

from edl_torch.client.position import SessionPosition
from edl_torch.client.session import Session
from edl_torch.data.batches.transport import Envelope
from edl_torch.data.loop.inner_loader import InnerLoader
from edl_torch.data.loop.notice import Notice
from edl_torch.data.weights import PaddingBatch, Statistics, Weights
from edl_torch.errors import EdlError, LoaderWorkerDied, ServiceClosed
from edl_torch.trainer.measuring import Stopwatch
from edl_torch.trainer.vocabulary import Procedure, Ticket

WORKER_DIED = "DataLoader worker (pid"  # how torch begins to say it, in each of its three ways
_CUT_OFF = (ConnectionError, EOFError)  # what comes of it in the midst of a message
_AT_NO_RECORD = (
    "It held no record; what it printed before says why (where workers are spawned, a program that does not "
    'begin under `if __name__ == "__main__":` is such a reason)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSetup:
    """What passes are made of. It is the loader's, and outlives them.

    Batches of less than `whole_batch` records, where that is given, are not handed out.
    """

    inner: InnerLoader
    session: Session
    position: SessionPosition
    whole_batch: int | None
    weights: Weights
    padding: PaddingBatch
    statistics: Statistics
    notice: Notice


class LoaderPass(Iterator[Any]):
    """The iterator, over `epoch`; NEW_PASS is the one that runs."""

    _closed = True
    _is_told = False  # whether a wrapper says of each batch when it passes it on

    def __init__(self, setup: PassSetup, epoch: int) -> None:
        self._loader = setup.inner
        self._session = session = setup.session
        self._passes = session.passes
        self._measuring = session.trainer.state.measuring
        self._stopwatch = Stopwatch(self._measuring, perf_counter)
        self._whole_batch = setup.whole_batch
        self._weights = setup.weights
        self._is_told = session.trainer.state.batches.is_told
        self._inner: Iterator[Envelope] | None = None
        self._pid = os.getpid()
        self._epoch = epoch
        self._number = self._open()
        self._closed = False  # last: without a pass there is nothing to close

    def _open(self) -> int:
        return self._session.open(self._epoch)

    def __next__(self) -> Any:
        if self._pid != os.getpid():
            raise ServiceClosed("this iterator belongs to the process that this one was forked from")
        asked_at = self._stopwatch.clock()
        going_on = False
        try:
            if self._closed or not self._session.request(self._number):
                self._end_early()
            batch, records = self._step()
            if not self._is_told:  # else the wrapper says of each when it passes it on
                self._weights.step(records)
            going_on = True
        finally:
            if not going_on:
                self._stopwatch.ended(asked_at)
                self.close()
        self._stopwatch.handed(asked_at, records)
        return batch

    def _step(self) -> tuple[Any, int]:
        """Return the batch of the next step, and its records; 0 for a padding batch. Raises StopIteration at
        the end of the epoch."""
        envelope = self._pull(self._more_to_read, self._passes.hand)
        if envelope is None:
            raise StopIteration
        return envelope.batch, envelope.size

    def _more_to_read(self) -> bool:
        return self._session.run(self._passes.more_to_read())

    def _end_early(self) -> NoReturn:
        """The pass has ended before its loop. Raises StopIteration, or what says why."""
        closed, self._closed = self._closed, True
        self._let_go()
        if self._session.closed and not closed:
            raise ServiceClosed("the DataShardService was closed while its loader was being iterated")
        if not closed:
            self._session.check_newest(self._number)
        raise StopIteration

    def _pull(self, more: Callable[[], bool], take: Callable[[Ticket], Procedure[bool]]) -> Envelope | None:
        """The next batch that `take`, a procedure, agrees to; None when there is no `more` to read."""
        try:
            while True:
                if self._inner is None:
                    if not more():
                        return None
                    self._inner = self._loader.read()
                # No `for`: Python asks an iterator for its iterator each time, which costs a call.
                while (envelope := next(self._inner, None)) is not None:
                    if self._whole_batch is not None and envelope.size < self._whole_batch:
                        self._session.run(self._passes.return_remainder(envelope.ticket))
                    elif self._session.run(take(envelope.ticket)):
                        if envelope.times is not None:
                            self._measuring.made(*envelope.times)
                        return envelope
                self._inner = None
        except (EdlError, RuntimeError, *_CUT_OFF) as exc:
            if (died := _died(exc)) is not None:
                named = self._name_records(died)
                self._loader.end_workers()  # torch would wait for the dead one in each pass to come
                raise named from exc
            if (own := in_own_words(exc)) is not None:
                raise own from exc
            raise

    def _name_records(self, what: str) -> LoaderWorkerDied:
        broken = self._session.run(self._session.trainer.broken_streams(timeout_s=1.0))
        where = "; ".join(f"{stream} was at {records}" for stream, records in sorted(broken.items()))
        return LoaderWorkerDied(
            f"{what.rstrip('. ')}. {where or _AT_NO_RECORD}. Nothing was put in quarantine: those "
            f"records go back to the master and are read again"
        )

    def close(self) -> None:
        """End the pass; a batch in hand that is not finished with goes back."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        try:
            self._session.close_pass(self._number)  # first: workers that wait for a lease hear of it
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """End threads and workers now: where the loop raised, its traceback would keep them, and the garbage
        collector can take 5 s for each."""
        inner, self._inner = self._inner, None
        self._loader.end_threads()
        shut_down = getattr(inner, "_shutdown_workers", None)
        if shut_down is not None and not self._loader.persistent_workers:
            shut_down()

    def __del__(self) -> None:
        # The garbage collector may run this at any allocation of any thread, whatever locks that holds: it
        # takes no lock and makes no call. A forked child has a copy, and no business with the trainer's pass.
        if not self._closed and self._pid == os.getpid():
            self._session.abandon(self._number)


def _died(error: Exception) -> str | None:
    """What says that a loader worker died; None for an error of another kind."""
    text = str(error)
    if text.startswith(WORKER_DIED):
        return text
    # What a worker raises comes with the word "Caught"; MasterUnavailable is a ConnectionError too.
    cut_off = isinstance(error, _CUT_OFF) and not isinstance(error, EdlError)
    return "DataLoader worker died as it sent a batch" if cut_off and not text.startswith("Caught ") else None


def in_own_words(error: Exception) -> Exception | None:
    """An error of ours as the loader worker raised it; None for others, and where no worker did.

    torch brings it with the worker's whole traceback for a message: that stays in the error that it leads to.
    """
    if not isinstance(error, EdlError):
        return None
    kind = type(error)
    text, found, said = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
    return kind(said.strip()) if found and text.startswith("Caught ") else None
