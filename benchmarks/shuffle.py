"""How well shuffles mix, what models make of it, and what reading in blocks costs.

`python benchmarks/shuffle.py --json runs/shuffle.json`. Orders are looked at as one trainer reads them: a
batch is neighbours.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import Contest, measure, parser, print_result, results_as_json, write_json
from reader_files import documents, write_parquet, write_recordio
from torch.utils.data import Dataset, RandomSampler

from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset
from edl_torch.core.plan import Plan
from edl_torch.readers import ParquetReader, RecordIODataReader
from edl_torch.shard import DatasetSpec, Slice, Source, Task

Order = npt.NDArray[np.int64]  # numbers of all records, as an epoch has them
OrderOf = Callable[[int, int], Order]  # of a seed and an epoch

CLASSES, OF_A_CLASS = 100, 500  # of CIFAR-100's size, sorted by class
BATCH, SHARD = 32, 256
WINDOWS = (4, 16, 64)
BLOCK = 10  # shards over which py1e spreads one
GOAL_ENTROPY, GOAL_RATE = 0.97, 0.8
USUAL = 16


# Orders -------------------------------------------------------------------------------------------------


def ours(size: int, shuffle: Mapping[str, Any], seed: int, epoch: int, *, shard: int = SHARD) -> Order:
    """The order of one of our shuffles."""
    spec = DatasetSpec(
        name="d", sources=(Source(name="", count=size),), records_per_shard=shard, seed=seed, **shuffle
    )
    plan = Plan(spec)
    windows = plan.windows_at(epoch, 0, plan.num_windows)
    slices = (Slice(epoch=epoch, shard=w, skip=0, limit=plan.records_in(epoch, w)) for w in windows)
    return np.concatenate([plan.indices(cut).numbers for cut in slices])


def torchs(size: int, seed: int, epoch: int) -> Order:
    """The order of torch's RandomSampler."""
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    return np.array(list(RandomSampler(range(size), generator=generator)))


def py1e(size: int, seed: int, epoch: int) -> Order:
    """The order that MosaicML Streaming calls py1e, on one node: shards in another order, records of each in
    another order, and each record moved by a random distance, so that those of a shard are spread over about
    `BLOCK` shards.

    After github.com/mosaicml/streaming, `streaming/base/shuffle/py1e.py`.
    """
    chance = np.random.default_rng((seed, epoch))
    shards = np.split(np.arange(size), range(SHARD, size, SHARD))
    chance.shuffle(shards)
    places, begin = [], 0
    for shard in shards:
        chance.shuffle(shard)
        block = chance.integers(int(0.75 * BLOCK * SHARD), int(1.25 * BLOCK * SHARD))
        reach = (block - len(shard)) / 2
        low, high = max(-reach, -begin), min(reach, size - begin - len(shard))
        places.append(begin + np.arange(len(shard)) + chance.uniform(low, high, len(shard)))
        begin += len(shard)
    return np.concatenate(shards)[np.argsort(np.concatenate(places))]


def orders(size: int) -> dict[str, OrderOf]:
    """All contenders."""
    in_shard = {"shuffle_shards": True, "shuffle_in_shard": True}
    windows = {f"window {w}": partial(ours, size, {**in_shard, "shuffle_window": w}) for w in WINDOWS}
    return {
        "in shard": partial(ours, size, in_shard),
        **windows,
        "global": partial(ours, size, {"shuffle": True}),
        "torch RandomSampler": partial(torchs, size),
        f"py1e, {BLOCK} shards": partial(py1e, size),
    }


