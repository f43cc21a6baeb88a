from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from edl_torch.data.loop.inner_loader import ReadingHere, reads_here


class Batches(IterableDataset):
    def __iter__(self):
        return iter([[1, 2], [3, 4], [5]])


def doubled(batch):
    return [2 * number for number in batch]


def loader(**arguments):
    return DataLoader(Batches(), **{"batch_size": None, "collate_fn": doubled, **arguments})


@pytest.mark.parametrize("begin", [iter, ReadingHere])
def test_batches_are_collated_and_end_for_good(begin):
    iterator = begin(loader())
    assert list(iterator) == [[2, 4], [6, 8], [10]]
    assert next(iterator, None) is None


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_random_numbers_go_on_as_after_torchs_iterator(generator):
    after = []
    for begin in (iter, ReadingHere):
        torch.manual_seed(7)
        if generator is not None:
            generator.manual_seed(8)
        list(begin(loader(generator=generator)))
        after.append((torch.rand(1), torch.rand(1, generator=generator)))
    assert after[0] == after[1]


def test_a_profiler_sees_what_it_sees_of_torchs_iterator():
    seen = []
    for begin in (iter, ReadingHere):
        batches = begin(loader())
        next(batches)  # before the profiler begins
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(batches)
        # Not `key_averages`: it drops an event that lies within one of its name, by another core's clock.
        names = [event.name() for event in profile.profiler.kineto_results.events()]
        seen.append(Counter(name for name in names if name.startswith("enumerate")))
    assert seen[0] == seen[1]
    assert list(seen[0].values()) == [3]


def test_a_batch_is_kept_by_nobody_else():
    class Batch:
        pass

    batches = ReadingHere(loader(collate_fn=lambda _: Batch()))
    batch = weakref.ref(next(batches))
    assert batch() is None


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 1}, {"timeout": 5}, {"pin_memory": True}, {"batch_size": 2}]
)
def test_torch_does_what_needs_more_of_it(arguments):
    assert reads_here(loader())
    assert not reads_here(loader(**arguments))
