"""A loader worker's first batch and its memory, with an index of many records and with none.

Each measurement is a process of its own, `python reader_start.py KIND PATH METHOD`, which makes the reader,
starts one worker and prints what it found.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from reader_files import write_huge
from records import TinyRows
from serving import environment_of_children

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset
from edl_torch.readers import CsvReader, ParquetReader, RecordIODataReader, TextReader
from edl_torch.readers.base import AbstractDataReader

METHODS = ("fork", "spawn")
TRIVIAL = "trivial"
READERS = {"text": TextReader, "csv": CsvReader, "recordio": RecordIODataReader, "parquet": ParquetReader}
BATCH, BATCHES = 256, 16
MOST_MB, MOST_TIMES = 50.0, 2.0
DEADLINE_S = 600.0


class Taken(NamedTuple):
    """One worker's start: seconds until its first batch, processor time until then, private memory in MB."""

    seconds: float
    processor_s: float
    private_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Workers of one reader, started in one way, beside those of a trivial dataset in the same rounds.

    `first_batch_s` counts from `iter(loader)`, and `processor_s` is what trainer and worker worked until
    then. `private_mb` is the worker's private memory after some batches, `extra_mb` what it is above the
    trivial worker's; `times` and `processor_times` the first batch over the trivial one's: medians over the
    rounds.
    """

    kind: str
    method: str
    records: int
    first_batch_s: list[float]
    processor_s: list[float]
    private_mb: list[float]
    extra_mb: float
    times: float
    processor_times: float
    met: bool


def measure_starts(
    folder: Path, count: int, kinds: Sequence[str], methods: Sequence[str], rounds: int
) -> list[Start]:
    """Start a worker of each reader in each way, round by round."""
    paths = {kind: write_huge(kind, folder, count) for kind in kinds}
    for kind, path in paths.items():
        READERS[kind](path)  # makes its index, which is kept
    found = []
    for method in methods:
        taken: dict[str, list[Taken]] = {kind: [] for kind in (TRIVIAL, *kinds)}
        for number in range(rounds):
            for kind in taken if number % 2 else reversed(taken):
                taken[kind].append(_started(kind, paths.get(kind, folder), method))
        found += [_compared(kind, method, count, taken) for kind in kinds]
    return found


def _started(kind: str, path: Path, method: str) -> Taken:
    done = subprocess.run(
        [sys.executable, __file__, kind, str(path), method],
        capture_output=True,
        text=True,
        env=environment_of_children(),
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise RuntimeError(f"starting a worker of '{kind}' failed: {done.stderr}")
    return Taken(*json.loads(done.stdout))


def _compared(kind: str, method: str, count: int, taken: dict[str, list[Taken]]) -> Start:
    pairs = list(zip(taken[kind], taken[TRIVIAL], strict=True))
    extra = statistics.median(mine.private_mb - other.private_mb for mine, other in pairs)
    times = statistics.median(mine.seconds / other.seconds for mine, other in pairs)
    return Start(
        kind=kind,
        method=method,
        records=count,
        first_batch_s=[each.seconds for each in taken[kind]],
        processor_s=[each.processor_s for each in taken[kind]],
        private_mb=[each.private_mb for each in taken[kind]],
        extra_mb=extra,
        times=times,
        processor_times=statistics.median(mine.processor_s / other.processor_s for mine, other in pairs),
        met=extra < MOST_MB and times < MOST_TIMES,
    )


def print_starts(starts: Sequence[Start]) -> None:
    """A line for each."""
    print(f"\na loader worker's start (targets: < {MOST_TIMES:g} ×, < {MOST_MB:g} MB)")
    for start in starts:
        first = statistics.median(start.first_batch_s)
        print(
            f"  {start.kind:<10}{start.method:<7}{start.records:>12,} records  first batch {first:7.3f} s "
            f"({start.times:.2f} × a trivial dataset's, {start.processor_times:.2f} × by processor time)  "
            f"private memory {start.extra_mb:+7.1f} MB  "
            f"{'met' if start.met else 'MISSED'}"
        )


def start_worker(reader: AbstractDataReader, method: str) -> Taken:
    """One worker's start; its memory is taken some batches later."""
    with DataShardService(BATCH, LocalMaster(), reader, shuffle_shards=True, num_epochs=0) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(dataset, num_workers=1, multiprocessing_context=method)
        begun, worked = time.perf_counter(), time.process_time()
        batches = iter(loader)
        next(batches)
        took, worked = time.perf_counter() - begun, time.process_time() - worked
        (worker,) = (child for child in multiprocessing.active_children() if child.name != "SyncManager")
        worked += processor_s(worker.pid)
        for _ in range(BATCHES):
            next(batches)
        private = private_mb(worker.pid)
        del batches
    return Taken(took, worked, private)


def processor_s(pid: int | None) -> float:
    """What a process has worked so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def private_mb(pid: int | None) -> float:
    """Memory that no other process shares, clean pages of files included, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    """Print the numbers of `Taken`."""
    kind, path, method = sys.argv[1:]
    reader = TinyRows(1 << 16) if kind == TRIVIAL else READERS[kind](path)
    print(json.dumps(start_worker(reader, method)))


if __name__ == "__main__":
    main()
