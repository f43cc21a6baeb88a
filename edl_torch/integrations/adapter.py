"""What adapters have in common: a framework that is missing, loaders that do not fit, a model's position, and
records for pipelines that are not torch's. It must not know which framework drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from edl_torch.client.service import DataShardService
from edl_torch.client.workers.links import DirectLink
from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.reading.sample_reading import Run, SampleReader
from edl_torch.errors import AccountingError, BadRecord, IntegrationUnavailable, InvalidArgument, ReaderError
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Slice
from edl_torch.trainer.counting import DrawnSamples
from edl_torch.trainer.inflight import Mode

if TYPE_CHECKING:
    from edl_torch.data.loader import ElasticDataLoader


@contextmanager
def needed_by(extra: str) -> Iterator[None]:
    """Raise IntegrationUnavailable where what the body imports is not installed; `extra` brings it."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise IntegrationUnavailable(
            f"edl_torch.integrations.{extra} needs {extra} and what it imports ({exc.name} is missing): "
            f"pip install 'edl-torch[{extra}]'"
        ) from exc


def read_ahead(loader: ElasticDataLoader, lookahead: int | Literal["manual"] = "manual") -> None:
    """Let a framework read ahead of the loop, and say by `loader.passed_on()` which batch that gets.

    A pass over the loader that is open ends. `lookahead` takes back how it was before.
    """
    loader.service.session.set_lookahead(None if lookahead == "manual" else lookahead)


def records_read(loader: ElasticDataLoader) -> int:
    """Return the records of the batch that was read last, and that no loop has got yet; 0 for padding, which
    the caller weighs."""
    batches = loader.service.session.trainer.state.batches
    loader.service.session.do(batches.weigh_padding, batches.ahead[-1])
    return batches.ahead[-1].records


def check_synchronous(loader: ElasticDataLoader, ranks: int, trains: str) -> None:
    """Raise InvalidArgument for a loader of one rank where one model trains on several."""
    if ranks > 1 and not loader.synchronous:
        raise InvalidArgument(f"{trains}: make the ElasticDataLoader with synchronous=True")


class ModelPosition:
    """Where a model is in its data: at a position that was loaded with it, or at the beginning."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = loader
        self._is_known = False
        self._is_left = False  # the loop was left, perhaps with batches that no step has learnt from

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go to a position, or to the beginning."""
        self._loader.load_state_dict(state)
        self._is_known, self._is_left = True, False

    def leave(self) -> None:
        """Note that what is not in the model is to come again."""
        self._is_left = True

    def end(self) -> None:
        """Note that all of it is in the model after all."""
        self._is_left = False

    def begin(self) -> bool:
        """Go to the model's position before a pass. Returns whether the data were moved."""
        if self._is_known and not self._is_left:
            return False
        self.load(self._loader.state_dict() if self._is_known else None)
        return True


class ShardedRecords:
    """The samples of a service's shards as a plain iterable, read in the trainer's own process.

    It says nothing about training: the loop reports its batches. Each iteration is a pass: it ends when this
    trainer has nothing more to fetch now. One that begins voids what is left of the one before: its records
    come again.

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