# How well they mix --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Means over all whole batches of some epochs.

    `entropy` is that of the labels in a batch, in bits. `correlation` is Pearson's, of the places of a record
    in two epochs that follow each other; `met_again` is the share of pairs of a batch that are in one batch
    in the next epoch, over that of a random order.
    """

    shards: float
    classes: float
    entropy: float
    correlation: float
    met_again: float


def mixing(order_of: OrderOf, size: int, of_a_class: int, seeds: range) -> Mixing:
    """Look at two epochs of each seed."""
    rows = []
    for seed in seeds:
        first, second = order_of(seed, 0), order_of(seed, 1)
        assert len(np.unique(first)) == size, "each record once"
        batches = first[: size - size % BATCH].reshape(-1, BATCH)
        labels = batches // of_a_class
        places = np.empty((2, size))
        places[0, first] = places[1, second] = np.arange(size)
        later = (places[1, batches] // BATCH).astype(np.int64)
        again = np.mean([sum(n * (n - 1) for n in Counter(row).values()) for row in later.tolist()])
        rows.append(
            (
                np.mean([len(np.unique(row)) for row in batches // SHARD]),
                np.mean([len(np.unique(row)) for row in labels]),
                label_entropy(labels),
                _correlation(places[0], places[1]),
                again / (BATCH * (BATCH - 1)) * (size - 1) / (BATCH - 1),
            )
        )
    shards, classes, entropy, correlation, met_again = np.array(rows, np.float64).mean(axis=0).tolist()
    return Mixing(
        shards=shards, classes=classes, entropy=entropy, correlation=correlation, met_again=met_again
    )


def _correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    return float(((one - one.mean()) * (other - other.mean())).mean() / (one.std() * other.std()))


def label_entropy(labels: Order) -> float:
    """The mean entropy of the labels in a row, in bits."""
    rows, length = labels.shape
    classes = int(labels.max()) + 1
    numbers = np.arange(rows)[:, None] * classes + labels
    shares = np.bincount(numbers.reshape(-1)) / length
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum() / rows)


# What a model makes of it -------------------------------------------------------------------------------


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 8×8 in the order of their classes: the class's own picture, moved a little, and noise."""

    def __init__(self, classes: int, of_a_class: int, seed: int) -> None:
        shapes = torch.randn(classes, 1, 4, 4, generator=torch.Generator().manual_seed(7))
        smooth = torch.nn.functional.interpolate(shapes, size=10, mode="bilinear")[:, 0]
        chance = np.random.default_rng(seed)
        self.labels = np.repeat(np.arange(classes), of_a_class)
        moves = chance.integers(0, 3, (len(self.labels), 2))
        pictures = [smooth[c, y : y + 8, x : x + 8] for c, (y, x) in zip(self.labels, moves, strict=True)]
        noise = torch.from_numpy(chance.normal(0, 0.7, (len(pictures), 64)).astype(np.float32))
        self.pictures = torch.stack(pictures).reshape(-1, 64) + noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index], int(self.labels[index])


