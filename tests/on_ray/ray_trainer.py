"""A trainer as a Ray actor: notes what it trained on in a file, which its death leaves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.integrations.ray import master_client
from edl_torch.readers import MapDatasetReader

BATCH = 4


class Trainer:
    """Trains in a thread, so that it can be asked."""

    def __init__(self, master: str, name: str, folder: str, size: int, step_s: float) -> None:
        self._arguments = (master, name, Path(folder), size, step_s)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def process(self) -> int:
        return os.getpid()

    def done(self) -> None:
        """Wait for its end, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._train(*self._arguments)
        except Exception as error:  # noqa: BLE001  the top of a thread: `done` raises it
            self._error = error

    def _train(self, master: str, name: str, folder: Path, size: int, step_s: float) -> None:
        reader = MapDatasetReader(range(size))
        with (
            (folder / name).open("w", encoding="ascii", buffering=1) as notes,
            master_client(master, worker_id=name, master_timeout_s=90.0) as client,
            DataShardService(
                BATCH,
                client,
                reader=reader,
                records_per_shard=5 * BATCH,
                audit_dir=str(folder / "audit"),
            ) as service,
        ):
            loader = ElasticDataLoader(ShardedDataset(service, reader))
            while not service.finished:
                for batch in loader:
                    time.sleep(step_s)
                    notes.write(" ".join(map(str, batch.tolist())) + "\n")
