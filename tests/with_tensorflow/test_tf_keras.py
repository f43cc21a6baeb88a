"""`fit`, `evaluate` and `predict` over leased shards: what counts, and when."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow_kit import BATCH, READER, SAMPLE, SIZE, Watch, make_dataset, make_service

from edl_torch import TaskType
from edl_torch.integrations.tensorflow import DynamicShardingCallback, sharded_dataset
from edl_torch.testing import FakeMaster


class Model(tf.keras.Sequential):
    """Not built before its first batch, as many are; tells a watch what each step has been given."""

    def __init__(self, watch, fail_at=None):
        super().__init__([tf.keras.layers.Dense(1)])
        self._note = watch.step
        self.fail_at = fail_at

    def train_step(self, data):
        numbers, _ = data
        if self.fail_at is not None:
            tf.debugging.assert_none_equal(numbers, float(self.fail_at), message="a step that fails")
        with tf.control_dependencies([tf.numpy_function(self._note, [numbers], [])]):
            return super().train_step(data)


class Checks(tf.keras.callbacks.Callback):
    """Looks for early acknowledgements around every batch."""

    def __init__(self, watch):
        super().__init__()
        self._watch = watch

    def on_train_batch_begin(self, batch, logs=None):
        self._watch.check()

    def on_train_batch_end(self, batch, logs=None):
        self._watch.check()


def compiled(watch, *, steps_per_execution=1, **options):
    model = Model(watch, **options)
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return model


@pytest.fixture
def master():
    return FakeMaster()


@pytest.fixture
def watch(master):
    return Watch(master.outcomes)


@pytest.mark.parametrize("steps_per_execution", [1, 2, 4])
def test_fit_over_two_epochs_trains_on_each_record_twice(master, watch, steps_per_execution):
    service = make_service(master, num_epochs=2, shuffle_shards=True)
    model = compiled(watch, steps_per_execution=steps_per_execution)
    callbacks = [DynamicShardingCallback(service), Checks(watch)]
    model.fit(make_dataset(service, shuffle=True), epochs=2, callbacks=callbacks, verbose=0)
    assert service.finished
    assert sorted(watch.trained) == sorted([*range(SIZE)] * 2)
    assert watch.trained[:SIZE] != watch.trained[SIZE:]
    assert watch.checks
    master.outcomes["training"].check_complete(2)


def test_fit_under_a_strategy_reads_ahead_to_build_the_model(master, watch):
    service = make_service(master)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = compiled(watch)
    callbacks = [DynamicShardingCallback(service), Checks(watch)]
    model.fit(make_dataset(service, ahead=8), callbacks=callbacks, verbose=0)
    assert sorted(watch.trained) == list(range(SIZE))
    master.outcomes["training"].check_complete(1)


def test_fit_ends_with_the_data(master, watch):
    service = make_service(master, num_epochs=2)
    history = compiled(watch).fit(
        make_dataset(service), epochs=50, callbacks=[DynamicShardingCallback(service)], verbose=0
    )
    assert history.epoch == [0, 1]
    master.outcomes["training"].check_complete(2)


def test_fit_pass_by_pass_shares_an_epoch_with_another_trainer(master, watch):
    ours = make_service(master.connect("ours"), num_epochs=3)
    theirs = make_service(master.connect("theirs"), num_epochs=3)
    taken = []

    class Peer(tf.keras.callbacks.Callback):
        """Trains on a shard while we step, other ones in each epoch."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == ours.epoch and (shard := theirs.fetch_shard()) is not None:
                taken.append(shard.end - shard.start)
                for _ in range(0, shard.end - shard.start, BATCH):
                    theirs.report_batch_done()

    model = compiled(watch)
    while not ours.finished:
        epoch, callbacks = ours.epoch, [DynamicShardingCallback(ours), Peer()]
        dataset = make_dataset(ours, ahead=1)
        model.fit(dataset, initial_epoch=epoch, epochs=epoch + 1, callbacks=callbacks, verbose=0)
    theirs.session.flush()
    assert taken
    assert sum(taken) + len(watch.trained) == 3 * SIZE
    master.outcomes["training"].check_complete(3)


