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


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Workers of one reader, started in one way, beside those of a trivial dataset in the same rounds.

    `first_batch_s` counts from `iter(loader)`. `private_mb` is the worker's private memory after some
    batches, `extra_mb` what it is above the trivial worker's, and `times` the first batch over the trivial
    one's: medians over the rounds.
    """

    kind: str
    method: str
    records: int
    first_batch_s: list[float]
    private_mb: list[float]
    extra_mb: float
    times: float
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
        taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (TRIVIAL, *kinds)}
        for number in range(rounds):
            for kind in taken if number % 2 else reversed(taken):
                taken[kind].append(_started(kind, paths.get(kind, folder), method))
        found += [_compared(kind, method, count, taken) for kind in kinds]
    return found


def _started(kind: str, path: Path, method: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, __file__, kind, str(path), method],
        capture_output=True,
        text=True,
        env=environment_of_children(),
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise RuntimeError(f"starting a worker of '{kind}' failed: {done.stderr}")
    seconds, private_mb = json.loads(done.stdout)
    return seconds, private_mb


def _compared(kind: str, method: str, count: int, taken: dict[str, list[tuple[float, float]]]) -> Start:
    pairs = list(zip(taken[kind], taken[TRIVIAL], strict=True))
    extra = statistics.median(mine[1] - other[1] for mine, other in pairs)
    times = statistics.median(mine[0] / other[0] for mine, other in pairs)
    return Start(
        kind=kind,
        method=method,
        records=count,
        first_batch_s=[seconds for seconds, _ in taken[kind]],
        private_mb=[private_mb for _, private_mb in taken[kind]],
        extra_mb=extra,
        times=times,
        met=extra < MOST_MB and times < MOST_TIMES,
    )


def print_starts(starts: Sequence[Start]) -> None:
    """A line for each."""
    print(f"\na loader worker's start (targets: < {MOST_TIMES:g} ×, < {MOST_MB:g} MB)")
    for start in starts:
        first = statistics.median(start.first_batch_s)
        print(
            f"  {start.kind:<10}{start.method:<7}{start.records:>12,} records  first batch {first:7.3f} s "
            f"({start.times:.2f} × a trivial dataset's)  private memory {start.extra_mb:+7.1f} MB  "
            f"{'met' if start.met else 'MISSED'}"
        )


def start_worker(reader: AbstractDataReader, method: str) -> tuple[float, float]:
    """Seconds until one worker's first batch, and its private memory in MB some batches later."""
    with DataShardService(BATCH, LocalMaster(), reader, shuffle_shards=True, num_epochs=0) as service:
        dataset = ShardedDataset(service, reader, shuffle=True)
        loader = ElasticDataLoader(dataset, num_workers=1, multiprocessing_context=method)
        begun = time.perf_counter()
        batches = iter(loader)
        next(batches)
        took = time.perf_counter() - begun
        for _ in range(BATCHES):
            next(batches)
        (worker,) = (child for child in multiprocessing.active_children() if child.name != "SyncManager")
        private = private_mb(worker.pid)
        del batches
    return took, private


def private_mb(pid: int | None) -> float:
    """Memory that no other process shares, clean pages of files included, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    """Print `[seconds, MB]`."""
    kind, path, method = sys.argv[1:]
    reader = TinyRows(1 << 16) if kind == TRIVIAL else READERS[kind](path)
    print(json.dumps(start_worker(reader, method)))


if __name__ == "__main__":
    main()
