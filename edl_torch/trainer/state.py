"""Everything that one trainer knows of one dataset; and how it forgets what the master took back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edl_torch.core.calls import UNREGISTERED, Failure, Fence, FencedCall, Grant
from edl_torch.core.plan import Plan
from edl_torch.errors import StaleLease
from edl_torch.trainer.batches import Batches
from edl_torch.trainer.counting import PlainPass
from edl_torch.trainer.inflight import InFlight, LeaseQueue, Mode
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.measuring import Measuring
from edl_torch.trainer.outbox import Outbox, Report
from edl_torch.trainer.vocabulary import (
    DataChanged,
    Dropped,
    Fact,
    Logged,
    Membership,
    Run,
    Uncounted,
    Voided,
    runs_of,
)

C = TypeVar("C", bound="FencedCall[Any]")

NAMED = 10  # records in quarantine that the log names; of others it has the count
REMEMBERED = 1000  # members of before, some of whose calls may still be answered late


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """What does not change in a trainer's life."""

    session: str
    dataset: str
    batch_size: int
    lookahead: int | None = 0  # None: a wrapper tells when it passes a batch on
    in_process: bool = False  # calls to the master are plain function calls: fetching ahead gains nothing
    report_delay_s: float = 0.0  # how long after a report the next acknowledgements may wait for more
    keeps_ledger: bool = True  # the master tells when all epochs are over
    audited: bool = False
    follows_data: bool = False  # a token of other data is taken to the next epoch of these


@dataclass(slots=True)
class Registered:
    """How the trainer takes part: the plan, the fence, and what was answered to it."""

    phase: Membership = Membership.NEW
    plan: Plan | None = None
    known_by: str = "none"  # strength of what this trainer itself saw of the data
    fence: Fence = UNREGISTERED
    asked: int = 0  # the last call for leases that was answered to this member in this lineage
    reported: int = 0  # the last report
    before: dict[Fence, tuple[int, int]] = field(default_factory=dict)  # the same of the members before it

    def move(self, fence: Fence) -> None:
        """Become another member, or of another lineage."""
        self.before[self.fence] = self.asked, self.reported
        for fence_before in list(self.before)[:-REMEMBERED]:
            del self.before[fence_before]
        self.fence, self.asked, self.reported = fence, 0, 0

    def answered(self, fence: Fence, *, asked: int = 0, reported: int = 0) -> None:
        """A call of this member was answered, with this number."""
        if fence == self.fence:
            self.asked = asked or self.asked
            self.reported = reported or self.reported
        elif fence in self.before:
            asked_before, reported_before = self.before[fence]
            self.before[fence] = asked or asked_before, reported or reported_before

    def known(self, fence: Fence) -> tuple[int, int]:
        """Return the numbers of the last call for leases and report that this member was answered."""
        if fence == self.fence:
            return self.asked, self.reported
        return self.before.get(fence, (0, 0))


