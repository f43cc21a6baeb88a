"""What is raced: our loader, torch's over the same reader, bare decoding, and a PIL image folder.

Each is a callable that goes over all records once and says how many there were. Worker processes persist
between rounds, so that starting them is not measured.
"""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cv2
import numpy as np
import serving
import torch
from PIL import Image
from records import SIDE, ToTensor, resized
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from edl_torch import (
    DataShardService,
    ElasticDataLoader,
    ImageDataset,
    LocalMaster,
    MasterClient,
    ShardedDataset,
)
from edl_torch.core.calls import MasterApi
from edl_torch.readers.base import AbstractDataReader, reader_sources
from edl_torch.shard import Shard, Task

Transform = Callable[[Any], Any]
Train = Callable[[Any], object]


class Elastic:
    """`ElasticDataLoader` over an endless dataset: each round is one epoch, acknowledged to its end."""

    def __init__(
        self,
        reader: AbstractDataReader,
        transform: Transform | None = None,
        *,
        master: MasterApi | None = None,
        batch_size: int,
        workers: int,
        shuffle: bool = False,
        columnar: bool = False,
        seeded: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        method: str | None = None,
        threads: int = 0,
        train: Train | None = None,
    ) -> None:
        self._train = train
        self.service = DataShardService(
            batch_size,
            master or LocalMaster(),
            reader,
            dataset_name=uuid.uuid4().hex,
            num_epochs=0,
            shuffle_shards=shuffle,
        )
        dataset = (
            ShardedDataset(self.service, reader, shuffle=shuffle)
            if transform is None
            else ImageDataset(
                self.service, reader, shuffle=shuffle, transform=transform, seed_transforms=seeded
            )
        )
        size: dict[str, Any] = {"batch_size": None} if columnar else {}
        started = _started(workers, method)
        self._loader = ElasticDataLoader(dataset, collate_fn=collate, num_threads=threads, **size, **started)

    def __call__(self) -> int:
        return trained(self._loader, self._train)

    def close(self) -> None:
        """Leave the master."""
        self.service.close()


class Plain:
    """torch's `DataLoader` over the same reader, as one would write it by hand."""

    def __init__(
        self,
        reader: AbstractDataReader,
        transform: Transform | None = None,
        *,
        batch_size: int,
        workers: int,
        shuffle: bool = False,
        train: Train | None = None,
    ) -> None:
        self._train = train
        dataset = StaticShares(reader, transform, batch_size, shuffle=shuffle)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0
        )

    def __call__(self) -> int:
        return trained(self._loader, self._train)


