"""What a service knows of its dataset, and how that is told to a master that may know it already.

It turns arguments into a `Registration`, and knows what to try when the master asks for more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Literal

from edl_torch.core.calls import RegisterAnswer, RegisterCall, Registration
from edl_torch.core.identity import identity
from edl_torch.core.master_api import MasterApi
from edl_torch.core.registration import new_spec
from edl_torch.core.spec import check_option
from edl_torch.core.token import Token
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset
from edl_torch.fingerprint import UNKNOWN, Fingerprint
from edl_torch.readers.base import AbstractDataReader, reader_fingerprint, reader_sources
from edl_torch.shard import Shuffle, Source, TaskType

_OPTIONS = ("seed", "shuffle", "shuffle_shards", "num_epochs", "epoch_barrier", "max_bad_records")


@dataclass(slots=True, kw_only=True)
class Description:
    """The arguments of a `DataShardService` that describe its dataset.

    `reader` is the service's own; `fallback_reader` that of the dataset object around the service, asked
    only where the master does not know the name. `in_shard` is None until a dataset object has said it.
    `told` says that a token was made of it: what it says of the order stands from then on.

    `shuffle_window` is None where the user left it open; a token's or the master's is followed then, and a
    dataset that this service makes has windows of `usual_window` shards. `fingerprint` is what the user says
    of the data; where it is None, the reader is asked. With `data_changed` a checkpoint of other data goes on
    in the epoch after its own.
    """

    name: str
    batch_size: int
    reader: AbstractDataReader | None = None
    dataset_size: int | None = None
    task_type: TaskType = TaskType.TRAINING
    num_epochs: int | None = 1
    records_per_shard: int | None = None
    shuffle: bool = False
    shuffle_shards: bool = False
    seed: int = 0
    epoch_barrier: bool = True
    max_bad_records: int = 0
    fallback_reader: AbstractDataReader | None = None
    in_shard: bool | None = None
    told: bool = False
    shuffle_window: int | None = None
    usual_window: int | None = None
    fingerprint: str | None = None
    data_changed: Literal["new_epoch"] | None = None
    _tokens_window: int | None = None
    _looked: str | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        for name in ("dataset_size", "records_per_shard", "shuffle_window"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in _OPTIONS:
            if name == "num_epochs" and self.num_epochs is None:  # as ElasticDL's users leave it open
                continue
            check_option(f"dataset {self.name!r}", name, getattr(self, name))
        if self.shuffle_window is not None:
            if self.shuffle:
                raise InvalidArgument(
                    "give shuffle or shuffle_window, not both: shuffle=True mixes all records"
                )
            self.in_shard = True
        if self.data_changed not in (None, "new_epoch"):
            raise InvalidArgument(f"data_changed must be 'new_epoch' or None, not {self.data_changed!r}")
        if self.fingerprint is not None:
            self._looked = Fingerprint.given(self.fingerprint).encode()
        if self.reader is not None:
            check_is_reader(self.reader, "create_shards")
        if self.reader is not None and self.dataset_size is not None:
            raise InvalidArgument("give reader or dataset_size, not both: a reader says its size itself")

    def check_on_bad_record(self, on_bad_record: str) -> None:
        """Raise InvalidArgument unless it is "raise", or "quarantine" where some records may be bad.

        Where the service gives no plan, the master that knows the dataset by name says how many.
        """
        if on_bad_record not in ("raise", "quarantine"):
            raise InvalidArgument(f"on_bad_record must be 'raise' or 'quarantine', not {on_bad_record!r}")
        has_plan = self.reader is not None or self.dataset_size is not None
        if on_bad_record == "quarantine" and has_plan and not self.max_bad_records:
            raise InvalidArgument(
                "on_bad_record='quarantine' with max_bad_records=0 ends the job at its first bad record: "
                "give max_bad_records=N too, how many records may be bad, or leave on_bad_record out"
            )

    def adopt(self, token: Token) -> None:
        """Take from a checkpoint's token what the user left open."""
        if self.records_per_shard is None:
            self.records_per_shard = token.records_per_shard
        if self.in_shard is None:
            self.in_shard = token.shuffle_in_shard
        self._tokens_window = token.shuffle_window

    def beginning(self) -> Token | None:
        """Return the token of the beginning, as of a dataset that this service registers first.

        None where this service does not know the plan.
        """
        sources = self.sources() or self.fallback_sources()
        if sources is None:
            return None
        self.told = True
        return Token(identity=identity(new_spec(self.in_full(sources), self.batch_size)))

    def register(self, master: MasterApi, session: str, *, again: bool) -> RegisterAnswer:
        """Register the dataset for a session; by its name alone where `again`, or without a plan."""
        sources = None if again else self.sources()
        if sources is None:
            try:
                return self._register(master, session, self.by_name())
            except UnknownDataset:
                sources = None if again else self.fallback_sources()
                if sources is None:
                    raise
        in_full = self.in_full(sources)
        try:
            return self._register(master, session, in_full)
        except DatasetConflict:
            if self._window is not None or self.usual_window is None:
                raise
            # Nobody has chosen a window here: that of whoever registered the dataset is as good.
            return self._register(master, session, replace(in_full, shuffle_window=None))

    def _fingerprint(self) -> str | None:
        """Return the text of what tells the data from other data; None where nothing does."""
        if self._looked is None:
            reader = self.reader or self.fallback_reader
            self._looked = UNKNOWN if reader is None else reader_fingerprint(reader)
        return self._looked or None

    def _register(self, master: MasterApi, session: str, registration: Registration) -> RegisterAnswer:
        return master.call(
            RegisterCall(
                session=session,
                worker_id=master.worker_id,
                batch_size=self.batch_size,
                registration=registration,
            )
        )

    def by_name(self) -> Registration:
        """Return a registration by name: options at their defaults are as the master has them."""
        defaults = {f.name: f.default for f in fields(self)}
        chosen = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) != defaults[name]}
        return Registration(
            name=self.name,
            records_per_shard=self.records_per_shard,
            shuffle_in_shard=self.in_shard,
            shuffle_window=self._window if self.in_shard else None,
            fingerprint=self._fingerprint(),
            **chosen,
        )

    def in_full(self, sources: tuple[Source, ...]) -> Registration:
        """Return a registration with the sources; options at their defaults are as the master has them."""
        named = self.by_name()
        return Registration(
            name=self.name,
            sources=sources,
            records_per_shard=self.records_per_shard,
            seed=self.seed,
            shuffle=self.shuffle,
            shuffle_shards=self.shuffle_shards,
            shuffle_in_shard=bool(self.in_shard),
            task_type=self.task_type,
            num_epochs=named.num_epochs,
            epoch_barrier=named.epoch_barrier,
            max_bad_records=named.max_bad_records,
            shuffle_window=named.shuffle_window or (self.usual_window if self.in_shard else None),
            fingerprint=named.fingerprint,
        )

    @property
    def _window(self) -> int | None:
        """The window that the dataset must have, where the user or a token has said one."""
        return self.shuffle_window or self._tokens_window

    @property
    def order(self) -> str:
        """The shuffle as it was described, for people; '' for none."""
        return order_of(
            Shuffle.GLOBAL if self.shuffle else Shuffle.SHARD if self.in_shard else Shuffle.NONE,
            self._window or self.usual_window or 1,
            shards=self.shuffle_shards,
        )

    def sources(self) -> tuple[Source, ...] | None:
        """Return the sources that the service was given; None where it was given none."""
        if self.dataset_size is not None:
            return (Source(name="", count=self.dataset_size),)
        return None if self.reader is None else reader_sources(self.reader, self.task_type)

    def fallback_sources(self) -> tuple[Source, ...] | None:
        """Return the sources of the dataset object's reader; None without one."""
        return None if self.fallback_reader is None else reader_sources(self.fallback_reader, self.task_type)


def order_of(order: Shuffle, window: int, *, shards: bool) -> str:
    """Return the name of a shuffle: "all records", "windows of 16 shards", "in_shard", "shards", or ''."""
    if order is Shuffle.GLOBAL:
        return "all records"
    if order is Shuffle.SHARD:
        return "in_shard" if window == 1 else f"windows of {window} shards"
    return "shards" if shards else ""


def check_is_reader(reader: object, method: str) -> None:
    """Raise InvalidArgument for what is no reader, as a path or a torch dataset."""
    if not callable(getattr(reader, method, None)):
        kind = repr(reader) if isinstance(reader, str | PurePath) else type(reader).__name__
        raise InvalidArgument(
            f"reader must have {method}(), as readers have, not {kind}: edl_torch.readers.open_reader(path) "
            "makes one for files, MapDatasetReader(dataset) of a dataset"
        )


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise InvalidArgument unless the argument called `name` is an int of `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be an int, not {value!r}")
    if value < least:
        raise InvalidArgument(f"{name} must be {least} or more, not {value}")
