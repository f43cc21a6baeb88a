"""Audit log of a trainer: what it acknowledges, so that this can be proven later; the format of its lines.

A line is with the operating system before the report that it is about is sent: a process killed at any point
has written down everything that a master can have heard of it.

One file holds what one trainer session told the master, in order. Lines are ASCII and end with '\\n':

* `{…}`: JSON; the first line of a file names the session, the others are rare events;
* `epoch shard start upto task attempt step ms`: eight decimal numbers. The trainer is about to acknowledge
  positions `start` to `upto` of a shard, in the epoch's order; `ms` counts from the opening of the log;
* `=`: the master has answered everything above.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edl_torch.core.calls import Acknowledgement, Failure, GiveBack
from edl_torch.core.codec import object_of, row_of
from edl_torch.core.leases import Span
from edl_torch.errors import AuditError, EdlError
from edl_torch.shard import IndexArray
from edl_torch.trainer.vocabulary import (
    Answered,
    AuditFact,
    DataChanged,
    Dropped,
    Evidence,
    Granted,
    Joined,
    ModelSeen,
    PaddingLearnt,
    Refused,
    Reporting,
    Restored,
    Reweighed,
    Run,
    StepShown,
    TokenTaken,
    Unanswered,
    Uncounted,
    Voided,
)

VERSION = 3
SUFFIX = ".audit"
LEDGERS = "ledgers"  # the file in each folder of logs with the ids of ledgers, in the order of their coming
ANSWERED = b"=\n"
COLUMNS, STEP = 8, 6  # of an acknowledgement, as above

_NEWLINE, _SPACE, _EQUALS = b"\n ="
_ALLOWED = b"0123456789 =\n"
_BLANK_ANSWERS = bytes.maketrans(b"=", b" ")
_LINE = re.compile(rb"=|\d{1,18}(?: \d{1,18}){7}")


class DamagedLine(EdlError):
    """Error: a line that no trainer wrote; `number` counts from 0 within what was read."""

    def __init__(self, number: int, text: bytes) -> None:
        super().__init__(f"line {number} is damaged: {text[:80]!r}")
        self.number = number
        self.text = text


# Events -----------------------------------------------------------------------------------------------


def write_event(values: Mapping[str, object]) -> bytes:
    """One JSON line. Names may hold undecodable bytes as lone surrogates, which ASCII escapes carry."""
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


# Acknowledgements -------------------------------------------------------------------------------------


def read_rows(text: bytes) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Read whole lines that are no events.

    Returns the rows, int64 of shape (n, 8), their line numbers, and those of the answers. Raises DamagedLine.
    """
    marks = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(marks == _NEWLINE)
    starts = np.concatenate(([0], ends[:-1] + 1))
    answers = marks[starts] == _EQUALS
    spaces = np.add.reduceat(marks == _SPACE, starts, dtype=np.int64)
    answered = int(answers.sum())
    rows = len(ends) - answered
    sound = (
        not text.translate(None, _ALLOWED)
        and text.count(b"=") == answered
        and bool((spaces == np.where(answers, 0, COLUMNS - 1)).all())
        and bool((ends[answers] - starts[answers] == 1).all())
    )
    numbers = _numbers(text) if sound else np.empty(0, dtype=np.int64)
    # A line of seven spaces has eight numbers at most, so the total says that each has eight.
    if not sound or len(numbers) != rows * COLUMNS:
        number, damaged = next(
            (i, line) for i, line in enumerate(text.split(b"\n")) if not _LINE.fullmatch(line)
        )
        raise DamagedLine(number, damaged)
    lines = np.arange(len(ends), dtype=np.int64)
    return numbers.reshape(rows, COLUMNS), lines[~answers], lines[answers]


def _numbers(text: bytes) -> IndexArray:
    blank = text.translate(_BLANK_ANSWERS)
    if blank.isspace():
        return np.empty(0, dtype=np.int64)
    # mypy knows only the binary form's bytes; the text form takes them too.
    return np.fromstring(blank, dtype=np.int64, sep=" ")


# The log of a session ---------------------------------------------------------------------------------

_UNFIT = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(slots=True, kw_only=True)
class _Lease(Span):
    """Lease as far as it is written down: the `holes` are in quarantine."""

    attempt: int
    epoch: int
    shard: int


