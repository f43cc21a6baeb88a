"""Lease: a slice lent to a session; which positions of it have no outcome; all leases; and the next ones.

Outcomes come as ranges of positions. In order they are one prefix, below `done`; what comes out of order is a
hole behind that, until the prefix reaches it. So a lease has no more holes than its trainer has batches in
flight. A report is checked here as a whole, before any of it is applied.

The next leases are slices that came back, then those at the cursor, smaller ones towards the end: there
throughput decides, as all trainers would wait for the batches that a slow one has read ahead. Only sizes and
order are decided here; the ledger decides whether a session may be lent anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from edl_torch.core.backlog import Backlog, Waiting
from edl_torch.core.calls import NEW_PASS, Failure, Grant, ReportCall
from edl_torch.core.changes import Mark, Version
from edl_torch.core.members import Participants
from edl_torch.errors import InvalidArgument, StaleLease
from edl_torch.shard import Slice

Range = tuple[int, int]  # of positions: the first, and the one after the last


def joined(ranges: list[Range]) -> list[Range]:
    """Return the positions of all these as the fewest ranges, ascending."""
    found: list[Range] = []
    for first, after in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(after, found[-1][1])
        else:
            found.append((first, after))
    return found


@dataclass(slots=True, kw_only=True)
class Span:
    """Positions `done` to `stop`, which are open, except the `holes` among them, which are closed.

    Holes ascend and do not touch; `done` stands on none and is never larger than `stop`.
    """

    done: int
    stop: int
    holes: list[Range] = field(default_factory=list)

    @property
    def open_records(self) -> int:
        count = self.stop - self.done
        for first, after in self.holes:
            count -= after - first
        return count

    @property
    def is_done(self) -> bool:
        """Whether every position is closed."""
        return self.done >= self.stop

    def is_open(self, first: int, upto: int) -> bool:
        """Return whether all positions from `first` up to `upto` are open."""
        if first < self.done or upto > self.stop:
            return False
        return not self.holes or all(after <= first or upto <= begin for begin, after in self.holes)

    def close(self, first: int, upto: int) -> int:
        """Close the positions from `first` up to `upto`. Returns how many of them were open."""
        if upto > self.stop:
            upto = self.stop
        if first <= self.done and not self.holes:  # in order, as usual
            gained = upto - self.done
            if gained <= 0:
                return 0
            self.done = upto
            return gained
        first = max(first, self.done)
        if first >= upto:
            return 0
        before = self.open_records
        self.holes = joined([*self.holes, (first, upto)])
        if self.holes[0][0] == self.done:
            self.done = self.holes.pop(0)[1]
        return before - self.open_records

    def position_after(self, count: int) -> int:
        """Return the position after the first `count` open ones, or `stop`."""
        for first, after in self.pieces():
            if count <= after - first:
                return first + count
            count -= after - first
        return self.stop

    def pieces(self, first: int = 0, upto: int | None = None) -> Iterator[Range]:
        """Return the open positions from `first` up to `upto` (None: all that follow) as ranges."""
        begin, stop = max(first, self.done), self.stop if upto is None else min(upto, self.stop)
        for hole, after in self.holes:
            if begin < min(hole, stop):
                yield begin, min(hole, stop)
            begin = max(begin, after)
        if begin < stop:
            yield begin, stop


@dataclass(slots=True, kw_only=True)
class Lease(Span):
    """Slice of a shard lent to a session: open are the records that are still lent.

    `returned` are those that were given back: an outcome that is told of one of them comes too late.
    `handed` says that all its batches are with the training loop.
    """

    task: int
    attempt: int
    session: str
    epoch: int
    shard: int
    handed: bool = False
    returned: list[Range] = field(default_factory=list)

    @classmethod
    def of(cls, task: int, attempt: int, session: str, cut: Slice) -> Lease:
        """Return a new lease of a slice, none of whose records has an outcome."""
        return cls(
            task=task,
            attempt=attempt,
            session=session,
            epoch=cut.epoch,
            shard=cut.shard,
            done=cut.skip,
            stop=cut.stop,
        )

    def outcomes(self) -> Iterator[Range]:
        """Return the positions below `stop` that are neither open nor given back."""
        begin = 0
        for first, after in joined([*self.pieces(), *self.returned]):
            if begin < first:
                yield begin, first
            begin = after
        if begin < self.stop:
            yield begin, self.stop

    def check_end(self, upto: int) -> None:
        """Raise InvalidArgument for positions that never belonged to the lease."""
        if upto > self.stop:
            raise InvalidArgument(f"task {self.task} ends at position {self.stop}; {upto} lies behind that")

    def acknowledge(self, start: int, upto: int) -> int:
        """Close the records from `start` up to `upto`, which were trained on. Returns how many were open.

        Raises InvalidArgument for more than the lease has, StaleLease for what was given back of it.
        """
        if upto > self.stop:
            self.check_end(upto)
        for first, after in self.returned:
            if first < upto and start < after:
                raise StaleLease(
                    f"positions {first} to {after - 1} of task {self.task} were given back; they cannot be "
                    f"acknowledged"
                )
        return self.close(start, upto)

    def give_back(self, start: int, upto: int | None = None) -> list[Slice]:
        """Close the records from `start` up to `upto` (None: all that follow), and return those still open.

        Raises InvalidArgument where it begins with a record that has its outcome.
        """
        back = list(self.pieces(start, upto))
        if back:
            if start < self.done and not any(first <= start < after for first, after in self.returned):
                raise InvalidArgument(
                    f"task {self.task} is acknowledged up to {self.done}; {start} cannot be given back"
                )
            self.returned = joined([*self.returned, *back])
            for piece in back:
                self.close(*piece)
        return [self._slice(*piece) for piece in back]

    def slices(self) -> Iterator[Slice]:
        """Return the records that are open, a slice for each range of them."""
        return (self._slice(*piece) for piece in self.pieces())

    def _slice(self, first: int, after: int) -> Slice:
        return Slice(epoch=self.epoch, shard=self.shard, skip=first, limit=after - first)


PAGE = 16  # of tasks: the leases of one page and one session are written down together


class Leases:
    """Live leases. The version grows when a pass may be over: no lease of an epoch can produce batches."""

    def __init__(self, mark: Mark, version: Version) -> None:
        self.next_task = 1
        self._version = version
        self._mark = mark
        self._leases: dict[int, Lease] = {}
        self._held: dict[str, set[int]] = {}  # session -> tasks, none empty
        self._ended: dict[str, dict[int, int]] = {}  # session -> task -> attempt, since its last report
        self._unhanded: dict[int, int] = {}  # epoch -> leases that may still produce batches

    # What there is --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """Return all leases, in the order in which they were granted."""
        return iter(self._leases.values())

    def find(self, task: int) -> Lease | None:
        return self._leases.get(task)

    def live(self, session: str, task: int, attempt: int) -> Lease | None:
        """Return the lease while it is this session's, else None."""
        lease = self._leases.get(task)
        mine = lease is not None and lease.session == session and lease.attempt == attempt
        return lease if mine else None

    def has_ended(self, session: str, task: int, attempt: int) -> bool:
        """Return whether the session has ended this lease itself since its last report."""
        return self._ended.get(session, {}).get(task) == attempt

    @property
    def holders(self) -> int:
        """Sessions that have a live lease."""
        return len(self._held)

    def holds(self, session: str) -> bool:
        """Return whether the session has a live lease."""
        return session in self._held

    def held(self, session: str) -> int:
        return len(self._held.get(session, ()))

    def of(self, session: str) -> Iterator[Lease]:
        """Return the session's leases, in no order."""
        return (self._leases[task] for task in self._held.get(session, ()))

    def unhanded(self, epoch: int | None = None) -> int:
        """Return how many leases of an epoch (None: of all) may still produce batches."""
        return sum(self._unhanded.values()) if epoch is None else self._unhanded.get(epoch, 0)

    # Changes --------------------------------------------------------------------------------------------

    def lend(self, session: str, item: Waiting, bundle: int = 0) -> Grant:
        """Lend a slice to a session; the caller calls `lent` after the last one."""
        task = self.next_task
        self.next_task += 1
        self._add(Lease.of(task, item.attempt, session, item.slice))
        return Grant(task=task, attempt=item.attempt, slice=item.slice, bundle=bundle)

    def lent(self, session: str, first: int) -> None:
        """Mark what was lent to a session from task `first` on: the pages, not each lease."""
        for page in range(first // PAGE, (self.next_task - 1) // PAGE + 1):
            self._mark("leases", session, page)

    def _add(self, lease: Lease) -> None:
        self._leases[lease.task] = lease
        held = self._held.get(lease.session)
        if held is None:
            held = self._held[lease.session] = set()
        held.add(lease.task)
        if not lease.handed:
            self._unhanded[lease.epoch] = self._unhanded.get(lease.epoch, 0) + 1

    def changed(self, lease: Lease) -> None:
        """Mark a lease that has changed and lives on."""
        self._mark("leases", lease.session, lease.task // PAGE)

    def hand_over(self, session: str) -> None:
        """Note that all batches of a session's leases are with its training loop."""
        for lease in [lease for lease in self.of(session) if not lease.handed]:
            lease.handed = True
            self._no_more_batches(lease.epoch)
            self.changed(lease)

    def end(self, lease: Lease) -> None:
        """End a lease whose records all have an outcome or were given back."""
        ended = self._ended.get(lease.session)
        if ended is None:
            ended = self._ended[lease.session] = {}
        ended[lease.task] = lease.attempt
        self._mark("report", lease.session)
        held = self._held[lease.session]
        held.discard(lease.task)
        if not held:
            del self._held[lease.session]
        self._drop(lease)

    def take_back(self, session: str) -> list[Lease]:
        """Take all leases of a session, and return them in the order of the tasks."""
        lost = [self._leases[task] for task in sorted(self._held.pop(session, ()))]
        for lease in lost:
            self._drop(lease)
        return lost

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.task]
        self.changed(lease)
        if not lease.handed:
            self._no_more_batches(lease.epoch)
        elif not self._leases:
            self._version.grow()

    def _no_more_batches(self, epoch: int) -> None:
        self._unhanded[epoch] -= 1
        if not self._unhanded[epoch]:
            del self._unhanded[epoch]
            self._version.grow()

    def forget_ended(self, session: str) -> None:
        """Forget which leases a session has ended: its newer report shows that it knows."""
        if self._ended.pop(session, None) is not None:
            self._mark("report", session)

    def clear(self) -> None:
        for lease in self:
            self.changed(lease)
        for session in self._ended:
            self._mark("report", session)
        self._leases.clear()
        self._unhanded.clear()
        self._held.clear()
        self._ended.clear()

    # As rows of a journal -------------------------------------------------------------------------------

    def pages(self) -> Iterable[tuple[str, int]]:
        """Return the session and page of every lease."""
        return {(lease.session, lease.task // PAGE): None for lease in self}

    def on(self, session: str, page: int) -> list[Lease]:
        """Return the session's leases of a page, in the order of the tasks."""
        tasks = self._held.get(session)
        if tasks is None:
            return []
        return [self._leases[task] for task in range(page * PAGE, (page + 1) * PAGE) if task in tasks]

    def ended(self, session: str) -> Mapping[int, int]:
        """Return the tasks that the session has ended since its last report, with their attempts."""
        return self._ended.get(session, {})

    def resume(self, next_task: int, leases: Iterable[Lease], ended: Mapping[str, dict[int, int]]) -> None:
        """Take over `next_task` and what `on` and `ended` said of another object; for a new one."""
        self.next_task = next_task
        self._ended.update(ended)
        for lease in sorted(leases, key=lambda lease: lease.task):
            self._add(lease)

    def __repr__(self) -> str:
        return f"<Leases n={len(self)} sessions={len(self._held)}>"


# Checks of a report: leases that are not the session's are no error here, the answer says so ------------


def check_report(leases: Leases, call: ReportCall) -> None:
    """Raise InvalidArgument if a part of it would, were those before it applied. Changes nothing."""
    session = call.session
    tried: dict[int, Lease] = {}  # the leases of which something goes back, as they will be by then
    for back in call.give_backs:
        lease = leases.live(session, back.task, back.attempt)
        if lease is not None:
            tried[back.task] = replace(lease)
    for failure in call.failures:
        lease = leases.live(session, failure.task, failure.attempt)
        if lease is not None:
            lease.check_end(failure.position + 1)
            if failure.task in tried:
                tried[failure.task].close(failure.position, failure.position + 1)
    for done in call.acknowledgements:
        lease = leases.live(session, done.task, done.attempt)
        if lease is not None:
            lease.check_end(done.upto)
            if done.task in tried:
                tried[done.task].close(done.start, done.upto)
    for back in call.give_backs:
        if leases.live(session, back.task, back.attempt) is not None:
            tried[back.task].give_back(back.start, back.upto)


def new_failures(
    leases: Leases, session: str, failures: Iterable[Failure]
) -> Iterable[tuple[Lease, int, str]]:
    """Return lease, position and reason of each record that these would put into quarantine anew."""
    new: dict[tuple[int, int], tuple[Lease, int, str]] = {}
    for failure in failures:
        lease = leases.live(session, failure.task, failure.attempt)
        if lease is not None and lease.is_open(failure.position, failure.position + 1):
            new.setdefault((failure.task, failure.position), (lease, failure.position, failure.reason))
    return new.values()


# Choice of the next leases ----------------------------------------------------------------------------

FAR = 64  # of the largest leases: a session with a larger share to come is lent such ones


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Request of a session for up to `count` slices of a pass over `epoch`; `ahead` of its need, or not."""

    session: str
    epoch: int
    count: int
    batch_size: int
    ahead: bool


@dataclass(slots=True)
class Quota:
    """Limit on the records of a session when the end is near, so that all sessions finish together.

    `share` is the part of all records without outcome that the session would train on at its throughput if
    all trainers took part; `share_now`, if only those did that hold records: others may not come for long.
    `held` are the records that it holds, `shown` those that it has trained on so far.
    """

    share: float
    share_now: float
    held: int
    shown: int
    request: LeaseRequest
    sessions: int

    def limit(self, waiting: int) -> int:
        """Return the size of the next lease, in whole batches; 0 where it reads ahead and has its share."""
        size = self.request.batch_size
        if self.request.ahead and self.held and self.held + size / 2 > self.share_now:
            return 0
        # Half of what is left of its share, because throughput changes; and no more than twice what it has
        # shown, because at first nobody knows which trainer is slow.
        most = min((self.share - self.held) / 2, 2 * self.shown - self.held, waiting / (2 * self.sessions))
        return max(1, int(most / size)) * size


class Lending:
    """Moves slices from `backlog` to `leases`; remainders in bundles that make whole batches."""

    def __init__(self, backlog: Backlog, leases: Leases, participants: Participants) -> None:
        self.next_bundle = 1
        self._backlog = backlog
        self._leases = leases
        self._participants = participants

    def open_pass(self, batch_size: int) -> int:
        """Return the oldest epoch with something for a trainer of this batch size; NEW_PASS for none."""
        backlog = self._backlog
        epochs = [] if backlog.past_end and not backlog.returned_records else [backlog.oldest]
        epochs += [
            epoch for epoch in backlog.remainder_epochs if backlog.remainder_records(epoch) >= batch_size
        ]
        return min(epochs, default=NEW_PASS)

    def grants(self, request: LeaseRequest, leased: Callable[[], int]) -> Iterator[Grant]:
        """Lend what is asked for; where slices run out, a bundle of remainders. `leased` counts lent ones."""
        session, epoch, batch_size = request.session, request.epoch, request.batch_size
        barrier = self._backlog.plan.spec.epoch_barrier
        if not barrier:  # endless epochs would pile them up
            yield from self._remainder_bundle(session, epoch, batch_size)
        quota = self._quota(request, leased)
        largest = self._largest(request)
        for _ in range(request.count):
            limit = quota.limit(self._backlog.waiting(epoch)) if quota else self._limit(epoch, batch_size)
            if not limit:
                return
            taken = self._backlog.take(epoch, min(limit, largest))
            if taken is None:
                if barrier:
                    yield from self._remainder_bundle(session, epoch, batch_size)
                return
            if quota is not None:
                quota.held += taken.slice.limit
            yield self._leases.lend(session, taken)

    def _quota(self, request: LeaseRequest, leased: Callable[[], int]) -> Quota | None:
        """Return None while the end is far off, and for the only trainer."""
        if not self._tail_applies or len(self._participants) == 1:
            return None
        throughput, waiting = self._participants.throughput, self._backlog.waiting(request.epoch)
        far = FAR * self._backlog.plan.spec.largest_lease
        if throughput.share(request.session, waiting) > far:
            return None  # mostly: what is lent need not be counted
        share = throughput.share(request.session, waiting + leased())
        if share > far:
            return None
        return Quota(
            share=share,
            share_now=share * len(self._participants) / max(1, self._leases.holders),
            held=self._held_by(request.session),
            shown=throughput.shown(request.session),
            request=request,
            sessions=len(self._participants),
        )

    def _limit(self, epoch: int, batch_size: int) -> int:
        """Guided self-scheduling: the waiting records over twice the trainers, in whole batches."""
        if not self._tail_applies:
            return max(batch_size, self._backlog.plan.spec.largest_lease)
        return self._share(self._backlog.waiting(epoch), batch_size)

    def _largest(self, request: LeaseRequest) -> int:
        """Return the most records of a lease: those of a shard or of a window, whichever ends first.

        A trainer that has shown little is lent a shard, not a window, because others may come.
        """
        spec, batch_size = self._backlog.plan.spec, request.batch_size
        if spec.largest_lease == spec.records_per_shard:
            return max(batch_size, spec.records_per_shard)
        shown = 2 * self._participants.throughput.shown(request.session) - self._held_by(request.session)
        most = max(spec.records_per_shard, min(shown, spec.largest_lease))
        return max(batch_size, most - most % batch_size)

    def _held_by(self, session: str) -> int:
        return sum(lease.open_records for lease in self._leases.of(session))

    @property
    def _tail_applies(self) -> bool:
        backlog, spec = self._backlog, self._backlog.plan.spec
        return spec.epoch_barrier or backlog.past_end or backlog.cursor_epoch + 1 == spec.num_epochs

    def _share(self, records: int, batch_size: int) -> int:
        share = records // (2 * len(self._participants))
        return max(batch_size, share - share % batch_size)

    def _remainder_bundle(self, session: str, epoch: int, batch_size: int) -> Iterator[Grant]:
        records = self._backlog.remainder_records(epoch)
        if records < batch_size:
            return
        bundle = self.next_bundle
        self.next_bundle += 1
        # Not all to the first that asks: remainders of ten thousand trainers are thousands of batches.
        for item in self._backlog.take_remainders(epoch, self._share(records, batch_size)):
            yield self._leases.lend(session, item, bundle)

    def __repr__(self) -> str:
        return f"<Lending {self._backlog!r} {self._leases!r}>"
