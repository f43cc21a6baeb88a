"""`ElasticDataLoader`: a `DataLoader` whose consumption tells the master what was trained on.

One `for batch in loader` is one epoch, with whatever comes back from peers that die. It does not read
records and does not speak to the master; the session does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.utils.data import DataLoader

from edl_torch.client.master_api import MasterApi
from edl_torch.client.optimizers import SteppingOptimizer, SteppingScaler
from edl_torch.client.peers import Peers
from edl_torch.client.service import DataShardService
from edl_torch.core.calls import NEW_PASS, DatasetStatus
from edl_torch.data.collate import Envelope, TicketedCollate
from edl_torch.data.convert import to_batch, to_tensors
from edl_torch.data.dataset import Feed, OnBadRecord, ShardedDataset
from edl_torch.data.loader_pass import LoaderPass
from edl_torch.data.lockstep_pass import LockstepPass
from edl_torch.data.opening import ReadingOptions, ShuffleKind, open_dataset
from edl_torch.data.padded_pass import PaddedPass
from edl_torch.data.padding import PaddingBatch, Statistics
from edl_torch.data.process_group import ProcessGroupPeers, check_no_ranks
from edl_torch.data.sorted_labels import warn_of_sorted_labels
from edl_torch.data.weights import Weights
from edl_torch.errors import InvalidArgument, ServiceClosed
from edl_torch.shard import Indices, TaskType

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _FromService:
    def __repr__(self) -> str:  # as signatures show it
        return "<the service's>"


_FROM_SERVICE: Any = _FromService()
_ELSEWHERE = {
    "sampler": "the master decides who reads what",
    "batch_sampler": "the master decides who reads what",
}


class ElasticDataLoader(DataLoader[Any]):
    """A `DataLoader` whose consumption tells the master what was trained on, in one line:

    `ElasticDataLoader(reader, batch_size=32, num_epochs=3, shuffle=True, transform=shrink, num_workers=2)`.

    A batch is acknowledged when the next one is asked for, or when the attached optimizer has stepped.
    Batches arrive as `collate_fn` made them. With `batch_size=None` the reader makes the batches where it
    has `read_batch`, of the service's `batch_size` records each; else samples arrive one by one.

    With `synchronous=True` all ranks of a `torch.distributed` job step together, for models whose gradients
    are reduced over them (DDP, FSDP): every rank gets the same number of batches. One that has none while
    others have gets a batch seen before to stand in, with `weight` 0. Every rank makes the loader, calls
    `load_state_dict` and iterates at the same points. Backpropagate `loader.weigh(loss)` and call
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
            by itself; else as "in_shard": another order of shards in each epoch, and of records inside each.
            "shards" shuffles shards only.
        transform, target_transform: applied to each record, as by `ImageDataset` where the reader yields
            images, else by `ShardedDataset`. So are `on_bad_record` and `seed_transforms`.
        num_epochs, seed: and the arguments after `seed_transforms`, those of `DataShardService`.
        synchronous: step together with the other ranks of the process group (or with these peers); False for
            ranks with models of their own. A process group of several ranks needs the one or the other.
        process_group: the ranks that train one model on different data; default: all.
        kwargs: those of `torch.utils.data.DataLoader`.

    Raises:
        InvalidArgument: data that nothing can read by index, an argument that decides the order, one that
            belongs to the service of a `ShardedDataset`, or another `batch_size` than that service's. From
            the first pass: several ranks, and no word on `synchronous`.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int | None = _FROM_SERVICE,
        *,
        num_epochs: int | None = 1,
        shuffle: ShuffleKind = False,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        on_bad_record: OnBadRecord = "raise",
        seed_transforms: bool | None = None,
        master_client: MasterApi | None = None,
        dataset_name: str = "training",
        task_type: TaskType = TaskType.TRAINING,
        records_per_shard: int | None = None,
        num_minibatches_per_shard: int | None = None,
        epoch_barrier: bool = True,
        max_bad_records: int = 0,
        lookahead: int | Literal["told"] = 0,
        master_timeout_s: float | None = None,
        audit_dir: str | Path | None = None,
        synchronous: bool | Peers | None = None,
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(kwargs)
        options = ReadingOptions(
            num_epochs=num_epochs,
            shuffle=shuffle,
            seed=seed,
            transform=transform,
            target_transform=target_transform,
            on_bad_record=on_bad_record,
            seed_transforms=seed_transforms,
            master_client=master_client,
            dataset_name=dataset_name,
            task_type=task_type,
            records_per_shard=records_per_shard,
            num_minibatches_per_shard=num_minibatches_per_shard,
            epoch_barrier=epoch_barrier,
            max_bad_records=max_bad_records,
            lookahead=lookahead,
            master_timeout_s=master_timeout_s,
            audit_dir=audit_dir,
        )
        self._owns_service = not isinstance(data, ShardedDataset)
        dataset = _dataset_of(data, batch_size, options)
        try:
            self._set_up(dataset, batch_size, synchronous, process_group, kwargs)
        except BaseException:
            if self._owns_service:
                dataset.service.close()
            raise

    def _set_up(
        self,
        dataset: ShardedDataset,
        batch_size: int | None,
        synchronous: bool | Peers | None,
        process_group: ProcessGroup | None,
        kwargs: dict[str, Any],
    ) -> None:
        service = dataset.service
        if batch_size is _FROM_SERVICE:
            batch_size = service.batch_size
        if batch_size is not None and batch_size != service.batch_size:
            raise InvalidArgument(f"batch_size is {service.batch_size} at the service: leave it out here")
        if batch_size is None and kwargs.get("drop_last"):
            raise InvalidArgument("drop_last needs batches made by the loader: leave out batch_size=None")
        super().__init__(dataset, batch_size=batch_size, **kwargs)
        self._arguments = kwargs
        self._inner: DataLoader[Any] | None = None
        self._feed: Feed | None = None
        self._live: weakref.ref[LoaderPass] | None = None
        self._peers = _peers_of(synchronous, process_group)
        self._undecided = synchronous is None
        self._ranks = 1 if self._peers is None else self._peers.size
        self._padding = PaddingBatch()
        self._statistics = Statistics()
        self._weights = Weights(
            self._peers,
            attached=lambda: service.optimizers,
            batches=service._live_session.trainer.elastic,
        )
        self._keeps_stepping = False
        self._lineage = 0
        self._told_of_order = False
        if self._peers is not None:
            service._live_session.position.synchronise(self._peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        name, batches = self.service.dataset_name, self.batch_size or "the reader's"
        return f"<ElasticDataLoader {name!r} batch_size={batches} num_workers={self.num_workers}>"

    @property
    def service(self) -> DataShardService:
        """Where the shards come from."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return dataset.service

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or of the last one; without barrier the one it began in.

        Other than `service.epoch` it cannot move on between a look at it and the batch that it is about.
        """
        return self.service._live_session.elastic.epoch

    @property
    def records(self) -> Indices:
        """Name and record number of each sample of the batch in hand, in its order.

        A lazy sequence of `(name, index)`, computed when it is asked for; empty for a batch that stands in.
        With wrappers that ask for batches ahead it is the batch handed out last.
        """
        return self.service._live_session.elastic.records_in_hand()

    def through(self, epoch: int) -> Iterator[Any]:
        """Iterate over every epoch up to `epoch` that is not over, and over none after it.

        For a pass between epochs of something else, as evaluation is: trainers that share it come at their
        own time, and one that finds the epoch over gets no batch, instead of the next epoch's. `epoch` counts
        from 0. The dataset needs its barrier between epochs.
        """
        spec = self.service._live_session.plan().spec
        if not spec.epoch_barrier:
            raise InvalidArgument("through() needs epochs that end: not with epoch_barrier=False")
        if spec.num_epochs:
            epoch = min(epoch, spec.num_epochs - 1)
        while (running := self._running_epoch()) <= epoch:
            # Not `yield from`: that closes the iterator where the garbage collector closes this generator.
            for batch in self._iterate(running):  # noqa: UP028
                yield batch

    def _running_epoch(self) -> int:
        position = self.service._live_session.position
        return self.service.epoch if position.lockstep is None else position.epoch_of_all(position.lockstep)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._iterate(NEW_PASS)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        iterator = self._begin(epoch)
        self._live = weakref.ref(iterator)
        return iterator

    def _begin(self, epoch: int) -> LoaderPass:
        if self._undecided:
            check_no_ranks()
        session = self.service._live_session
        plan = session.plan()  # joins
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if not self._told_of_order:
            self._told_of_order = True
            warn_of_sorted_labels(dataset.reader, plan)
        whole_batch = self.batch_size if self.drop_last else None
        if session.lineage != self._lineage:
            self._lineage = session.lineage
            self._weights.restart()
        if self._peers is None and not self._keeps_stepping:
            return LoaderPass(self, session, whole_batch, self._weights, epoch)
        kind = PaddedPass if self._peers is None else LockstepPass
        return kind(self, session, whole_batch, self._weights, self._padding, self._statistics, epoch)

    def __len__(self) -> int:
        size = self.service.size
        if self.batch_size is None and not self._columnar:
            return size
        batch = self.service.batch_size * self._ranks
        return size // batch if self.drop_last else -(-size // batch)

    @property
    def weight(self) -> int:
        """Records in the batch in hand; 0 for one that stands in, or that was reported as failed."""
        return self._weights.own

    def weigh(self, loss: torch.Tensor, count: float | torch.Tensor | None = None) -> torch.Tensor:
        """What to backpropagate: the batch's mean loss times its records, which is the sum over them.

        Where the loss is a mean over something else, `count` is how much that is: what the loss was divided
        by, as a number or a tensor of one (read at once: from an accelerator that waits for it). Tokens that
        are not ignored, the class weights' sum, boxes. Give it always or never.

        Of a batch that stands in or has failed, and where `count` is 0, it is 0 and gives every parameter a
        gradient of exactly 0, whatever the loss was. Any shape; dtype and shape are kept. The batch counts
        for `scale_gradients` when the result is backpropagated, once for each batch, before the next one is
        asked for.
        """
        self._statistics.put_back()
        return self._weights.weigh(loss, count)

    def scale_gradients(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make gradients the mean over all records (or `count`s) of all ranks that were weighed since the
        last call.

        Call it once before each `step()`, for the optimizers that step: before clipping, and with a
        `GradScaler` after `unscale_(optimizer)`. Each optimizer has a window of its own: the batches
        backpropagated since its gradients were last scaled, or since `zero_grad()` made them None (zeros of
        `set_to_none=False` are not seen: what they threw away counts on). A second call for a window does
        nothing; a parameter of two optimizers is scaled once. With several optimizers, `service.attach` each
        before the loop: the first window of one that nobody knew of may be refused.

        On synchronous ranks all call it at the same point. Needs weighed losses, and a wrapper that averages
        over the ranks, as DDP does. Raises InvalidArgument where some batches were weighed with `count` and
        others without.
        """
        self._statistics.put_back()
        self._weights.scale(*optimizers)

    def freeze_statistics(self, model: torch.nn.Module) -> None:
        """Let batches that stand in leave running statistics (batch norms) as they were.

        They are put back by `weigh`, `scale_gradients` and the next batch; the model may be compiled. Call it
        before the loop. Raises InvalidArgument for a model with SyncBatchNorm, which takes stand-ins into all
        ranks' statistics.
        """
        self._statistics.watch(model)

    def keep_stepping(self) -> None:
        """From the next pass on hand out a batch that stands in, with `weight` 0, where the loop would wait
        for records that other trainers hold.

        For trainers that wait for each other at each step and are no synchronous ranks, as the replicas of
        torchft. Backpropagate `weigh(loss)`, which is 0 for such a batch. A loader that never had a batch
        has none to stand in, and waits.
        """
        self._keeps_stepping = True

    @property
    def _columnar(self) -> bool:
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        return self.batch_size is None and dataset._makes_batches

    # The service's, for who has only the loader ------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Go through the epochs that are left: `for epoch in loader.epochs(): for batch in loader: …`.

        Yields the number of the epoch that the next pass reads, until every record of every epoch has its
        outcome, here and at every other trainer. A loop that leaves an epoch early gets it again.
        """
        while not self.service.finished:
            yield self.service.epoch

    def attach(self, optimizer: SteppingOptimizer, *, scaler: SteppingScaler | None = None) -> None:
        """Acknowledge batches after each `optimizer.step()`; see `DataShardService.attach`."""
        self.service.attach(optimizer, scaler=scaler)

    def detach(self, optimizer: SteppingOptimizer) -> None:
        """Let an attached optimizer decide no more; see `DataShardService.detach`."""
        self.service.detach(optimizer)

    def stepped(self) -> None:
        """Say that the batches in hand were trained on, without an attached optimizer that steps on them."""
        self.service.report_batch_done()

    def passed_on(self) -> None:
        """Say, in a wrapper that reads ahead, that the oldest batch which it has read goes to its loop.

        For `lookahead="told"`. Call it for each batch when the loop asks for it, and once more when it asks
        and none is left. What was read and not passed on is neither acknowledged nor lost.
        """
        self.service._live_session.elastic.passed_on()

    def give_back(self, *, window: bool = False) -> None:
        """Say that the batch in hand was not trained on, as after a commit that failed: it is read again.

        With `window` so is every batch that was handed out and is not acknowledged: all that were gathered
        for a step which did not take place. With several attached optimizers some may have stepped on it.
        Raises AccountingError where the batch in hand was acknowledged already: call it before the last
        optimizer steps.
        """
        self.service._live_session.elastic.give_back(window=window)

    def state_dict(self) -> dict[str, Any]:
        """The data position, to be saved with the model; see `DataShardService.state_dict`."""
        return self.service.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | str | None) -> None:
        """Make the master go back to `state`; see `DataShardService.load_state_dict`."""
        self.service.load_state_dict(state)

    def progress(self) -> DatasetStatus:
        """Counts of the dataset over all trainers; see `DataShardService.progress`."""
        return self.service.progress()

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End an iteration that is under way, or was left: what the loop has not finished with goes back.

        A service that the loader has made is closed too.
        """
        live = None if self._live is None else self._live()
        try:
            if live is not None:
                live.close()
            with suppress(ServiceClosed):
                self.service._live_session.elastic.end_abandoned()
        finally:
            if self._owns_service:
                self.service.close()

    def _end_workers(self) -> None:
        """End persistent workers; torch complains of those that are left when the program exits."""
        if self._inner is None:
            return
        iterator: Any
        iterator, self._inner._iterator = self._inner._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()

    def _read(self) -> Iterator[Envelope]:
        """Begin to read what the session has leases for; the inner loader never drops a partial batch."""
        dataset: ShardedDataset = self.dataset  # type: ignore[assignment]
        if self._inner is None:
            size = self.batch_size
            list_size = 0 if size is None or not dataset._makes_lists else size
            self._feed = Feed(columnar=self._columnar, list_size=list_size)
            collate = TicketedCollate(
                self._user_collate(), self._feed.tally, self._feed.generators, batched=size is not None
            )
            arguments = {**self._arguments, "collate_fn": collate, "drop_last": False}
            self._inner = DataLoader(dataset, batch_size=None if list_size else size, **arguments)
            if self.persistent_workers:
                dataset.service._take_along(self)
        dataset._bind(self._feed)
        try:
            return iter(self._inner)
        finally:
            dataset._bind(None)  # the iterator has it: the dataset may serve a plain DataLoader again

    def _user_collate(self) -> Callable[[Any], Any]:
        given: Callable[[Any], Any] | None = self._arguments.get("collate_fn")
        if given is not None:
            return given
        return to_tensors if self.batch_size is None else to_batch


def _peers_of(synchronous: bool | Peers | None, group: ProcessGroup | None) -> Peers | None:
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


def _check_arguments(kwargs: dict[str, Any]) -> None:
    for name, why in _ELSEWHERE.items():
        if kwargs.pop(name, None) not in (None, False):
            raise InvalidArgument(f"ElasticDataLoader takes no {name}: {why}")