class State:
    """The parts of a trainer. Changed by its procedures alone, under the shell's lock.

    `now` is the time, as the shell last told it.
    """

    def __init__(self, config: TrainerConfig, liveness: Liveness | None = None) -> None:
        self.config = config
        self.now = 0.0
        self.facts: list[Fact] = []  # what has happened and is not written down yet
        self.registered = Registered()
        self.liveness = liveness  # None where it is never in doubt
        self.supply = LeaseQueue(ahead=not config.in_process)
        self.inflight = InFlight()
        self.outbox = Outbox()
        self.batches = Batches(config.lookahead)
        self.plain = PlainPass()
        self.measuring = Measuring()
        self.closed = False
        self._bad: set[tuple[str, int]] = set()  # records in quarantine that this trainer met
        self._bad_told = NAMED
        self._told_of_change = False
        self._lost = ""  # what the model has learnt from and will come again

    def __repr__(self) -> str:
        return f"<State {self.registered.phase.name} {self.supply} {self.inflight}>"

    @property
    def fence(self) -> Fence:
        """The fence (ledger, lineage, member) that calls of this trainer carry now."""
        return self.registered.fence

    @property
    def elastic(self) -> bool:
        """Whether the pass that is open, or was last, is one of an `ElasticDataLoader`."""
        return self.supply.current.mode is Mode.ELASTIC

    def call(self, kind: type[C], fence: Fence, **more: Any) -> C:
        """Return a call of that member. What it says was answered shows a journal that went back."""
        registered, config = self.registered, self.config
        if fence is registered.fence:
            asked, reported = registered.asked, registered.reported
        else:
            asked, reported = registered.known(fence)
        return kind(
            session=config.session,
            dataset=config.dataset,
            fence=fence,
            asked=asked,
            reported=reported,
            **more,
        )

    @property
    def exact(self) -> bool:
        """Whether a token taken now says precisely what was trained on."""
        return self.elastic or self.plain.exact

    # Leases go back without a call --------------------------------------------------------------------------

    def close_pass(self) -> None:
        """End the pass: leases that nobody drew go back, and streams that wait get none."""
        self._unwanted(self.supply.close())

    def release_undrawn(self) -> None:
        """Give back what is not drawn, and fetch nothing ahead any more: another trainer waits."""
        self.outbox.may_wait_until = self.now
        self._unwanted(self.supply.rest())

    def _unwanted(self, grants: list[Grant]) -> None:
        if grants:
            self.outbox.note(give_backs=self.inflight.give_back_undrawn(grants))

    # What cannot be read ------------------------------------------------------------------------------------

    def quarantine(self, runs: Iterable[Run], reason: str) -> None:
        """Put records into quarantine: the first ten that this trainer meets are named in the log."""
        plan = self.registered.plan
        failures: list[Failure] = []
        for task, first, after in runs:
            cut = self.inflight.slice_of(task)
            for position in range(first, after):
                failed = self.inflight.fail(task, position, reason)
                failures += failed
                if failed and plan is not None and cut is not None:
                    self._tell_bad(*plan.locate(cut.epoch, cut.shard, position), reason)
        self.outbox.note(failures=failures)

    def _tell_bad(self, name: str, index: int, reason: str) -> None:
        if (name, index) in self._bad:  # in an epoch before
            return
        self._bad.add((name, index))
        if len(self._bad) > NAMED:
            self.count_bad()
            return
        what = reason.removeprefix(record := f"record {index} of {name!r}: ")
        rest = "; others are counted here, and listed by loader.quarantined()" * (len(self._bad) == NAMED)
        self.facts.append(Logged(f"dataset {self.config.dataset}: in quarantine: {record}{what}{rest}"))

    def count_bad(self, *, at_end: bool = False) -> None:
        """Say how many records are in quarantine, each time that they are twice as many, and at the end."""
        bad = len(self._bad)
        if bad >= 2 * self._bad_told or (at_end and bad > self._bad_told):
            self._bad_told = bad
            self.facts.append(Logged(f"dataset {self.config.dataset}: {bad} records in quarantine"))

    def data_changed(self, said: str, tokens: int = 0) -> None:
        """Note what of the data is other than when they were registered; the user is told once. So many
        tokens were taken since they were last seen to be the same."""
        self.facts.append(DataChanged(said=said, tokens=tokens))
        if not self._told_of_change:
            self._told_of_change = True
            self.facts.append(
                Logged(
                    f"dataset {self.config.dataset}: the data were changed while they were read: {said}. "
                    f"Data must stay as they are while a job runs: start it again; to data that change on "
                    f'purpose give fingerprint="v1"'
                )
            )

    # What is void -------------------------------------------------------------------------------------------

    def become(self, fence: Fence) -> None:
        """Become the member of `fence`: what was held, and what was not sent, is void."""
        self.registered.move(fence)
        if self.liveness is not None:
            self.liveness.member = fence.member
        for report in (void := self.outbox.void()):
            self.drop(report)
        self.refused(tuple([task for report in void for task in report.tasks]))
        self.supply.clear()
        self.forget()

    def forget(self) -> None:
        """Forget all that was held: it is void."""
        self._voided(self._may_be_trained)
        if self.batches:
            self.lose(f"{len(self.batches)} batch(es)")
        self.inflight.clear()
        self.batches.clear()
        self.forget_counts()

    def forget_counts(self) -> None:
        """Forget the counts of a plain pass: its reports prove nothing any more."""
        if uncounted := self.plain.uncounted:
            self.facts.append(Uncounted(uncounted))
        self.plain.counts = None

    def void(self, tasks: tuple[int, ...]) -> None:
        """Forget leases that the master took back; their batches are thrown away where they arrive."""
        self.facts.append(Logged(f"dataset {self.config.dataset}: {len(tasks)} lease(s) were taken back"))
        self._voided(run for run in self._may_be_trained if run[0] in tasks)
        if lost := sum(any(run[0] in tasks for run in ticket) for ticket in self.batches.tickets):
            self.lose(f"{lost} batch(es)")
        self.inflight.void(tasks)
        self.supply.void(tasks)
        if not self.elastic:
            # Batches of void leases are on their way, and a report does not say which batch it means: the
            # pass ends, and what is left of it is read in the next one.
            self.close_pass()

    def _voided(self, runs: Iterable[Run]) -> None:
        if found := tuple(runs):
            self.facts.append(Voided(found))

    @property
    def _may_be_trained(self) -> tuple[Run, ...]:
        """What the loop has; in a plain pass, where nobody sees that, what was drawn for it."""
        return runs_of(self.batches.tickets) if self.elastic else self.inflight.drawn()

    def drop(self, report: Report) -> None:
        """Note that a report will never be sent: others train on its records."""
        self.facts.append(
            Dropped(
                acknowledgements=tuple(report.acknowledgements.values()),
                returned=report.returned,
                on_its_way=self.outbox.is_sending,
            )
        )

    def refused(self, tasks: tuple[int, ...]) -> None:
        """Note that acknowledgements of these tasks came too late, or will never be sent."""
        if tasks:
            self.lose(f"batches of {len(tasks)} lease(s)")

    # The model and the count --------------------------------------------------------------------------------

    def lose(self, what: str) -> None:
        """Note that records which the model has learnt from are not counted, and will come again."""
        self._lost = self._lost or (
            f"{what} of dataset {self.config.dataset!r}: this trainer was cut off from the master for too "
            "long, and the records come again, here or at another trainer, though the model has learnt from "
            "them. Start again from the last checkpoint, on all ranks where there are several"
        )

    def check(self) -> None:
        """Raise StaleLease if the model and the count of what it was trained on have parted."""
        if self._lost:
            raise StaleLease(self._lost)

    def restored(self) -> None:
        """Note that the model and the count are those of a checkpoint again."""
        self._lost = ""
