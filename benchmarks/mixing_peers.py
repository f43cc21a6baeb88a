"""Mixers of other libraries over the same rows in memory, for `mixing.py --peers DIR`.

Each draws by the same weights without end, in one process, and collates by torch's `default_collate`. Grain
shuffles by a function of the index, as we do. LitData, WebDataset and torchdata read each component in order;
LitData's are optimized by it into chunks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from harness import Round
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate

PACKAGES = ("grain", "litdata", "torchdata", "datasets", "webdataset")


class Rounds:
    """Takes so many batches a round of an iterator that does not end."""

    def __init__(self, batches: Iterator[Any], number: int, size: int) -> None:
        self._batches, self._number, self._size = batches, number, size

    def __call__(self) -> int:
        return self._size * sum(1 for _ in islice(self._batches, self._number))


def peers(
    parts: Sequence[Dataset[Any]], shares: Sequence[int], number: int, size: int, scratch: Path
) -> dict[str, Round]:
    """All of them by name and version."""
    weights = [share / sum(shares) for share in shares]
    makers: dict[str, Callable[..., Iterator[Any]]] = {
        "grain": _grain,
        "litdata": partial(_litdata, scratch),
        "torchdata": _torchdata,
        "datasets": _datasets,
        "webdataset": _webdataset,
    }
    return {
        f"{name} {metadata.version(name)}": Rounds(make(parts, weights, size), number, size)
        for name, make in makers.items()
    }


def _batches(records: Iterable[Any], size: int) -> Iterator[Any]:
    rest = iter(records)
    while samples := list(islice(rest, size)):
        yield default_collate(samples)


def _grain(parts: Sequence[Any], weights: Sequence[float], size: int) -> Iterator[Any]:
    import grain

    each = [grain.MapDataset.source(part).shuffle(seed=1).repeat() for part in parts]
    mixed = grain.MapDataset.mix(each, weights).batch(size, batch_fn=default_collate)
    return map(mixed.__getitem__, range(len(mixed)))


def _litdata(scratch: Path, parts: Sequence[Any], weights: Sequence[float], size: int) -> Iterator[Any]:
    import litdata

    made = []
    for number, part in enumerate(parts):
        folder = str(scratch / f"litdata{number}")
        rows = partial(_row, part)
        litdata.optimize(rows, list(range(len(part))), folder, chunk_bytes="64MB", num_workers=1)
        made.append(litdata.StreamingDataset(folder, shuffle=False))
    while True:
        mixed = litdata.CombinedStreamingDataset(made, seed=1, weights=list(weights), iterate_over_all=False)
        yield from litdata.StreamingDataLoader(
            mixed, batch_size=size, num_workers=0, collate_fn=default_collate
        )


def _row(part: Any, index: int) -> Any:
    return part[index]


def _torchdata(parts: Sequence[Any], weights: Sequence[float], size: int) -> Iterator[Any]:
    from torchdata.nodes import (
        Batcher,
        Loader,
        Mapper,
        MultiNodeWeightedSampler,
        SamplerWrapper,
        StopCriteria,
    )

    names = [str(number) for number in range(len(parts))]
    nodes = {
        name: Mapper(SamplerWrapper(SequentialSampler(part)), part.__getitem__)
        for name, part in zip(names, parts, strict=True)
    }
    mixed = MultiNodeWeightedSampler(
        nodes, dict(zip(names, weights, strict=True)), stop_criteria=StopCriteria.CYCLE_FOREVER, seed=1
    )
    return iter(Loader(Mapper(Batcher(mixed, size), default_collate)))


def _datasets(parts: Sequence[Any], weights: Sequence[float], size: int) -> Iterator[Any]:
    import datasets

    columns = [default_collate([part[index] for index in range(len(part))]) for part in parts]
    each = [
        datasets.Dataset.from_dict({"row": rows.numpy(), "label": labels.numpy()}).with_format("torch")
        for rows, labels in columns
    ]
    mixed = datasets.interleave_datasets(each, list(weights), seed=1, stopping_strategy="all_exhausted")
    loader: DataLoader[Any] = DataLoader(mixed, size, sampler=RandomSampler(mixed))
    while True:
        yield from loader


def _webdataset(parts: Sequence[Any], weights: Sequence[float], size: int) -> Iterator[Any]:
    import webdataset

    each = [webdataset.DataPipeline(partial(_forever, part)) for part in parts]
    return _batches(webdataset.RandomMix(each, list(weights)), size)


def _forever(part: Any) -> Iterator[Any]:
    while True:
        yield from map(part.__getitem__, range(len(part)))
