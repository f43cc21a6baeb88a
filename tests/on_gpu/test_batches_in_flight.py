"""A batch stays what it is until its copy to the GPU is done, and nothing waits for the GPU that need not."""

from __future__ import annotations

import pytest
import torch
from gpu_kit import Learner, Pictures, Prefetcher, lag, no_wait_for, settle, side_stream

from edl_torch import ElasticDataLoader
from edl_torch.readers import MapDatasetReader

RECORDS, BATCH, EPOCHS = 64, 4, 2
BATCHES = EPOCHS * RECORDS // BATCH

# Loader workers, threads that read
reading = pytest.mark.parametrize(("workers", "threads"), [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0)])


def loader_of(workers: int, threads: int, *, pin: bool = False, lookahead: object = 0) -> ElasticDataLoader:
    return ElasticDataLoader(
        MapDatasetReader(Pictures(RECORDS), thread_safe=True),
        BATCH,
        num_epochs=EPOCHS,
        shuffle=True,
        num_workers=workers,
        num_threads=threads,
        pin_memory=pin,
        lookahead=lookahead,  # type: ignore[arg-type]
        multiprocessing_context="fork" if workers else None,
    )


def check_copies(device: torch.device, workers: int, threads: int, *, pin: bool) -> None:
    """Let go of each batch at once, and look at the copies when all are done."""
    copies, places, in_flight = list[tuple[torch.Tensor, list[int]]](), set[int](), 0
    with loader_of(workers, threads, pin=pin) as loader:
        for _epoch in loader.epochs():
            with side_stream(device) as stream:
                for batch in loader:
                    assert batch.is_pinned() == pin
                    places.add(batch.data_ptr())
                    lag(device)
                    copies.append((batch.to(device, non_blocking=True), loader.records.numbers.tolist()))
                    in_flight += stream is not None and not stream.query()
                    del batch
            settle(device)
    assert len(copies) == BATCHES
    for copy, numbers in copies:
        assert copy[:, 0, 0, 0].tolist() == numbers
        assert bool((copy == copy[:, :1, :1, :1]).all())
    if pin:
        assert in_flight, "no copy was in flight"
    if device.type == "cuda" and (pin or (threads and not workers)):
        assert len(places) < BATCHES, "each batch had memory of its own"


@reading
def test_memory_of_batches_is_not_used_again_before_they_are_copied(
    device: torch.device, workers: int, threads: int
) -> None:
    check_copies(device, workers, threads, pin=False)


@reading
def test_nor_is_pinned_memory(gpu: torch.device, workers: int, threads: int) -> None:
    check_copies(gpu, workers, threads, pin=True)


def test_the_kit_sees_memory_that_is_overwritten_while_a_copy_is_in_flight(gpu: torch.device) -> None:
    batch = torch.zeros(BATCH, 3, 240, 240).pin_memory()
    with side_stream(gpu):
        lag(gpu)
        copy = batch.to(gpu, non_blocking=True)
        batch.fill_(1)
    settle(gpu)
    assert bool((copy == 1).any())


@pytest.mark.parametrize(("workers", "threads"), [(0, 2), (1, 2)])
def test_a_prefetcher_on_a_stream_of_its_own_brings_each_record_once(
    device: torch.device, workers: int, threads: int
) -> None:
    learner, done = Learner(RECORDS, device), 0
    pin = device.type == "cuda"
    with loader_of(workers, threads, pin=pin, lookahead="manual") as loader:
        loader.attach(learner.optimizer)
        for _epoch in loader.epochs():
            for pictures in Prefetcher(loader, device):
                learner.learn(pictures[:, 0, 0, 0].long())
                done += BATCH
                assert loader.progress().acknowledged == done
    assert learner.learnt == [EPOCHS] * RECORDS


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(("workers", "threads"), [(0, 0), (1, 2)])
def test_neither_batches_nor_steps_wait_for_the_gpu(
    device: torch.device, workers: int, threads: int, fused: bool | None
) -> None:
    learner = Learner(RECORDS, device, fused=fused)

    def learn(pictures: torch.Tensor) -> None:
        learner.learn(pictures.to(device, non_blocking=True)[:, 0, 0, 0].long())

    with loader_of(workers, threads, pin=device.type == "cuda") as loader:
        loader.attach(learner.optimizer)
        for _epoch in loader.epochs():
            batches = iter(loader)
            learn(next(batches))
            with no_wait_for(device):
                for _ in range(RECORDS // BATCH - 2):
                    learn(next(batches))
            for batch in batches:
                learn(batch)
    assert learner.learnt == [EPOCHS] * RECORDS
