"""Synchronous ranks as threads over one fake master.

It knows how to start them and gather what they saw; what must hold is the tests'.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch._dynamo  # noqa: F401  else the first optimizer does, for seconds, while the other ranks wait
from loader_kit import NumberReader, all_records, numbers

from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.testing import FakeMaster, ThreadPeers


@dataclass
class Seen:
    """What one rank was given: its batches with their weights, pass by pass."""

    passes: list[list[tuple[list[int], int]]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Steps of each pass."""
        return [len(batches) for batches in self.passes]

    @property
    def trained(self) -> list[int]:
        """Records of batches that count."""
        return [n for batches in self.passes for batch, weight in batches if weight for n in batch]

    @property
    def stand_ins(self) -> int:
        """Batches that do not count."""
        return sum(not weight for batches in self.passes for _, weight in batches)


class Rank:
    """One rank in its thread: its service and loader."""

    def __init__(
        self, fake: FakeMaster, peers: ThreadPeers, reader: AbstractDataReader, **arguments: Any
    ) -> None:
        loader_arguments = arguments.pop("loader", {})
        dataset_arguments = arguments.pop("dataset", {})
        joins_first = arguments.pop("joins_first", False)
        client = fake.connect(f"rank{peers.rank}", in_process=arguments.pop("in_process", True))
        self.peers = peers
        self.service = DataShardService(
            arguments.pop("batch_size", 4), client, reader=reader, **{"records_per_shard": 6, **arguments}
        )
        if joins_first:
            assert self.service.size
        dataset = ShardedDataset(self.service, reader, **dataset_arguments)
        self.loader = ElasticDataLoader(dataset, synchronous=peers, **loader_arguments)
        self.seen = Seen()

    def one_pass(self) -> Iterator[list[int]]:
        """Iterate once over the loader and note what comes."""
        self.seen.passes.append([])
        for batch in self.loader:
            self.seen.passes[-1].append((numbers(batch), self.loader.weight))
            yield numbers(batch)

    def train(self) -> None:
        """The whole job, from the beginning."""
        self.service.load_state_dict(None)
        while not self.service.finished:
            for _ in self.one_pass():
                pass


class Failed(AssertionError):
    """Some ranks raised; `errors` by rank."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(f"ranks raised: {dict(errors)}")
        self.errors = dict(errors)

    @property
    def kinds(self) -> dict[int, type[Exception]]:
        """What kind of error each rank raised."""
        return {rank: type(error) for rank, error in self.errors.items()}


def trained(ranks: list[Rank], parts: int = 1) -> Counter[int]:
    """How often each record was in a batch that counts: once for all parts of a model, which agree."""
    holders = ranks[::parts]
    for number, rank in enumerate(ranks):
        assert rank.seen == holders[number // parts].seen
    return Counter(number for rank in holders for number in rank.seen.trained)


def each(times: int) -> Counter[int]:
    """Every record of UNEVEN so often."""
    return Counter(dict.fromkeys(all_records(), times))


def run_ranks(
    fake: FakeMaster,
    size: int,
    work: Callable[[Rank], object],
    counts: Mapping[str, int] | AbstractDataReader,
    *,
    parts: int = 1,
    **arguments: Any,
) -> list[Rank]:
    """Run `work` on each rank, each in a thread of its own; each run of `parts` ranks holds one model.

    Raises Failed where a rank raised, and AssertionError where one hangs.
    """
    ranks: dict[int, Rank] = {}
    errors: dict[int, Exception] = {}

    def run(peers: ThreadPeers) -> None:
        reader = counts if isinstance(counts, AbstractDataReader) else NumberReader(counts)
        try:
            with _closing(Rank(fake, peers, reader, **arguments)) as rank:
                ranks[peers.rank] = rank
                work(rank)
        except Exception as exc:  # noqa: BLE001  the top of a thread
            errors[peers.rank] = exc
        finally:
            peers.leave()

    all_peers = ThreadPeers.group(size, 30.0, parts=parts)
    threads = [threading.Thread(target=run, args=(peers,), daemon=True) for peers in all_peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise Failed(errors)
    return [ranks[number] for number in range(size)]


@contextmanager
def _closing(rank: Rank) -> Iterator[Rank]:
    with rank.service:
        yield rank
