"""The samples of a service's shards as a plain iterable, for pipelines that are not torch's.

It reads in the trainer's own process and says nothing about training: the loop reports its batches. It must
not know which framework drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from edl_torch.client.service import DataShardService
from edl_torch.client.workers.links import DirectLink
from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.reading.sample_reading import Run, SampleReader
from edl_torch.errors import AccountingError, BadRecord, ReaderError
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Slice
from edl_torch.trainer.counting import DrawnSamples
from edl_torch.trainer.inflight import Mode


class ShardedRecords:
    """Each iteration is a pass: it ends when this trainer has nothing more to fetch now.

    A pass that begins voids what is left of the one before: its records come again.

    Args:
        service: where the shards come from.
        reader: what reads them.
        shuffle: another order of the records inside each shard in each epoch.
        transform: makes a sample of a record.
        on_bad_record: "raise", or "quarantine" up to as many as the service allows.
    """

    def __init__(
        self,
        service: DataShardService,
        reader: AbstractDataReader,
        *,
        shuffle: bool = False,
        transform: Callable[[Any], Any] | None = None,
        on_bad_record: Literal["raise", "quarantine"] = "raise",
    ) -> None:
        service.session.read_by(reader, shuffle=shuffle, on_bad_record=on_bad_record)
        self._service = service
        self._quarantines = on_bad_record == "quarantine"
        self._transform = transform
        self._reader = SampleReader(reader, self._to_samples)

    def __iter__(self) -> Iterator[Any]:
        """Begins when its first sample is asked for. Raises AccountingError while the loop may still be at
        the last pass, whose reports could not be told from those of this one."""
        session = self._service.session
        if owed := session.do(lambda: session.trainer.plain.owed):
            raise AccountingError(
                f"{owed} record(s) of {self._service.dataset_name!r} were read and not yet reported as "
                f"trained on when the next pass began: leave .repeat() out, report each batch, and call "
                f"service.abandon_pass() when a loop was left early"
            )
        link = DirectLink(session.readers)
        drawn = DrawnSamples()
        plan = link.begin(Mode.PLAIN, drawn)
        for grant in iter(link.next, None):
            yield from self._samples(link, plan, grant, drawn)

    def _samples(self, link: DirectLink, plan: Plan, grant: Grant, drawn: DrawnSamples) -> Iterator[Any]:
        def on_bad(position: int, error: ReaderError) -> Run:
            if not (self._quarantines and isinstance(error, BadRecord)):
                raise error
            link.fail(grant.task, position, str(error))
            return drawn.start(grant.task, position + 1)

        run = drawn.start(grant.task, grant.slice.skip)
        return self._reader.samples(plan, grant, run, on_bad)

    def _to_samples(self, plan: Plan, part: Slice, records: Iterable[Any]) -> Iterable[Any]:
        return records if self._transform is None else map(self._transform, records)

    def __repr__(self) -> str:
        return f"<ShardedRecords of {self._service!r}>"
