"""`ElasticDataLoader`: a `DataLoader` whose consumption tells the master what was trained on.

One `for batch in loader` is one epoch, with whatever comes back from peers that die. It does not read
records and does not speak to the master; the session does.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from torch.utils.data import DataLoader

from edl_torch.client.description import shows
from edl_torch.client.peers import Peers
from edl_torch.client.service import ServiceKeywords
from edl_torch.core.calls import NEW_PASS
from edl_torch.core.mixture import ENDLESS
from edl_torch.data.dataset import OnBadRecord, ShardedDataset
from edl_torch.data.loop.inner_loader import InnerLoader
from edl_torch.data.loop.loader_methods import GradientMethods, ServiceMethods
from edl_torch.data.loop.loader_pass import LoaderPass, PassSetup
from edl_torch.data.loop.lockstep_pass import LockstepPass, PaddedPass, PartsPass
from edl_torch.data.loop.notice import Notice
from edl_torch.data.loop.opening import (
    SERVICE_PARAMETERS,
    ReadingOptions,
    ShuffleKind,
    open_dataset,
    warn_of_sorted_labels,
)
from edl_torch.data.ranks.process_group import ProcessGroupPeers, check_no_ranks, peers_over
from edl_torch.data.reading.record_jobs import NumThreads, thread_count
from edl_torch.data.weights import PaddingBatch, Statistics, Weights
from edl_torch.errors import ForeignLoop, InvalidArgument, ServiceClosed
from edl_torch.integrations.frameworks import check_asked_by, check_no_manager, check_no_trainer, raising

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class _FromService:
    def __repr__(self) -> str:  # as signatures show it
        return "<the service's>"


class LoaderKeywords(ServiceKeywords, total=False):
    """Keywords of an `ElasticDataLoader` that it hands on: to its service, and to torch's `DataLoader`."""

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    # Refused, with what to give instead:
    sampler: Any
    batch_sampler: Any
    generator: Any


_FROM_SERVICE: Any = _FromService()
_AHEAD = 2  # batches, as torch's workers
_OF_ITS_RECORDS = "read torch.utils.data.Subset(dataset, list(sampler)), each record as often as drawn"
_IN_PLACE_OF = {
    "DistributedSampler": "give shuffle=True and seed=…, and leave set_epoch() out: trainers share records",
    "RandomSampler": "give shuffle=True and seed=…",
    "SequentialSampler": "give nothing: that is the order without shuffle=True",
}
_TORCHS_ARGUMENTS = inspect.signature(DataLoader.__init__).parameters.keys()


