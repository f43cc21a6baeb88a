"""Loader workers that are forked from a process with a GPU leave it alone."""

from __future__ import annotations

import random

import pytest
import torch

from edl_torch import ElasticDataLoader
from edl_torch.readers import MapDatasetReader

RECORDS, BATCH = 48, 4


class Flipped:
    """A transform that draws, and says whether it runs where torch allows no CUDA."""

    def __call__(self, record: int) -> tuple[int, float, bool]:
        noise = random.random() + torch.rand(()).item()
        return record, noise, torch.cuda._is_in_bad_fork()


class OnTheGpu:
    """A transform that uses the GPU, as it must not in a forked worker."""

    def __call__(self, record: int) -> torch.Tensor:
        return torch.tensor(record, device="cuda")


def reader() -> MapDatasetReader:
    return MapDatasetReader(range(RECORDS), thread_safe=True)


@pytest.mark.parametrize(("workers", "threads"), [(2, 0), (1, 2)])
def test_forked_workers_read_and_draw_without_cuda(device: torch.device, workers: int, threads: int) -> None:
    """Twice, with other workers: the same numbers."""
    torch.zeros(1, device=device)
    passes = []
    for _ in range(2):
        with ElasticDataLoader(
            reader(),
            BATCH,
            shuffle=True,
            transform=Flipped(),
            seed_transforms=True,
            num_workers=workers,
            num_threads=threads,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork",
        ) as loader:
            seen = []
            for records, noise, forked in loader:
                assert device.type == "cpu" or forked.all()
                seen += zip(records.tolist(), noise.tolist(), strict=True)
        passes.append(sorted(seen))
    assert [record for record, _ in passes[0]] == list(range(RECORDS))
    assert passes[0] == passes[1]


def test_a_transform_that_uses_the_gpu_in_a_forked_worker_ends_the_loop(gpu: torch.device) -> None:
    torch.zeros(1, device=gpu)
    with ElasticDataLoader(
        reader(), BATCH, transform=OnTheGpu(), num_workers=1, multiprocessing_context="fork"
    ) as loader:
        with pytest.raises(Exception, match="forked subprocess"):
            next(iter(loader))
        assert loader.progress().acknowledged == 0


def test_it_may_use_it_in_the_trainer(gpu: torch.device) -> None:
    with ElasticDataLoader(reader(), BATCH, transform=OnTheGpu(), num_threads=2) as loader:
        batches = list(loader)
    assert all(batch.is_cuda for batch in batches)
    assert torch.cat(batches).tolist() == list(range(RECORDS))
