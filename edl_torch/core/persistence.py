"""The state of a dispatcher as small rows by key, and a dispatcher from such rows.

Rows are JSON-able and say what is, never what was asked for: an upgrade reads them without deciding anything
again. Where shards are mixed in windows, a slice's shard is the first of one.
Deadlines are not among them, nor who waits at this moment. Where rows are kept is not known here.
A page has the leases of one session among `leases.PAGE` tasks: a hundred leases of a call are seven rows.

| key | row |
| --- | --- |
| `dataset`, name | place among the datasets, specification |
| `head`, dataset | lineage, first epoch, cursor (epoch, position, offset), acknowledged, dropped, |
| | next task and bundle, member and request that opened the lineage |
| `waiting`, dataset, number | remainder or not, attempt, epoch, shard, skip, limit |
| `leases`, dataset, session, page | of each: task, attempt, epoch, shard, done, stop[, handed, |
| | holes, returned]: of each range the first position, and the one after the last |
| `bad`, dataset, number | epoch, shard, position, name, index, reason |
| `session`, session | worker id, number of its membership |
| `next`, `member` | the number of the next member |
| `next`, `gaps` | the numbers below it that were never given: of each run the first, and the one after it |
| `departed_members`, member | of one that registered before the last start: dataset, lease call, report, … |
| `ledger`, `id` | the ledger that this is since it went back in time, in place of the journal's own |
| `suspended`, dataset | why nothing of it is lent until it is restored |
| `member`, dataset, session | batch size |
| `answer`, dataset, session | request, epoch, state, grants (task, attempt, four of the slice, bundle) |
| `report`, dataset, session | number of the last report, leases ended since (task, attempt) |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from edl_torch.core.backlog import Waiting
from edl_torch.core.calls import LeaseAnswer, QuarantinedRecord
from edl_torch.core.changes import Changes, Key
from edl_torch.core.codec import Row, from_object, from_row, object_of, row_of
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import Lease, Range
from edl_torch.core.ledger import Head, ShardLedger
from edl_torch.core.members import Member
from edl_torch.core.registration import check_batch_size
from edl_torch.shard import DatasetSpec, Slice

VERSION = 5  # of the meaning of rows; older ones were never released

Rows = dict[Key, Row]
Update = dict[Key, Row | None]  # None: there is no such part any more
_Parts = dict[str, dict[Any, Row]]  # of one dataset: by kind, and by the rest of the key


# To rows ------------------------------------------------------------------------------------------------


def update(dispatcher: Dispatcher, keys: Iterable[Key]) -> Update:
    """Return the parts of these keys as they are now."""
    return {key: _ROW[str(key[0])](dispatcher, *key[1:]) for key in keys}


def dump(dispatcher: Dispatcher) -> Rows:
    """Return all of the state."""
    return {key: row for key, row in update(dispatcher, _keys(dispatcher)).items() if row is not None}


def _keys(dispatcher: Dispatcher) -> Iterator[Key]:
    members = tuple(dispatcher.members)
    yield from (("next", "member"), ("next", "gaps"), ("ledger", "id"))
    yield from (("departed_members", number) for number in dispatcher.members.departed_members)
    yield from (("suspended", name) for name in dispatcher.suspended)
    for member in members:
        yield "session", member.session
    for ledger in dispatcher.ledgers:
        name = ledger.spec.name
        yield "dataset", name
        yield "head", name
        yield from (("waiting", name, number) for number in ledger.waiting)
        yield from (("leases", name, session, page) for session, page in ledger.leases.pages())
        yield from (("bad", name, number) for number in range(len(ledger.quarantine)))
        yield from ((kind, name, m.session) for m in members for kind in ("member", "answer", "report"))


def _dataset(dispatcher: Dispatcher, dataset: str) -> Row | None:
    for place, ledger in enumerate(dispatcher.ledgers):
        if ledger.spec.name == dataset:
            return place, object_of(ledger.spec)
    return None


def _of_ledger(
    row: Callable[..., Row | None],
) -> Callable[..., Row | None]:
    """Return the row of a part of a ledger, which is not there where the ledger is not."""

    def find(dispatcher: Dispatcher, dataset: str, *key: str | int) -> Row | None:
        ledger = dispatcher.find_ledger(dataset)
        return None if ledger is None else row(ledger, *key)

    return find


def _head(ledger: ShardLedger) -> Row:
    head = ledger.head
    return (
        head.lineage,
        head.first_epoch,
        *head.cursor,
        *(head.acknowledged, head.dropped),
        *(head.next_task, head.next_bundle),
        *head.opened_by,
    )


def _waiting(ledger: ShardLedger, number: int) -> Row | None:
    found = ledger.waiting_slice(number)
    if found is None:
        return None
    remainder, item = found
    return int(remainder), item.attempt, *row_of(item.slice)


def _leases(ledger: ShardLedger, session: str, page: int) -> Row | None:
    leases = ledger.leases.on(session, page)
    return tuple([_lease_row(lease) for lease in leases]) if leases else None


def _lease_row(lease: Lease) -> Row:
    row = lease.task, lease.attempt, lease.epoch, lease.shard, lease.done, lease.stop
    if not (lease.handed or lease.holes or lease.returned):
        return row
    return (*row, int(lease.handed), _flat(lease.holes), _flat(lease.returned))


def _flat(ranges: Iterable[Range]) -> Row:
    return tuple(chain.from_iterable(ranges))


def _bad(ledger: ShardLedger, number: int) -> Row | None:
    if number >= len(ledger.quarantine):
        return None
    return row_of(ledger.quarantine[number])


def _member(ledger: ShardLedger, session: str) -> Row | None:
    batch_size = ledger.participants.batch_size(session)
    return None if batch_size is None else (batch_size,)


def _session(dispatcher: Dispatcher, session: str) -> Row | None:
    member = dispatcher.members.get(session)
    return None if member is None else (member.worker_id, member.number)


def _next(dispatcher: Dispatcher, what: str) -> Row | None:
    members = dispatcher.members
    if what == "gaps":
        return tuple(members.gaps) or None
    return (members.next_number,) if members.next_number > 1 else None


def _ledger(dispatcher: Dispatcher, _: str) -> Row | None:
    return (dispatcher.ledger_id,) if dispatcher.ledger_id != dispatcher.first_ledger_id else None


def _departed_members(dispatcher: Dispatcher, number: int) -> Row | None:
    found = dispatcher.members.departed_members.get(number, {})
    return tuple([(dataset, *numbers) for dataset, numbers in found.items()]) or None


def _suspended(dispatcher: Dispatcher, dataset: str) -> Row | None:
    why = dispatcher.suspended.get(dataset)
    return None if why is None else (why,)


def _answer(dispatcher: Dispatcher, dataset: str, session: str) -> Row | None:
    member = dispatcher.members.get(session)
    answer = None if member is None else member.answers.get(dataset)
    if answer is None:
        return None
    return row_of(answer)


def _report(dispatcher: Dispatcher, dataset: str, session: str) -> Row | None:
    member, ledger = dispatcher.members.get(session), dispatcher.find_ledger(dataset)
    number = 0 if member is None else member.reports.get(dataset, 0)
    refused = () if member is None else member.refused.get(dataset, ())
    closed = {} if ledger is None else ledger.leases.ended(session)
    row = number, tuple(closed.items())
    return (*row, *refused) if number or closed else None


_ROW: dict[str, Callable[..., Row | None]] = {
    "dataset": _dataset,
    "head": _of_ledger(_head),
    "waiting": _of_ledger(_waiting),
    "leases": _of_ledger(_leases),
    "bad": _of_ledger(_bad),
    "member": _of_ledger(_member),
    "session": _session,
    "next": _next,
    "ledger": _ledger,
    "suspended": _suspended,
    "departed_members": _departed_members,
    "answer": _answer,
    "report": _report,
}


# From rows ----------------------------------------------------------------------------------------------


def load(
    rows: Mapping[Key, Row],
    *,
    ledger_id: str,
    now: float,
    lease_timeout_s: float = 30.0,
    grace_s: float = 1.0,
    progress_timeout_s: float = 0.0,
    changes: Changes | None = None,
) -> Dispatcher:
    """The dispatcher that `dump` describes. Every session counts as heard at `now`, its stream as unbroken.

    Raises LookupError, TypeError or ValueError for rows that no dump has.
    """
    dispatcher = Dispatcher(
        ledger_id=ledger_id,
        lease_timeout_s=lease_timeout_s,
        grace_s=grace_s,
        progress_timeout_s=progress_timeout_s,
        changes=changes,
    )
    specs: dict[str, Row] = {}
    parts: dict[str, _Parts] = {}
    for (kind, name, *rest), row in rows.items():
        if kind == "session":
            worker_id, number = row
            dispatcher.members.take_up(str(name), worker_id, int(number), now)
        elif (kind, name) == ("next", "gaps"):
            dispatcher.members.gaps = [(first, after) for first, after in row]
        elif kind == "next":
            (dispatcher.members.next_number,) = row
        elif kind == "ledger":
            (dispatcher.ledger_id,) = row
        elif kind == "departed_members":
            dispatcher.members.departed_members[int(name)] = {
                dataset: (asked, reported) for dataset, asked, reported in row
            }
        elif kind == "suspended":
            (dispatcher.suspended[str(name)],) = row
        elif kind == "dataset":
            specs[str(name)] = row
        else:
            of_it = parts.setdefault(str(name), {of: {} for of in _ROW})
            of_it[str(kind)][rest[0] if len(rest) == 1 else tuple(rest)] = row
    if any(member.number >= dispatcher.members.next_number for member in dispatcher.members):
        raise ValueError("a member has a number that is still to be given")
    for name, (_, spec) in sorted(specs.items(), key=lambda item: int(item[1][0])):
        ledger = dispatcher.add(from_object(DatasetSpec, spec))
        _resume(ledger, parts[name])
        _resume_members(dispatcher, name, parts[name])
    if changes is not None:
        changes.take()  # it is as written
    return dispatcher


def _resume(ledger: ShardLedger, of_it: _Parts) -> None:
    strangers = {session for session, _ in of_it["leases"]} - set(of_it["member"])
    if strangers:  # nobody would ever take their leases back
        raise ValueError(f"leases of sessions that take no part: {sorted(strangers)}")
    batch_sizes = {session: size for session, (size,) in of_it["member"].items()}
    for size in batch_sizes.values():
        check_batch_size(size)
    (head,) = of_it["head"].values()
    lineage, first_epoch, *cursor, acknowledged, dropped, next_task, next_bundle, member, request = head
    epoch, position, offset = cursor
    ledger.resume(
        Head(
            lineage=lineage,
            opened_by=(member, request),
            first_epoch=first_epoch,
            cursor=(epoch, position, offset),
            acknowledged=acknowledged,
            dropped=dropped,
            next_task=next_task,
            next_bundle=next_bundle,
        ),
        leases=(_lease_from(session, row) for (session, _), rows in of_it["leases"].items() for row in rows),
        waiting={number: _waiting_from(row) for number, row in of_it["waiting"].items()},
        quarantine=(from_row(QuarantinedRecord, row) for _, row in sorted(of_it["bad"].items())),
        batch_sizes=batch_sizes,
        closed={
            session: {int(task): int(attempt) for task, attempt in closed}
            for session, (_, closed, *_) in of_it["report"].items()
            if closed
        },
    )


def _resume_members(dispatcher: Dispatcher, name: str, of_it: _Parts) -> None:
    members = {session: dispatcher.members.get(session) for session in of_it["member"]}
    for session, member in members.items():
        if member is None:
            raise ValueError(f"session {session!r} takes part and is not known")
        member.datasets.add(name)
        _resume_member(member, name, of_it["answer"].get(session), of_it["report"].get(session))


def _resume_member(member: Member, name: str, answer: Row | None, report: Row | None) -> None:
    if answer is not None:
        member.answers[name] = from_row(LeaseAnswer, answer)
    if report is not None and report[0]:
        member.reports[name], member.refused[name] = report[0], tuple(map(int, report[2:]))


def _lease_from(session: str, row: Row) -> Lease:
    task, attempt, epoch, shard, done, stop, *more = row
    handed, holes, returned = more or (0, (), ())
    return Lease(
        task=task,
        attempt=attempt,
        session=session,
        epoch=epoch,
        shard=shard,
        done=done,
        stop=stop,
        handed=bool(handed),
        holes=_ranges(holes),
        returned=_ranges(returned),
    )


def _ranges(flat: Row) -> list[Range]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _waiting_from(row: Row) -> tuple[bool, Waiting]:
    remainder, attempt, *cut = row
    return bool(remainder), Waiting(from_row(Slice, cut), attempt)
