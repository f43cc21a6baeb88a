"""The hook in sessions of `tf.compat.v1`: which runs count."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_kit import BATCH, SIZE, Watch, make_dataset, make_service

from edl_torch.errors import InvalidArgument
from edl_torch.integrations.tensorflow import DynamicShardingHook
from edl_torch.testing import FakeMaster

tf1 = tf.compat.v1


class Job:
    """A linear model with an optimizer, its data from a service, in a graph of its own."""

    def __init__(self, service, watch, *, fail_at=None):
        self.graph = tf1.Graph()
        with self.graph.as_default():
            self.step = tf1.train.get_or_create_global_step()
            iterator = tf1.data.make_initializable_iterator(make_dataset(service))
            self.initializer = iterator.initializer
            tf1.add_to_collection(tf1.GraphKeys.TABLE_INITIALIZERS, self.initializer)
            x, y = iterator.get_next()
            if fail_at is not None:
                with tf1.control_dependencies([tf1.debugging.assert_none_equal(x, float(fail_at))]):
                    x = tf1.identity(x)
            weight = tf1.get_variable("weight", (1,), use_resource=True)
            loss = tf1.reduce_mean((x * weight * 1e-3 - y) ** 2)
            with tf1.control_dependencies([tf1.numpy_function(watch.step, [x], [])]):
                self.train = tf1.train.GradientDescentOptimizer(1e-3).minimize(loss, self.step)
            self.weight = weight
            self.loss = loss


@pytest.fixture
def master():
    return FakeMaster()


@pytest.fixture
def watch(master):
    return Watch(master.outcomes)


@pytest.fixture(autouse=True)
def own_graph():
    with tf1.Graph().as_default():
        yield


def acknowledged(master):
    return {number for _, _, number in master.outcomes["training"].acknowledged}


def train(job, session, service, fetch, watch):
    """Passes until the data is finished."""
    while True:
        try:
            while True:
                session.run(fetch)
                watch.check()
        except tf.errors.OutOfRangeError:
            if service.finished:
                return
            session.run(job.initializer)


@pytest.mark.parametrize("pick", ["operation", "structure", "name", "grouped"])
def test_two_epochs_in_a_monitored_session(master, watch, pick):
    service = make_service(master, num_epochs=2)
    job = Job(service, watch)
    with job.graph.as_default():
        grouped = tf1.group(job.train, tf1.no_op())
        fetch = {
            "operation": job.train,
            "structure": {"train": job.train, "more": [job.loss, job.weight]},
            "name": job.train.name,
            "grouped": (job.step, grouped),
        }[pick]
        with tf1.train.MonitoredTrainingSession(hooks=[DynamicShardingHook(service)]) as session:
            train(job, session, service, fetch, watch)
    assert sorted(watch.trained) == sorted([*range(SIZE)] * 2)
    assert watch.checks == 12
    master.outcomes["training"].check_complete(2)


def test_runs_that_do_not_train_report_nothing(master, watch):
    service = make_service(master)
    job = Job(service, watch)
    with (
        job.graph.as_default(),
        tf1.train.MonitoredTrainingSession(hooks=[DynamicShardingHook(service)]) as session,
    ):
        session.run(job.train)
        for _ in range(3):
            session.run([job.weight, job.step])
        service.session.flush()
        assert acknowledged(master) == set(range(BATCH))
        train(job, session, service, job.train, watch)
    master.outcomes["training"].check_complete(1)


def test_given_operation_is_what_counts(master, watch):
    service = make_service(master)
    job = Job(service, watch)
    with job.graph.as_default():
        other = tf1.group(job.train, name="everything")
        hook = DynamicShardingHook(service, train_op=other)
        with tf1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            train(job, session, service, other, watch)
    master.outcomes["training"].check_complete(1)


def test_graph_that_does_not_train_is_refused(master):
    with pytest.raises(InvalidArgument, match="train_op="):
        DynamicShardingHook(make_service(master)).begin()


def test_failed_run_reports_nothing_and_a_new_session_reads_its_batch_again(master, watch):
    service = make_service(master)
    failing = Job(service, watch, fail_at=2 * BATCH + 1)
    with (
        failing.graph.as_default(),
        pytest.raises(tf.errors.InvalidArgumentError),
        tf1.train.MonitoredTrainingSession(hooks=[DynamicShardingHook(service)]) as session,
    ):
        train(failing, session, service, failing.train, watch)
    service.session.flush()
    assert acknowledged(master) == set(range(2 * BATCH))
    job = Job(service, watch)
    with (
        job.graph.as_default(),
        tf1.train.MonitoredTrainingSession(hooks=[DynamicShardingHook(service)]) as session,
    ):
        train(job, session, service, job.train, watch)
    assert sorted(watch.trained) == list(range(SIZE))
    assert np.isfinite(watch.trained).all()
    master.outcomes["training"].check_complete(1)


def test_preempted_session_goes_on_with_a_new_one(master, watch):
    service = make_service(master)
    job = Job(service, watch)

    class Preempts(tf1.train.SessionRunHook):
        """The third step is lost with its worker; the monitored session makes a new one and runs it again."""

        runs = 0

        def before_run(self, run_context):
            if job.train in [run_context.original_args.fetches]:
                self.runs += 1
                if self.runs == 3:
                    raise tf.errors.AbortedError(None, None, "preempted")

    with (
        job.graph.as_default(),
        tf1.train.MonitoredTrainingSession(hooks=[DynamicShardingHook(service), Preempts()]) as session,
    ):
        train(job, session, service, job.train, watch)
    assert sorted(watch.trained) == list(range(SIZE))
    master.outcomes["training"].check_complete(1)
