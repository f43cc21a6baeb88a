"""`ShardedDataset` and `ImageDataset`: leased shards as an `IterableDataset`.

They read and transform records wherever torch puts them, in the trainer or in a loader worker. They do not
know when a record has been trained on.
"""

from __future__ import annotations

import math
import os
import reprlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Lock
from time import perf_counter
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from edl_torch.client.service import DataShardService
from edl_torch.client.workers.links import DirectLink, Handle, Link, SocketLink
from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.batches.convert import tensor_rows
from edl_torch.data.batches.transport import Collated, IterationSetup
from edl_torch.data.reading.columns import read_columns
from edl_torch.data.reading.iterations import iterations
from edl_torch.data.reading.sample_reading import (
    LeasesAhead,
    OnBad,
    ReadingTimes,
    Run,
    SampleList,
    SampleReader,
    Transform,
)
from edl_torch.data.reading.seeding import (
    Generators,
    draws_by_itself,
    name_of,
    record_seeds,
    with_own_numbers,
)
from edl_torch.data.reading.threaded_reading import ThreadedReading
from edl_torch.data.reading.worker_start import tell_what_ends_worker
from edl_torch.errors import BadRecord, EdlError, ForeignLoop, InvalidArgument, ReaderError, ServiceClosed
from edl_torch.integrations.frameworks import check_asked_by, check_no_trainer, raising
from edl_torch.readers.base import (
    AbstractDataReader,
    changed_since,
    import_for_reading,
)
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.mixture import MixtureReader
from edl_torch.shard import Slice
from edl_torch.system.processes import end_with_parent
from edl_torch.trainer.counting import Deliveries, DrawnSamples
from edl_torch.trainer.inflight import Mode
from edl_torch.trainer.vocabulary import Tally

OnBadRecord = Literal["raise", "quarantine"]

_SEEDS_AT_ONCE = 1024
_RARELY = 100  # between two looks at the data lies so many times what one takes


def _seeds(plan: Plan, part: Slice) -> Iterator[list[int]]:
    """Yield the seeds of a part, some at a time: at each timed batch the rest of a lease begins anew."""
    for skip in range(part.skip, part.stop, _SEEDS_AT_ONCE):
        some = replace(part, skip=skip, limit=min(_SEEDS_AT_ONCE, part.stop - skip))
        yield record_seeds(plan.spec.seed, part.epoch, plan.seeding(some), plan.folder)