class AuditLog:
    """The log of one session: a file of its own in `directory`, made when the session joins.

    `clock` gives seconds that only grow. Raises AuditError when a file cannot be written; the log is unusable
    from then on, and a report that is not written down must not be sent.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        session: str,
        worker_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        name = _UNFIT.sub("_", worker_id)[:80] or "trainer"
        self.path = Path(directory) / f"{name}-{_UNFIT.sub('_', session)}{SUFFIX}"
        self._session = session
        self._worker_id = worker_id
        self._clock = clock
        self._opened = 0.0
        self._file = -1
        self._broken = ""
        # When leases are void, what is pending stays so: a call on its way may still be answered.
        self._leases: dict[int, _Lease] = {}
        self._gone: dict[int, _Lease] = {}  # void since the session joined this lineage anew
        self._finished: list[int] = []  # leases that end with what is pending
        self._pending: set[int] = set()  # tasks with outcomes that no answer has settled
        self._repeated: set[int] = set()  # of those, tasks that were reported before without an answer
        self._steps = 0
        self._way = 0  # of the rows written last
        self._part: dict[str, object] = {}  # as what it takes part: ledger, lineage, member

    def __repr__(self) -> str:
        return f"<AuditLog {str(self.path)!r} pending={len(self._pending)}>"

    def write(self, fact: AuditFact) -> None:
        """Write down what has happened to the trainer, in the order of events and by one thread at a time."""
        match fact:
            case Granted(grant):
                cut = grant.slice
                self._leases[grant.task] = _Lease(
                    attempt=grant.attempt, epoch=cut.epoch, shard=cut.shard, done=cut.skip, stop=cut.stop
                )
            case Reweighed(segments):
                self._event("segments", segments=[row_of(segment) for segment in segments])
            case Reporting():
                self._reporting(fact)
            case Answered(stale):
                self._answered(stale)
            case Unanswered():
                self._repeated |= self._pending
            case Refused():  # nobody will say whether an earlier try of it arrived
                self._lost()
            case Joined():
                self._joined(fact)
            case Dropped():
                self._dropped(fact)
            case Voided(runs):
                self._write(b"".join(self._repeated_runs("void", runs)))
            case StepShown(what=kind, runs=runs):
                for (task, first, after), cut in runs:
                    where = {"epoch": cut.epoch, "shard": cut.shard, "start": first, "upto": after}
                    self._event(kind, **where, task=task)
            case DataChanged(said=said, tokens=tokens):
                if self._part:
                    self._event("changed", said=said, tokens=tokens)
            case PaddingLearnt(batches):
                if self._part:
                    self._event("padding", batches=batches)
            case Uncounted(records):
                if records and self._leases:  # without a lease a restore has made all of it void
                    self._event("uncounted", records=records)
            case TokenTaken():
                told = object_of(fact) | {"token": token_digest(fact.token)}
                self._event("snapshot", **self._part, **told)
            case Restored():
                self._gone, self._leases = {}, {}
                self._finished.clear()
                replaced, self._part = self._part["lineage"], self._part | {"lineage": fact.lineage}
                self._event("restored", lineage=fact.lineage, replaced=replaced, token=fact.token)
            case ModelSeen():
                if self._part:  # one that is before the session takes part says nothing
                    self._event("model", **object_of(fact))

    def _joined(self, fact: Joined) -> None:
        """The session takes part in a dataset, for the first time or anew: leases of before are void."""
        self._open()
        part = object_of(fact.fence)
        if self._part.get("ledger") != part["ledger"]:
            self._order(fact.fence.ledger)
        goes_on = all(self._part.get(name) == part[name] for name in ("ledger", "lineage"))
        self._gone = self._leases if goes_on else {}
        self._leases = {}
        self._finished.clear()
        self._part = part
        told = {"batch_size": fact.batch_size, "known_by": fact.known_by, "dataset": object_of(fact.spec)}
        self._event("joined", **part, **told)

    def _reporting(self, fact: Reporting) -> None:
        """What was written down before and is reported again adds nothing.

        Raises AuditError where the log is broken, also when there is nothing to add: the last line may be one
        that was not written.
        """
        self._check()
        lines = [line for failure in fact.failures for line in self._quarantine(failure)]
        self._steps += 1
        tail = f"{self._steps} {self._ms()}\n"
        rows = [line for done in fact.acknowledgements for line in self._acknowledge(done, tail)]
        if rows and fact.way != self._way:
            self._way = fact.way
            lines.append(self._line("way", way=Evidence(fact.way).label))
        lines += rows
        lines += self._repeated_runs("returned", fact.returned)
        lines += [line for back in fact.give_backs for line in self._give_back(back)]
        self._write(b"".join(lines))

    def _quarantine(self, failure: Failure) -> Iterable[bytes]:
        lease = self._held(failure.task, failure.attempt)
        if lease is None or not lease.close(failure.position, failure.position + 1):
            return
        self._pending.add(failure.task)
        self._finish(failure.task, lease)
        yield self._line(
            "quarantined",
            epoch=lease.epoch,
            shard=lease.shard,
            position=failure.position,
            task=failure.task,
            attempt=failure.attempt,
            reason=failure.reason,
        )

    def _acknowledge(self, done: Acknowledgement, tail: str) -> Iterable[bytes]:
        lease = self._held(done.task, done.attempt)
        if lease is None:
            yield from self._report_in_vain(done)
            return
        if not (pieces := list(lease.pieces(done.start, done.upto))):
            return
        lease.close(done.start, done.upto)
        self._pending.add(done.task)
        self._finish(done.task, lease)
        for first, after in pieces:
            yield f"{lease.epoch} {lease.shard} {first} {after} {done.task} {done.attempt} {tail}".encode()

    def _repeated_runs(self, kind: str, runs: Iterable[Run]) -> Iterator[bytes]:
        for task, first, after in runs:
            lease = self._leases.get(task)
            # Else it is written down, or void since.
            if lease is not None and any(lease.pieces(first, after)):
                yield self._run(kind, lease, (task, first, after))

    def _run(self, kind: str, lease: _Lease, run: Run) -> bytes:
        task, first, after = run
        return self._line(kind, epoch=lease.epoch, shard=lease.shard, start=first, upto=after, task=task)

    def _report_in_vain(self, done: Acknowledgement) -> Iterator[bytes]:
        """A report was on its way here when the session joined anew: the master will refuse it."""
        lease = self._gone.get(done.task)
        if lease is not None and lease.attempt == done.attempt:
            for first, after in list(lease.pieces(done.start, done.upto)):
                lease.close(first, after)
                yield self._run("void", lease, (done.task, first, after))

    def _give_back(self, back: GiveBack) -> Iterable[bytes]:
        lease = self._held(back.task, back.attempt)
        if lease is None or not (pieces := list(lease.pieces(back.start, back.upto))):
            return
        lease.close(back.start, lease.stop if back.upto is None else back.upto)
        self._finish(back.task, lease)
        for first, after in pieces if back.remainder else ():
            yield self._line("remainder", epoch=lease.epoch, shard=lease.shard, start=first, upto=after)

    def _held(self, task: int, attempt: int) -> _Lease | None:
        """Return the lease, unless it is void: then the master refuses whatever is said of it."""
        lease = self._leases.get(task)
        return lease if lease is not None and lease.attempt == attempt else None

    def _finish(self, task: int, lease: _Lease) -> None:
        if lease.is_done:
            self._finished.append(task)  # kept until the answer: the report may be repeated

    def _answered(self, stale: Collection[int]) -> None:
        """The master has answered the last report; it refused what was said of the tasks in `stale`."""
        refused = self._pending.intersection(stale)
        unsure = refused & self._repeated
        if refused:
            self._write(self._line("refused", tasks=sorted(refused - unsure), unsure=sorted(unsure)))
        elif self._pending:
            self._write(ANSWERED)
        for task in self._finished:  # of one that was refused more may be told: what the loop has of it
            self._leases.pop(task, None)
        self._settle()

    def _lost(self) -> None:
        if self._pending:
            self._event("lost")
        self._settle()

    def _dropped(self, fact: Dropped) -> None:
        told = [(done, self._held(done.task, done.attempt)) for done in fact.acknowledgements]
        unwritten = [
            (done.task, *piece)
            for done, lease in told
            if lease is not None
            for piece in lease.pieces(done.start, done.upto)
        ]
        self._write(b"".join(self._repeated_runs("void", (*unwritten, *fact.returned))))
        if self._pending and not fact.on_its_way:
            self._lost()

    def close(self) -> None:
        """Nothing more will come."""
        if self._file >= 0:
            if self._pending and not self._broken:
                self._event("lost")  # a killed trainer cannot say so, and its model is gone
            file, self._file = self._file, -1  # Ctrl-C must not have it closed twice
            os.close(file)
        self._broken = self._broken or "it is closed"

    # Writing --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._finished.clear()
        self._pending.clear()
        self._repeated.clear()

    def _open(self) -> None:
        if self._file >= 0 or self._broken:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, flags, 0o644)
        except OSError as exc:
            raise AuditError(
                f"cannot make the audit log {str(self.path)!r} ({exc}): check audit_dir"
            ) from exc
        self._opened = self._clock()
        header = {"edl_audit": VERSION, "session": self._session, "worker_id": self._worker_id}
        self._write(write_event(header | {"opened": time.time()}))

    def _order(self, ledger: str) -> None:
        """Note that this ledger came after the others whose logs are here: clocks do not tell."""
        path = self.path.parent / LEDGERS
        try:
            known = path.read_bytes() if path.exists() else b""
            line = f"{ledger}\n".encode("utf-8", "surrogateescape")
            if not known.endswith(line):
                with path.open("ab", buffering=0) as file:
                    file.write(line)
        except OSError as exc:
            self._broken = str(exc)
            raise AuditError(f"the order of ledgers {str(path)!r} cannot be written: {exc}") from exc

    def _event(self, kind: str, **values: object) -> None:
        self._write(self._line(kind, **values))

    def _line(self, kind: str, **values: object) -> bytes:
        return write_event({"event": kind, **values, "ms": self._ms()})

    def _ms(self) -> int:
        return max(0, int((self._clock() - self._opened) * 1000))

    def _write(self, text: bytes) -> None:
        if not text:
            return
        self._check()
        try:
            # One call, no buffer: what a killed process has written is whole, and a fork has no copy of it.
            if os.write(self._file, text) < len(text):  # nothing may follow half a line
                self._broken = "the disk is full"
        except OSError as exc:
            self._broken = str(exc)
            raise AuditError(f"the audit log {str(self.path)!r} cannot be written: {exc}") from exc
        self._check()

    def _check(self) -> None:
        if self._broken:
            raise AuditError(f"the audit log {str(self.path)!r} cannot be written: {self._broken}")


def token_digest(token: str) -> str:
    """Return the digest of a token that a log keeps: BLAKE2b (RFC 7693), 32 hex digits."""
    return hashlib.blake2b(token.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
