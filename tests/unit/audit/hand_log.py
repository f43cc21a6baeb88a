"""An audit log that a test writes by hand: each method is a fact of a trainer's."""

from __future__ import annotations

from collections.abc import Iterable

from edl_torch.audit.log import AuditLog
from edl_torch.core.calls import Acknowledgement, Failure, Fence, GiveBack, Grant
from edl_torch.fingerprint import strength_of
from edl_torch.shard import DatasetSpec
from edl_torch.trainer.vocabulary import (
    Answered,
    Dropped,
    Evidence,
    Granted,
    Joined,
    ModelSeen,
    PaddingLearnt,
    Refused,
    Reporting,
    Restored,
    Run,
    TokenTaken,
    Unanswered,
    Uncounted,
    Voided,
)


class HandLog(AuditLog):
    """Says what has happened by calls."""

    def joined(
        self, spec: DatasetSpec, *, ledger: str, lineage: int, batch_size: int, member: int = 0
    ) -> None:
        fence = Fence(ledger=ledger, lineage=lineage, member=member)
        known_by = strength_of(spec.fingerprint)
        self.write(Joined(spec=spec, fence=fence, batch_size=batch_size, known_by=known_by))

    def granted(self, grant: Grant) -> None:
        self.write(Granted(grant))

    def intent(
        self,
        *,
        failures: Iterable[Failure] = (),
        acknowledgements: Iterable[Acknowledgement] = (),
        give_backs: Iterable[GiveBack] = (),
        way: Evidence = Evidence.STEP,
        returned: Iterable[Run] = (),
    ) -> None:
        self.write(
            Reporting(
                failures=tuple(failures),
                acknowledgements=tuple(acknowledgements),
                give_backs=tuple(give_backs),
                way=way,
                returned=tuple(returned),
            )
        )

    def answered(self, stale: Iterable[int] = ()) -> None:
        self.write(Answered(tuple(stale)))

    def unanswered(self) -> None:
        self.write(Unanswered())

    def lost(self) -> None:
        self.write(Refused())

    def dropped(
        self, acknowledgements: Iterable[Acknowledgement], returned: Iterable[Run], *, on_its_way: bool
    ) -> None:
        told = tuple(acknowledgements)
        self.write(Dropped(acknowledgements=told, returned=tuple(returned), on_its_way=on_its_way))

    def void(self, runs: Iterable[Run]) -> None:
        self.write(Voided(tuple(runs)))

    def uncounted(self, records: int) -> None:
        self.write(Uncounted(records))

    def padding(self, batches: int) -> None:
        self.write(PaddingLearnt(batches))

    def snapshot(self, token: str, *, exact: bool = True, uncounted: int = 0, half_stepped: int = 0) -> None:
        self.write(TokenTaken(token=token, exact=exact, uncounted=uncounted, half_stepped=half_stepped))

    def model(self, seen: ModelSeen) -> None:
        self.write(seen)

    def restored(self, token: str | None, *, lineage: int) -> None:
        self.write(Restored(token=token, lineage=lineage))
