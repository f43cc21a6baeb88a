"""Reader of audit logs: what each session did, lineage by lineage, and what the master answered.

It checks that a log is whole and says where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edl_torch.audit.log import LEDGERS, STEP, SUFFIX, VERSION, DamagedLine, read_rows
from edl_torch.core.codec import from_object, from_row
from edl_torch.errors import AuditError, EdlError
from edl_torch.fingerprint import STRENGTHS
from edl_torch.shard import DatasetSpec, IndexArray, MixtureSegment
from edl_torch.trainer.vocabulary import Evidence, ModelSeen, TokenTaken

BLOCK_BYTES = 1 << 24  # of rows, read together
_COLUMNS = 8  # of a run: epoch, window, first position, the one after the last, task, attempt, line, kind


class Answer(IntEnum):
    """Answer to something that was reported."""

    NONE = 0  # the trainer never learnt it
    ACCEPTED = 1
    REFUSED = 2
    LOST = 3  # it learnt that the report was refused, of which an earlier try may have been heard


class Kind(IntEnum):
    """What a line tells of a run of records.

    The last four say why a training loop may have learnt them once more, or once less, than is counted.
    """

    ACKNOWLEDGED = 0
    QUARANTINED = 1
    REMAINDER = 2  # given back as less than a batch
    RETURNED = 3  # given back by the trainer that had them
    VOID = 4  # taken back by the master
    UNLEARNT = 5  # their gradients were thrown away before the step
    SEVERAL = 6  # an optimizer stepped on them more than once, on new gradients each time
    PARTLY = 7  # of several attached optimizers some used gradients of them, and others did not


@dataclass(slots=True)
class Reports:
    """Runs of records that lines tell of, in their order, as arrays of one length.

    They are positions of a window in a `Chapter`, and numbers of `audit.intervals` in a lineage. `answers` is
    what became of those that were reported, `settled` the line that says so (its own where none does), `ways`
    how they came about, and `who` the place of the log.
    """

    starts: IndexArray
    ends: IndexArray
    kinds: IndexArray
    tasks: IndexArray
    attempts: IndexArray
    answers: IndexArray
    settled: IndexArray
    ways: IndexArray
    who: IndexArray

    @classmethod
    def join(cls, parts: Sequence[Reports]) -> Reports:
        """Return all of them, in order."""
        if not parts:
            return cls(*(np.empty(0, dtype=np.int64) for _ in cls.__slots__))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, places: IndexArray | npt.NDArray[np.bool_]) -> Reports:
        """Return those at `places`, numbers or flags."""
        return Reports(*(getattr(self, name)[places] for name in self.__slots__))

    def of(self, kind: Kind) -> Reports:
        """Return those of a kind."""
        return self.at(self.kinds == kind)

    def answered(self, *answers: int) -> Reports:
        """Return those with one of these answers."""
        return self.at(np.isin(self.answers, answers))

    def until(self, limits: Mapping[int, int]) -> Reports:
        """Return those settled before the line that `limits` has for their log; all of other logs."""
        if not limits:
            return self
        kept = np.ones(len(self), dtype=np.bool_)
        for place, line in limits.items():
            kept &= (self.who != place) | (self.settled < line)
        return self.at(kept)

    @property
    def records(self) -> int:
        """Records reported, each as often as it was."""
        return int((self.ends - self.starts).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(ModelSeen):
    """Sample of a session's model in its log; `line` is that of the token, where one was taken."""

    line: int

    def __post_init__(self) -> None:
        if len(self.values) % 4 or len(self.sums) % 8:
            raise ValueError("values and sums that are no float32 and float64")

    @property
    def places(self) -> npt.NDArray[np.float32]:
        """The values at the places that are looked at; NaN for those of other ranks' shards."""
        return np.frombuffer(self.values, dtype="<f4")

    @property
    def totals(self) -> npt.NDArray[np.float64]:
        """The weighted sums over all values."""
        return np.frombuffer(self.sums, dtype="<f8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(TokenTaken):
    """Token that was taken: `token` is its digest, and `late` says that the session knew of a later lineage,
    or of another ledger."""

    ledger: str
    lineage: int
    member: int
    late: bool
    line: int


class Note(NamedTuple):
    """What a line says of no records by name: so many `padding` batches, or records `uncounted`; or what of
    the data was `changed`."""

    kind: str
    said: Any
    line: int


_NOTED: dict[str, tuple[str, type]] = {
    "padding": ("batches", int),
    "uncounted": ("records", int),
}


def _nothing() -> IndexArray:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class Chapter:
    """Chapter of a log: one session in one lineage, from one joining to the next.

    Each of its `runs` lies in a window of an epoch; `lines` are their line numbers, from 0. `token` is what
    the lineage was opened with, where this session opened it.
    """

    dataset: DatasetSpec
    ledger: str
    lineage: int
    batch_size: int
    member: int  # that the session was there
    began: float  # seconds since 1970, by the trainer's clock
    known_by: str  # strength of the session's own fingerprint of its data
    opened: bool = False
    token: str | None = None
    before: int = 0  # the lineage that the restore left
    epochs: IndexArray = field(default_factory=_nothing)
    windows: IndexArray = field(default_factory=_nothing)
    lines: IndexArray = field(default_factory=_nothing)
    runs: Reports = field(default_factory=lambda: Reports.join([]))
    notes: list[Note] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    segments: list[MixtureSegment] = field(default_factory=list)  # of a mixture, since it joined
    seen: list[Seen] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Log:
    """Log of one session of one trainer: one file."""

    path: Path
    session: str
    worker_id: str
    chapters: list[Chapter]


def read_logs(directories: Sequence[str | PathLike[str]]) -> list[Log]:
    """All logs in `directories`. Raises AuditError for a missing folder, a folder without logs, or damage."""
    paths: dict[Path, Path] = {}
    for given in directories:
        directory = Path(given)
        if not directory.is_dir():
            raise AuditError(
                f"{str(given)!r} is not a directory here: give the audit_dir of the trainers, or a copy of it"
            )
        found = sorted(directory.glob(f"*{SUFFIX}"))
        if not found:
            raise AuditError(
                f"there is no audit log (*{SUFFIX}) in {str(directory)!r}: give the audit_dir of the trainers"
            )
        paths.update((path.resolve(), path) for path in found)
    logs = [log for path in paths.values() for log in read_log(path)]
    seen: dict[str, Path] = {}
    for log in logs:
        if log.session in seen:
            raise AuditError(
                f"{str(seen[log.session])!r} and {str(log.path)!r} are logs of one session: remove the copy"
            )
        seen[log.session] = log.path
    return logs


def read_order(directories: Sequence[str | PathLike[str]]) -> list[list[str]]:
    """Return the ids of ledgers in each folder, in the order in which their trainers came."""
    paths = [Path(directory) / LEDGERS for directory in directories]
    lines = (path.read_bytes().split(b"\n")[:-1] for path in paths if path.is_file())
    return [[line.decode("utf-8", "surrogateescape") for line in found] for found in lines]


def read_log(path: Path) -> Iterator[Log]:
    """Return the log in a file; none where the trainer was killed before its first line was whole."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise AuditError(f"cannot read the audit log {str(path)!r}: {exc}") from exc
    data = data[: data.rfind(b"\n") + 1]  # a killed process, or a full disk, leaves half a line at the end
    if data:
        yield _LogReader(path).read(data)


class _LogReader:
    """Reads one file, line by line where they are events, in blocks where they are acknowledgements."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = 0.0
        self._chapters: list[Chapter] = []
        self._runs: list[list[IndexArray]] = []  # by chapter: arrays with the columns of `_COLUMNS`
        self._answered: list[IndexArray] = []  # line numbers of what settles the lines above
        self._lost: list[int] = []
        self._refused: dict[int, tuple[list[int], list[int]]] = {}  # line -> tasks refused, tasks unsure
        self._ways: list[tuple[int, Evidence]] = []  # that of the rows after each line

    def read(self, data: bytes) -> Log:
        line, place = 0, 0
        header = self._header(data[: data.index(b"\n")])
        for start, end in _events(data):
            line += self._rows(data, place, start, line)
            place = end
            if start:
                self._event(data[start : end - 1], line)
            line += 1
        self._rows(data, place, len(data), line)
        self._settle()
        return Log(
            path=self._path,
            session=header["session"],
            worker_id=header["worker_id"],
            chapters=self._chapters,
        )

    def _damaged(self, line: int, why: object) -> AuditError:
        return AuditError(
            f"{str(self._path)!r}, line {line + 1}, is damaged ({why}): an audit needs the logs as written"
        )

    def _header(self, text: bytes) -> dict[str, str]:
        try:
            values = json.loads(text)
            version = values["edl_audit"]
            self._opened = float(values["opened"])
            header = {"session": str(values["session"]), "worker_id": str(values["worker_id"])}
        except (ValueError, TypeError, KeyError) as exc:
            raise self._damaged(0, f"no header of an audit log: {text[:80]!r}") from exc
        if version != VERSION:
            raise AuditError(
                f"{str(self._path)!r} has version {version}, and this edl-torch reads {VERSION}: audit it "
                f"with the edl-torch that wrote it"
            )
        return header

    # Rows -----------------------------------------------------------------------------------------------

    def _rows(self, data: bytes, place: int, stop: int, line: int) -> int:
        """Read the lines in `data[place:stop]`, the first of which has number `line`. Returns how many."""
        first = line
        while place < stop:
            end = stop if stop - place <= BLOCK_BYTES else data.rindex(b"\n", place, place + BLOCK_BYTES) + 1
            line += self._block(data[place:end], line)
            place = end
        return line - first

    def _block(self, text: bytes, line: int) -> int:
        try:
            rows, lines, answered = read_rows(text)
        except DamagedLine as exc:
            raise self._damaged(line + exc.number, repr(exc.text[:80])) from exc
        if len(rows):
            if not self._ways:
                raise self._damaged(line, "an acknowledgement, and no line before says how it came about")
            kind = np.full(len(rows), Kind.ACKNOWLEDGED)
            self._runs[-1].append(np.column_stack((rows[:, :STEP], lines + line, kind)))
        self._answered.append(answered + line)
        return len(rows) + len(answered)

    # Events ---------------------------------------------------------------------------------------------

    def _event(self, text: bytes, line: int) -> None:
        try:
            values = json.loads(text)
            self._apply(values["event"], values, line)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, EdlError) as exc:
            if isinstance(exc, AuditError):
                raise
            raise self._damaged(line, repr(text[:80])) from exc

    def _apply(self, kind: str, values: dict[str, Any], line: int) -> None:
        match kind:
            case "joined":
                self._begin(
                    values,
                    dataset=from_object(DatasetSpec, values["dataset"]),
                    ledger=str(values["ledger"]),
                    batch_size=int(values["batch_size"]),
                    member=int(values["member"]),
                    known_by=STRENGTHS[STRENGTHS.index(values["known_by"])],
                )
            case "restored":
                last, token = self._chapters[-1], values["token"]
                self._begin(
                    values,
                    dataset=last.dataset,
                    ledger=last.ledger,
                    batch_size=last.batch_size,
                    member=last.member,
                    known_by=last.known_by,
                    opened=True,
                    token=None if token is None else str(token),
                    before=int(values["replaced"]),
                )
            case "segments":
                found = (from_row(MixtureSegment, row) for row in values["segments"])
                self._chapters[-1].segments.extend(found)
            case "refused":
                self._refused[line] = list(map(int, values["tasks"])), list(map(int, values["unsure"]))
                self._answered.append(np.array([line], dtype=np.int64))
            case "lost":
                self._lost.append(line)
            case "way":
                self._ways.append((line, Evidence[values["way"].upper()]))
            case "snapshot":
                here, seen = self._chapters[-1], self._chapters[-1].seen
                late = (values["ledger"], values["lineage"]) != (here.ledger, here.lineage)
                here.snapshots.append(from_object(Snapshot, values | {"late": late, "line": line}))
                if seen and seen[-1].at in ("token", "swapped"):
                    seen[-1] = replace(seen[-1], line=line)
            case "model":
                self._chapters[-1].seen.append(from_object(Seen, values | {"line": line}))
            case "changed":
                maybe_later = int(values["tokens"])  # of the last tokens, also those of before a restore
                for here in reversed(self._chapters):
                    tokens = here.snapshots[max(0, len(here.snapshots) - maybe_later) :]
                    maybe_later -= len(tokens)
                    if tokens or here is self._chapters[-1]:
                        since = min([line, *(token.line - 1 for token in tokens)])
                        here.notes.append(Note(kind, str(values["said"]), since))
            case "padding" | "uncounted":
                name, of = _NOTED[kind]
                self._chapters[-1].notes.append(Note(kind, of(values[name]), line))
            case "quarantined":
                at = int(values["position"])
                self._run(Kind.QUARANTINED, values | {"start": at, "upto": at + 1}, line)
            case "remainder" | "returned" | "void" | "unlearnt" | "several" | "partly":
                self._run(Kind[kind.upper()], values, line)
            case _:
                raise ValueError(f"unknown event {kind!r}")

    def _begin(self, values: dict[str, Any], **said: Any) -> None:
        began = self._opened + values["ms"] / 1000
        self._chapters.append(Chapter(lineage=int(values["lineage"]), began=began, **said))
        self._runs.append([])

    def _run(self, kind: Kind, values: dict[str, Any], line: int) -> None:
        epoch, shard, start, upto = (int(values[name]) for name in ("epoch", "shard", "start", "upto"))
        task, attempt = (int(values.get(name, 0)) for name in ("task", "attempt"))
        self._runs[-1].append(np.array([[epoch, shard, start, upto, task, attempt, line, kind]]))

    # Answers --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        answered = np.concatenate((*self._answered, np.array(self._lost, dtype=np.int64)))
        order = np.argsort(answered, kind="stable")
        lost = order >= len(answered) - len(self._lost)
        settling = answered[order]
        told, ways = np.array([(-1, 0), *self._ways], dtype=np.int64).T
        for chapter, found in zip(self._chapters, self._runs, strict=True):
            table = np.concatenate((np.empty((0, _COLUMNS), dtype=np.int64), *found))
            epochs, windows, starts, ends, tasks, attempts, lines, kinds = np.ascontiguousarray(table.T)
            chapter.epochs, chapter.windows, chapter.lines = epochs, windows, lines
            chapter.runs = Reports(
                starts=starts,
                ends=ends,
                kinds=kinds,
                tasks=tasks,
                attempts=attempts,
                answers=self._answers(lines, tasks, settling, lost),
                settled=np.where(kinds <= Kind.QUARANTINED, _settled(lines, settling), lines),
                ways=ways[np.searchsorted(told, lines) - 1],
                who=np.zeros_like(lines),
            )

    def _answers(self, lines: IndexArray, tasks: IndexArray, settling: IndexArray, lost: Any) -> IndexArray:
        """What the next line that settles says of each."""
        answers = np.full(len(lines), Answer.NONE, dtype=np.int64)
        if not len(settling) or not len(lines):
            return answers
        after = np.searchsorted(settling, lines)
        known = after < len(settling)
        after = np.minimum(after, len(settling) - 1)
        answers[known] = np.where(lost[after[known]], Answer.LOST, Answer.ACCEPTED)
        events = np.searchsorted(settling, np.array(list(self._refused), dtype=np.int64))
        firsts = np.searchsorted(after, events, side="left")  # `lines` ascend, so what each settles is a run
        ends = np.searchsorted(after, events, side="right")
        for (refused, unsure), first, end in zip(self._refused.values(), firsts, ends, strict=True):
            here = slice(first, end)
            answers[here][np.isin(tasks[here], refused) & known[here]] = Answer.REFUSED
            answers[here][np.isin(tasks[here], unsure) & known[here]] = Answer.LOST
        return answers


def _settled(lines: IndexArray, settling: IndexArray) -> IndexArray:
    """Return the line after each that settles it; its own where none does."""
    after = np.searchsorted(settling, lines)
    found: IndexArray = np.where(after < len(settling), np.append(settling, 0)[after], lines)
    return found


def _events(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the JSON lines are, the header first: JSON has no newline inside, so `\\n{` begins one."""
    start = 0
    while start >= 0:
        end = data.index(b"\n", start) + 1
        yield start, end
        start = data.find(b"\n{", end - 1) + 1 or -1
