"""Leased shards for TensorFlow: a `tf.data.Dataset`, a hook for sessions, and a callback for Keras.

Importing it imports TensorFlow. A batch counts when a training step has returned, never when it was fetched;
which records those are is counted by the service, as for a plain `DataLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal

from edl_torch.client.service import DataShardService
from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.integrations.adapter import needed_by
from edl_torch.integrations.records import ShardedRecords
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import TaskType

with needed_by("tensorflow"):
    import tensorflow as tf

__all__ = ["DynamicShardingCallback", "DynamicShardingHook", "sharded_dataset"]

tf1: Any = tf.compat.v1
SessionRunHook: Any = tf1.train.SessionRunHook
Callback: Any = tf.keras.callbacks.Callback


def sharded_dataset(
    service: DataShardService,
    reader: AbstractDataReader,
    output_signature: Any,
    *,
    shuffle: bool = False,
    transform: Callable[[Any], Any] | None = None,
    padded: bool = False,
    on_bad_record: Literal["raise", "quarantine"] = "raise",
) -> Any:
    """Batches of the service's `batch_size` as a `tf.data.Dataset`; one iteration is one pass.

    Further `map` (in order) and `prefetch` are fine, what is prefetched does not count. What moves
    records between batches (`shuffle`, `unbatch`, `filter`, `repeat`) is not: reports name batches by their
    order alone. Use `shuffle=True` here, and `shuffle_shards=True` at the service.

    Args:
        service: where the shards come from.
        reader: what reads them, in this process.
        output_signature: of one sample: a (nested) structure of `tf.TensorSpec`.
        shuffle: another order of the records inside each shard in each epoch.
        transform: makes a sample of a record, in Python.
        padded: samples differ in shape: the batch is padded with zeros to its largest.
        on_bad_record: "raise", or "quarantine" up to as many as the service allows.
    """
    records = ShardedRecords(
        service, reader, shuffle=shuffle, transform=transform, on_bad_record=on_bad_record
    )
    samples = tf.data.Dataset.from_generator(lambda: records, output_signature=output_signature)
    return samples.padded_batch(service.batch_size) if padded else samples.batch(service.batch_size)


class DynamicShardingHook(SessionRunHook):  # type: ignore[misc]  # TensorFlow has no types
    """Reports a batch after each `run` of a `MonitoredSession` that trained.

    A run trains when something it fetches is, or depends on, a training operation: `train_op`, else
    what optimizers put into the graph's `TRAIN_OP` collection. Runs that evaluate, or initialise an iterator,
    report nothing, and neither does a run that fails.
    """

    def __init__(self, service: DataShardService, train_op: Any = None) -> None:
        self._service = service
        self._given = train_op
        self._train_ops: frozenset[Any] = frozenset()
        self._trains: dict[Any, bool] = {}

    def begin(self) -> None:
        """The graph is complete. Raises InvalidArgument where nothing in it trains."""
        graph = tf1.get_default_graph()
        found = graph.get_collection(tf1.GraphKeys.TRAIN_OP) if self._given is None else [self._given]
        self._train_ops = frozenset(_operations(found, graph))
        self._trains = {}
        if not self._train_ops:
            raise InvalidArgument(
                "the graph has no training operation that DynamicShardingHook could see run: give train_op="
            )

    def after_create_session(self, session: Any, coord: Any) -> None:
        """A new session reads anew: what an earlier one left unreported is read again."""
        self._service.abandon_pass()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """A run came to its end without an error."""
        fetched = _operations(run_context.original_args.fetches, run_context.session.graph)
        if any(self._runs_training(operation) for operation in fetched):
            self._service.report_batch_done()

    def _runs_training(self, fetched: Any) -> bool:
        known = self._trains.get(fetched)
        if known is None:
            known = self._trains[fetched] = not self._train_ops.isdisjoint(_upstream(fetched))
        return known


def _operations(fetches: Any, graph: Any) -> Iterator[Any]:
    """The operations behind what `Session.run` was asked for: tensors, names, variables, in any structure."""
    for fetch in tf.nest.flatten(fetches, expand_composites=True):
        if fetch is not None:
            element = graph.as_graph_element(fetch, allow_tensor=True, allow_operation=True)
            yield element if isinstance(element, tf1.Operation) else element.op


def _upstream(operation: Any) -> Iterator[Any]:
    """An operation, and all that runs when it does."""
    seen = {operation}
    waiting = [operation]
    while waiting:
        current = waiting.pop()
        yield current
        before = {*(tensor.op for tensor in current.inputs), *current.control_inputs} - seen
        seen |= before
        waiting.extend(before)


class DynamicShardingCallback(Callback):  # type: ignore[misc]  # as above
    """Reports the batches of `fit`, or of `evaluate` or `predict` where the service is of that task type.

    `fit` ends when the data is finished, whatever its number of epochs. Batches of a validation inside
    `fit` are none of the training service's; they are those of a service of their own, with a callback of
    its own in the same list.
    """

    def __init__(self, service: DataShardService) -> None:
        super().__init__()
        self._service = service
        self._first = 0
        if service.task_type is TaskType.TRAINING:
            self.on_train_begin = self._begin
            self.on_train_batch_begin, self.on_train_batch_end = self._step, self._report
        elif service.task_type is TaskType.EVALUATION:
            self.on_test_begin = self._begin
            self.on_test_batch_begin, self.on_test_batch_end = self._step, self._report
        else:
            self.on_predict_begin = self._begin
            self.on_predict_batch_begin, self.on_predict_batch_end = self._step, self._report

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """A pass over the data is over, and perhaps all of it. Raises TooManyBadRecords."""
        if self._service.task_type is TaskType.TRAINING and self._service.finished:
            self.model.stop_training = True

    def _begin(self, logs: Any = None) -> None:
        """Begin; `fit` may have read ahead to build the model, and begins again."""
        self._service.abandon_pass()

    def _step(self, batch: int, logs: Any = None) -> None:
        """Note that one step begins, or `steps_per_execution` of them."""
        self._first = batch

    def _report(self, batch: int, logs: Any = None) -> None:
        """Report the steps up to `batch`, which are done."""
        self._service.report_batch_done()
        # Keras names `steps_per_execution` steps also where the data end before the last of them.
        with suppress(AccountingError):
            for _ in range(self._first, batch):
                self._service.report_batch_done()
