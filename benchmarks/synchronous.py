"""What the agreement of synchronous ranks costs beside a step of 20 ms.

    python benchmarks/synchronous.py [--ranks 2] [--json FILE]

Every rank steps for 20 ms and then reduces a gradient, as DDP does. The contenders differ only in the loader:
one agrees on each step of data that all ranks share, in the other each rank has as many batches of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Contest, measure, parser, print_result, results_as_json, write_json

from edl_torch import AbstractDataReader, DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.testing import wait_until

STEP_S = 0.02
TARGET = 0.98  # of the throughput: the agreement costs under 2 %
BATCH = 8
AGREED, ALONE = "steps agreed on", "steps not agreed on"


class Numbers(AbstractDataReader):
    """Record i is i."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.records = records

    def create_shards(self, mode: Any = None) -> dict[str, int]:
        """One source."""
        return {"numbers": self.records}

    def read_records(self, task: Any) -> Iterator[int]:
        """The numbers themselves."""
        return iter(range(task.start, task.end))


def train(name: str, steps: int, *, synchronous: bool) -> int:
    """`steps` steps of this rank."""
    reader = Numbers(BATCH * steps * (dist.get_world_size() if synchronous else 1))
    gradient = torch.ones(1)
    taken = 0
    with DataShardService(BATCH, reader=reader, dataset_name=name) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), synchronous=synchronous)
        service.load_state_dict(None)
        for _ in loader:
            time.sleep(STEP_S)
            dist.all_reduce(gradient)
            taken += 1
    return taken


def run_rank(store: str, rank: int, ranks: int, steps: int, rounds: int, json_path: str) -> None:
    """What one rank's process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    number = count()

    def agreed() -> int:
        return train(f"agreed-{next(number)}", steps, synchronous=True)

    def alone() -> int:
        return train(f"alone-{next(number)}-{rank}", steps, synchronous=False)

    title = f"{ranks} ranks, steps of {STEP_S * 1000:.0f} ms"
    result = measure(
        Contest(title=title, contenders={AGREED: agreed, ALONE: alone}, ratios=[(AGREED, ALONE, TARGET)]),
        rounds,
    )
    if rank == 0:
        print_result(result)
        if json_path:
            write_json(Path(json_path), {"synchronous": results_as_json([result])})
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a master and the ranks."""
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--ranks", type=int, default=2)
    options_parser.add_argument("--rank", type=int, help="one rank's process; started by the script itself")
    options_parser.add_argument("--store", default="")
    options = options_parser.parse_args(arguments)
    steps, rounds = (5, 1) if options.quick else (200, 5)
    if options.rank is not None:
        run_rank(options.store, options.rank, options.ranks, steps, rounds, str(options.json or ""))
        return
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder, "address")
        master = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edl_torch",
                "master",
                "--addr",
                "127.0.0.1:0",
                "--address-file",
                address_file,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(address_file.exists, timeout_s=30)
            environment = {**os.environ, "EDL_MASTER_ADDR": address_file.read_text().strip()}
            given = sys.argv[1:] if arguments is None else list(arguments)
            command = [sys.executable, __file__, *given, "--store", str(Path(folder, "store"))]
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], env=environment)
                for rank in range(options.ranks)
            ]
            if sum(rank.wait() != 0 for rank in ranks):
                sys.exit("a rank failed")
        finally:
            master.terminate()
            master.wait()


if __name__ == "__main__":
    main()
