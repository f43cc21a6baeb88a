"""One replica of a torchft job as a process, which may kill itself before its gradients go out.

    python ft_trainer.py '{"number": 0, "lighthouse": …}'

Its argument is a `Life` as JSON. The step that it came to and the counts of its model are in
FOLDER/NUMBER.json at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from replicas import Replica

from edl_torch import MasterClient


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a replica is, until it ends or dies."""

    number: int
    lighthouse: str
    folder: str
    records: int
    window: int = 2
    workers: int = 0
    dies_at: int = 0  # the attempt at a step before which it is gone; 0 for none
    alone_s: float = 2.0  # alone it takes its time: data are left for one that takes seconds to start again
    saves: bool = False


def main(life: Life) -> None:
    """Train to the end of the data."""
    torch.set_num_threads(1)
    folder = Path(life.folder)
    attempts = folder / f"{life.number}.attempts"

    def before(replica: Replica) -> None:
        with attempts.open("a") as log:
            log.write(".")
        time.sleep(0.05 if replica.manager.num_participants() > 1 else life.alone_s)
        if replica.attempts == life.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    replica = Replica(
        life.number,
        life.lighthouse,
        MasterClient(os.environ["EDL_MASTER_ADDR"]),
        life.records,
        window=life.window,
        num_workers=life.workers,
        audit_dir=folder / "audit",
        checkpoint=folder / "checkpoint.pt" if life.saves else None,
        before=before,
        timeout_s=8.0,
    )
    replica.train()
    step, counts = replica.manager.current_step(), replica.counts.tolist()
    (folder / f"{life.number}.json").write_text(json.dumps([step, counts]))
    replica.close()


if __name__ == "__main__":
    main(Life(**json.loads(sys.argv[1])))
