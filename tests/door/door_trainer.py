"""A trainer as a process: finds the master, and what opens its door, in the environment.

    python door_trainer.py OUT AUDIT_DIR

Notes the records that it trained on, one a line.
"""

from __future__ import annotations

import sys
import time

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.readers import MapDatasetReader

RECORDS = 240


def main() -> None:
    out, audit_dir = sys.argv[1:]
    numbers = MapDatasetReader(range(RECORDS))
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    with (
        open(out, "a", encoding="ascii", buffering=1) as lines,
        DataShardService(4, reader=numbers, num_minibatches_per_shard=2, audit_dir=audit_dir) as service,
    ):
        while not service.finished:
            for batch in ElasticDataLoader(ShardedDataset(service, numbers), **workers):
                time.sleep(0.01)  # the training step
                lines.write("".join(f"{number}\n" for number in batch.tolist()))


if __name__ == "__main__":
    main()