def test_validation_inside_fit_reports_nothing(master, watch):
    service = make_service(master)
    counts = []
    seen = master.outcomes

    class Count(tf.keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            service.session.flush()
            counts.append(len(seen["training"].acknowledged))

    held_out = tf.data.Dataset.from_tensor_slices(([[1.0]] * 9, [[1.0]] * 9)).batch(3)
    compiled(watch).fit(
        make_dataset(service),
        validation_data=held_out,
        callbacks=[DynamicShardingCallback(service), Count()],
        verbose=0,
    )
    assert counts == [SIZE] * 3
    master.outcomes["training"].check_complete(1)


def test_validation_steps_in_the_middle_of_an_epoch_report_nothing(master, watch):
    service = make_service(master)

    class Evaluates(tf.keras.callbacks.Callback):
        """With the training's own callback in the list, as a user may have it."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                service.session.flush()
                before = len(master.outcomes["training"].acknowledged)
                self.model.evaluate(
                    tf.ones((8, 1)), tf.ones((8, 1)), callbacks=[DynamicShardingCallback(service)], verbose=0
                )
                service.session.flush()
                assert before == len(master.outcomes["training"].acknowledged) == 2 * BATCH

    callbacks = [DynamicShardingCallback(service), Evaluates(), Checks(watch)]
    compiled(watch).fit(make_dataset(service), callbacks=callbacks, verbose=0)
    master.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("kind", [TaskType.EVALUATION, TaskType.PREDICTION])
def test_evaluation_and_prediction_have_services_of_their_own(master, watch, kind):
    service = make_service(master, dataset_name="other", task_type=kind)
    model = compiled(watch)
    model.build((None, 1))
    dataset = sharded_dataset(service, READER, SAMPLE).prefetch(2)
    callbacks = [DynamicShardingCallback(service)]
    if kind is TaskType.EVALUATION:
        model.evaluate(dataset, callbacks=callbacks, verbose=0)
    else:
        assert model.predict(dataset, callbacks=callbacks, verbose=0).shape == (SIZE, 1)
    assert service.finished
    master.outcomes["other"].check_complete(1)


def test_validation_of_leased_shards_between_epochs(master, watch):
    training = make_service(master, num_epochs=2)
    evaluation = make_service(master, dataset_name="evaluation", task_type=TaskType.EVALUATION, num_epochs=2)
    compiled(watch).fit(
        make_dataset(training),
        validation_data=make_dataset(evaluation),
        epochs=2,
        callbacks=[DynamicShardingCallback(training), DynamicShardingCallback(evaluation)],
        verbose=0,
    )
    master.outcomes["training"].check_complete(2)
    master.outcomes["evaluation"].check_complete(2)


def test_batch_of_a_step_that_failed_is_not_reported_and_comes_again(master, watch):
    service = make_service(master)
    model = compiled(watch, fail_at=2 * BATCH + 1)  # in the third batch
    callbacks = [DynamicShardingCallback(service), Checks(watch)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="a step that fails"):
        model.fit(make_dataset(service), callbacks=callbacks, verbose=0)
    service.session.flush()
    assert {n for _, _, n in master.outcomes["training"].acknowledged} == set(range(2 * BATCH))
    again = compiled(watch)
    again.fit(make_dataset(service), callbacks=callbacks, verbose=0)
    assert sorted(watch.trained) == list(range(SIZE))
    master.outcomes["training"].check_complete(1)


def test_fit_without_the_callback_is_told_so(master, watch):
    service = make_service(master, num_epochs=2)
    with pytest.raises(tf.errors.UnknownError, match=r"AccountingError.*reported"):
        compiled(watch).fit(make_dataset(service, ahead=8), epochs=2, verbose=0)
    service.close()


def test_repeat_is_refused_before_it_miscounts(master, watch):
    service = make_service(master, num_epochs=2)
    dataset = make_dataset(service, ahead=1).repeat().prefetch(4)
    callbacks = [DynamicShardingCallback(service), Checks(watch)]
    with pytest.raises(tf.errors.UnknownError, match=r"leave \.repeat\(\) out"):
        compiled(watch).fit(dataset, steps_per_epoch=6, epochs=2, callbacks=callbacks, verbose=0)
    service.close()
