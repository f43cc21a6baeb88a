"""Shards as a plain iterable: passes, what is owed between them, and loops that were left."""

from __future__ import annotations

import pytest

from edl_torch import DataShardService
from edl_torch.errors import AccountingError, BadRecord, InvalidArgument
from edl_torch.integrations.records import ShardedRecords
from edl_torch.readers import MapDatasetReader
from edl_torch.testing import FakeMaster

SIZE = 22
BATCH = 4


def make(master, **options):
    options = {"num_epochs": 1, "num_minibatches_per_shard": 2} | options
    reader = options.pop("reader", MapDatasetReader(range(SIZE)))
    service = DataShardService(BATCH, master, reader=reader, **options)
    return service, reader


def train(service, records, *, batches=None):
    """Report after each batch of a pass, as a loop does; returns the samples of reported batches."""
    seen, batch = [], []
    for sample in records:
        batch.append(sample)
        if len(batch) == BATCH:
            service.report_batch_done()
            seen += batch
            batch = []
            if batches is not None and len(seen) == batches * BATCH:
                return seen
    if batch:
        service.report_batch_done()
    return seen + batch


def test_every_pass_gives_one_epoch():
    master = FakeMaster()
    service, reader = make(master, num_epochs=2, shuffle_shards=True)
    records = ShardedRecords(service, reader, shuffle=True, transform=lambda n: -n)
    orders = []
    while not service.finished:
        orders.append(train(service, records))
    assert [sorted(order) for order in orders] == [list(range(1 - SIZE, 1))] * 2
    assert orders[0] != orders[1]
    master.outcomes["training"].check_complete(2)


def test_pass_that_begins_while_reports_are_owed_is_refused():
    master = FakeMaster()
    service, reader = make(master)
    records = ShardedRecords(service, reader)
    read_ahead = list(records)  # as a pipeline prefetches it
    service.report_batch_done()
    with pytest.raises(AccountingError, match=r"18 record\(s\).*repeat.*abandon_pass"):
        next(iter(records))
    for _ in range(4):
        service.report_batch_done()
    with pytest.raises(AccountingError, match=r"2 record"):
        next(iter(records))
    service.report_batch_done()
    assert list(records) == []
    assert read_ahead == list(range(SIZE))
    master.outcomes["training"].check_complete(1)


@pytest.mark.parametrize("ahead", [1, SIZE], ids=["read in part", "read to its end"])
def test_what_a_loop_left_is_read_again_once_it_said_so(ahead):
    master = FakeMaster()
    service, reader = make(master)
    records = ShardedRecords(service, reader)
    iterator = iter(records)
    assert [next(iterator) for _ in range(ahead)] == list(range(ahead))
    list(iterator) if ahead == SIZE else None
    service.abandon_pass()
    assert service.record_count == 0
    assert train(service, records) == list(range(SIZE))
    master.outcomes["training"].check_complete(1)


def test_what_was_reported_before_a_loop_was_left_stays_trained_on():
    master = FakeMaster()
    service, reader = make(master)
    records = ShardedRecords(service, reader)
    first = train(service, records, batches=3)
    service.abandon_pass()
    assert first + train(service, records) == list(range(SIZE))
    master.outcomes["training"].check_complete(1)


def test_iterator_of_a_pass_that_was_left_gets_nothing_more_and_disturbs_nothing():
    master = FakeMaster()
    service, reader = make(master)
    records = ShardedRecords(service, reader)
    old = iter(records)
    next(old)
    service.abandon_pass()
    new = iter(records)
    assert [next(new) for _ in range(2 * BATCH)] == list(range(2 * BATCH))
    assert list(old) == list(range(1, 2 * BATCH))  # what it had been lent; no more
    assert service.session.trainer.plain.owed == 0  # the new pass has not ended, whatever the old one says
    for _ in range(2):
        service.report_batch_done()
    service.abandon_pass()
    assert train(service, records) == list(range(2 * BATCH, SIZE))
    master.outcomes["training"].check_complete(1)


def test_pass_begun_without_a_word_warns_and_gives_back():
    master = FakeMaster()
    service, reader = make(master)
    records = ShardedRecords(service, reader)
    left = iter(records)
    next(left)
    with pytest.warns(UserWarning, match="not reported as trained on"):
        assert train(service, records) == list(range(SIZE))
    master.outcomes["training"].check_complete(1)


def test_peer_reads_what_this_trainer_gave_back():
    master = FakeMaster()
    service, reader = make(master.connect("a"))
    other, _ = make(master.connect("b"))
    records = ShardedRecords(service, reader)
    list(records)
    service.close()
    assert train(other, ShardedRecords(other, reader)) == list(range(SIZE))
    other.session.flush()
    master.outcomes["training"].check_complete(1)


class Broken:
    """Record 5 cannot be read."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index == 5:
            raise OSError("cannot be decoded")
        return index


def test_bad_record_is_named_or_quarantined():
    service, reader = make(FakeMaster(), reader=MapDatasetReader(Broken()))
    with pytest.raises(BadRecord, match=r"record 5 .*cannot be decoded"):
        list(ShardedRecords(service, reader))
    master = FakeMaster()
    service, reader = make(master, reader=MapDatasetReader(Broken()), max_bad_records=1)
    records = ShardedRecords(service, reader, on_bad_record="quarantine")
    assert train(service, records) == [n for n in range(SIZE) if n != 5]
    master.outcomes["training"].check_complete(1)
    assert sum(master.outcomes["training"].quarantined.values()) == 1


def test_wrong_word_for_bad_records_is_refused():
    service, reader = make(FakeMaster())
    with pytest.raises(InvalidArgument, match="'skip'"):
        ShardedRecords(service, reader, on_bad_record="skip")