class ShardedDataset(IterableDataset[Any]):
    """The records of a service's shards, read by `reader`, in the order that the plan gives them.

    Args:
        service: where the shards come from.
        reader: what reads them. With `read_record` a shuffled shard is read lazily; without, it is read whole
            and permuted in memory.
        shuffle: another order of the records inside each shard in each epoch.
        transform: applied to each record, where it is read.
        on_bad_record: "raise" ends the loop with a `BadRecord` that names the record; "quarantine" reports
            it to the master and goes on, up to as many as the service allows, or the master where the
            service gives neither reader nor size. An error that is not the record's, as of a network that
            is down, ends the loop with `SourceUnavailable` either way.
        seed_transforms: seed Python's, numpy's and torch's random numbers by (seed, epoch, record) around
            `transform`, and around `dataset[index]` of a map-style dataset, so that augmentation does not
            depend on workers. Costs some 10 µs a record, in a plain `DataLoader` 100 µs.
    """

    components = ""  # of a mixture, by name

    def __init__(
        self,
        service: DataShardService,
        reader: AbstractDataReader,
        shuffle: bool = False,
        transform: Transform | None = None,
        *,
        on_bad_record: OnBadRecord = "raise",
        seed_transforms: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(service, DataShardService):
            raise InvalidArgument(f"service must be a DataShardService, not {type(service).__name__}")
        service.session.read_by(reader, shuffle=shuffle, on_bad_record=on_bad_record)
        import_for_reading(reader)
        self.reader = reader
        self.transform = _function("transform", transform)
        self._quarantines = on_bad_record == "quarantine"
        self._seed_transforms = seed_transforms
        self._service: DataShardService | None = service
        self._batch_size = service.batch_size
        self._pid = os.getpid()
        service.session.readers.watch(iterations)
        self._handle: Handle = (
            service.session.readers.listen()
        )  # before torch forks: workers must find somebody listening
        self._link: tuple[int, SocketLink] | None = None
        self._setup: IterationSetup | None = None
        self._may_differ = False  # the data of this process: it has read, or was sent them
        self._generators: Generators | None = None
        self._reads = reader
        self._makes: Transform | None = None
        self._reading: weakref.ref[ThreadedReading] | None = None

    @property
    def service(self) -> DataShardService:
        """The service, in the trainer's process. Raises ServiceClosed in a loader worker, which has none."""
        if self._service is None or os.getpid() != self._pid:
            raise ServiceClosed(
                "a loader worker, or another child, has no DataShardService: use it in the trainer's process"
            )
        return self._service

    def __len__(self) -> int:
        """Records in one epoch, over all trainers."""
        check_no_trainer(sys._getframe())
        return self.service.size

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_service": None,
            "_link": None,
            "_reading": None,
            "_reads": None,
            "_makes": None,
            "_run": iterations.beginning_run,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        iterations.unpickled(state.pop("_run"))
        self.__dict__.update(state)
        self._may_differ |= isinstance(self.reader, MapDatasetReader)  # it may have opened files anew

    def bind(self, setup: IterationSetup | None) -> None:
        """Let `setup` count in the next iteration, an `ElasticDataLoader`'s; None for a plain one."""
        self._setup = setup

    def __iter__(self) -> Iterator[Any]:
        try:
            if self._setup is None:
                check_asked_by(sys._getframe(1), "a ShardedDataset")
            return self._begin()
        except ForeignLoop as error:
            return raising(error)
        except EdlError as error:
            if get_worker_info() is None:
                raise
            # torch brings the trainer what a worker raises as it reads, not as a persistent one begins again.
            return raising(error)

    def _begin(self) -> Iterator[Any]:
        setup = self._setup
        link = self._connect()
        seeds = self._seed_transforms or self._draws_by_itself
        self._generators = self._generators_of(setup) if seeds else None
        self._reads, self._makes = self._steps_of_reading()
        if setup is None:
            drawn = DrawnSamples()
            plan = link.begin(Mode.PLAIN, self._deliveries(link, drawn))
            self._look_again(link, plan.spec.fingerprint)
            return self._samples(link, plan, drawn)
        plan = link.begin(Mode.ELASTIC)
        self._look_again(link, plan.spec.fingerprint)
        setup.tally.clear()
        setup.times.clear()
        if setup.columnar:
            return self._batches(link, plan, setup.tally, setup.times)
        if setup.threads:
            return self._in_threads(link, plan, setup)
        if setup.list_size:
            return self._lists(link, plan, setup)
        return self._samples(link, plan, setup.tally)

    def _look_again(self, link: Link, then: str) -> None:
        """In a worker that persists, as a pass before may have written to its copy of the data, and in one
        that was not forked, as a dataset that was sent may open its files anew. At the data of the trainer's
        own process its session looks."""
        may_differ, self._may_differ = self._may_differ, True
        if may_differ and isinstance(link, SocketLink) and (said := changed_since(self.reader, then)):
            link.tell_changed(f"in a loader worker {said}")

    def _draws(self, link: Link, plan: Plan) -> Callable[[], Grant | None]:
        """What draws leases. A worker of a mixture reads records again within an iteration, and a read before
        may have written to its copy of the data: it looks between leases, as long as that costs a hundredth
        of the time, and at the end."""
        mixture = self.reader
        if not (isinstance(link, SocketLink) and isinstance(mixture, MixtureReader)):
            return link.next
        due = math.inf  # before anything is read

        def draw() -> Grant | None:
            nonlocal due
            grant, began = link.next(), time.monotonic()
            if due == math.inf:
                due = began
            elif began >= due or (grant is None and due >= 0):
                if said := mixture.changed(plan.spec.components):
                    link.tell_changed(f"in a loader worker {said}")
                due = -1.0 if said else began + _RARELY * (time.monotonic() - began)
            return grant

        return draw

    def _deliveries(self, link: Link, drawn: DrawnSamples) -> Deliveries | None:
        """What the loop is given of what is read here: a DataLoader's batches, else whatever is drawn."""
        if not isinstance(link, DirectLink):
            return None  # the trainer sees it
        loader = iterations.beginning()
        if loader is not None:
            iterations.check(loader.run)
        return loader if loader is not None and loader.counts_records else drawn

    def _connect(self) -> Link:
        info = get_worker_info()
        pid = os.getpid()
        if info is None and pid == self._pid and self._service is not None:
            return DirectLink(self._service.session.readers)
        if self._link is None or self._link[0] != pid:
            stream = f"process {pid}" if info is None else f"worker {info.id}"
            run = "" if info is None else iterations.served
            if info is not None:
                end_with_parent()
            self._link = pid, SocketLink(self._handle, stream, run)
            if info is not None:
                tell_what_ends_worker(self._link[1])
        return self._link[1]

    def _samples(self, link: Link, plan: Plan, tally: Tally | DrawnSamples) -> Iterator[Any]:
        leases = LeasesAhead(self._draws(link, plan))
        reader = SampleReader(self._reads, self._to_samples, leases)
        return self._read(link, plan, leases, tally, partial(reader.samples, plan))

    def _lists(self, link: Link, plan: Plan, setup: IterationSetup) -> Iterator[list[Any] | Collated]:
        """Lists of samples; batches, where these are made of the numbers of rows."""
        rows = tensor_rows(self.reader) if setup.collate is not None and self._makes is None else None
        reader = self._reads if rows is None else rows.numbers
        samples = SampleList(setup.list_size, setup.times, plan.spec.turn)
        leases = LeasesAhead(self._draws(link, plan))
        read = partial(SampleReader(reader, self._to_samples, leases).lists, samples, plan)
        lists = chain(self._read(link, plan, leases, setup.tally, read), samples.rest())
        return lists if rows is None else map(rows.batch, lists)

    def _read(
        self,
        link: Link,
        plan: Plan,
        leases: Iterator[Grant],
        tally: Tally | DrawnSamples,
        read: Callable[[Grant, Run, OnBad], Iterator[Any]],
    ) -> Iterator[Any]:
        def read_lease(grant: Grant) -> Iterator[Any]:
            def on_bad(position: int, error: ReaderError) -> Run:
                self._bad(link, plan, grant, position, error)
                return tally.start(grant.task, position + 1)

            return read(grant, tally.start(grant.task, grant.slice.skip), on_bad)

        return chain.from_iterable(map(read_lease, leases))

    def _in_threads(self, link: Link, plan: Plan, setup: IterationSetup) -> Iterator[Any]:
        self.end_reading()
        reading = ThreadedReading(
            self._reads,
            plan,
            iter(self._draws(link, plan), None),
            setup,
            partial(self._bad, link, plan),
            transform=self._makes,
            seeds=self._generators is not None,
            keeps_samples=self._quarantines,
        )
        self._reading = weakref.ref(reading)
        return _batches_of(reading)

    def end_reading(self) -> None:
        """End the threads of an iteration that was left."""
        reading = None if self._reading is None else self._reading()
        if reading is not None:
            reading.close()

    def _batches(self, link: Link, plan: Plan, tally: Tally, times: ReadingTimes) -> Iterator[Any]:
        transform = with_own_numbers(self.transform)
        for grant in iter(self._draws(link, plan), None):
            on_bad = partial(self._bad, link, plan, grant)
            run = tally.start(grant.task, grant.slice.skip)
            asked_at = perf_counter()
            for positions, batch in read_columns(self.reader, plan, grant, self._batch_size, on_bad):
                read_at = perf_counter()
                for first, after in positions:
                    if first != run[2]:  # those before it are bad
                        run = tally.start(grant.task, first)
                    run[2] = after
                if transform is not None:
                    batch = transform(batch)
                if times.begin_if_due():
                    times.add(read_at - asked_at, perf_counter() - read_at)
                yield batch
                asked_at = perf_counter()

    def _bad(self, link: Link, plan: Plan, grant: Grant, position: int, error: ReaderError) -> None:
        if self._generators is not None:
            self._generators.put_back()
        may_be_bad = self._quarantines and isinstance(error, BadRecord)
        name, _ = plan.locate(grant.slice.epoch, grant.slice.shard, position)
        if not may_be_bad or self._raises_of(name):
            raise error
        link.fail(grant.task, position, str(error))

    def _raises_of(self, name: str) -> bool:
        """Whether a bad record of this source ends the loop, where some may be bad."""
        return False

    def _to_samples(self, plan: Plan, part: Slice, records: Iterable[Any]) -> Iterable[Any]:
        transform = self._makes
        if transform is None:
            return records
        if self._generators is None:
            return map(transform, records)
        seeds = chain.from_iterable(_seeds(plan, part))
        return map(self._generators.seeded(transform), records, seeds)

    def _steps_of_reading(self) -> tuple[AbstractDataReader, Transform | None]:
        """Return what reads, and what makes samples of what was read.

        A map-style dataset may draw random numbers in `__getitem__`. Where these are seeded by the record,
        its number is what is read, and the record is part of what is made of it.
        """
        reader, transform = self.reader, self._record_transform
        if not isinstance(reader, MapDatasetReader) or self._generators is None or tensor_rows(reader):
            return reader, transform
        numbers = MapDatasetReader(range(reader.count), reader.name, thread_safe=True)
        lock = nullcontext() if reader.thread_safe else Lock()

        def make(number: int) -> Any:
            with lock:
                record = reader.load(number)
            return record if transform is None else transform(record)

        make.__qualname__ = name_of(self.transform or type(reader.dataset).__getitem__).rstrip("()")
        return numbers, make

    def _generators_of(self, setup: IterationSetup | None) -> Generators:
        generators = Generators(after_each=True) if setup is None else setup.generators
        generators.put_back()  # an earlier pass may have ended in the middle of a batch
        return generators

    @property
    def _record_transform(self) -> Transform | None:
        """What makes a sample of a record; None where the record is the sample."""
        return with_own_numbers(self.transform)

    @property
    def _draws_by_itself(self) -> bool:
        return draws_by_itself(self.transform)

    @property
    def makes_lists(self) -> bool:
        """Whether an iteration may yield samples by the list: not where a subclass does something to each."""
        return type(self).__iter__ is ShardedDataset.__iter__


def _batches_of(reading: ThreadedReading) -> Iterator[Any]:
    """Yield the batches, and abandon the reading when nobody asks for more.

    A record's error keeps the frames that it came through, and they those that called them, up to the loop
    with its iterator. A generator that waits has no caller: an error that is kept does not keep the loop's.
    """
    try:
        for batch in reading:  # noqa: UP028  `yield from` would wait for the threads when this is let go
            yield batch
    finally:
        reading.abandon()


class ImageDataset(ShardedDataset):
    """Images, or images with targets, by index range: records are `image` or `(image, target)`.

    `image` is a uint8 array [height, width, 3] in RGB, until `transform` makes something else of it.

    Args:
        service, reader, shuffle, on_bad_record: as for `ShardedDataset`.
        transform: applied to the image.
        target_transform: applied to the target.
        seed_transforms: as for `ShardedDataset`; on, because decoding costs far more.
    """

    def __init__(
        self,
        service: DataShardService,
        reader: AbstractDataReader,
        shuffle: bool = False,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        *,
        on_bad_record: OnBadRecord = "raise",
        seed_transforms: bool = True,
    ) -> None:
        super().__init__(
            service,
            reader,
            shuffle,
            transform,
            on_bad_record=on_bad_record,
            seed_transforms=seed_transforms,
        )
        self.target_transform = _function("target_transform", target_transform)

    @property
    def _record_transform(self) -> Transform | None:
        return of_image(self.transform, self.target_transform)

    @property
    def _draws_by_itself(self) -> bool:
        return draws_by_itself(self.transform) or draws_by_itself(self.target_transform)


def _function(name: str, given: Transform | None) -> Transform | None:
    if given is not None and not callable(given):
        raise InvalidArgument(f"{name} must be a function of one record, not {reprlib.repr(given)}")
    return given


def of_image(transform: Transform | None, target_transform: Transform | None) -> Transform | None:
    """Return what transforms an image, and its target where it has one; None where neither is transformed."""
    if transform is None and target_transform is None:
        return None
    return partial(_transformed, *map(with_own_numbers, (transform, target_transform)))


def _transformed(transform: Transform | None, target_transform: Transform | None, record: Any) -> Any:
    if not isinstance(record, tuple):
        return record if transform is None else transform(record)
    image, target = record
    if transform is not None:
        image = transform(image)
    if target_transform is not None:
        target = target_transform(target)
    return image, target
