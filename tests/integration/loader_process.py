"""A small training script that ends in the way that its arguments say; `test_loader_endings.py` runs it.

loader_process.py elastic|plain NUM_WORKERS embedded|remote ENDING
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import Any

from loader_kit import NumberReader
from torch.utils.data import DataLoader

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.testing import FakeMaster

kind, workers, place, ending = sys.argv[1:]
warnings.simplefilter("ignore")


def loader_of(service: DataShardService) -> Any:
    dataset = ShardedDataset(service, NumberReader({"a": 400}))
    arguments: dict[str, Any] = {"num_workers": int(workers)}
    if int(workers):
        arguments["multiprocessing_context"] = "fork"
    return (
        ElasticDataLoader(dataset, **arguments) if kind == "elastic" else DataLoader(dataset, 4, **arguments)
    )


def fork_and_leave() -> None:
    """A child that ends as a Python process does must leave the parent's service alone."""
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    fake = FakeMaster()
    service = DataShardService(
        4, fake.connect(in_process=place == "embedded"), reader=NumberReader({"a": 400})
    )
    loader = loader_of(service)
    kept = iter(loader)
    done = 0
    for done, _ in enumerate(kept, 1):
        if kind == "plain":
            service.report_batch_done()
        if done == 5:
            match ending:
                case "interrupt":
                    print("ready", flush=True)
                    while True:  # pause() would not end for a signal that came just before it
                        time.sleep(0.05)
                case "break":
                    break
                case "exception":
                    raise SystemError("the loop failed")
                case "fork":
                    fork_and_leave()
                case "drop":
                    del kept
                    break
    print("batches", done, "finished", service.finished, flush=True)


if __name__ == "__main__":
    main()
