"""A `ShardedDataset` by itself: in its trainer's process, pickled to another one, and asked for samples."""

from __future__ import annotations

import pickle
import random

import pytest
from loader_kit import UNEVEN, NumberReader, acknowledged, all_records, once, trainer

from edl_torch import ShardedDataset
from edl_torch.data.reading.iterations import iterations
from edl_torch.errors import BadRecord, ServiceClosed
from edl_torch.testing import FakeMaster


class Torn(NumberReader):
    """Record 7 cannot be read."""

    def number(self, name: str, index: int) -> int:
        if name == "a" and index == 7:
            raise ValueError("no such record")
        return super().number(name, index)


def test_only_the_trainers_process_has_the_service() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        assert dataset.service is service
        copy = pickle.loads(pickle.dumps(dataset))
        for elsewhere in (copy, dataset):
            dataset._pid -= 1  # as a forked child finds it
            with pytest.raises(ServiceClosed, match="has no DataShardService"):
                elsewhere.service  # noqa: B018
            dataset._pid += 1


def test_a_copy_serves_the_iteration_that_it_was_pickled_for() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        state = dataset.__getstate__()
        assert state["_run"] == ""
        assert iterations.served == ""
        copy = ShardedDataset.__new__(ShardedDataset)
        copy.__setstate__(state)
        assert iterations.served == ""
        assert not hasattr(copy, "_run")
        assert (copy.reader.counts, copy._link, copy._reading) == (UNEVEN, None, None)


def test_samples_count_when_they_are_reported() -> None:
    fake = FakeMaster()
    with trainer(fake) as (service, dataset):
        samples = iter(dataset)
        first = [next(samples) for _ in range(4)]
        assert not acknowledged(fake, service)
        service.report_batch_done()
        assert acknowledged(fake, service) == once(first)
        rest = [*first, *samples]
        assert sorted(rest) == all_records()


@pytest.mark.parametrize("quarantines", [False, True])
def test_a_record_that_cannot_be_read_is_named(quarantines: bool) -> None:
    fake = FakeMaster()
    kind = {"on_bad_record": "quarantine" if quarantines else "raise"}
    with trainer(fake, Torn(UNEVEN), dataset=kind, max_bad_records=int(quarantines)) as (service, dataset):
        if quarantines:
            assert sorted(dataset) == [number for number in all_records() if number != 7]
            assert service.progress().quarantined == 1
        else:
            with pytest.raises(BadRecord, match=r"record 7 of 'a'.*no such record"):
                list(dataset)
            assert service.progress().quarantined == 0


@pytest.mark.parametrize("seeds", [False, True])
def test_random_numbers_of_transforms_may_depend_on_the_record_alone(seeds: bool) -> None:
    def draw(number: int) -> tuple[int, float]:
        return number, random.random()

    runs = []
    for seed in (1, 2):
        random.seed(seed)
        with trainer(FakeMaster(), dataset={"transform": draw, "seed_transforms": seeds}) as (_, dataset):
            runs.append(dict(iter(dataset)))
        assert (random.random() == random.Random(seed).random()) is seeds, "nothing was drawn from the loop's"
    assert (runs[0] == runs[1]) is seeds


def test_an_iteration_in_a_child_asks_the_trainer() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        elsewhere = pickle.loads(pickle.dumps(dataset))
        assert elsewhere._connect() is elsewhere._connect(), "one link for all its iterations"
        assert sorted(iter(elsewhere)) == all_records()
