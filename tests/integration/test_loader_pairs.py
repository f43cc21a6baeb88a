"""Two `ElasticDataLoader`s in one loop: when one ends, the other gives back what the loop did not get."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from loader_kit import acknowledged, elastic, numbers, once, trainer

from edl_torch import DataShardService, ElasticDataLoader
from edl_torch.errors import ConcurrentIteration
from edl_torch.testing import FakeMaster

LONG, SHORT = 39, 10  # records; batches of 4

Pair = tuple[DataShardService, ElasticDataLoader]


@contextmanager
def two(fake: FakeMaster, num_workers: int, **more: object) -> Iterator[tuple[Pair, Pair]]:
    """Loaders over a long and a short dataset of one master."""
    with ExitStack() as stack:

        def make(name: str, size: int) -> Pair:
            entered = trainer(fake, {name: size}, dataset_name=name, **more)  # type: ignore[arg-type]
            service, dataset = stack.enter_context(entered)
            return service, elastic(dataset, num_workers=num_workers)

        yield make("long", LONG), make("short", SHORT)


def rest_of(loader: ElasticDataLoader, seen: list[int]) -> list[int]:
    """All that has been seen once the loader's epoch is over."""
    for batch in loader:
        seen += numbers(batch)
    return sorted(seen)


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_the_batch_that_zip_threw_away_comes_again(num_workers: int, in_process: bool) -> None:
    fake = FakeMaster()
    with two(fake, num_workers, in_process=in_process) as ((long, loader), (short, other)):
        pairs = [(numbers(a), numbers(b)) for a, b in zip(loader, other, strict=False)]
        assert [len(pairs), len(loader)] == [3, 10]  # zip drew a fourth batch of the long one, and dropped it
        seen = list(itertools.chain(*(a for a, _ in pairs)))
        assert long.record_count == short.record_count == 0
        assert acknowledged(fake, long) == once(seen)
        assert acknowledged(fake, short) == once(range(SHORT))
        assert (short.finished, long.finished) == (True, False)
        assert list(zip(loader, other, strict=False)) == []  # the short one is over: one more is dropped
        assert acknowledged(fake, long) == once(seen)
        assert rest_of(loader, seen) == list(range(LONG))
        assert long.finished
    fake.outcomes["long"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_with_an_optimizer_zip_is_exact_whichever_comes_first(num_workers: int) -> None:
    fake = FakeMaster()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with two(fake, num_workers) as ((long, loader), (short, other)):
        long.attach(optimizer)
        short.attach(optimizer)
        seen: list[int] = []
        for batch, more in zip(other, loader, strict=False):  # ends before it asks the long one again
            seen += numbers(more)
            assert numbers(batch)
            optimizer.step()
        assert len(seen) == 12
        assert acknowledged(fake, long) == once(seen)
        assert short.finished
        for (batch,) in zip(loader, strict=True):
            seen += numbers(batch)
            optimizer.step()
        assert sorted(seen) == list(range(LONG))
        assert long.finished
    fake.outcomes["long"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_a_loop_that_draws_from_two_loaders_may_break_where_one_ends(num_workers: int) -> None:
    fake = FakeMaster()
    with two(fake, num_workers) as ((long, loader), (short, other)):
        seen: list[int] = []
        shorter = iter(other)
        for batch in loader:
            if next(shorter, None) is None:
                break  # the batch in hand was not trained on
            seen += numbers(batch)
        assert acknowledged(fake, long) == once(seen)
        assert short.finished
        assert rest_of(loader, seen) == list(range(LONG))
    fake.outcomes["long"].check_complete(1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_a_loop_that_begins_the_shorter_one_again_reads_both_to_their_ends(num_workers: int) -> None:
    fake = FakeMaster()
    with two(fake, num_workers, num_epochs=4) as ((long, loader), (short, other)):
        shorter = iter(other)
        seen: list[int] = []
        for batch in loader:
            pair = next(shorter, None)
            if pair is None:
                shorter = iter(other)
                pair = next(shorter)
            seen += numbers(batch)
        assert sorted(seen) == list(range(LONG))
        assert (long.epoch, short.epoch) == (1, 3)
        del shorter
        list(other)
        list(other)
        fake.outcomes["short"].check_complete(4)


@contextmanager
def of_one_dataset(fake: FakeMaster, num_workers: int, **more: object) -> Iterator[tuple[Pair, Pair]]:
    """Two loaders that share the long dataset, each with a trainer of its own."""
    with ExitStack() as stack:

        def make() -> Pair:
            service, dataset = stack.enter_context(trainer(fake, {"a": LONG}, **more))  # type: ignore[arg-type]
            return service, elastic(dataset, num_workers=num_workers)

        yield make(), make()


@pytest.mark.parametrize("in_process", [True, False], ids=["embedded", "remote"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.timeout(60)
def test_loaders_of_one_dataset_in_one_loop_are_told_that_they_wait_for_each_other(
    num_workers: int, in_process: bool
) -> None:
    fake = FakeMaster()
    seen: list[int] = []
    with of_one_dataset(fake, num_workers, in_process=in_process) as ((service, loader), (_, other)):
        pairs = zip(loader, other, strict=False)
        with pytest.raises(ConcurrentIteration, match=r"'training'.*same thread.*dataset_name.*close\(\)"):
            seen.extend(number for pair in pairs for batch in pair for number in numbers(batch))
        assert len(seen) == len(set(seen))
        other.close()  # what it holds goes back
        assert set(range(LONG)) == {*seen, *rest_of(loader, [])}
        assert service.finished
    fake.outcomes["training"].check_complete(1)


@pytest.mark.timeout(60)
def test_a_loader_that_was_left_with_its_iterator_is_named_to_the_one_after_it() -> None:
    """As where a notebook cell is run again."""
    fake = FakeMaster()
    with of_one_dataset(fake, 0) as ((_, loader), (service, again)):
        left = iter(loader)
        held = numbers(next(left))  # of a lease of 6
        with pytest.raises(ConcurrentIteration, match=r"6 record\(s\)"):
            list(again)
        loader.close()
        assert set(held) <= set(rest_of(again, []))
        assert service.finished


@pytest.mark.timeout(60)
def test_loaders_of_one_dataset_in_threads_of_their_own_wait_for_each_other() -> None:
    fake = FakeMaster()
    with of_one_dataset(fake, 0) as ((_, loader), (_, other)):
        left = iter(loader)
        held = numbers(next(left))
        rest: list[int] = []
        thread = threading.Thread(target=rest_of, args=(other, rest))
        thread.start()
        thread.join(2)  # longer than one question to the master waits
        assert thread.is_alive()
        held += [number for batch in left for number in numbers(batch)]
        thread.join(20)
        assert not thread.is_alive()
        assert sorted(held + rest) == list(range(LONG))
