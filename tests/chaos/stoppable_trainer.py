"""A trainer as a process, for tests that stop it: `stoppable_trainer.py ADDRESS OUT SIZE`.

Writes one line of record numbers to OUT for each batch that its loop was done with.
"""

from __future__ import annotations

import sys
import time

from edl_torch import DataShardService, ElasticDataLoader, MasterClient, ShardedDataset
from edl_torch.readers import MapDatasetReader

STEP_S = 0.01


def main(address: str, out: str, size: str) -> None:
    """Train the whole job."""
    reader = MapDatasetReader(range(int(size)))
    with (
        open(out, "w", encoding="ascii", buffering=1) as lines,
        MasterClient(address, "stoppable") as client,
        DataShardService(4, client, reader=reader, records_per_shard=20) as service,
    ):
        loader = ElasticDataLoader(ShardedDataset(service, reader))
        while not service.finished:
            for batch in loader:
                time.sleep(STEP_S)
                lines.write(" ".join(map(str, batch.tolist())) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
