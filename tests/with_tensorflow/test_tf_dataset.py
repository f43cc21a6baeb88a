"""Datasets of TensorFlow's over shards, and the page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_kit import BATCH, SIZE, make_dataset, make_service

from edl_torch.integrations.tensorflow import sharded_dataset
from edl_torch.readers import MapDatasetReader
from edl_torch.testing import FakeMaster, wait_until


def numbers(batch):
    return [int(n) for n in np.ravel(batch[0])]


def test_what_was_prefetched_goes_to_another_trainer():
    master = FakeMaster()
    service = make_service(master.connect("first"))
    batches = iter(make_dataset(service, ahead=16))
    trained = numbers(next(batches))
    service.report_batch_done()
    wait_until(lambda: service.session.trainer.plain.owed > 0)  # all is read
    in_hand = numbers(next(batches))
    assert service.record_count == SIZE - BATCH
    service.close()
    other = make_service(master.connect("second"))
    rest = []
    for batch in make_dataset(other):
        rest += numbers(batch)
        other.report_batch_done()
    assert trained + rest == list(range(SIZE))
    assert set(in_hand) < set(rest)
    assert other.finished
    master.outcomes["training"].check_complete(1)


def test_loop_of_ones_own_over_two_epochs():
    master = FakeMaster()
    service = make_service(master, num_epochs=2, shuffle_shards=True)
    dataset = make_dataset(service, shuffle=True)
    trained = []
    while not service.finished:
        for batch in dataset:
            trained.append(numbers(batch))
            service.report_batch_done()
    assert [len(batch) for batch in trained] == [4, 4, 4, 4, 4, 2] * 2
    assert sorted(n for batch in trained for n in batch) == sorted([*range(SIZE)] * 2)
    master.outcomes["training"].check_complete(2)


def test_reading_error_is_no_end_of_the_data():
    class Broken:
        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            if index == 5:
                raise StopIteration  # what would end a careless generator
            return np.float32([index])

    reader = MapDatasetReader(Broken())
    service = make_service(FakeMaster(), reader=reader)
    with pytest.raises(tf.errors.UnknownError, match="BadRecord: record 5"):
        list(sharded_dataset(service, reader, tf.TensorSpec((1,), tf.float32)))
    service.close()


def test_padded_batches_of_samples_that_differ_in_length():
    reader = MapDatasetReader([np.full(n + 1, n, np.int32) for n in range(6)])
    service = make_service(FakeMaster(), reader=reader)
    batches = []
    for batch in sharded_dataset(service, reader, tf.TensorSpec((None,), tf.int32), padded=True):
        batches.append(batch.numpy())
        service.report_batch_done()
    assert [batch.shape for batch in batches] == [(4, 4), (2, 6)]
    assert batches[1][0].tolist() == [4, 4, 4, 4, 4, 0]
    assert service.finished


# The page ---------------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text("utf-8")
(BLOCK,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_program_of_the_page_runs(monkeypatch):
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    exec(compile(BLOCK + "\n    assert service.finished\n", "docs/tensorflow.md", "exec"), {})
