"""The other side of `makespan.py`: one trainer, whose step is a sleep.

`makespan_peers.py ADDRESS DATASET BATCHES EPOCHS STEP_S WORKERS` registers, prints `ready`, waits for a line,
trains through all epochs, and prints a line of JSON: for each epoch when its first and its last step ended,
and how many there were. Times are of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time

from records import TinyRows

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset

BATCH = 8


def train(address: str, dataset: str, batches: int, epochs: int, step_s: float, workers: int) -> None:
    """Be a trainer."""
    steps: list[list[float]] = [[] for _ in range(epochs)]
    reader = TinyRows(batches * BATCH)
    client = MasterClient(address)
    with DataShardService(
        BATCH, client, reader, dataset_name=dataset, num_epochs=epochs, shuffle_shards=True
    ) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), num_workers=workers)
        assert service.size == batches * BATCH  # asks: it takes part from here on
        print("ready", flush=True)
        sys.stdin.readline()
        while not service.finished:
            for _ in loader:
                time.sleep(step_s)
                steps[loader.epoch].append(time.monotonic())
    client.close()
    print(json.dumps([_told(ends) for ends in steps]), flush=True)


def _told(ends: list[float]) -> dict[str, float]:
    first, last = (ends[0], ends[-1]) if ends else (0.0, 0.0)
    return {"first_at": first, "ended_at": last, "steps": len(ends)}


if __name__ == "__main__":
    where, name, *numbers = sys.argv[1:]
    train(where, name, int(numbers[0]), int(numbers[1]), float(numbers[2]), int(numbers[3]))