def accuracy(order_of: OrderOf, data: Digits, held_out: Digits, epochs: int, seed: int) -> float:
    """Train a small network with SGD, and return the share of pictures held out that it names."""
    torch.manual_seed(seed)
    classes = int(data.labels[-1]) + 1
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels = torch.from_numpy(data.labels)
    for epoch in range(epochs):
        order = order_of(seed, epoch)
        for batch in map(torch.from_numpy, np.split(order, range(BATCH, len(order), BATCH))):
            loss = torch.nn.functional.cross_entropy(model(data.pictures[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        found = model(held_out.pictures).argmax(dim=1)
    return float((found == torch.from_numpy(held_out.labels)).float().mean())


# What reading in blocks costs ---------------------------------------------------------------------------


class CountedShards(AbstractDataReader):
    """Reads in order only, and counts the shards that it reads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.reads = 0

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        return {"": self.size}

    def read_records(self, task: Task) -> Iterator[int]:
        self.reads += 1
        return iter(range(task.start, task.end))


def reads(trainers: int, shards: int, window: int) -> float:
    """How often a shard is read in an epoch that so many trainers share, each in one process."""
    master = LocalMaster()
    readers = [CountedShards(shards * SHARD) for _ in range(trainers)]

    def train(reader: CountedShards) -> None:
        with ElasticDataLoader(
            *(reader, BATCH),
            shuffle=True,
            shuffle_window=window,
            records_per_shard=SHARD,
            master_client=master,
        ) as loader:
            for _ in loader:
                pass

    threads = [threading.Thread(target=train, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    master.close()
    return sum(reader.reads for reader in readers) / shards


def loop(reader: AbstractDataReader, batch: int, window: int, columnar: bool) -> int:
    """One epoch; how many records it had."""
    with DataShardService(
        batch, LocalMaster(), reader, records_per_shard=SHARD, shuffle_shards=True, shuffle_window=window
    ) as service:
        dataset = ShardedDataset(service, reader)
        loader = ElasticDataLoader(dataset, batch_size=None) if columnar else ElasticDataLoader(dataset)
        for _ in loader:
            pass
        return service.progress().acknowledged


def rates(folder: Path, size: int) -> Iterator[Contest]:
    """Windows against shards, where records are read in blocks."""
    for number in range(8):
        write_parquet(folder / f"{number}.parquet", size // 8, SHARD)
    write_recordio(folder / "text.recordio", documents(size), 1 << 14)
    tables, texts = ParquetReader(folder), RecordIODataReader(folder / "text.recordio")
    for title, reader, batch, columnar in (
        ("Parquet, rows", tables, BATCH, False),
        ("Parquet, columns", tables, SHARD, True),
        ("RecordIO, compressed", texts, BATCH, False),
    ):
        contenders = {
            "in shard": partial(loop, reader, batch, 1, columnar),
            f"window {USUAL}": partial(loop, reader, batch, USUAL, columnar),
        }
        yield Contest(title=title, contenders=contenders, ratios=[(f"window {USUAL}", "in shard", GOAL_RATE)])


# The program --------------------------------------------------------------------------------------------


def show_mixing(quick: bool) -> dict[str, object]:
    """How well each order mixes, and what a model makes of it."""
    of_a_class, seeds, epochs = (20, range(1), 1) if quick else (OF_A_CLASS, range(3), 3)
    size = CLASSES * of_a_class
    data, held_out = Digits(CLASSES, of_a_class, 1), Digits(CLASSES, max(1, of_a_class // 10), 2)
    found: dict[str, object] = {}
    print(f"{size} records of {CLASSES} classes, sorted by class; shards of {SHARD}, batches of {BATCH}")
    print(
        "| order | shards in a batch | classes | entropy of labels | / global | correlation "
        "| pairs met again | accuracy |\n|---|---|---|---|---|---|---|---|"
    )
    contenders = orders(size)
    entropy = mixing(contenders["global"], size, of_a_class, seeds).entropy
    for name, order_of in contenders.items():
        one = mixing(order_of, size, of_a_class, seeds)
        each = [accuracy(order_of, data, held_out, epochs, seed) for seed in seeds]
        ratio = one.entropy / entropy
        found[name] = {**asdict(one), "entropy_over_global": ratio, "accuracy": each}
        target = f" (target {GOAL_ENTROPY}: {_verdict(ratio)})" if name == f"window {USUAL}" else ""
        print(
            f"| {name} | {one.shards:.1f} | {one.classes:.1f} | {one.entropy:.2f} | {ratio:.3f}{target} "
            f"| {one.correlation:.3f} | {one.met_again:.1f} × | {statistics.mean(each):.3f} |",
            flush=True,
        )
    return found


def show_reads(quick: bool) -> dict[str, object]:
    """How often shards are read."""
    found: dict[str, object] = {}
    windows = (1, *WINDOWS)
    print("\n| shards | trainers | " + " | ".join(f"window {w}" for w in windows) + " |")
    print("|---" * (2 + len(windows)) + "|")
    for shards, trainers in ((64, 2),) if quick else ((256, 1), (256, 2), (256, 8), (2048, 2), (2048, 8)):
        row = [reads(trainers, shards, window) for window in windows]
        found[f"{shards} shards, {trainers} trainers"] = row
        print(f"| {shards} | {trainers} | " + " | ".join(f"{each:.2f}" for each in row) + " |", flush=True)
    return found


def show_rates(quick: bool) -> list[dict[str, object]]:
    """What windows cost in records a second."""
    with tempfile.TemporaryDirectory() as folder:
        contests = rates(Path(folder), 4096 if quick else 65_536)
        results = [measure(contest, 1 if quick else 9) for contest in contests]
    for result in results:
        print_result(result)
    return results_as_json(results)


def main() -> None:
    """Run what was asked for."""
    parts = {"mixing": show_mixing, "reads": show_reads, "rates": show_rates}
    options = parser(__doc__ or "")
    options.add_argument("--only", choices=parts, nargs="+", default=list(parts))
    arguments = options.parse_args()
    torch.set_num_threads(1)
    found = {name: show(arguments.quick) for name, show in parts.items() if name in arguments.only}
    if arguments.json:
        write_json(arguments.json, {"quick": arguments.quick, **found})


def _verdict(ratio: float) -> str:
    return "met" if ratio >= GOAL_ENTROPY else "MISSED"


if __name__ == "__main__":
    main()
