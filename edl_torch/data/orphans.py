"""A loader worker ends when its trainer was killed, though it has batches that nobody will take.

torch's worker sees that its parent is gone and leaves its loop; but then the thread of its queue wants to be
rid of a batch, and waits for ever where the pipe is full: the other workers hold the end that is read. This
must not know what a worker does.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

from edl_torch.master.with_process import until_gone

PATIENCE_S = 8.0  # for an end of its own: torch looks every 5 s


def end_with_trainer() -> None:
    """End this process, a loader worker, at the latest some seconds after its trainer."""
    trainer = multiprocessing.parent_process()  # under forkserver too
    if trainer is None or trainer.pid is None:
        return

    def watch(pid: int = trainer.pid) -> None:
        until_gone(pid)  # `trainer.is_alive()` would not tell: workers forked later hold that sign of life
        time.sleep(PATIENCE_S)
        os._exit(1)

    threading.Thread(target=watch, name="edl-orphan", daemon=True).start()
