"""What a service knows of its dataset, and how that is told to a master that may know it already.

It turns arguments into a `Registration`, and knows what to try when the master asks for more.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import Parameter
from pathlib import PurePath
from typing import Any, Literal, TypeVar, Unpack

from edl_torch.core.calls import MasterApi, RegisterAnswer, RegisterCall
from edl_torch.core.registration import check_option, identity, new_spec
from edl_torch.core.token import Token
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset
from edl_torch.fingerprint import (
    STRENGTHS,
    UNKNOWN,
    Fingerprint,
    describe_change,
    differ,
    strength_of,
    weakest,
)
from edl_torch.readers.base import AbstractDataReader, changed_since, reader_fingerprint, reader_sources
from edl_torch.readers.mixture import MixtureReader
from edl_torch.shard import OPTIONS, Component, DatasetOptions, Registration, Shuffle, Source, TaskType

C = TypeVar("C", bound=type[Any])
T = TypeVar("T")

_LEFT_OPEN = ("records_per_shard", "num_epochs", "shuffle_window", "fingerprint")  # where they are None
_CHEAP_S, _RARELY = 0.1, 100  # a look that takes longer is taken again after so many times its length


class Description:
    """The arguments of a `DataShardService` that describe its dataset.

    `options` are those that are said. Where the window is none of them, a token's or the master's is
    followed, and a dataset that this service makes has windows of `usual_window` shards. Where the
    fingerprint is none, the reader is asked. With `data_changed` a checkpoint of other data goes on in the
    epoch after its own.

    `reader` is the service's own; `fallback_reader` that of the dataset object around the service, asked
    only where the master does not know the name. `in_shard` is None until a dataset object has said it.
    `told` says that a token was made of it: what it says of the order stands from then on.
    """

    def __init__(
        self,
        *,
        name: str,
        batch_size: int,
        reader: AbstractDataReader | None = None,
        dataset_size: int | None = None,
        shuffle: bool = False,
        shuffle_shards: bool = False,
        data_changed: Literal["new_epoch"] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        self.name = name
        self.batch_size = batch_size
        self.reader = reader
        self.dataset_size = dataset_size
        self.shuffle = shuffle
        self.shuffle_shards = shuffle_shards
        self.data_changed = data_changed
        given: dict[str, Any] = {"shuffle": shuffle, "shuffle_shards": shuffle_shards, **options}
        kind = given.setdefault("task_type", TaskType.TRAINING)
        if kind not in list(TaskType):
            known = "TaskType.TRAINING, TaskType.EVALUATION or TaskType.PREDICTION"
            raise InvalidArgument(f"task_type must be {known}, not {kind!r}")
        given["task_type"] = TaskType(kind)
        self.options = {n: v for n, v in given.items() if v is not None or n not in _LEFT_OPEN}
        self.fallback_reader: AbstractDataReader | None = None
        self.in_shard: bool | None = None
        self.told = False
        self.usual_window: int | None = None
        self._own_window: int | None = self.options.pop("shuffle_window", None)
        self._tokens_window: int | None = None
        self._fingerprint: str | None = None
        self._components: tuple[Component, ...] = ()  # of a mixture
        self._look_s = self._looked_at = 0.0
        self.clock = time.monotonic
        self._check()

    def _check(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgument(
                f"dataset_name is {self.name!r}: give the dataset a name, such as 'training'"
            )
        check_count("batch_size", self.batch_size)
        if self.dataset_size is not None:
            check_count("dataset_size", self.dataset_size)
        if "fingerprint" in self.options:
            self._fingerprint = Fingerprint.given(self.options.pop("fingerprint")).encode()
        for name, value in self.options.items():
            check_option(f"dataset {self.name!r}", name, value)
        if self._own_window is not None:
            check_count("shuffle_window", self._own_window)
            if self.shuffle:
                raise InvalidArgument(
                    "give shuffle or shuffle_window, not both: shuffle=True mixes all records"
                )
            self.in_shard = True
        if self.data_changed not in (None, "new_epoch"):
            raise InvalidArgument(f"data_changed must be 'new_epoch' or None, not {self.data_changed!r}")
        if self.reader is not None:
            check_is_reader(self.reader, "create_shards")
        if self.reader is not None and self.dataset_size is not None:
            raise InvalidArgument("give reader or dataset_size, not both: a reader says its size itself")

    @property
    def task_type(self) -> TaskType:
        kind: TaskType = self.options["task_type"]
        return kind

    def read_by(
        self, reader: AbstractDataReader, *, shuffle: bool, on_bad_record: str, is_used: bool
    ) -> None:
        """Take in the reader of a dataset object, and whether that shuffles inside shards.

        Raises InvalidArgument where the service `is_used` with another shuffle, for a reader of other data
        than the service's own, or where it `is_used` of less known data, and for `on_bad_record` that is not
        "raise", nor "quarantine" where some records may be bad. Where the service gives no plan, the
        master that knows the dataset by name says how many.
        """
        check_is_reader(reader, "read_records")
        if on_bad_record not in ("raise", "quarantine"):
            raise InvalidArgument(f"on_bad_record must be 'raise' or 'quarantine', not {on_bad_record!r}")
        has_plan = self.reader is not None or self.dataset_size is not None
        if on_bad_record == "quarantine" and has_plan and not self.options.get("max_bad_records"):
            raise InvalidArgument(
                "on_bad_record='quarantine' with max_bad_records=0 ends the job at its first bad record: "
                "give max_bad_records=N too, how many records may be bad, or leave on_bad_record out"
            )
        shuffle = shuffle or self._own_window is not None
        if (is_used or self.told) and bool(self.in_shard) != shuffle:
            raise InvalidArgument(
                f"dataset {self.name!r} is in use with shuffle={bool(self.in_shard)}: make all "
                f"datasets around one service with the same shuffle, before the first pass"
            )
        self._compare(reader, is_used=is_used)
        self.in_shard = shuffle
        self.fallback_reader = reader

    def _compare(self, reader: AbstractDataReader, *, is_used: bool) -> None:
        """Look at what is read, where another reader says what there is: the weaker look counts."""
        other = self.fallback_reader or self.reader
        known = self._fingerprint
        if other is None or other is reader or strength_of(known or UNKNOWN) == "given":
            return
        if known is None:
            known = reader_fingerprint(other)
        found = self._timed(reader_fingerprint, reader)
        told = f"dataset {self.name!r} is of {other!r}, and read by {reader!r}"
        if differ(known, found):
            raise InvalidArgument(
                f"{told}, whose data are others: {describe_change(known, found)}. Give both the same data"
            )
        weaker = min(found, known, key=lambda text: STRENGTHS.index(strength_of(text)))
        if is_used and strength_of(weaker) != strength_of(known):
            raise InvalidArgument(
                f"{told}, of which is not known that it has the same data: make all datasets around one "
                f'service before the first pass, or give the service fingerprint="v1"'
            )
        self._fingerprint = weaker

    def adopt(self, token: Token) -> None:
        """Take from a checkpoint's token what the user left open."""
        self.options.setdefault("records_per_shard", token.option("records_per_shard"))
        if self.in_shard is None:
            self.in_shard = token.option("shuffle_in_shard")
        self._tokens_window = token.option("shuffle_window")

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
        if self._fingerprint is None:
            reader = self.reader or self.fallback_reader
            self._fingerprint = UNKNOWN if reader is None else self._timed(reader_fingerprint, reader)
        chosen = {name: value for name, value in self.options.items() if value != OPTIONS[name].default}
        chosen["task_type"] = None
        return Registration(
            name=self.name,
            **chosen,
            shuffle_in_shard=self.in_shard,
            shuffle_window=self._window if self.in_shard else None,
            fingerprint=self._fingerprint or None,
        )

    def _timed(self, look: Callable[..., T], *arguments: Any) -> T:
        began = self.clock()
        found = look(*arguments)
        self._looked_at = self.clock()
        self._look_s = self._looked_at - began
        return found

    def changed(self, *, at_any_cost: bool = False) -> str | None:
        """Say what differs in the data from when they were registered; "" where no difference is seen.

        A look that takes long is taken seldom: it costs a hundredth of the time. None where it is put off.
        """
        is_soon = self.clock() - self._looked_at < _RARELY * self._look_s
        if self._look_s > _CHEAP_S and is_soon and not at_any_cost:
            return None
        return self._timed(self._changed)

    def _changed(self) -> str:
        reader = self.fallback_reader or self.reader
        if isinstance(reader, MixtureReader):
            return reader.changed(self._components, is_own=True)
        known = self._fingerprint or UNKNOWN
        return "" if reader is None else changed_since(reader, known, is_own=True)

    @property
    def known_by(self) -> str:
        """Strength of the fingerprint that was told to the master; "none" before."""
        there = [component.fingerprint for component in self._components if not component.left]
        return weakest(map(strength_of, there or [self._fingerprint or UNKNOWN]))

    def in_full(self, sources: tuple[Source, ...]) -> Registration:
        """Return a registration with the sources, and all that orders the records."""
        named = self.by_name()
        reader = self.reader or self.fallback_reader
        mixture: dict[str, Any] = {}
        if isinstance(reader, MixtureReader):
            components = reader.components(self.task_type)
            mixture = {
                "components": components,
                "weights": reader.weights,
                "stops": reader.stops,
                "turn": reader.turn,
            }
            self._components = components
        return replace(
            named,
            **mixture,
            sources=sources,
            seed=named.seed or 0,
            shuffle=self.shuffle,
            shuffle_shards=self.shuffle_shards,
            shuffle_in_shard=bool(self.in_shard),
            task_type=self.task_type,
            shuffle_window=named.shuffle_window or (self.usual_window if self.in_shard else None),
        )

    @property
    def _window(self) -> int | None:
        """The window that the dataset must have, where the user or a token has said one."""
        return self._own_window or self._tokens_window

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