@shows(SERVICE_PARAMETERS.values())
class ElasticDataLoader(ServiceMethods, GradientMethods, DataLoader[Any]):
    """A `DataLoader` whose consumption tells the master what was trained on, in one line:

    `ElasticDataLoader(reader, batch_size=32, num_epochs=3, shuffle=True, transform=shrink, num_workers=2)`.

    A batch is acknowledged when the optimizer has stepped on it; where nothing steps, when the next one is
    asked for. Batches arrive as `collate_fn` made them. With `batch_size=None` the reader makes the batches
    where it has `read_batch`, of the service's `batch_size` records each; else samples arrive one by one.

    With `synchronous=True` all ranks of a `torch.distributed` job step together, for models whose gradients
    are reduced over them (DDP, FSDP): every rank gets the same number of batches. One that has none while
    others have gets a padding batch, a copy of one seen before, with `weight` 0. Every rank makes the loader,
    calls `load_state_dict` and iterates at the same points. Backpropagate `loader.weigh(loss)` and call
    `loader.scale_gradients(optimizer)` before each step: gradients are then those of the mean over all
    records of all ranks since the last step.

    `len(loader)` is the epoch's records over the batch size (and the ranks, where they are synchronous); an
    estimate where several trainers share them.

    Args:
        data: what to read: a reader, a map-style dataset, a path or address that a reader knows, for which
            the loader makes its own `service`; or a `ShardedDataset` around one.
        batch_size: records in a batch. Around a `ShardedDataset` left out, or None for batches that the
            reader makes.
        shuffle: True is the best that the reader can: records over the whole dataset, where each can be read
            by itself; else another order of shards in each epoch, and of the records inside windows of 16
            shards. "in_shard" mixes the records of each shard only, "shards" shuffles shards only.
        transform, target_transform: applied to each record, as by `ImageDataset` where the reader yields
            images, else by `ShardedDataset`. So are `on_bad_record` and `seed_transforms`.
        synchronous: step together with the other ranks of the process group (or with these peers); False for
            ranks with models of their own. A process group of several ranks needs the one or the other.
        process_group: the ranks that train one model on different data; default: all.
        mesh: a device mesh over all ranks, where some hold one model in parts (tensor, pipeline or context
            parallelism): they get the same batches, which one of them reads. It implies `synchronous=True`.
        dp: the dimension or dimensions of `mesh` over which ranks read different data.
        num_threads: read and transform records by so many threads, in this process or, with `num_workers`,
            in each loader worker; "auto" for as many as there are cores, eight at most. They are up to
            `prefetch_factor` (2) batches ahead of the loop. Batches are those of one thread; `transform` is
            called by several at once.
        storage_options: endpoint, region, credentials of the store that `data` is a URL of.
        options: those of `DatasetOptions`.
        master_client, dataset_name, num_minibatches_per_shard, data_changed, lookahead, audit_dir: those of
            `DataShardService`, as is `master_timeout_s`.
        keywords: those of `torch.utils.data.DataLoader`.

    Raises:
        TypeError: an argument that there is not.
        InvalidArgument: data that nothing can read by index, an argument that decides the order, one that
            belongs to the service of a `ShardedDataset`, another `batch_size` than that service's; a `mesh`
            that is not over all ranks, or has no dimension `dp`. From the first pass: several ranks, and no
            word on `synchronous`.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int | None = _FROM_SERVICE,
        shuffle: ShuffleKind = False,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        on_bad_record: OnBadRecord = "raise",
        seed_transforms: bool | None = None,
        synchronous: bool | Peers | None = None,
        process_group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        dp: str | tuple[str, ...] = "dp",
        num_threads: NumThreads = None,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[LoaderKeywords],
    ) -> None:
        kwargs: dict[str, Any] = {**keywords}
        given: Any = {name: kwargs.pop(name) for name in SERVICE_PARAMETERS if name in kwargs}
        _check_arguments(kwargs)
        self._num_threads = thread_count(num_threads, kwargs.get("num_workers", 0))
        options = ReadingOptions(
            shuffle=shuffle,
            transform=transform,
            target_transform=target_transform,
            on_bad_record=on_bad_record,
            seed_transforms=seed_transforms,
            service=given,
            storage_options=storage_options,
        )
        self._owns_service = not isinstance(data, ShardedDataset)
        dataset = _dataset_of(data, batch_size, options)
        try:
            pin_memory = bool(kwargs.get("pin_memory"))
            peers = _peers_of(synchronous, process_group, mesh, dp, pin_memory=pin_memory)
            self._undecided = synchronous is None and mesh is None
            self._set_up(dataset, batch_size, peers, kwargs)
        except BaseException:
            if self._owns_service:
                dataset.service.close()
            raise

    def _set_up(
        self,
        dataset: ShardedDataset,
        batch_size: int | None,
        peers: Peers | None,
        kwargs: dict[str, Any],
    ) -> None:
        service = dataset.service
        if batch_size is _FROM_SERVICE:
            batch_size = service.batch_size
        if batch_size is not None and batch_size != service.batch_size:
            raise InvalidArgument(f"batch_size is {service.batch_size} at the service: leave it out here")
        if not callable(collate := kwargs.get("collate_fn") or list):
            raise InvalidArgument(f"collate_fn must be a function of a list of records, not {collate!r}")
        if batch_size is None and kwargs.get("drop_last"):
            raise InvalidArgument("drop_last needs batches made by the loader: leave out batch_size=None")
        threads = self._num_threads
        if threads:
            _check_threads(dataset, batch_size)
        ahead = kwargs.get("prefetch_factor")
        if threads and not kwargs.get("num_workers"):
            kwargs.pop("prefetch_factor", None)  # torch refuses it without workers
            if ahead is not None and ahead < 1:
                raise InvalidArgument(f"prefetch_factor is {ahead}: threads are at least one batch ahead")
        super().__init__(dataset, batch_size=batch_size, **kwargs)
        self._inner = InnerLoader(dataset, batch_size, kwargs, threads=threads, ahead=ahead or _AHEAD)
        self._live: weakref.ref[LoaderPass] | None = None
        self._peers = peers
        self._padding = PaddingBatch()
        self._statistics = Statistics()
        self.notice = Notice(together=self._peers is not None)
        session = service.session
        gradients = session.gradients
        self._weights = Weights(
            self._peers,
            attached=lambda: [o for o in gradients.optimizers() if hasattr(o, "param_groups")],
            batches=session.passes,
            weighs_padding=lambda gathered: session.do(session.passes.weigh_padding, gathered),
        )
        self._keeps_stepping = False
        self._lineage: int | None = None  # of the last pass
        if self._peers is not None:
            service.position.synchronise(self._peers)
        service.optimizers.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name, batches = self.service.dataset_name, self.batch_size or "the reader's"
        threads = f" num_threads={self.num_threads}" if self.num_threads else ""
        order = f" shuffle={self.service.order!r}" if self.service.order else ""
        workers = f"num_workers={self.num_workers}{threads}"
        return f"<ElasticDataLoader {name!r} batch_size={batches} {workers}{order}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            f"{self!r} is one trainer's part in the data, and cannot be copied or pickled: make another "
            f"loader, in another process with the address of a master (EDL_MASTER_ADDR)"
        )

    @property
    def num_threads(self) -> int:
        """Threads that read and transform records, in this process or in each loader worker; 0 for none."""
        return self._num_threads

    @property
    def synchronous(self) -> bool:
        """Whether it steps together with other ranks."""
        return self._peers is not None

    @property
    def preempted(self) -> bool:
        """Whether the job is to end soon. Then save, and leave the loop. Look after each batch, on all ranks.

        SIGTERM is such a notice from the first look on, which belongs in the main thread: the first one is
        noted, and a handler that the program had is still called; the second one ends the process as ever.
        `close()` puts things back. `preempt()` is a notice too. On synchronous ranks one rank's notice is
        seen by all at the same batch, at most two after it came.
        """
        return self.notice.is_to_end()

    def preempt(self) -> None:
        """Make `preempted` true, here and on all synchronous ranks; from any thread or signal handler.

        For notices that come in other ways (a cloud's, Ray's, another signal), and for what one rank alone
        decides (a limit of time). Iteration goes on until the loop is left; `epochs()` ends once the program
        has seen `preempted`.
        """
        self.notice.give()

    def through(self, epoch: int) -> Iterator[Any]:
        """Iterate over every epoch up to `epoch` that is not over, and over none after it.

        For a pass between epochs of something else, as evaluation is: trainers that share it come at their
        own time, and one that finds the epoch over gets no batch, instead of the next epoch's. `epoch` counts
        from 0. The dataset needs its barrier between epochs.
        """
        spec = self.service.session.plan().spec
        if not spec.epoch_barrier:
            raise InvalidArgument("through() needs epochs that end: not with epoch_barrier=False")
        if spec.num_epochs:
            epoch = min(epoch, spec.num_epochs - 1)
        while (running := self._running_epoch()) <= epoch:
            # Not `yield from`: that closes the iterator where the garbage collector closes this generator.
            for batch in self._iterate(running):  # noqa: UP028
                yield batch

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Say what takes the place of a sampler's method; for `hasattr` there is none."""
            if name == "set_epoch":
                raise AttributeError(
                    "ElasticDataLoader has no set_epoch(), and needs none: seed= and its number give each "
                    "epoch an order of its own. Leave the call out"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            check_asked_by(sys._getframe(1), repr(self))
            if not self._keeps_stepping:  # attach_manager() has seen to it
                check_no_manager(sys._getframe(1))
        except ForeignLoop as error:
            return raising(error)
        return self._iterate(NEW_PASS)

    def _iterate(self, epoch: int) -> LoaderPass:
        if self._undecided:
            check_no_ranks()
        session, position = self.service.session, self.service.position
        if session.lockstep is not None:
            position.begin_together(session.lockstep)
        plan = session.plan()  # joins
        before, self._lineage = self._lineage, session.lineage
        if self._lineage != before:
            self._weights.restart()
        if before is None:
            warn_of_sorted_labels(self.dataset.reader, plan)
        statistics = self._statistics
        if self.service.lookahead == "manual":
            statistics.let_go()
            statistics = Statistics()  # passed_on() sees to those of the model
        setup = PassSetup(
            inner=self._inner,
            session=session,
            position=position,
            whole_batch=self.batch_size if self.drop_last else None,
            weights=self._weights,
            padding=self._padding,
            statistics=statistics,
            notice=self.notice,
        )
        kind = PaddedPass if self._keeps_stepping else LoaderPass
        if self._peers is not None:
            kind = LockstepPass if self._peers.parts is None else PartsPass
        iterator = kind(setup, epoch)
        self._live = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        check_no_trainer(sys._getframe())
        if self.service.size == ENDLESS:
            raise TypeError(
                "this mixture has no length, as it has no end: give its end as Mixture(…, num_records=…) or "
                "stopping_strategy=…, or count batches in the loop"
            )
        return self._batches_of(self.service.size)

    def _batches_of(self, size: int) -> int:
        """Batches that so many records make."""
        if self.batch_size is None and not self._inner.columnar:
            return size
        batch = self.service.batch_size * (1 if self._peers is None else self._peers.coordinates)
        return size // batch if self.drop_last else -(-size // batch)

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that the next pass reads which are done: 0, but after a resume, or a loop that
        was left.

        `enumerate(loader, loader.batches_done)` counts on where the epoch was, up to `len(loader)`: for loops
        that step, or log, by that number. Without loader workers and with one trainer, or synchronous ranks,
        it is exact; else an estimate, as `len(loader)` is. A call to the master; synchronous ranks make it
        together.
        """
        position, size = self.service.position, self.service.size
        return self._batches_of(size) - self._batches_of(size - position.done_in_epoch())

    def keep_stepping(self) -> None:
        """From the next pass on hand out a padding batch, with `weight` 0, where the loop would wait for
        records that other trainers hold.

        For trainers that wait for each other at each step and are no synchronous ranks, as the replicas of
        torchft. Backpropagate `weigh(loss)`, which is 0 for such a batch. A loader that never had a batch
        has none to copy, and waits.
        """
        self._keeps_stepping = True

    def close(self) -> None:
        """End an iteration that is under way, or was left: what the loop has not finished with goes back.

        A service that the loader has made is closed too.
        """
        self.notice.close()
        live = None if self._live is None else self._live()
        try:
            if live is not None:
                live.close()
            with suppress(ServiceClosed):
                _ = self.service.session  # which ends a pass without an iterator
        finally:
            if self._owns_service:
                self.service.close()


def _peers_of(
    synchronous: bool | Peers | None,
    group: ProcessGroup | None,
    mesh: DeviceMesh | None,
    dp: str | tuple[str, ...],
    *,
    pin_memory: bool,
) -> Peers | None:
    if mesh is not None:
        if group is not None or synchronous not in (None, True):
            raise InvalidArgument(
                "mesh= says which ranks step together: leave out process_group=, and synchronous= too"
            )
        return peers_over(mesh, dp, pin_memory=pin_memory)
    if dp != "dp":
        raise InvalidArgument("dp= names dimensions of mesh=: give that too")
    if synchronous is not None and not isinstance(synchronous, bool):
        return synchronous
    if group is not None and not synchronous:
        raise InvalidArgument("process_group is for synchronous ranks: give synchronous=True too")
    return ProcessGroupPeers(group) if synchronous else None


def _dataset_of(data: Any, batch_size: int | None, options: ReadingOptions) -> ShardedDataset:
    if isinstance(data, ShardedDataset):
        if options.given:
            order = "; order is set by shuffle= at the dataset and shuffle_shards=, shuffle= at the service"
            raise InvalidArgument(
                f"{', '.join(options.given)}: around a ShardedDataset these are arguments of its "
                f"DataShardService, or of the dataset{order if options.shuffle else ''}"
            )
        return data
    if batch_size is _FROM_SERVICE or batch_size is None:
        raise InvalidArgument(
            "ElasticDataLoader needs a batch_size for this data. Batches that the reader makes need a "
            "ShardedDataset around a DataShardService(batch_size=…)"
        )
    return open_dataset(data, batch_size, options)


def _check_threads(dataset: ShardedDataset, batch_size: int | None) -> None:
    if batch_size is None:
        raise InvalidArgument(
            "num_threads is for batches that the loader makes of records: leave it out with batch_size=None"
        )
    if not dataset.makes_lists:
        raise InvalidArgument(
            f"num_threads is for datasets that iterate as ShardedDataset does, and {type(dataset).__name__} "
            f"has an __iter__ of its own: do it in `transform`, or leave num_threads out"
        )


def _check_arguments(kwargs: dict[str, Any]) -> None:
    if kwargs.pop("generator", None) is not None:
        raise InvalidArgument(
            "ElasticDataLoader takes no generator: seed=… decides the order of the records, at all trainers, "
            "and with seed_transforms=True the random numbers of each record, in any number of workers"
        )
    if kwargs.pop("batch_sampler", None) not in (None, False):
        raise InvalidArgument(
            "ElasticDataLoader takes no batch_sampler, as the master decides who reads what: give "
            "batch_size=…, shuffle=True and seed=…, and drop_last=True where that dropped the last batch"
        )
    sampler = kwargs.pop("sampler", None)
    if sampler not in (None, False):
        kinds = {kind.__name__ for kind in type(sampler).__mro__}
        remedy = next((remedy for kind, remedy in _IN_PLACE_OF.items() if kind in kinds), _OF_ITS_RECORDS)
        raise InvalidArgument(
            f"ElasticDataLoader takes no sampler, as the master decides who reads what: in place of this "
            f"{type(sampler).__name__} {remedy}"
        )
    for name in kwargs.keys() - _TORCHS_ARGUMENTS:
        names = {*_TORCHS_ARGUMENTS, *inspect.signature(ElasticDataLoader.__init__).parameters}
        meant = get_close_matches(name, names - {"self", "keywords"})
        hint = f": did you mean {meant[0]}?" if meant else ""
        hint = ": give it to the reader" if name in ("index_dir", "refresh") else hint
        raise TypeError(f"ElasticDataLoader has no argument {name!r}{hint}")
