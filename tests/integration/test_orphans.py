"""Loader workers of a trainer that was killed end, with batches in a pipe that nobody reads any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import preloaded
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

TRAINER = """
import sys, time
import numpy as np
from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.system import processes
from edl_torch.readers import MapDatasetReader

processes.PATIENCE_S = float(sys.argv[1])

class Large:
    def __len__(self): return 64
    def __getitem__(self, index): return np.zeros(100_000, dtype=np.uint8)

reader = MapDatasetReader(Large())
with DataShardService(4, reader=reader) as service:
    dataset = ShardedDataset(service, reader)
    for _ in ElasticDataLoader(dataset, num_workers=2, multiprocessing_context="fork"):
        print("a batch", flush=True)
        time.sleep(120)
"""


def test_they_end_though_nobody_takes_their_batches() -> None:
    trainer = preloaded.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER, "0.1"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"a batch\n"
        trainer.kill()
        assert trainer.communicate(timeout=30) == (b"", None)  # its workers had the pipe's other end too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
