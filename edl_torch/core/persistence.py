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
| `bad`, dataset, number | epoch, shard, position, name, index, reason[, runs of passes: first, end, …] |
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

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Unpack

from edl_torch.core.backlog import Waiting
from edl_torch.core.calls import LeaseAnswer
from edl_torch.core.changes import Changes, Key
from edl_torch.core.codec import Row, from_object, from_row, object_of, row_of
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import Lease
from edl_torch.core.ledger import Head, ShardLedger
from edl_torch.core.members import Patience
from edl_torch.core.quarantine import quarantine_row, quarantined
from edl_torch.core.registration import check_batch_size
from edl_torch.shard import DatasetSpec, Slice

VERSION = 6  # of the meaning of rows; older ones were never released

Rows = dict[Key, Row]
Update = dict[Key, Row | None]  # None: there is no such part any more
_Parts = dict[str, dict[Any, Row]]  # of one dataset: by kind, and by the rest of the key
_KINDS = ("head", "waiting", "leases", "bad", "member", "answer", "report")  # of these parts


# To rows ------------------------------------------------------------------------------------------------


def update(dispatcher: Dispatcher, keys: Iterable[Key]) -> Update:
    """Return the parts of these keys as they are now."""
    return {key: _row(dispatcher, *key) for key in keys}


def dump(dispatcher: Dispatcher) -> Rows:
    return {key: row for key, row in update(dispatcher, _keys(dispatcher)).items() if row is not None}


def _keys(dispatcher: Dispatcher) -> Iterator[Key]:
    members = tuple(dispatcher.members)
    yield from (("next", "member"), ("next", "gaps"), ("ledger", "id"))
    yield from (("departed_members", number) for number in dispatcher.members.departed_members)
    yield from (("suspended", name) for name in dispatcher.suspended)
    yield from (("session", member.session) for member in members)
    for ledger in dispatcher.ledgers:
        name = ledger.spec.name
        yield from (("dataset", name), ("head", name))
        yield from (("waiting", name, number) for number in ledger.backlog.numbers())
        yield from (("leases", name, session, page) for session, page in ledger.leases.pages())
        yield from (("bad", name, number) for number in range(len(ledger.quarantine.records)))
        yield from ((kind, name, m.session) for m in members for kind in ("member", "answer", "report"))


def _row(dispatcher: Dispatcher, kind: str | int, name: Any, *rest: Any) -> Row | None:
    """Return the row of a key; None where there is no such part any more."""
    if kind in _KINDS:  # as nearly all are
        ledger = dispatcher.find_ledger(name)
        return None if ledger is None else _part(dispatcher, ledger, kind, *rest)
    members = dispatcher.members
    match kind:
        case "session":
            member = members.get(name)
            return None if member is None else (member.worker_id, member.number)
        case "next":
            if name == "gaps":
                return tuple(members.gaps) or None
            return (members.next_number,) if members.next_number > 1 else None
        case "departed_members":
            found = members.departed_members.get(name, {})
            return tuple([(dataset, *numbers) for dataset, numbers in found.items()]) or None
        case "ledger":
            return (dispatcher.ledger_id,) if dispatcher.ledger_id != dispatcher.first_ledger_id else None
        case "suspended":
            why = dispatcher.suspended.get(name)
            return None if why is None else (why,)
        case "dataset":
            names = [ledger.spec.name for ledger in dispatcher.ledgers]
            spec = dispatcher.find_ledger(name)
            return None if spec is None else (names.index(name), object_of(spec.spec))
    raise LookupError(kind)