def option_parameters() -> list[Parameter]:
    """Return the options of a dataset as parameters with their defaults."""
    # What orders the records is that of who has said it, where it may be left open.
    return [
        Parameter(
            *(name, Parameter.KEYWORD_ONLY),
            default=None
            if name in _LEFT_OPEN and OPTIONS[name].metadata["orders"]
            else OPTIONS[name].default,
            annotation=hint.__forward_arg__,
        )
        for name, hint in DatasetOptions.__annotations__.items()
    ]


def shows(parameters: Iterable[Parameter]) -> Callable[[C], C]:
    """Return a decorator for a class that takes `**options`: `help()` shows these parameters one by one, and
    explains those of a dataset in the place of the docstring's "options: …"."""

    def decorate(kind: C) -> C:
        init = vars(kind)["__init__"]
        signature = inspect.signature(init)
        *own, rest = signature.parameters.values()
        taken = (parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters)
        shown = [*own, *taken, *([] if rest.name == "options" else [rest])]
        init.__signature__ = signature.replace(parameters=shown)
        if kind.__doc__ is not None and DatasetOptions.__doc__ is not None:  # not with python -OO
            options = DatasetOptions.__doc__.partition("Args:\n")[2].rstrip() + "\n"
            kind.__doc__ = re.sub(r"(?m)^ *options: .*\n", lambda _: options, kind.__doc__)
        return kind

    return decorate


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