class StaticShares(IterableDataset[Any]):
    """Every worker reads an equal share of a reader's only source, in whole batches, in order or shuffled."""

    def __init__(
        self, reader: AbstractDataReader, transform: Transform | None, batch_size: int, *, shuffle: bool
    ) -> None:
        self._reader = reader
        self._transform = transform
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        source = reader_sources(self._reader)[0]
        start, end = self._share(source.count)
        self._epoch += 1
        if self._shuffle:
            order = np.random.default_rng(self._epoch).permutation(source.count)[start:end]
            read = partial(self._reader.read_record, source.name)
            records: Iterable[Any] = map(read, order.tolist())
        else:
            records = self._reader.read_records(Task(shard=Shard(name=source.name, start=start, end=end)))
        yield from records if self._transform is None else map(self._transform, records)

    def _share(self, count: int) -> tuple[int, int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        batches = -(-count // self._batch_size)
        bounds = [worker * batches // workers, (worker + 1) * batches // workers]
        first, last = (min(count, bound * self._batch_size) for bound in bounds)
        return first, last


class MapStyle:
    """torch's `DataLoader` over a map-style dataset of rows, or of batches by `__getitems__`."""

    def __init__(
        self,
        rows: Dataset[Any],
        *,
        batch_size: int,
        workers: int,
        method: str | None = None,
        shuffle: bool = False,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        started = _started(workers, method)
        self._loader: DataLoader[Any] = DataLoader(
            rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collate, **started
        )

    def __call__(self) -> int:
        return sum(map(records_of, self._loader))


def _started(workers: int, method: str | None) -> dict[str, Any]:
    """A loader's arguments: so many workers, started once, in this way (None: the system's own)."""
    if not workers:
        return {}
    return {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": method}


class ReaderRows(Dataset[Any]):
    """The records of a reader's only source, each by `read_record`."""

    def __init__(self, reader: AbstractDataReader) -> None:
        self._reader = reader
        source = reader_sources(reader)[0]
        self._name, self._count = source.name, source.count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._reader.read_record(self._name, index)


class PilFolder:
    """A shuffling map-style loader over PIL, as torchvision's `ImageFolder` with `Resize` does it."""

    def __init__(
        self, paths: list[str], count: int, to_tensor: ToTensor, *, batch_size: int, workers: int
    ) -> None:
        self._loader: DataLoader[Any] = DataLoader(
            _PilImages(paths, count, to_tensor),
            batch_size=batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def __call__(self) -> int:
        return sum(map(records_of, self._loader))


class _PilImages(Dataset[torch.Tensor]):
    def __init__(self, paths: list[str], count: int, to_tensor: ToTensor) -> None:
        self._paths = paths
        self._count = count
        self._to_tensor = to_tensor

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self._paths[index % len(self._paths)]) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return self._to_tensor.tensor(np.array(small))


class BareDecoding:
    """OpenCV's decoding and `transform` alone: in this process, or in others that send nothing back."""

    def __init__(
        self, paths: list[str], count: int, *, processes: int, transform: Callable[[Any], Any] = resized
    ) -> None:
        shares = [range(n, count, max(1, processes)) for n in range(max(1, processes))]
        self._work = [[paths[i % len(paths)] for i in share] for share in shares]
        self._transform = transform
        self._pipes = [_start_decoder(work, transform) for work in self._work] if processes else []

    def __call__(self) -> int:
        if not self._pipes:
            return decode_all(self._work[0], self._transform)
        for pipe in self._pipes:
            pipe.send_bytes(b"go")
        return sum(int(pipe.recv_bytes()) for pipe in self._pipes)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send_bytes(b"")


class ThreadedDecoding:
    """The same by two threads of this process, and nothing else: what any loader's can reach."""

    def __init__(self, paths: list[str], count: int, transform: Callable[[Any], Any]) -> None:
        self._work = [[paths[i % len(paths)] for i in range(n, count, 2)] for n in range(2)]
        self._transform = transform

    def __call__(self) -> int:
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(2, initializer=_one_thread_each) as pool:
            done = sum(pool.map(partial(decode_all, transform=self._transform), self._work))
        torch.set_num_threads(threads)
        return done


def _one_thread_each() -> None:
    torch.set_num_threads(1)


def _start_decoder(paths: list[str], transform: Callable[[Any], Any]) -> Connection[Any, Any]:
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.Process(target=_decoder, args=(theirs, paths, transform), daemon=True).start()
    return ours


def _decoder(pipe: Connection[Any, Any], paths: list[str], transform: Callable[[Any], Any]) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    while pipe.recv_bytes():
        pipe.send_bytes(str(decode_all(paths, transform)).encode())


def decode_all(paths: list[str], transform: Callable[[Any], Any]) -> int:
    """Decode and transform each file; returns how many."""
    for path in paths:
        with open(path, "rb") as file:
            image = cv2.imdecode(np.frombuffer(file.read(), np.uint8), cv2.IMREAD_COLOR)
        assert image is not None
        transform(image)
    return len(paths)


def trained(loader: Iterable[Any], train: Train | None) -> int:
    """Go through the batches, and train on each where there is something to train."""
    records = 0
    for batch in loader:
        records += records_of(batch)
        if train is not None:
            train(batch)
    return records


def records_of(batch: Any) -> int:
    """Records of a batch that is one tensor, or has one first (of a dict: its first column)."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch if isinstance(batch, torch.Tensor | np.ndarray) else batch[0])


@contextmanager
def loopback_master(*options: str) -> Iterator[MasterClient]:
    """A client of a master process of our own on this machine, started with `options`."""
    with (
        serving.master(*options) as server,
        MasterClient(server.address, master_timeout_s=serving.READY_S) as client,
    ):
        yield client