def _part(dispatcher: Dispatcher, ledger: ShardLedger, kind: str | int, *rest: Any) -> Row | None:
    name, members = ledger.spec.name, dispatcher.members
    match kind:
        case "leases":
            return tuple(map(_lease_row, ledger.leases.on(*rest))) or None
        case "head":
            return ledger.head
        case "answer":
            member = members.get(*rest)
            answer = None if member is None else member.answers.get(name)
            return None if answer is None else row_of(answer)
        case "report":
            member, closed = members.get(*rest), ledger.leases.ended(*rest)
            number = 0 if member is None else member.reports.get(name, 0)
            refused = () if member is None else member.refused.get(name, ())
            return (number, tuple(closed.items()), *refused) if number or closed else None
        case "waiting":
            found = ledger.backlog.find(*rest)
            return None if found is None else (int(found[0]), found[1].attempt, *row_of(found[1].slice))
        case "bad":
            (number,) = rest
            bad = ledger.quarantine.records
            return quarantine_row(bad[number]) if number < len(bad) else None
        case "member":
            batch_size = ledger.participants.batch_size(*rest)
            return None if batch_size is None else (batch_size,)
    raise LookupError(kind)


def _lease_row(lease: Lease) -> Row:
    row = lease.task, lease.attempt, lease.epoch, lease.shard, lease.done, lease.stop
    if not (lease.handed or lease.holes or lease.returned):
        return row
    return (*row, int(lease.handed), *(tuple(chain(*ranges)) for ranges in (lease.holes, lease.returned)))


# From rows ----------------------------------------------------------------------------------------------


def load(
    rows: Mapping[Key, Row],
    *,
    ledger_id: str,
    now: float,
    changes: Changes | None = None,
    **patience: Unpack[Patience],
) -> Dispatcher:
    """The dispatcher that `dump` describes. Every session counts as heard at `now`, its stream as unbroken.

    Raises LookupError, TypeError or ValueError for rows that no dump has.
    """
    dispatcher = Dispatcher(ledger_id=ledger_id, changes=changes, **patience)
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
            of_it = parts.setdefault(str(name), {of: {} for of in _KINDS})
            of_it[str(kind)][rest[0] if len(rest) == 1 else tuple(rest)] = row
    if any(member.number >= dispatcher.members.next_number for member in dispatcher.members):
        raise ValueError("a member has a number that is still to be given")
    for name, (_, spec) in sorted(specs.items(), key=lambda item: int(item[1][0])):
        ledger = dispatcher.add(from_object(DatasetSpec, spec))
        _resume(ledger, parts[name])
        for session in parts[name]["member"]:
            member = dispatcher.members.get(session)
            if member is None:
                raise ValueError(f"session {session!r} takes part and is not known")
            member.datasets.add(name)
            if (answer := parts[name]["answer"].get(session)) is not None:
                member.answers[name] = from_row(LeaseAnswer, answer)
            report = parts[name]["report"].get(session)
            if report is not None and report[0]:
                member.reports[name], member.refused[name] = report[0], tuple(map(int, report[2:]))
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
    ledger.resume(
        Head(*head),
        leases=(_lease_from(session, row) for (session, _), rows in of_it["leases"].items() for row in rows),
        waiting={number: _waiting_from(row) for number, row in of_it["waiting"].items()},
        quarantine=(quarantined(row) for _, row in sorted(of_it["bad"].items())),
        batch_sizes=batch_sizes,
        closed={
            session: {int(task): int(attempt) for task, attempt in closed}
            for session, (_, closed, *_) in of_it["report"].items()
            if closed
        },
    )


def _lease_from(session: str, row: Row) -> Lease:
    task, attempt, epoch, shard, done, stop, *more = row
    handed, *ranges = more or (0, (), ())
    holes, returned = (list(zip(flat[::2], flat[1::2], strict=True)) for flat in ranges)
    return Lease(
        task=task,
        attempt=attempt,
        session=session,
        epoch=epoch,
        shard=shard,
        done=done,
        stop=stop,
        handed=bool(handed),
        holes=holes,
        returned=returned,
    )


def _waiting_from(row: Row) -> tuple[bool, Waiting]:
    remainder, attempt, *cut = row
    return bool(remainder), Waiting(from_row(Slice, cut), attempt)
