"""One replica of a torchft job as a process, which may kill itself before its gradients go out.

    python ft_trainer.py NUMBER LIGHTHOUSE RECORDS FOLDER WORKERS DIES_AT

WORKERS are loader workers. DIES_AT is the attempt at a step before which it is gone; 0 for none. The step
that it came to and the counts of its model are in FOLDER/NUMBER.json at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from replicas import Replica

from edl_torch import MasterClient


def main(number: str, lighthouse: str, records: str, folder: str, workers: str, dies_at: str) -> None:
    """Train to the end of the data."""
    torch.set_num_threads(1)
    attempts = Path(folder, f"{number}.attempts")

    def before(replica: Replica) -> None:
        with attempts.open("a") as log:
            log.write(".")
        # Alone it takes its time, so that data are left for the other, which takes seconds to start again.
        time.sleep(0.05 if replica.manager.num_participants() > 1 else 2.0)
        if replica.attempts == int(dies_at):
            os.kill(os.getpid(), signal.SIGKILL)

    replica = Replica(
        int(number),
        lighthouse,
        MasterClient(os.environ["EDL_MASTER_ADDR"]),
        int(records),
        window=2,
        num_workers=int(workers),
        audit_dir=Path(folder, "audit"),
        before=before,
    )
    replica.train()
    step, counts = replica.manager.current_step(), replica.counts.tolist()
    Path(folder, f"{number}.json").write_text(json.dumps([step, counts]))
    replica.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
