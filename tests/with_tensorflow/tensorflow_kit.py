"""Numbers as training data, and a watch over what was acknowledged against what was trained on."""

from __future__ import annotations

import threading

import numpy as np
import tensorflow as tf

from edl_torch import DataShardService
from edl_torch.integrations.tensorflow import sharded_dataset
from edl_torch.readers import MapDatasetReader

SIZE = 22
BATCH = 4
SAMPLE = (tf.TensorSpec((1,), tf.float32), tf.TensorSpec((1,), tf.float32))
READER = MapDatasetReader([(np.float32([n]), np.float32([n % 3])) for n in range(SIZE)])


def make_service(master, **options):
    options = {"num_minibatches_per_shard": 2, "reader": READER} | options
    return DataShardService(BATCH, master, **options)


def make_dataset(service, *, ahead=3, **options):
    """With everything that is allowed to stand behind it."""
    dataset = sharded_dataset(service, READER, SAMPLE, **options)
    return dataset.map(lambda x, y: (x, y), num_parallel_calls=2).prefetch(ahead)


class Watch:
    """Notes which records a step has trained on; `check()` says whether one was acknowledged before that."""

    def __init__(self, outcomes):
        self._outcomes = outcomes
        self._lock = threading.Lock()
        self.trained = []
        self.checks = 0

    def step(self, numbers):
        """To be called by the step itself."""
        with self._lock:
            self.trained += [int(n) for n in np.ravel(numbers)]

    def check(self):
        """Raise AssertionError for an acknowledgement that came too early."""
        self.checks += 1
        early = [] if "training" not in self._outcomes else self._early()
        assert not early, f"acknowledged and not trained on: {early}"

    def _early(self):
        acknowledged = self._outcomes["training"].acknowledged
        times = dict.fromkeys(range(SIZE), 0)
        for (_, _, number), count in acknowledged.items():
            times[number] += count
        return [n for n, count in times.items() if count > self.trained.count(n)]
